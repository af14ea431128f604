"""Azure and BurstGPT files: every row a request or a reason, times to the nanosecond."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.recorded import AZURE, BURST, S, imported, written
from traces.records import Unusable, at_ns


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1970-01-01 00:00:00", 0),
        ("1970-01-01 00:00:01.5", 1_500_000_000),
        ("1970-01-01T00:00:00.0000001", 100),  # seven digits, as in the files of 2023
        ("1970-01-01 01:00:00.000009+01:00", 9_000),  # an offset, as in those of 2024
        ("1969-12-31 23:30:00-0030", 0),
        ("1970-01-01 00:00:00Z", 0),
    ],
)
def test_dates_are_exact_to_the_nanosecond(text: str, expected: int) -> None:
    assert at_ns(text) == expected


@given(stamp=st.datetimes(datetime(1970, 1, 2), datetime(2200, 1, 1)))
def test_dates_equal_those_of_the_library(stamp: datetime) -> None:
    whole_s = int(stamp.replace(tzinfo=UTC, microsecond=0).timestamp())
    assert at_ns(str(stamp)) == whole_s * S + stamp.microsecond * 1000


@pytest.mark.parametrize("text", ["", None, "yesterday", "2023-13-01 00:00:00", float("inf")])
def test_a_cell_without_a_date_is_unusable(text: Any) -> None:
    with pytest.raises(Unusable, match="timestamp"):
        at_ns(text)


def test_azure_rows_are_requests_or_named_lines(tmp_path: Path) -> None:
    rows = ["2023-11-16 18:15:46.6805900,374,44", "2023-11-16 18:15:50.9951690,396,109"]
    bad = ["2023-11-16 18:15:51,abc,1", "2023-11-16 18:15:52,5", "no date,5,5", "", "\0,,"]
    more = ["2023-11-16 18:15:53,7,0", "2023-11-16 18:15:54,8,9"]
    sidecar, requests = imported(written(tmp_path / "a.csv", AZURE, *rows, *bad, *more))
    assert sidecar["kind"] == "azure" and sidecar["rows_read"] == 8
    assert [(r.arrival_ns, r.prompt_tokens, r.output_tokens) for r in requests] == [
        (0, 374, 44),
        (4_314_579_000, 396, 109),
        (7_319_410_000, 8, 9),
    ]
    assert sidecar["first_lines_dropped"]["prompt is not a whole number"] == [4]
    assert sidecar["first_lines_dropped"]["malformed line"] == [5]
    assert sidecar["first_lines_dropped"]["output under 1 tokens"] == [9]


def test_azure_dates_in_parquet_equal_those_in_text(tmp_path: Path) -> None:
    stamps = ["2024-05-10 00:00:00.009930", "2024-05-10 00:00:01.000001"]
    text = written(tmp_path / "a.csv", AZURE, *(f"{s}+00:00,3,4" for s in stamps))
    dates = pa.array([datetime.fromisoformat(s) for s in stamps], pa.timestamp("us", tz="UTC"))
    columns = {"TIMESTAMP": dates, "ContextTokens": [3, 3], "GeneratedTokens": [4, 4]}
    pq.write_table(pa.table(columns), tmp_path / "b.parquet")
    assert imported(text)[1] == imported(tmp_path / "b.parquet")[1]


@pytest.mark.parametrize("kind", [pa.int64(), pa.float64()])
def test_seconds_of_an_extract_are_seconds_also_where_they_are_whole(
    tmp_path: Path, kind: pa.DataType
) -> None:
    columns = {"arrival_s": pa.array([0, 10, 20], kind), "prompt_tokens": [5] * 3}
    pq.write_table(pa.table({**columns, "output_tokens": [2] * 3}), tmp_path / "a.parquet")
    _, requests = imported(tmp_path / "a.parquet", kind="azure")
    assert [r.arrival_ns for r in requests] == [0, 10 * S, 20 * S]


def test_a_missing_column_is_named_and_nothing_written(tmp_path: Path) -> None:
    source = written(tmp_path / "a.csv", "TIMESTAMP,ContextTokens", "2023-11-16 18:15:46,5")
    with pytest.raises(ValueError, match="no column GeneratedTokens or output_tokens") as caught:
        imported(source, kind="azure")
    assert "\n" not in str(caught.value) and [*tmp_path.iterdir()] == [source]


def test_rows_out_of_order_are_sorted_and_counted(tmp_path: Path) -> None:
    rows = [f"2024-01-01 00:00:0{second},{second + 1},1" for second in (0, 5, 2, 9)]
    sidecar, requests = imported(written(tmp_path / "a.csv", AZURE, *rows))
    assert sidecar["rows_out_of_order"] == 1
    assert [r.prompt_tokens for r in requests] == [1, 3, 6, 10]


def test_burstgpt_failures_and_other_models_are_counted(tmp_path: Path) -> None:
    rows = [
        "5,ChatGPT,472,18,490,Conversation log",
        "45,ChatGPT,1087,230,1317,Conversation log",
        "118,GPT-4,417,276,693,Conversation log",
        "119,ChatGPT,1360,0,1360,Conversation log",
        "120,ChatGPT,10,5,99,API log",
        "131,ChatGPT,1,2,3,API log",
    ]
    source = written(tmp_path / "a.csv", BURST, *rows)
    sidecar, requests = imported(source)
    assert sidecar["kind"] == "burstgpt"
    assert [r.arrival_ns for r in requests] == [0, 40 * S, 113 * S, 126 * S]
    assert sidecar["rows_dropped"] == {
        "failed: no response tokens": 1,
        "total is not request and response tokens": 1,
    }
    sidecar, requests = imported(source, model="ChatGPT", log_type="Conversation log")
    assert [r.prompt_tokens for r in requests] == [472, 1087]
    assert sidecar["rows_dropped"]["model is not ChatGPT"] == 1
    assert sidecar["rows_dropped"]["log type is not Conversation log"] == 2


def test_evenly_spaced_stamps_are_noted(tmp_path: Path) -> None:
    # a synthetic BurstGPT file is in circulation, whose seconds count 0, 1, 2, ...
    rows = [f"{second},ChatGPT,5,5,10,API log" for second in range(9)]
    assert imported(written(tmp_path / "a.csv", BURST, *rows))[0]["evenly_spaced"]
