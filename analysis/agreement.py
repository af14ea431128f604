"""How far two runs decided alike: their plan logs side by side."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pandas as pd

from analysis.run import Run

Row = tuple[Any, ...]  # device, body, returned


@dataclass(frozen=True)
class Agreement:
    """Plans in common before the first that differs, and what differs there (None: nothing)."""

    common: int
    prediction: int
    measurement: int
    divergence: str | None

    @property
    def share(self) -> float:
        """Common prefix over the longer log; 1 when the runs made the same decisions."""
        longer = max(self.prediction, self.measurement)
        return self.common / longer if longer else 1.0


def agreement(prediction: Run, measurement: Run) -> Agreement:
    """Compares the plan logs in issue order; equal bodies on a device are equal plans."""
    names = ["device", "body", "returned"]
    logs = [
        list(run.plans[names].itertuples(index=False, name=None))
        for run in (prediction, measurement)
    ]
    same = (_is_same(a, b) for a, b in zip(*logs, strict=False))
    common = next((i for i, equal in enumerate(same) if not equal), min(map(len, logs)))
    differs = common < max(map(len, logs))
    text = _divergence(common, prediction, measurement) if differs else None
    return Agreement(common, len(logs[0]), len(logs[1]), text)


def _is_same(a: Row, b: Row) -> bool:
    return a[:2] == b[:2] or (a[0] == b[0] and _decision(a) == _decision(b))


def _decision(row: Row) -> tuple[Any, ...]:
    """What was decided, whether finished memory was given back by the engine or by the plan.

    Where a log is played back, the plan begins by freeing what the engine had returned
    (policies/recorded.py), so that its body differs from that of the plan it repeats.
    """
    content = json.loads(row[1])
    ops = content.pop("ops", [])
    first = next((i for i, op in enumerate(ops) if op[0] != "free"), len(ops))
    returned = {int(job) for job in (row[2] if row[2] is not None else ())}
    return returned | {op[1][0] for op in ops[:first]}, ops[first:], content


def _divergence(index: int, prediction: Run, measurement: Run) -> str:
    runs = (("prediction", prediction), ("measurement", measurement))
    found = [_batch(run, index) for _, run in runs]
    said = [f"{name} {_words(run, index)}" for name, run in runs]
    only = [
        f"only in the {name}: {_jobs(mine - other)}"
        for (name, _), mine, other in zip(runs, found, reversed(found), strict=True)
        if mine - other
    ]
    return "; ".join([f"at plan {index}, " + ", ".join(said), *only])


def _rows(run: Run, index: int) -> pd.DataFrame:
    step = run.plans["step"].iloc[index]
    return run.steps[run.steps["step"].eq(step)]


def _batch(run: Run, index: int) -> set[int]:
    if index >= len(run.plans):
        return set()
    return {int(job) for jobs in _rows(run, index)["jobs"] if jobs is not None for job in jobs}


def _words(run: Run, index: int) -> str:
    if index >= len(run.plans):
        return "has ended"
    rows, at_s = _rows(run, index), float(run.plans["at_ns"].iloc[index]) / 1e9
    copies = int(rows["lane"].str.contains("->").sum())
    parts = [f"{int(rows[f'{kind}_tokens'].sum())} {kind}" for kind in ("prefill", "decode")]
    return f"({at_s:.3f} s: {' + '.join(parts)} tokens, {copies} copies)"


def _jobs(jobs: set[int]) -> str:
    shown = ", ".join(str(job) for job in sorted(jobs)[:5])
    return f"job {shown}" + (f" and {len(jobs) - 5} more" if len(jobs) > 5 else "")
