"""Agreement of two runs' decisions: their plan logs side by side."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pandas as pd

from analysis.run import Run
from analysis.units import amount
from engine.results.schema import whole_body

Row = tuple[Any, ...]  # device, body, returned


@dataclass(frozen=True)
class Agreement:
    """Plans in common before the first that differs, and that difference in words (None: none).

    Each device has a log of its own, and `common` is the sum over devices: the order of plans
    across devices depends on timing alone.
    """

    common: int
    prediction: int
    measurement: int
    divergence: str | None

    @property
    def share(self) -> float:
        """Common prefix over the longer log; 1 when the runs made the same decisions."""
        longer = max(self.prediction, self.measurement)
        return self.common / longer if longer else 1.0


def common_plans(prediction: Run, measurement: Run) -> dict[int, int]:
    """The number of equal plans at the start of both logs, by device; equal bodies, equal plans."""
    logs = _logs(prediction), _logs(measurement)
    devices = sorted(logs[0].keys() | logs[1].keys())
    return {d: _common(*(log.get(d, pd.DataFrame()) for log in logs)) for d in devices}


def agreement(prediction: Run, measurement: Run) -> Agreement:
    """Compares the plan logs of each device in issue order."""
    logs, common = (_logs(prediction), _logs(measurement)), common_plans(prediction, measurement)
    differs = [
        device
        for device, count in common.items()
        if any(len(log.get(device, ())) > count for log in logs)
    ]
    text = None
    if differs:
        first = min(differs, key=lambda device: _parted_ns(common[device], device, *logs))
        text = _divergence(first, common[first], prediction, measurement)
        text += f" (device {first})" if len(common) > 1 else ""
    return Agreement(sum(common.values()), len(prediction.plans), len(measurement.plans), text)


def _logs(run: Run) -> dict[int, pd.DataFrame]:
    """The plans of each device, in issue order."""
    plans = run.plans
    return {int(d): plans[plans["device"].eq(d)] for d in plans["device"].unique()}


def _common(prediction: pd.DataFrame, measurement: pd.DataFrame) -> int:
    logs = [_plan_rows(log) for log in (prediction, measurement)]
    same = (_is_same(a, b) for a, b in zip(*logs, strict=False))
    return next((i for i, equal in enumerate(same) if not equal), min(map(len, logs)))


def _plan_rows(log: pd.DataFrame) -> list[Row]:
    """Device, whole text and returned jobs of each plan of a log."""
    if log.empty:
        return []
    parts = zip(log["grows"], log["body"], strict=True)
    bodies = [whole_body(grows, body) for grows, body in parts]
    return [*zip(log["device"], bodies, log["returned"], strict=True)]


def _parted_ns(index: int, device: int, *logs: dict[int, pd.DataFrame]) -> int:
    """The first time at which one of two logs has a plan that the other lacks."""
    found = [log[device]["at_ns"] for log in logs if len(log.get(device, ())) > index]
    return min(int(at_ns.iloc[index]) for at_ns in found)


def _is_same(a: Row, b: Row) -> bool:
    return a[:2] == b[:2] or (a[0] == b[0] and _decision(a) == _decision(b))


def _decision(row: Row) -> tuple[Any, ...]:
    """The decision of a plan, whether the engine or the plan freed finished jobs' memory.

    A replayed plan begins with the frees that the engine issued in the recorded run
    (policies/scheduling/recorded.py), so its body differs from the body that it repeats.
    """
    content = json.loads(row[1])
    ops = content.pop("ops", [])
    first = next((i for i, op in enumerate(ops) if op[0] != "free"), len(ops))
    returned = {int(job) for job in (row[2] if row[2] is not None else ())}
    return returned | {op[1][0] for op in ops[:first]}, ops[first:], content


def _divergence(device: int, index: int, prediction: Run, measurement: Run) -> str:
    runs = (("prediction", prediction), ("measurement", measurement))
    plans = [_logs(run).get(device, run.plans.iloc[:0]) for _, run in runs]
    rows = [_rows(run, log, index) for (_, run), log in zip(runs, plans, strict=True)]
    found = [_batch(part) for part in rows]
    sides = [
        f"{name} {_plan_text(part, log, index)}"
        for (name, _), part, log in zip(runs, rows, plans, strict=True)
    ]
    only = [
        f"only in the {name}: {_jobs(mine - other)}"
        for (name, _), mine, other in zip(runs, found, reversed(found), strict=True)
        if mine - other
    ]
    return "; ".join([f"at plan {index}, " + ", ".join(sides), *only])


def _rows(run: Run, plans: pd.DataFrame, index: int) -> pd.DataFrame:
    if index >= len(plans):
        return run.steps.iloc[:0]
    return run.steps[run.steps["step"].eq(plans["step"].iloc[index])]


def _batch(rows: pd.DataFrame) -> set[int]:
    return {int(job) for jobs in rows["jobs"] if jobs is not None for job in jobs}


def _plan_text(rows: pd.DataFrame, plans: pd.DataFrame, index: int) -> str:
    if index >= len(plans):
        return "has ended"
    at = amount(float(plans["at_ns"].iloc[index]) / 1e9, "s")
    copies = int(rows["lane"].str.contains("->").sum())
    parts = [f"{int(rows[f'{kind}_tokens'].sum())} {kind}" for kind in ("prefill", "decode")]
    return f"({at}: {' + '.join(parts)} tokens, {copies} copies)"


def _jobs(jobs: set[int]) -> str:
    shown = ", ".join(str(job) for job in sorted(jobs)[:5])
    return f"job {shown}" + (f" and {len(jobs) - 5} more" if len(jobs) > 5 else "")
