"""Token-length tables: pairs stay pairs, and every row is a request or a reason."""

from __future__ import annotations

import gzip
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from traces.importing import import_trace
from traces.serving.lengths import Lengths, Limits, read_lengths, sample
from traces.serving.request import Request


def csv(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize(
    "header",
    [
        "prompt_tokens,output_tokens",
        "num_prefill_tokens,num_decode_tokens",
        "ContextTokens,GeneratedTokens",
        "Request tokens,Response tokens",
    ],
)
def test_known_headers(tmp_path: Path, header: str) -> None:
    lengths = read_lengths(csv(tmp_path / "a.csv", header, "5,7", "6,8"))
    assert [(r.prompt_tokens, r.output_tokens) for r in lengths.requests] == [(5, 7), (6, 8)]
    assert lengths.rows_read == 2 and not lengths.rows_dropped


def test_each_reason_is_counted(tmp_path: Path) -> None:
    rows = ("5,7", ",7", "5,", "0,7", "2.5,7", "5,-1", "90,1", "50,60", "6,6")
    path = csv(tmp_path / "a.csv", "prompt_tokens,output_tokens", *rows)
    lengths = read_lengths(path, Limits(1, 80, 100))
    assert lengths.rows_read == 9 and len(lengths.requests) == 2
    assert lengths.rows_dropped == {
        "prompt missing": 1,
        "output missing": 1,
        "prompt under 1 tokens": 1,
        "prompt is not a whole number": 1,
        "output under 1 tokens": 1,
        "prompt over 80 tokens": 1,
        "prompt and output over 100 tokens": 1,
    }


def test_arrivals_and_ids_of_a_table_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    columns = {
        "arrival_s": [2.0, 2.5],
        "prompt_tokens": [2, 1],
        "output_tokens": [4, 4],
        "prompt_ids": [[8, 9], [1, 2, 3]],
    }
    pq.write_table(pa.table(columns), path)
    lengths = read_lengths(path)
    assert lengths.requests == [Request(0, 0, 2, 4, prompt_ids=(8, 9))]
    assert lengths.rows_dropped == {"prompt ids are not as many as prompt tokens": 1}
    without = read_lengths(path, keep_ids=False).requests
    assert [r.arrival_ns for r in without] == [0, 500_000_000]


def test_a_spoilt_row_of_json_lines_costs_only_itself(tmp_path: Path) -> None:
    """A malformed row is dropped by reason and ends no import."""
    row = '{{"prompt_tokens": {}, "output_tokens": 2, "prompt_ids": {}}}'.format
    ids = {"7": 1, '"abc"': 1, "[1, 2]": 1, '["a", "b", "c"]': 1, "[1, 2, 4294967296]": 1}
    rows = [row(3, "[1, 2, 3]"), *(row(3, wrong) for wrong in ids)]
    rows += [row("9" * 5000, "null"), row(2**31, "null"), "{", "[" * 100_000, "17"]
    lengths = read_lengths(csv(tmp_path / "a.jsonl", *rows))
    assert lengths.rows_read == len(rows)
    assert [r.prompt_ids for r in lengths.requests] == [(1, 2, 3)]
    assert lengths.rows_dropped == {
        "malformed line": 3,
        "prompt ids are not a list": 2,
        "prompt ids are not as many as prompt tokens": 1,
        "prompt ids are not all token ids": 2,
        "prompt is not a whole number": 1,
        "prompt over 2147483647 tokens": 1,
    }


def test_a_spoilt_row_of_csv_costs_only_itself(tmp_path: Path) -> None:
    """A cell of text drops its row alone, and so does a ragged line."""
    rows = ("prompt_tokens,output_tokens", "5,7", "x,7", "5,7.0", "6", "6,8,9", '"6","8"')
    path = csv(tmp_path / "a.csv", *rows)
    lengths = read_lengths(path)
    kept = [(r.prompt_tokens, r.output_tokens) for r in lengths.requests]
    assert kept == [(5, 7), (5, 7), (6, 8)]
    assert lengths.rows_read == 6
    assert lengths.rows_dropped == {"prompt is not a whole number": 1, "malformed line": 2}
    packed = tmp_path / "b.csv.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert read_lengths(packed).requests == lengths.requests
    assert import_trace(packed, tmp_path / "b.parquet")["kind"] == "lengths"


def test_a_spoilt_time_costs_only_its_row(tmp_path: Path) -> None:
    rows = ("arrival_s,prompt_tokens,output_tokens", "2,1,2", "1e300,1,2", "soon,1,2", "2.5,1,2")
    lengths = read_lengths(csv(tmp_path / "a.csv", *rows))
    assert [r.arrival_ns for r in lengths.requests] == [0, 500_000_000]
    assert lengths.rows_dropped == {"timestamp out of range": 1, "timestamp is not a number": 1}
    with pytest.raises(ValueError, match=r"a\.csv: arrivals go back in time"):
        read_lengths(csv(tmp_path / "a.csv", *rows, "2,1,2"))


def test_nanoseconds_of_text_are_exact(tmp_path: Path) -> None:
    """A float of them would be off by up to 128."""
    stamps = (1_700_000_000_000_000_001, 1_700_000_000_000_000_004)
    rows = ("arrival_time_ns,input_toks,output_toks", *(f"{stamp},1,2" for stamp in stamps))
    assert [r.arrival_ns for r in read_lengths(csv(tmp_path / "a.csv", *rows)).requests] == [0, 3]


@pytest.mark.parametrize("lines", [("a,b", "1,2"), ("prompt_tokens", "1")])
def test_a_table_without_counts_is_refused(tmp_path: Path, lines: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=r"a\.csv: no column of token counts"):
        read_lengths(csv(tmp_path / "a.csv", *lines))


@given(n=st.integers(0, 40), seed=st.none() | st.integers(0, 2**32))
def test_sampling_is_joint_without_replacement_and_accounted(n: int, seed: int | None) -> None:
    rows = [Request(i, 10 * i, 1 + i, 1000 + i) for i in range(30)]
    drawn = sample(Lengths(32, rows, Counter({"prompt missing": 2})), n, seed)
    assert drawn.rows_read == len(drawn.requests) + drawn.rows_dropped.total()
    assert len(drawn.requests) == min(n, 30)
    assert all(r.output_tokens == r.prompt_tokens + 999 for r in drawn.requests)
    assert len({r.prompt_tokens for r in drawn.requests}) == len(drawn.requests)
    assert [(r.request_id, r.arrival_ns) for r in drawn.requests] == [
        (i, 10 * i) for i in range(len(drawn.requests))
    ]


def test_shared_tables_read_whole(shared: Path) -> None:
    folder = shared / "data" / "lengths"
    lengths = read_lengths(folder / "sharegpt_v3_firstturn_llama2.parquet", Limits(4, 1024, 2048))
    # 88.8 % survive vLLM's filter (over 58,787 rows; here the first 50,000)
    assert lengths.rows_read == 50_000
    assert len(lengths.requests) == 44_418  # as the notes on the data have it
