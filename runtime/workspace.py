"""What a launch allocates and gives back on a CPU, measured by repeating some of them."""

from __future__ import annotations

from typing import Any, Protocol

from engine.plan import Compute, Op
from runtime.tracker import StorageTracker


class Repeatable(Protocol):
    """A machine whose forwards may run again: same rows, same pages, same ring slots."""

    def start(self, prepared: Any) -> Any: ...


class Workspace:
    """Every `every`-th compute launch is started once more under the tracker, for Span.peak_bytes.

    The repeat writes what the launch has just written (equal KV into equal pages, equal tokens
    into equal ring slots), so it changes nothing; the measured launch itself runs untracked. A
    repeat takes about twice the time of its launch (measured on a CPU: 2.2 times for one
    sequence, 1.8 for 16), which a service clock leaves out; in real time it delays its lane, so
    it is off (0) unless asked for.
    Launches over some of the layers only are left alone: those hand rows on, once.
    """

    def __init__(self, machine: Repeatable, every: int = 0) -> None:
        if every < 0:
            raise ValueError(f"workspace: every is {every}; 0 measures none, 1 every launch")
        self._machine, self._every = machine, every
        self._calls = 0

    def is_due(self, op: Op) -> bool:
        """Whether a launch that has just ended is one of those to be repeated; asked once each."""
        if not self._every or not isinstance(op, Compute):
            return False
        self._calls += 1
        return (self._calls - 1) % self._every == 0 and all(s.layers is None for s in op.slices)

    def peak_bytes(self, prepared: Any) -> int:
        """Bytes of a launch's own storages at their peak.

        Call it on the thread that ran the launch, right after it.
        """
        with StorageTracker() as tracker:
            self._machine.start(prepared)
        return tracker.peak_bytes
