"""Runs as a Chrome trace-event file for ui.perfetto.dev: prediction and measurement in one."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analysis.run import Run
from analysis.usage import operations, pools

Event = dict[str, Any]
Window = tuple[float, float]  # seconds from the first arrival
HOST = "host"


def write_perfetto(
    path: Path | str, runs: Sequence[tuple[str, Run]], window: Window | None = None
) -> int:
    """Writes named runs, each as a process with its first arrival at 0.

    A process has a thread per lane (two for overlapping operations, because a thread shows no
    overlap), a track per request, and counters of KV pages, running and waiting requests.

    Args:
        path: the file; Perfetto opens a gzipped one (.gz) as it is.
        runs: (name, run) pairs.
        window: seconds from the first arrival; only events that reach into it are kept.

    Returns:
        The number of events.
    """
    path = Path(path)
    events = [
        event
        for pid, (name, run) in enumerate(runs, 1)
        for event in _events(run, pid, name, window)
    ]
    text = json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, separators=(",", ":"))
    raw = text.encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.tmp")
    # no time stamp in the file: equal runs give equal bytes
    aside.write_bytes(gzip.compress(raw, mtime=0) if path.suffix == ".gz" else raw)
    aside.rename(path)
    return len(events)


def _events(run: Run, pid: int, name: str, window: Window | None) -> Iterator[Event]:
    zero_ns = int(run.requests["arrival_ns"].min()) if len(run.requests) else 0
    reach = (-np.inf, np.inf) if window is None else tuple(s * 1e9 + zero_ns for s in window)
    for event in _all_events(run, name, reach):
        for key in ("ts", "dur"):
            if key in event:  # microseconds, exact to the nanosecond
                since = event[key] - (zero_ns if key == "ts" else 0)
                event[key] = since / 1000
        yield {"pid": pid, **event}


def _all_events(run: Run, name: str, reach: tuple[float, ...]) -> Iterator[Event]:
    """Times in nanoseconds of the run's clock."""
    title = f"{name} ({run.backend}, {run.name})"
    yield {"ph": "M", "name": "process_name", "tid": 0, "args": {"name": title}}
    yield from _lanes(run, reach)
    yield from _requests(run, reach)
    yield from _pages(run, reach)
    yield from _occupancy(run, reach)


# ---- lanes
def _lanes(run: Run, reach: tuple[float, ...]) -> Iterator[Event]:
    slices = [*_host_slices(run), *_op_slices(run)]
    lanes = sorted({lane for lane, _ in slices}, key=lambda lane: (HOST not in lane, lane))
    tid = 0
    for lane in lanes:
        rows = _without_overlap([event for of, event in slices if of == lane])
        for number, row in enumerate(rows, start=1):
            tid += 1
            title = lane if number == 1 else f"{lane} ({number})"
            yield {"ph": "M", "name": "thread_name", "tid": tid, "args": {"name": title}}
            order = {"sort_index": tid}
            yield {"ph": "M", "name": "thread_sort_index", "tid": tid, "args": order}
            for event in row:
                if _reaches(event["ts"], event["ts"] + event["dur"], reach):
                    yield {"ph": "X", "tid": tid, **event}


def _op_slices(run: Run) -> Iterator[tuple[str, Event]]:
    shown = ("step", "prefill_tokens", "decode_tokens", "samples", "nbytes")
    for row in operations(run).to_dict("records"):
        args = {key: int(row[key]) for key in shown if pd.notna(row[key])}
        jobs = [] if row["jobs"] is None else [int(job) for job in row["jobs"]]
        start, end = int(row["start_ns"]), int(row["end_ns"])
        event = {"name": str(row["group"]), "cat": "operation", "ts": start, "dur": end - start}
        yield f"{row['device']}:{row['lane']}", {**event, "args": {**args, "jobs": jobs}}


def _host_slices(run: Run) -> Iterator[tuple[str, Event]]:
    """The host's time for each plan, from its issue on."""
    for row in run.steps[run.steps["host_ns"] > 0].to_dict("records"):
        args = {"step": int(row["step"])}
        span = {"ts": int(row["issue_ns"]), "dur": int(row["host_ns"])}
        yield f"{row['device']}:{HOST}", {"name": "plan", "cat": "host", **span, "args": args}


