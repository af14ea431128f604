"""A measurement at equal decisions: its operations take the time that was predicted for them.

Each plan, each batch and each wait for a request stays as it was measured. Where a computing lane
is busy, time passes by the predicted over the measured duration of its operation; else where the
host makes a plan, by that of the host's time; else where a copy or a collective is in flight, by
its. Otherwise it passes as measured. A request arrives within an operation where it did.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from analysis.run import Run

Floats = NDArray[np.float64]
COMPUTING = ("cpu", "compute")  # the last has the say where both are busy
TIMES = ("arrival_ns", "scheduled_ns", "first_token_ns", "finish_ns")


class Clock:
    """Time of a device as it would have passed with predicted durations."""

    def __init__(self, operations: pd.DataFrame) -> None:
        """A clock from the matched operations of a device, see `analysis.causes.matched_steps`."""
        host = operations[operations["host_s_measurement"] > 0]
        hosts = _lane(host["issue_ns_measurement"], host, "host_s")
        lanes = {
            str(name): _lane(part["start_ns_measurement"], part, "duration_s")
            for name, part in operations.groupby("lane")
        }
        moving = [lane for name, lane in lanes.items() if name not in COMPUTING]
        computing = [lanes[name] for name in COMPUTING if name in lanes]
        spans = [*moving, hosts, *computing]
        self._at = np.unique(np.concatenate([part for lane in spans for part in lane[:2]]))
        pace = np.ones(max(0, len(self._at) - 1))
        for lane in spans:
            _paint(pace, self._at, *lane)
        self._passed = np.concatenate([[0.0], np.cumsum(pace * np.diff(self._at))])

    def ns(self, at_ns: Floats) -> Floats:
        """Times of this clock for measured ones, NaN where unknown."""
        if not len(self._at):
            return at_ns
        early = np.minimum(at_ns - self._at[0], 0)  # outside of the operations as measured
        late = np.maximum(at_ns - self._at[-1], 0)
        found: Floats = np.interp(at_ns, self._at, self._passed) + early + late
        return found


def _lane(starts_ns: pd.Series, rows: pd.DataFrame, name: str) -> tuple[Floats, Floats, Floats]:
    """Starts and ends of what a lane did, in order, and predicted over measured time."""
    measured_s = rows[f"{name}_measurement"].to_numpy(float)
    order = np.argsort(starts_ns.to_numpy(), kind="stable")
    order = order[measured_s[order] > 0]
    starts = starts_ns.to_numpy(float)[order]
    ratio = rows[f"{name}_prediction"].to_numpy(float)[order] / measured_s[order]
    return starts, starts + measured_s[order] * 1e9, ratio


def _paint(pace: Floats, at: Floats, starts: Floats, ends: Floats, ratio: Floats) -> None:
    """Sets the pace between the times `at` where a lane is busy."""
    middle = (at[:-1] + at[1:]) / 2
    number = np.searchsorted(starts, middle, side="right") - 1
    busy = number >= 0
    busy[busy] = middle[busy] < ends[number[busy]]
    pace[busy] = ratio[number[busy]]


def retimed(operations: pd.DataFrame, measurement: Run) -> Run:
    """The requests and training steps of a measured run, with predicted durations.

    Args:
        operations: of a replay of the measured plans and of the measurement, side by side.
        measurement: the measured run.

    Returns:
        The run; its tables of steps, memory and plans are as measured.
    """
    clocks = {int(str(name)): Clock(part) for name, part in operations.groupby("device")}
    first = min(clocks, default=0)
    clocks.setdefault(first, Clock(operations))
    requests, training = measurement.requests.copy(), measurement.training.copy()
    devices = requests["device"].fillna(first).to_numpy(int)
    for device in {*devices.tolist()}:
        own, clock = devices == device, clocks.get(device, clocks[first])
        for name in TIMES:
            requests[name] = requests[name].astype(float)
            requests.loc[own, name] = clock.ns(requests.loc[own, name].to_numpy(float))
        tokens = requests.loc[own, "token_ns"].map(partial(_tokens, clock))
        requests.loc[own, "token_ns"] = tokens
    for name in ("start_ns", "end_ns"):
        training[name] = clocks[first].ns(training[name].to_numpy(float))
    return replace(measurement, requests=requests, training=training)


def _tokens(clock: Clock, token_ns: Sequence[int] | None) -> Floats | None:
    return None if token_ns is None else clock.ns(np.asarray(token_ns, float))
