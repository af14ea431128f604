"""Azure, BurstGPT and Mooncake files: every row a request or a reason, times to the nanosecond."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis.run import load
from tandem.cli import main
from tandem.compose import composed
from tandem.experiment import run_experiment
from traces.buckets import bucket_ns, spread_inside
from traces.cells import Unusable, at_ns
from traces.import_ import import_trace
from traces.mooncake import write_mooncake
from traces.recorded_times import read_times_ns
from traces.request import Request
from traces.store import read_trace, write_trace

S = 1_000_000_000
MS = 1_000_000
BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens"


def imported(source: Path, **options: Any) -> tuple[dict[str, Any], list[Request]]:
    out = source.with_name("out.parquet")
    sidecar = import_trace(source, out, **options)
    total = sum(sidecar["rows_dropped"].values())
    assert sidecar["rows_read"] == sidecar["rows_kept"] + total
    return sidecar, read_trace(out)


def written(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def mooncake(path: Path, *rows: tuple[Any, int, int, Any]) -> Path:
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    return written(path, *(json.dumps(dict(zip(names, row, strict=True))) for row in rows))


# ---- Azure
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
def test_what_is_no_date_is_unusable(text: Any) -> None:
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


# ---- BurstGPT
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
    # the BurstGPT file in circulation that is made up counts its seconds 0, 1, 2, ...
    rows = [f"{second},ChatGPT,5,5,10,API log" for second in range(9)]
    assert imported(written(tmp_path / "a.csv", BURST, *rows))[0]["evenly_spaced"]


# ---- Mooncake
@given(rate=st.floats(0.12, 85), seed=st.integers(0, 999), unit=st.sampled_from(["ms", "s"]))
@settings(max_examples=10, deadline=None)
def test_ms_and_s_are_told_apart(
    tmp_path_factory: pytest.TempPathFactory, rate: float, seed: int, unit: str
) -> None:
    times_s = np.cumsum(np.random.default_rng(seed).exponential(1 / rate, 1000))
    stamps = [int(t * 1000) for t in times_s] if unit == "ms" else [float(t) for t in times_s]
    # the measured rate wanders by 3 % (one deviation); 0.1 and 100 are the limits
    path = tmp_path_factory.mktemp("mooncake") / "a.jsonl"
    sidecar, requests = imported(mooncake(path, *((t, 9, 5, [1]) for t in stamps)))
    assert (sidecar["kind"], sidecar["time_unit"]) == ("mooncake", unit)
    # ms files drop what is below a millisecond
    assert requests[-1].arrival_ns == pytest.approx((times_s[-1] - times_s[0]) * S, abs=2 * MS)


@pytest.mark.parametrize("unit_s", [1, 1000])
def test_recorded_arrivals_and_length_tables_tell_the_unit_too(tmp_path: Path, unit_s: int) -> None:
    source = mooncake(tmp_path / "a.jsonl", *((i * unit_s / 2, 9, 5, [1]) for i in range(9)))
    assert read_times_ns(source).tolist() == [i * S // 2 for i in range(9)]
    assert imported(source, kind="lengths")[1][-1].arrival_ns == 4 * S


def test_stamps_that_are_text_tell_their_unit_too(tmp_path: Path) -> None:
    """Of a CSV file every cell is text, and some write JSON numbers so."""
    lines = written(tmp_path / "a.csv", "timestamp,input_length,output_length", "0,9,5", "2,9,5")
    quoted = mooncake(tmp_path / "a.jsonl", ("0", 9, 5, None), ("2.0", 9, 5, None))
    for source in (lines, quoted):
        sidecar, requests = imported(source, kind="mooncake")
        assert sidecar["time_unit"] == "s" and requests[-1].arrival_ns == 2 * S


def test_lengths_that_are_floats_find_their_blocks(tmp_path: Path) -> None:
    rows: list[Any] = [(0, 512.0, 5.0, [7]), (2000, "1024", 5, [7, 8]), (4000, 0.0, 5, [7])]
    sidecar, requests = imported(mooncake(tmp_path / "a.jsonl", *rows))
    assert sidecar["block_tokens"] == 512 and [r.prefix_ids for r in requests] == [(7,), (7, 8)]


def test_hash_ids_are_kept_as_prefix_blocks(tmp_path: Path) -> None:
    rows = [(0, 1024, 5, [7, 8]), (2000, 1025, 5, [7, 8, 9]), (4000, 100, 5, None)]
    sidecar, requests = imported(mooncake(tmp_path / "a.jsonl", *rows))
    assert [r.prefix_ids for r in requests] == [(7, 8), (7, 8, 9), None]
    assert [r.prefix_block_tokens for r in requests] == [512, 512, 0]
    assert sidecar["block_tokens"] == 512 and sidecar["time_unit"] == "ms"
    sidecar, _ = imported(mooncake(tmp_path / "b.jsonl", (0, 40, 5, [1, 2, 3])))
    assert sidecar["block_tokens"] == 16


def test_malformed_mooncake_lines_are_named(tmp_path: Path) -> None:
    good = json.dumps({"timestamp": 0, "input_length": 5, "output_length": 5, "hash_ids": [1]})
    bad = ['{"timestamp": 1', "[1, 2]", good.replace("[1]", '["a"]'), good.replace("[1]", "[1,2]")]
    source = written(tmp_path / "a.jsonl", good, *bad, "", good.replace("0", "9000", 1))
    sidecar, requests = imported(source, block_tokens=512)
    assert len(requests) == 2 and sidecar["rows_read"] == 6
    assert sidecar["first_lines_dropped"] == {
        "malformed line": [2, 3],
        "hash ids are not whole numbers": [4],
        "more hash ids than blocks of 512 tokens": [5],
    }


def test_ids_of_no_known_block_size_ask_for_one(tmp_path: Path) -> None:
    source = mooncake(tmp_path / "a.jsonl", (0, 1000, 5, [1, 2, 3]), (9, 1000, 5, [1] * 9))
    with pytest.raises(ValueError, match="give block_tokens"):
        imported(source)


def test_mooncake_lines_come_back(tmp_path: Path) -> None:
    made = [
        Request(0, 0, 1024, 5, prefix_ids=(3, 4), prefix_block_tokens=512),
        Request(1, 1_500 * MS, 600, 7, prompt_ids=tuple(range(600))),
        Request(2, 2_000 * MS, 513, 7, prompt_ids=(*range(512), 9)),
        Request(3, 3_000 * MS, 1, 1),
    ]
    write_mooncake(tmp_path / "a.jsonl", made)
    _, back = imported(tmp_path / "a.jsonl")
    seen = [(r.arrival_ns, r.prompt_tokens, r.output_tokens) for r in back]
    assert seen == [(r.arrival_ns, r.prompt_tokens, r.output_tokens) for r in made]
    ids = [r.prefix_ids for r in back]
    assert ids[0] == (3, 4)
    assert ids[1][0] == ids[2][0] and ids[1][1] != ids[2][1]  # one block of 512 tokens in common
    assert len({i for row in ids for i in row}) == 2 + 3 + 1


def test_closed_loops_are_not_written_as_mooncake_lines(tmp_path: Path) -> None:
    turns = [Request(0, 0, 1, 1, session=0), Request(1, 0, 1, 1, session=0, turn=1)]
    with pytest.raises(ValueError, match="request 1 follows an answer"):
        write_mooncake(tmp_path / "a.jsonl", turns)
    assert list(tmp_path.iterdir()) == []


# ---- buckets, parts and rates
@given(seed=st.integers(0, 10**6), width=st.sampled_from([100 * MS, 3 * S, 7 * S]))
@settings(deadline=None)
def test_buckets_are_found_and_nothing_leaves_its_own(seed: int, width: int) -> None:
    rng = np.random.default_rng(seed)
    exact = np.cumsum(rng.exponential(width / 5, 400)).astype(np.int64)
    wander = rng.integers(-MS // 4, MS // 4, exact[-1] // width + 1)
    rounded = exact // width * width + wander[exact // width]
    found = bucket_ns(rounded)
    assert found is not None and abs(found - width) <= MS  # the wander at two ends of a gap
    spread = spread_inside(rounded, found, seed)
    assert np.all(np.diff(spread) >= 0) and np.all(spread >= rounded)
    assert np.all(spread < rounded + found)
    assert np.array_equal(spread, spread_inside(rounded, found, seed))
    assert bucket_ns(exact) is None


@pytest.mark.parametrize("times", [[], [5], [0] * 50, [0, 0, 9, 9]])
def test_few_stamps_are_no_buckets(times: list[int]) -> None:
    assert bucket_ns(np.asarray(times, dtype=np.int64)) is None


def test_stamps_of_three_seconds_are_spread_by_seed(tmp_path: Path) -> None:
    source = mooncake(tmp_path / "a.jsonl", *((i // 10 * 3000, 9, 5, [i]) for i in range(200)))
    sidecar, spread = imported(source)
    assert sidecar["bucket"] == {"width_s": 3.0, "is_spread": True, "seed": 0}
    assert len({r.arrival_ns for r in spread}) == 200
    assert [r.prefix_ids for r in spread] == [(i,) for i in range(200)]  # order is kept
    assert imported(source)[1] == spread != imported(source, seed=1)[1]
    sidecar, plain = imported(source, spread=False)
    assert len({r.arrival_ns for r in plain}) == 20 and not sidecar["bucket"]["is_spread"]


def test_a_part_at_another_rate(tmp_path: Path) -> None:
    rows = [f"2024-01-01 00:00:{i:02d},{i + 1},1" for i in range(60)]
    source = written(tmp_path / "a.csv", AZURE, *rows)
    sidecar, requests = imported(source, start_s=10, duration_s=20, limit=11, rate=4.0)
    assert [r.prompt_tokens for r in requests] == list(range(11, 22))
    assert requests[-1].arrival_ns == 10 * S // 4 and sidecar["recorded_rate"] == 1.0
    assert sidecar["rows_dropped"] == {
        "outside the wanted time": 40,
        "beyond the limit of 11 requests": 9,
    }
    with pytest.raises(ValueError, match="no request left of 60 rows: 60 outside"):
        imported(source, start_s=1000)
    with pytest.raises(ValueError, match="cannot be oversampled"):
        imported(source, oversample=True, limit=99)


def test_compressed_and_spoilt_files(tmp_path: Path) -> None:
    plain = written(tmp_path / "a.csv", AZURE, "2024-01-01 00:00:00,5,6")
    packed = tmp_path / "b.csv.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert imported(plain)[1] == imported(packed)[1]
    (tmp_path / "c.parquet").write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"not a readable \.parquet"):
        imported(tmp_path / "c.parquet", kind="azure")
    packed.write_bytes(packed.read_bytes()[:40])
    with pytest.raises(ValueError, match=r"b\.csv\.gz: not a complete gzip file"):
        imported(packed)


def test_a_row_of_huge_numbers_costs_only_itself(tmp_path: Path) -> None:
    """Python reads no integer of 5,000 digits, and makes no float of one of 400."""
    rows = [(at, 5, 6, None) for at in (0, 1000, 2000)]
    path = mooncake(tmp_path / "a.jsonl", *rows, (10**400, 5, 6, None), (1e300, 5, 6, None))
    with path.open("a") as file:
        file.write('{"timestamp": 9, "input_length": %s, "output_length": 1}\n' % ("9" * 5000))
    sidecar, requests = imported(path)
    assert [r.arrival_ns for r in requests] == [0, S, 2 * S]  # the unit is told by the others
    assert sidecar["first_lines_dropped"] == {
        "timestamp out of range": [4, 5],
        "prompt is not a whole number": [6],
    }


def test_a_header_beyond_all_bounds_is_one_line(tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", f"TIMESTAMP,{'x' * 140_000}", "2024-01-01 00:00:00,5")
    for kind in ("auto", "azure"):
        with pytest.raises(ValueError, match=r"a\.csv: line 1 holds no names of columns"):
            imported(path, kind=kind)


# ---- from the command line and in a run
def test_the_command_line_imports_and_exports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [(0, 1024, 5, [7, 8]), (20_000, 600, 5, [7, 9]), (21_000, 0, 5, [1])]
    source, out = mooncake(tmp_path / "a.jsonl", *rows), tmp_path / "out.parquet"
    words = ["trace", "import", str(source), "--kind", "mooncake", "--out", str(out)]
    assert main([*words, "--time-unit", "s", "--rate", "0.5"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[1:] == [
        "rows read 3 = kept 2 + dropped 1",
        "        1 prompt under 1 tokens (first at 3)",
    ]
    assert [r.arrival_ns for r in read_trace(out)] == [0, 2 * S]
    assert main(["trace", "export", str(out), "--out", str(tmp_path / "b.jsonl")]) == 0
    lines = [json.loads(line) for line in (tmp_path / "b.jsonl").read_text().splitlines()]
    assert lines == [
        {"timestamp": 0, "input_length": 1024, "output_length": 5, "hash_ids": [7, 8]},
        {"timestamp": 2000, "input_length": 600, "output_length": 5, "hash_ids": [7, 9]},
    ]
    assert main(["trace", "import", str(source), "--kind", "nokind", "--out", str(out)]) == 2


def test_a_recorded_trace_is_run_at_its_own_times(tmp_path: Path) -> None:
    rows = [(i * 500, 33 + i, 5, [0, 1, i + 2]) for i in range(10)]
    source = mooncake(tmp_path / "a.jsonl", *rows)
    chosen = ["trace=recorded", f"trace.path={source}", "backend=sim"]
    cache = f"cache={tmp_path / 'cache'}"
    run_experiment(composed([*chosen, "trace.rate=4", cache]), tmp_path / "run")
    requests = load(tmp_path / "run").requests
    assert requests["arrival_ns"].tolist() == [i * 250 * MS for i in range(10)]
    assert requests["prompt_tokens"].tolist() == list(range(33, 43))
    given = [*chosen, cache, "arrival=all_at_once"]
    run_experiment(composed(given), tmp_path / "other")
    assert set(load(tmp_path / "other").requests["arrival_ns"]) == {0}
    with pytest.raises(ValueError, match=r"trace.rate=4: the trace's times are replaced"):
        run_experiment(composed([*given, "trace.rate=4"]), tmp_path / "third")
    with pytest.raises(
        ValueError, match=r"arrival\.rate: no setting of the arrival that is chosen"
    ):
        composed([*chosen, "arrival.rate=4"])


def test_times_that_the_default_arrival_replaces_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_trace(tmp_path / "t.parquet", [Request(i, i * S, 9, 3) for i in range(4)], {})
    chosen = ["trace=file", f"trace.path={tmp_path}/t.parquet"]
    for name, word in (("keep", "arrival=trace"), ("ask", "arrival.rate=2")):
        run_experiment(composed([*chosen, word]), tmp_path / name)
    assert not caplog.messages, "somebody asked for it"
    run_experiment(composed(chosen), tmp_path / "unasked")
    [told] = caplog.messages
    assert "arrival times are replaced by the default arrival=poisson; arrival=trace keeps" in told


# ---- the real extracts
Extract = Callable[[str, str], tuple[dict[str, Any], list[Request]]]


@pytest.fixture(scope="module")
def extract(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Extract:
    """Imports an extract of a kind, each once: its sidecar and its requests."""

    @cache
    def extract(name: str, kind: str) -> tuple[dict[str, Any], list[Request]]:
        source = shared / "data" / "arrivals" / f"{name}.parquet"
        out = tmp_path_factory.mktemp("extracts") / "out.parquet"
        return import_trace(source, out, kind=kind), read_trace(out)

    return extract


@pytest.mark.parametrize(
    ("name", "kind", "count", "prompt_mean", "bucket_s"),
    [
        ("azure2023_conv_first45min", "azure", 15_877, 1184, None),
        ("azure2023_code_first45min", "azure", 8_068, 2042, None),
        ("mooncake_conversation_first45min", "mooncake", 8_940, None, 3.0),
        ("mooncake_synthetic", "mooncake", 3_993, 15_325, None),
    ],
)
def test_published_counts(
    extract: Extract,
    name: str,
    kind: str,
    count: int,
    prompt_mean: int,
    bucket_s: float,
) -> None:
    # counts and means as the notes on the data have them (in whole tokens)
    sidecar, requests = extract(name, kind)
    assert sidecar["rows_read"] == len(requests) == count and not sidecar["rows_dropped"]
    if prompt_mean:
        # 1: a figure rounded on one side or the other
        assert np.mean([r.prompt_tokens for r in requests]) == pytest.approx(prompt_mean, abs=1)
    assert (sidecar["bucket"] or {"width_s": None})["width_s"] == bucket_s


@pytest.mark.parametrize(
    ("name", "share"),
    [("mooncake_conversation_first45min", 0.36), ("mooncake_synthetic", 0.65)],
)
def test_prefixes_repeat_as_published(extract: Extract, name: str, share: float) -> None:
    # prompt tokens that an infinite prefix cache would have served, from the notes on the data (the
    # whole hour there, 45 minutes of the conversation here: 2 points for that, and for rounding)
    seen: set[int] = set()
    reused = total = 0
    for request in extract(name, "mooncake")[1]:
        known = 0
        while known < len(request.prefix_ids) and request.prefix_ids[known] in seen:
            known += 1
        reused += min(known * request.prefix_block_tokens, request.prompt_tokens)
        total += request.prompt_tokens
        seen.update(request.prefix_ids)
    assert reused / total == pytest.approx(share, abs=0.02)