def _without_overlap(slices: list[Event]) -> list[list[Event]]:
    """The slices on as few rows as possible, without overlap in a row."""
    rows: list[list[Event]] = []
    ends: list[int] = []
    for event in sorted(slices, key=lambda e: (e["ts"], e["dur"])):
        at = next((i for i, end in enumerate(ends) if end <= event["ts"]), len(rows))
        if at == len(rows):
            rows.append([])
            ends.append(0)
        rows[at].append(event)
        ends[at] = event["ts"] + event["dur"]
    return rows


# ---- requests
def _requests(run: Run, reach: tuple[float, ...]) -> Iterator[Event]:
    """A track per request: the request, and in it waiting, prefill and decode."""
    last = max(_last_ns(run), 0)
    for row in run.requests.sort_values("arrival_ns", kind="stable").to_dict("records"):
        arrival, end = int(row["arrival_ns"]), _time(row["finish_ns"], last)
        if not _reaches(arrival, end, reach):
            continue
        scheduled = _time(row["scheduled_ns"], end)
        first = _time(row["first_token_ns"], end)
        counts = ("prompt_tokens", "output_tokens", "restarts", "swaps", "cached_tokens")
        args = {name: int(row[name]) for name in counts} | {"status": str(row["status"])}
        spans = [(f"request {row['request_id']}", arrival, end, args)]
        spans += [("waiting", arrival, scheduled, {}), ("prefill", scheduled, first, {})]
        spans += [("decode", first, end, {})]
        of = {"cat": "request", "tid": 0, "id2": {"local": hex(int(row["request_id"]))}}
        yield from _nested(spans, of)


def _nested(spans: Sequence[tuple[str, int, int, Event]], of: Event) -> Iterator[Event]:
    """The first span around the remaining ones, one after another; empty spans are left out."""
    (name, start, end, args), *parts = spans
    yield {"ph": "b", "name": name, "ts": start, "args": args, **of}
    for part, from_ns, to_ns, _ in parts:
        if to_ns > from_ns:
            yield {"ph": "b", "name": part, "ts": from_ns, **of}
            yield {"ph": "e", "name": part, "ts": to_ns, **of}
    yield {"ph": "e", "name": name, "ts": end, **of}


def _time(value: Any, default: int) -> int:
    return default if pd.isna(value) else int(value)


def _last_ns(run: Run) -> int:
    known = [run.steps["end_ns"].max(), run.requests["finish_ns"].max()]
    return max(
        (int(time) for time in [*known, run.requests["arrival_ns"].max()] if pd.notna(time)),
        default=0,
    )


# ---- counters
def _pages(run: Run, reach: tuple[float, ...]) -> Iterator[Event]:
    for pool, rows in pools(run).items():
        last = rows.groupby("at_ns")["kv_pages"].last()  # several rows at one time: the last holds
        if last.notna().any() and last.max() > 0:
            yield from _counter(f"KV pages {pool}", "pages", last, reach)


def _occupancy(run: Run, reach: tuple[float, ...]) -> Iterator[Event]:
    """Requests waiting (arrived, neither issued nor ended) and running (issued, not ended)."""
    arrival, issue, end = (run.requests[f"{at}_ns"] for at in ("arrival", "scheduled", "finish"))
    moves = {
        "waiting": ((arrival, 1), (issue.fillna(end), -1)),
        "running": ((issue, 1), (end[issue.notna()], -1)),
    }
    for name, sides in moves.items():
        changes = pd.concat([pd.Series(sign, index=at.dropna()) for at, sign in sides])
        if len(changes):
            counts = changes.groupby(level=0).sum().cumsum()
            yield from _counter(name, "requests", counts, reach)


def _counter(name: str, unit: str, values: pd.Series, reach: tuple[float, ...]) -> Iterator[Event]:
    """A value at each change, and at the window's start the value that holds there."""
    values = values.dropna().sort_index()
    before, inside = values[values.index < reach[0]], values[values.index >= reach[0]]
    inside = inside[inside.index <= reach[1]]
    if len(before) and (inside.empty or inside.index[0] > reach[0]):
        held = pd.Series([before.iloc[-1]], index=[reach[0]])
        inside = pd.concat([held, inside])
    inside = inside[inside.ne(inside.shift())]
    for at, value in zip(inside.index.to_numpy(), inside.to_numpy(), strict=True):
        yield {"ph": "C", "name": name, "tid": 0, "ts": int(at), "args": {unit: int(value)}}


def _reaches(start: float, end: float, reach: tuple[float, ...]) -> bool:
    return end >= reach[0] and start <= reach[1]
