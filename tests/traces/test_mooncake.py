"""Mooncake files: the unit of stamps, prefix blocks, and export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.cli.__main__ import main
from tests.support.recorded import MS, S, imported, mooncake, written
from traces.serving.mooncake import write_mooncake
from traces.serving.recorded_times import read_times_ns
from traces.serving.request import Request


@given(rate=st.floats(0.12, 85), seed=st.integers(0, 999), unit=st.sampled_from(["ms", "s"]))
@settings(max_examples=10, deadline=None)
def test_ms_and_s_are_distinguished(
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
def test_recorded_arrivals_and_length_tables_find_the_unit(tmp_path: Path, unit_s: int) -> None:
    source = mooncake(tmp_path / "a.jsonl", *((i * unit_s / 2, 9, 5, [1]) for i in range(9)))
    assert read_times_ns(source).tolist() == [i * S // 2 for i in range(9)]
    assert imported(source, kind="lengths")[1][-1].arrival_ns == 4 * S


def test_stamps_that_are_text_have_their_unit_found(tmp_path: Path) -> None:
    """Every cell of a CSV file is text, and some JSON lines quote numbers."""
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


def test_dense_stamps_are_warned_of_at_export_and_at_import(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """200 requests a second in ms look like one in 5 s: the format names no unit."""
    made = [Request(i, 5 * i * MS, 9, 1) for i in range(50)]
    warning = write_mooncake(tmp_path / "a.jsonl", made)
    assert warning is not None and "--time-unit ms" in warning
    words = ["trace", "import", str(tmp_path / "a.jsonl"), "--out", str(tmp_path / "b.parquet")]
    assert main(words) == 0 and "stamps count s (mean gap of 5" in capsys.readouterr().out
    _, back = imported(tmp_path / "a.jsonl", time_unit="ms")
    assert [r.arrival_ns for r in back] == [r.arrival_ns for r in made]
    assert write_mooncake(tmp_path / "a.jsonl", [Request(i, i * S, 9, 1) for i in range(5)]) is None


def test_another_block_size_than_the_traces_own_is_refused(tmp_path: Path) -> None:
    made = [Request(0, 0, 32, 5, prefix_ids=(3, 4), prefix_block_tokens=16)]
    with pytest.raises(ValueError, match="block_tokens is 512, but the trace's prefix ids"):
        write_mooncake(tmp_path / "a.jsonl", made, 512)
    assert list(tmp_path.iterdir()) == []
    write_mooncake(tmp_path / "a.jsonl", made)
    assert json.loads((tmp_path / "a.jsonl").read_text())["hash_ids"] == [3, 4]
