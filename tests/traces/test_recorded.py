"""Stamps of coarse clocks, parts of a trace at another rate, malformed files."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.recorded import AZURE, MS, S, imported, mooncake, written
from traces.serving.recorded_times import bucket_ns, spread_inside


@given(seed=st.integers(0, 10**6), width=st.sampled_from([100 * MS, 3 * S, 7 * S]))
@settings(deadline=None)
def test_buckets_are_found_and_times_stay_in_their_bucket(seed: int, width: int) -> None:
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


def test_compressed_and_malformed_files(tmp_path: Path) -> None:
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
    assert [r.arrival_ns for r in requests] == [0, S, 2 * S]  # the readable rows decide the unit
    assert sidecar["first_lines_dropped"] == {
        "timestamp out of range": [4, 5],
        "prompt is not a whole number": [6],
    }


def test_a_huge_header_is_refused_in_one_line(tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", f"TIMESTAMP,{'x' * 140_000}", "2024-01-01 00:00:00,5")
    for kind in ("auto", "azure"):
        with pytest.raises(ValueError, match=r"a\.csv: line 1 holds no names of columns"):
            imported(path, kind=kind)
