"""ServeGen's client windows: recorded rates exactly, gaps as fitted, lengths per client."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from traces.importing import import_trace
from traces.serving.request import Request
from traces.serving.servegen import Window, read_windows, times_s
from traces.store import read_trace

S = 1_000_000_000
COLUMNS = ("client_id", "window_start_s", "rate_rps", "iat_cv", "iat_dist", "shape", "scale")
POISSON = (0, 0, 1.0, 1.0, "Gamma", 1.0, 1.0)


def windows(folder: Path, *rows: tuple[Any, ...]) -> Path:
    path = folder / "a_client_windows.parquet"
    columns = zip(*rows, strict=True)
    pq.write_table(pa.table(dict(zip(COLUMNS, map(list, columns), strict=True))), path)
    return path


def histogram(folder: Path, *rows: tuple[int, int, str, int, float]) -> Path:
    path = folder / "a_length_hist.parquet"
    names = ("client_id", "window_start_s", "field", "value", "prob")
    pq.write_table(
        pa.table(dict(zip(names, map(list, zip(*rows, strict=True)), strict=True))), path
    )
    return path


def always(client: int, prompt: int, output: int, start_s: int = 0) -> list[tuple[Any, ...]]:
    return [
        (client, start_s, "input_tokens", prompt, 1.0),
        (client, start_s, "output_tokens", output, 1.0),
        (client, start_s, "reason_ratio", 0, 1.0),
    ]


def imported(source: Path, **options: Any) -> tuple[dict[str, Any], list[Request]]:
    out = source.with_name("out.parquet")
    sidecar = import_trace(source, out, **options)
    dropped = sum(sidecar["rows_dropped"].values())
    assert sidecar["rows_read"] == sidecar["rows_kept"] + dropped
    kept = sidecar["requests_drawn"] - sum(sidecar["requests_dropped"].values())
    assert kept == sidecar["requests"]
    return sidecar, read_trace(out)


@given(
    rate=st.floats(0.01, 5),
    shape=st.floats(0.01, 400),
    scale=st.floats(1e-6, 400),
    is_gamma=st.booleans(),
    faster=st.floats(0.1, 10),
    seed=st.integers(0, 999),
)
def test_a_window_holds_its_rate_and_all_its_arrivals(
    rate: float, shape: float, scale: float, is_gamma: bool, faster: float, seed: int
) -> None:
    window = Window(1, 3, 1200.0, rate, is_gamma, shape, scale)
    times = times_s(window, 600.0, faster, seed)
    assert abs(len(times) - rate * faster * 600) < 1
    # a sum of floats may pass the end by its rounding
    assert np.all(times >= 1200) and np.all(times <= 1800 * (1 + 1e-12))
    assert np.all(np.diff(times) >= 0)
    assert np.array_equal(times, times_s(window, 600.0, faster, seed))


@pytest.mark.parametrize(
    ("is_gamma", "shape", "cv"),
    # of a gamma 1/sqrt(shape); of a Weibull of shape 1/2: sqrt(G(5)/G(3)^2 - 1) = sqrt(5)
    [(True, 0.25, 2.0), (True, 4.0, 0.5), (False, 0.5, 5**0.5), (False, 1.0, 1.0)],
)
def test_gaps_vary_as_fitted(is_gamma: bool, shape: float, cv: float) -> None:
    # Short bursts in long windows, so that none is shrunk: 200 windows of 100 requests. The CV of
    # each is biased by some 3/100 of itself and more for heavy tails; squares and sums over all
    # windows are not, and 20,000 gaps of kurtosis up to 88 give their ratio to 5 %.
    window = Window(1, 0, 0.0, 100 / 600, is_gamma, shape, 0.01)
    gaps = np.concatenate([np.diff(times_s(window, 600.0, 1.0, seed)) for seed in range(200)])
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05)


def test_a_burst_stays_a_burst() -> None:
    # 60 requests at a mean gap of 10 ms: 0.6 s out of 600
    window = Window(1, 0, 0.0, 0.1, True, 1.0, 0.01)
    spans = [np.ptp(times_s(window, 600.0, 1.0, seed)) for seed in range(50)]
    starts = [times_s(window, 600.0, 1.0, seed)[0] for seed in range(50)]
    assert 0.3 < np.mean(spans) < 0.9 and np.ptp(starts) > 300


def test_clients_keep_their_own_lengths_and_rates(tmp_path: Path) -> None:
    rows = [(c, s, 0.5 + c, 1.0, "Gamma", 1.0, 1 / (0.5 + c)) for c in (0, 1) for s in (0, 600)]
    source = windows(tmp_path, *rows)
    histogram(tmp_path, *always(0, 11, 5), *always(1, 22, 6), *always(1, 33, 7, start_s=600))
    sidecar, requests = imported(source)
    assert sidecar["kind"] == "servegen" and sidecar["recorded_rate"] == 2.0
    assert Counter((r.prompt_tokens, r.output_tokens) for r in requests) == {
        (11, 5): 600,
        (22, 6): 900,
        (33, 7): 900,
    }
    times = [r.arrival_ns for r in requests]
    assert times == sorted(times) and times[0] == 0 and times[-1] < 1200 * S
    early = [r for r in requests if r.prompt_tokens == 22]
    assert max(r.arrival_ns for r in early) < 600 * S


def test_another_rate_keeps_the_clock(tmp_path: Path) -> None:
    source = windows(tmp_path, *((0, s, 1.0, 1.0, "Gamma", 1.0, 1.0) for s in (0, 600, 1200)))
    histogram(tmp_path, *always(0, 11, 5))
    sidecar, requests = imported(source, rate=4.0, seed=5)
    assert sidecar["rate_factor"] == 4.0 and len(requests) == 7200
    sidecar, part = imported(source, rate=4.0, seed=5, start_s=600, duration_s=600)
    assert len(part) == 2400 and sidecar["rows_dropped"] == {"outside the wanted time": 2}
    times, same = ([r.arrival_ns for r in some] for some in (part, requests[2400:4800]))
    # equal but for the time of the first and the rounding to nanoseconds
    assert np.allclose(np.diff(times), np.diff(same), rtol=0, atol=1)


@pytest.mark.parametrize(
    ("start_s", "duration_s"), [(0, 900), (0, 60), (300, 600), (300, None), (1750, 600)]
)
def test_any_part_is_what_the_whole_has_there(
    tmp_path: Path, start_s: int, duration_s: int | None
) -> None:
    source = windows(
        tmp_path,
        *((0, s, 1.0, 1.0, "Gamma", 1.0, 1.0) for s in (0, 600, 1200)),
        *((1, s, 0.2, 1.0, "Weibull", 0.5, 2.0) for s in (0, 600, 1200)),
    )
    histogram(tmp_path, *always(0, 11, 5), *always(1, 22, 6))
    whole = [times_s(window, 600.0, 1.0, 5) for window in read_windows(source)[0]]
    times = np.sort(np.concatenate(whole))
    end_s = min(1800, start_s + (duration_s or 1800))
    inside = times[(times >= start_s) & (times < end_s)]
    sidecar, requests = imported(source, seed=5, start_s=start_s, duration_s=duration_s)
    assert np.array_equal([r.arrival_ns for r in requests], np.rint((inside - inside[0]) * S))
    assert sidecar["recorded_rate"] == pytest.approx(1.2)
    assert sidecar["requests_dropped"].get("outside the wanted time", 0) == (
        sidecar["requests_drawn"] - len(inside)
    )


@pytest.mark.slow
@pytest.mark.parametrize(("start_s", "duration_s"), [(0, 900), (0, 60), (300, 600)])
def test_another_rate_holds_in_any_part(tmp_path: Path, start_s: int, duration_s: int) -> None:
    source = windows(tmp_path, POISSON, (0, 600, *POISSON[2:]))
    histogram(tmp_path, *always(0, 11, 5))
    asked = {"rate": 10.0, "start_s": start_s, "duration_s": duration_s}
    found = [imported(source, seed=seed, **asked)[1] for seed in range(20)]
    assert all(requests[-1].arrival_ns < duration_s * S for requests in found)
    # Poisson but for the ends of a window, where a burst may leave some seconds (of 600) empty; the
    # mean of 20 deviates by 0.9 % at 60 s
    assert np.mean([*map(len, found)]) == pytest.approx(10 * duration_s, rel=0.08)


def test_a_limit_takes_the_first(tmp_path: Path) -> None:
    source = windows(
        tmp_path, POISSON, (1, 0, 2.0, 1.0, "Weibull", 1.0, 0.5), (0, 600, *POISSON[2:])
    )
    histogram(tmp_path, *always(0, 11, 5), *always(1, 22, 6))
    _, everything = imported(source)
    sidecar, first = imported(source, limit=100)
    assert first == everything[:100]
    assert sidecar["requests_dropped"] == {"beyond the limit of 100 requests": 1700}


def test_spoilt_windows_and_unknown_clients_are_counted(tmp_path: Path) -> None:
    bad = [
        (0, 0, 0.0, 1.0, "Gamma", 1.0, 1.0),
        (0, 0, 1.0, 1.0, "Pareto", 1.0, 1.0),
        (0, 0, 1.0, 1.0, "Gamma", float("nan"), 1.0),
        (7, 0, 1.0, 1.0, "Gamma", 1.0, 1.0),
    ]
    source = windows(tmp_path, POISSON, *bad)
    histogram(tmp_path, *always(0, 11, 0), *always(0, 11, 5), (7, 0, "input_tokens", 9, 1.0))
    sidecar, requests = imported(source)
    assert sidecar["first_lines_dropped"] == {
        "rate_rps is out of range": [2],
        "gaps are neither Gamma nor Weibull": [3],
        "shape is out of range": [4],
        "client without token lengths": [5],
    }
    # half of the outputs have no token
    assert sidecar["requests_dropped"]["output under 1 tokens"] == 600 - len(requests)
    assert 200 < len(requests) < 400


def test_lengths_must_be_somewhere(tmp_path: Path) -> None:
    source = windows(tmp_path, POISSON)
    with pytest.raises(ValueError, match="no token lengths beside it"):
        imported(source)
    pairs = tmp_path / "pairs.csv"
    pairs.write_text("prompt_tokens,output_tokens\n5,6\n7,8\n", encoding="utf-8")
    sidecar, requests = imported(source, lengths=pairs)
    assert not sidecar["lengths"]["per_client"]
    assert {(r.prompt_tokens, r.output_tokens) for r in requests} == {(5, 6), (7, 8)}


def test_a_histogram_in_csv_is_read_as_one_in_parquet(tmp_path: Path) -> None:
    source = windows(tmp_path, POISSON)
    rows = [*always(0, 11, 5), *always(0, 33, 7)]
    histogram(tmp_path, *rows)
    _, expected = imported(source)
    table, names = tmp_path / "hist.csv", "client_id,window_start_s,field,value,prob"
    table.write_text("\n".join([names, *(",".join(map(str, row)) for row in rows)]) + "\n")
    assert imported(source, lengths=table)[1] == expected
    for spoilt, told in (("0,0,input_tokens,x,1", "value is not a number"), ("0,0", "line 8 can")):
        path = tmp_path / "spoilt.csv"
        path.write_text(f"{table.read_text()}{spoilt}\n")
        with pytest.raises(ValueError, match=rf"spoilt\.csv: {told}"):
            imported(source, lengths=path)


def test_too_many_requests_are_refused(tmp_path: Path) -> None:
    source = windows(tmp_path, (0, 0, 1e6, 1.0, "Gamma", 1.0, 1.0))
    histogram(tmp_path, *always(0, 11, 5))
    with pytest.raises(ValueError, match="6e\\+08 requests would be drawn"):
        imported(source)


@pytest.mark.parametrize(
    "model",
    ["deepseek-r1", *(pytest.param(f"m-{s}", marks=pytest.mark.slow) for s in ("small", "large"))],
)
def test_published_pools_are_read(shared: Path, model: str) -> None:
    source = shared / "data" / "arrivals" / f"servegen_{model}_client_windows.parquet"
    found, rows = read_windows(source)
    counts = {"m-small": 40_095, "deepseek-r1": 3_111, "m-large": 99_839}  # data/README.md
    assert len(found) == rows.rows_read == counts[model] and not rows.dropped


@pytest.mark.slow
def test_a_real_hour_has_its_rate_and_varies(shared: Path, tmp_path: Path) -> None:
    source = shared / "data" / "arrivals" / "servegen_deepseek-r1_client_windows.parquet"
    out = tmp_path / "out.parquet"
    sidecar = import_trace(source, out, start_s=36_000, duration_s=3600, rate=1.0)
    requests = read_trace(out)
    gaps = np.diff([r.arrival_ns for r in requests])
    # each of some 400 client windows is rounded to whole requests by chance: 10 requests at most
    drawn = sidecar["requests_drawn"]
    assert drawn == pytest.approx(1.0 * 3600, abs=50)
    assert gaps.std() / gaps.mean() > 1.0  # burstier than Poisson, as published
    assert sidecar["rows_kept"] > 100
