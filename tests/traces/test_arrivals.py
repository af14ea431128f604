"""Arrival processes: exact, seeded, and refused with one line where they cannot be."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from traces.serving.arrivals import (
    AllAtOnce,
    Arrivals,
    Gamma,
    Poisson,
    RecordedArrivals,
    assign,
    num_arrivals,
)
from traces.serving.recorded_times import read_times_ns
from traces.serving.request import Request

S = 1_000_000_000
rates = st.floats(0.01, 1e4)
seeds = st.integers(0, 2**32)


@given(rate=rates, burstiness=st.floats(0.05, 50), seed=seeds, n=st.integers(0, 300))
def test_times_never_decrease_and_depend_on_the_seed_alone(
    rate: float, burstiness: float, seed: int, n: int
) -> None:
    process = Gamma(rate=rate, burstiness=burstiness)
    times = process.times_ns(n, seed)
    assert times.dtype == np.int64 and len(times) == n
    assert np.all(times >= 0) and np.all(np.diff(times) >= 0)
    assert np.array_equal(times, Gamma(rate=rate, burstiness=burstiness).times_ns(n, seed))


@given(rate=rates, seed=seeds, n=st.integers(0, 200), more=st.integers(0, 100))
def test_more_requests_leave_the_first_where_they_were(
    rate: float, seed: int, n: int, more: int
) -> None:
    process = Poisson(rate=rate)
    assert np.array_equal(process.times_ns(n + more, seed)[:n], process.times_ns(n, seed))


@given(rate=rates, burstiness=st.floats(0.2, 50), seed=seeds, n=st.integers(1, 300))
def test_rescaled_times_end_exactly_at_n_over_rate(
    rate: float, burstiness: float, seed: int, n: int
) -> None:
    plain = Gamma(rate=rate, burstiness=burstiness).times_ns(n, seed)
    rescaled = Gamma(rate=rate, burstiness=burstiness, rescale=True).times_ns(n, seed)
    # two float roundings of 2^-53 each, then the rounding to nanoseconds
    assert abs(int(rescaled[-1]) - n / rate * S) <= 1 + n / rate * S * 2**-51
    if plain[-1] > 1000 * n:  # else the plain times are too coarse in nanoseconds to compare
        stretch = n / rate * S / plain[-1]
        # both sides are rounded to a nanosecond, and so is the last time that gives the stretch
        assert np.allclose(rescaled, plain * stretch, rtol=1 / plain[-1], atol=1 + stretch)


def test_different_seeds_differ() -> None:
    assert not np.array_equal(Poisson().times_ns(10, 0), Poisson().times_ns(10, 1))


def test_all_at_once_is_all_at_zero() -> None:
    assert AllAtOnce().times_ns(3).tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("process", "cv"),
    [(Poisson(rate=7), 1.0), (Gamma(rate=7, burstiness=4), 0.5), (Gamma(rate=7), 1.0)],
)
def test_rate_and_variation_are_those_asked_for(process: Arrivals, cv: float) -> None:
    # 20 seeds of 5,000: five standard errors of both means (benchmarks/correctness/arrivals.py
    # derives them)
    gaps = [np.diff(process.times_ns(5000, seed), prepend=0) for seed in range(20)]
    rate_error = np.mean([1 / g.mean() for g in gaps]) * S / 7 - 1
    cv_error = np.mean([g.std() / g.mean() for g in gaps]) - cv
    assert abs(rate_error) < 5 * cv / np.sqrt(100_000)
    assert abs(cv_error) < 5 * cv * np.sqrt((1 + cv**2) / 200_000)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Poisson(rate=0),
        lambda: Poisson(rate=float("nan")),
        lambda: Gamma(rate=float("inf")),
        lambda: Gamma(burstiness=-1),
        lambda: Gamma(rate=1e-12).times_ns(3),
        lambda: RecordedArrivals(),
        lambda: RecordedArrivals(path="a", times_s=(1.0,)),
        lambda: RecordedArrivals(times_s=(float("nan"),)),
        lambda: RecordedArrivals(times_s=(1.0,), mode="squeeze"),
        lambda: RecordedArrivals(times_s=(1.0,), rate=-2),
        lambda: Poisson().times_ns(-1),
        lambda: RecordedArrivals(times_s=(2.0, 1.0)).times_ns(1),
        lambda: RecordedArrivals(times_s=(0.0, 1.0)).times_ns(3),
        lambda: RecordedArrivals(times_s=(0.0, 1.0, 2.0), rate=9.0, mode="thin").times_ns(1),
        lambda: RecordedArrivals(path="/no/such/file.csv").times_ns(1),
        lambda: RecordedArrivals(times_s=(1.0, 1.0, 1.0), rate=4.0).times_ns(3),
    ],
)
def test_mistakes_are_one_line(wrong: Callable[[], object]) -> None:
    with pytest.raises(ValueError) as caught:
        wrong()
    assert "\n" not in str(caught.value) and len(str(caught.value)) > 10


@given(
    gaps=st.lists(st.floats(1e-3, 10), min_size=2, max_size=50),
    start=st.floats(0, 100),
    rate=rates,
)
def test_stretching_gives_exactly_the_rate_and_keeps_the_shape(
    gaps: list[float], start: float, rate: float
) -> None:
    times_s = tuple(float(t) for t in start + np.cumsum([0.0, *gaps]))
    recorded = RecordedArrivals(times_s=times_s).times_ns(len(times_s))
    stretched = RecordedArrivals(times_s=times_s, rate=rate).times_ns(len(times_s))
    assert recorded[0] == stretched[0] == 0
    span_ns = len(gaps) / rate * S
    assert abs(int(stretched[-1]) - span_ns) <= 1 + span_ns * 2**-50
    assert np.allclose(stretched / stretched[-1], recorded / recorded[-1], atol=1 / stretched[-1])


def test_thinning_keeps_recorded_times_and_their_clock() -> None:
    recorded = tuple(np.arange(10_000) / 10.0)
    thinned = RecordedArrivals(times_s=recorded, rate=2.5, mode="thin").times_ns(2000, seed=3)
    assert set(np.diff(thinned) % (S // 10)) == {0}
    # 1/4 is kept: 2,000 gaps of 4 recorded gaps on average, geometric with variance 12
    assert abs(thinned[-1] / S - 2000 * 0.4) < 4 * np.sqrt(2000 * 12) * 0.1
    again = RecordedArrivals(times_s=recorded, rate=2.5, mode="thin")
    assert not np.array_equal(thinned, again.times_ns(2000, seed=4))


def test_recorded_layouts(tmp_path: Path) -> None:
    azure = tmp_path / "azure.csv"
    azure.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.0319600,3180,8\n"
    )
    mooncake = tmp_path / "mooncake.jsonl"
    mooncake.write_text("".join(json.dumps({"timestamp": t}) + "\n" for t in (3000, 3500)))
    burst = tmp_path / "burst.csv"
    burst.write_text("Timestamp,Model\n5,ChatGPT\n45,ChatGPT\n")
    later = tmp_path / "azure2024.csv"  # dates with an offset
    later.write_text(
        "TIMESTAMP\n2024-05-10 01:00:00.009930+01:00\n2024-05-10 00:00:01.000001+00:00\n"
    )
    assert RecordedArrivals(path=str(azure)).times_ns(2).tolist() == [0, 52_000_000]
    assert RecordedArrivals(path=str(later)).times_ns(2).tolist() == [0, 990_071_000]
    assert RecordedArrivals(path=str(mooncake)).times_ns(2).tolist() == [0, 500_000_000]
    assert RecordedArrivals(path=str(burst)).times_ns(2).tolist() == [0, 40 * S]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", "time\n1\n"),
        ("b.csv", "arrival_s\n1\nx\n"),
        ("c.jsonl", '{"timestamp": 1}\n{"timestamp"\n'),
        ("d.jsonl", "[1]\n"),
        ("e.parquet", "no parquet"),
        ("f.txt", "1"),
        ("g.csv", "TIMESTAMP\nyesterday\n"),
        ("h.csv", "arrival_s\n3\n2\n"),
    ],
)
def test_spoilt_recordings_are_named(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ValueError, match=name) as caught:
        read_times_ns(path)
    assert "\n" not in str(caught.value)


def test_a_torn_recording_is_named(tmp_path: Path) -> None:
    path = tmp_path / "torn.jsonl.gz"
    rows = "".join(json.dumps({"timestamp": t}) + "\n" for t in range(1000))
    path.write_bytes(gzip.compress(rows.encode())[:-20])
    with pytest.raises(ValueError, match=r"torn\.jsonl\.gz: not a complete gzip file"):
        read_times_ns(path)


def test_azure_recording(shared: Path) -> None:
    path = shared / "data" / "arrivals" / "azure2023_conv_first45min.parquet"
    times = RecordedArrivals(path=str(path)).times_ns(15_877)
    # as the notes on the data have it: 5.88 requests per second over 45 minutes
    assert times[0] == 0 and 15_876 / (times[-1] / S) == pytest.approx(5.88, abs=0.005)


def test_only_the_first_turn_of_a_session_takes_an_arrival() -> None:
    lone = Request(0, 0, 5, 5)
    turns = [Request(1 + t, 0, 5, 5, session=9, turn=t, think_ns=t * S) for t in range(3)]
    assert num_arrivals([lone, *turns]) == 2
    assigned = assign([lone, *turns], [10, 20])
    assert [r.arrival_ns for r in assigned] == [10, 20, 20, 20]
    assert [r.think_ns for r in assigned] == [0, 0, S, 2 * S]
    assert all(type(r.arrival_ns) is int for r in assign([lone], Poisson().times_ns(1)))


def test_assign_refuses_a_wrong_count_and_a_headless_session() -> None:
    with pytest.raises(ValueError, match="2 times for 1"):
        assign([Request(0, 0, 5, 5)], [1, 2])
    with pytest.raises(ValueError, match="no turn 0"):
        assign([Request(7, 0, 5, 5, session=1, turn=1)], [])
