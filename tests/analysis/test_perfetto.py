"""The Perfetto file, parsed back and compared with its source tables."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from analysis.perfetto import write_perfetto
from analysis.run import Run, load
from tests.support.synthetic import MS, TWO, Toy, write

EIGHT = Toy([i * 30 * MS for i in range(8)], prompts=[20] * 8, outputs=[4, 9, 2, 7, 1, 5, 8, 3])


def parsed(path: Path, *runs: tuple[str, Run], **options: Any) -> list[dict[str, Any]]:
    count = write_perfetto(path, runs, **options)
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    assert len(events) == count
    return events


def of(events: list[dict[str, Any]], **fields: Any) -> list[dict[str, Any]]:
    return [e for e in events if all(e.get(key) == value for key, value in fields.items())]


@pytest.fixture
def both(tmp_path: Path) -> tuple[tuple[str, Run], tuple[str, Run]]:
    slow = replace(EIGHT, backend="cpu", host_ns=MS, factor=lambda step: 1.5)
    return (
        ("prediction", load(write(tmp_path / "a", EIGHT))),
        ("measurement", load(write(tmp_path / "b", slow))),
    )


def test_two_runs_are_two_processes(tmp_path: Path, both: Any) -> None:
    events = parsed(tmp_path / "t.json.gz", *both)
    names = [e["args"]["name"] for e in of(events, name="process_name")]
    assert names == ["prediction (sim, a)", "measurement (cpu, b)"]
    assert {e["pid"] for e in events} == {1, 2}
    assert json.loads(gzip.decompress((tmp_path / "t.json.gz").read_bytes()))["displayTimeUnit"]


def test_slices_are_the_operations_of_the_steps_table(tmp_path: Path, both: Any) -> None:
    events = parsed(tmp_path / "t.json.gz", *both)
    for pid, (_, run) in enumerate(both, start=1):
        slices = of(events, ph="X", cat="operation", pid=pid)
        steps = run.steps.sort_values("start_ns")
        # microseconds of whole nanoseconds: three decimals, which a double holds exactly enough
        assert [round(e["ts"] * 1000) for e in slices] == steps["start_ns"].tolist()
        ends = [round((e["ts"] + e["dur"]) * 1000) for e in slices]
        assert ends == steps["end_ns"].tolist()
        for key in ("step", "prefill_tokens", "decode_tokens", "samples"):
            assert [e["args"][key] for e in slices] == steps[key].tolist()
        assert [e["args"]["jobs"] for e in slices] == [list(jobs) for jobs in steps["jobs"]]
    assert len(of(events, ph="X", cat="host", pid=2)) == len(both[1][1].plans)
    lanes = {e["args"]["name"]: e["tid"] for e in of(events, name="thread_name", pid=2)}
    assert lanes == {"0:host": 1, "0:compute": 2}
    assert {e["tid"] for e in of(events, ph="X", cat="operation", pid=2)} == {2}


def test_no_thread_shows_overlapping_slices(tmp_path: Path) -> None:
    run = load(write(tmp_path / "a", EIGHT))
    rng = np.random.default_rng(0)
    start = rng.integers(0, 50 * MS, len(run.steps))
    steps = run.steps.assign(start_ns=start, end_ns=start + rng.integers(0, 20 * MS, len(start)))
    events = parsed(tmp_path / "t.json.gz", ("p", replace(run, steps=steps)))
    slices = of(events, ph="X")
    assert len(slices) == len(steps)
    times = sorted((round(e["ts"] * 1000), round(e["dur"] * 1000)) for e in slices)
    assert times == sorted(zip(steps["start_ns"], steps["end_ns"] - steps["start_ns"], strict=True))
    rows = {e["tid"] for e in slices}
    for tid in rows:
        row = sorted((round(e["ts"] * 1000), round(e["dur"] * 1000)) for e in of(slices, tid=tid))
        assert all(a + d <= b for (a, d), (b, _) in pairwise(row))
    deepest = max(
        sum(s <= at < e for s, e in zip(steps["start_ns"], steps["end_ns"], strict=True))
        for at in steps["start_ns"]
    )
    assert len(rows) == deepest > 1  # as few rows as overlap at once


def test_requests_are_tracks_of_nested_phases(tmp_path: Path) -> None:
    run = load(write(tmp_path / "a", TWO))
    events = of(parsed(tmp_path / "t.json.gz", ("p", run)), cat="request")
    # request 1 arrives at 5 ms, is issued at 10, has its tokens at 20 and 25
    one = [(e["ph"], e["name"], e["ts"]) for e in events if e["id2"] == {"local": "0x1"}]
    assert one == [
        ("b", "request 1", 5000.0),
        ("b", "waiting", 5000.0),
        ("e", "waiting", 10000.0),
        ("b", "prefill", 10000.0),
        ("e", "prefill", 20000.0),
        ("b", "decode", 20000.0),
        ("e", "decode", 25000.0),
        ("e", "request 1", 25000.0),
    ]
    begun, ended = (Counter((e["name"], str(e["id2"])) for e in of(events, ph=p)) for p in "be")
    assert begun == ended


def test_requests_that_never_ended_reach_to_the_end(tmp_path: Path) -> None:
    run = load(write(tmp_path / "a", TWO))
    lost = run.requests.assign(
        status=["finished", "unfinished"], finish_ns=[30.0 * MS, np.nan], scheduled_ns=[0, np.nan]
    ).assign(first_token_ns=[10.0 * MS, np.nan])
    events = parsed(tmp_path / "t.json.gz", ("p", replace(run, requests=lost)))
    ends = of(events, ph="e", name="request 1")
    assert [e["ts"] for e in ends] == [30000.0]
    waiting = [(e["ts"], e["args"]["requests"]) for e in of(events, ph="C", name="waiting")]
    assert waiting == [(0.0, 0), (5000.0, 1)]


def test_counters_follow_the_tables(tmp_path: Path) -> None:
    run = load(write(tmp_path / "a", TWO))
    events = parsed(tmp_path / "t.json.gz", ("p", run))
    counters = {
        name: [(e["ts"], *e["args"].values()) for e in of(events, ph="C", name=name)]
        for name in ("running", "waiting", "KV pages gpu:0")
    }
    assert counters["running"] == [(0.0, 1), (10000.0, 2), (25000.0, 1), (30000.0, 0)]
    assert counters["waiting"] == [(0.0, 0), (5000.0, 1), (10000.0, 0)]
    pages = run.memory.groupby("at_ns")["kv_pages"].last()
    assert all(pages[round(ts * 1000)] == value for ts, value in counters["KV pages gpu:0"])
    assert max(value for _, value in counters["KV pages gpu:0"]) == pages.max()


def test_a_window_keeps_events_that_reach_into_it(tmp_path: Path, both: Any) -> None:
    whole = parsed(tmp_path / "t.json.gz", *both)
    part = parsed(tmp_path / "p.json.gz", *both, window=(0.05, 0.08))
    inside = [e for e in of(whole, ph="X") if e["ts"] + e["dur"] >= 50_000 and e["ts"] <= 80_000]
    assert of(part, ph="X") == inside and 0 < len(inside) < len(of(whole, ph="X"))
    for pid in (1, 2):
        before = [e for e in of(whole, ph="C", name="running", pid=pid) if e["ts"] <= 50_000]
        first = of(part, ph="C", name="running", pid=pid)[0]
        assert first["ts"] == 50_000 and first["args"] == before[-1]["args"]


def test_runs_of_another_clock_start_together(tmp_path: Path) -> None:
    shifted = replace(TWO, arrivals_ns=[t + 77 * MS for t in TWO.arrivals_ns])
    a = parsed(tmp_path / "a.json.gz", ("p", load(write(tmp_path / "run" / "x", TWO))))
    b = parsed(tmp_path / "b.json.gz", ("p", load(write(tmp_path / "shifted" / "x", shifted))))
    assert of(a, ph="X") == of(b, ph="X")


def test_plain_and_packed_files_hold_equal_events(tmp_path: Path, both: Any) -> None:
    events = parsed(tmp_path / "t.json.gz", *both)
    write_perfetto(tmp_path / "t.json", both)
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"] == events
    first = (tmp_path / "t.json.gz").read_bytes()
    write_perfetto(tmp_path / "t.json.gz", both)
    assert (tmp_path / "t.json.gz").read_bytes() == first
