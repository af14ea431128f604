"""A device's own time on the clock of a run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from runtime.clock import WallClock

REANCHOR_MS = 1000.0  # elapsed_time is a 32-bit float: up to here it resolves 61 ns
ANCHORS = 8  # looks for the moment of an anchor: the tightest one counts


class Timed(Protocol):
    """A CUDA event with timing."""

    def elapsed_time(self, later: Any) -> float: ...


class Look(NamedTuple):
    """An event that happened between two moments of the run's clock."""

    event: Timed
    from_ns: int
    until_ns: int


def anchored(clock: WallClock, happen: Callable[[], Timed]) -> Timeline:
    """A timeline whose anchor is the best known of ANCHORS events, which `happen` makes and waits
    for. The host learns of an event 5 to 50 us after it: it lies in the middle of the shortest
    stretch of time, at most half of that away."""
    looks = []
    for _ in range(ANCHORS):
        from_ns = clock.now
        event = happen()
        looks.append(Look(event, from_ns, clock.now))
    best = min(looks, key=lambda look: look.until_ns - look.from_ns)
    return Timeline(clock, best.event, (best.from_ns + best.until_ns) // 2)


class Timeline:
    """Puts a device's events on the run's clock.

    Starts from one event whose moment on both clocks is known. The two drift apart by a few us a
    second, so a span that would start before its issue or end in the future moves the anchor.
    """

    def __init__(self, clock: WallClock, anchor: Timed, anchor_ns: int | None = None) -> None:
        """`anchor` happened at `anchor_ns`; None: now. `lock`: to be held by whoever asks."""
        self.lock = threading.Lock()
        self._clock, self._anchor = clock, anchor
        self._anchor_ns = clock.now if anchor_ns is None else anchor_ns
        self._last, self._last_ns = self._anchor, 0  # the end told so far that is latest

    def span_ns(
        self, begin: Timed, end: Timed, issued_ns: int, after_ns: int = 0
    ) -> tuple[int, int]:
        """Start and end of what two past events enclose. What it followed ended at `after_ns`, or
        on this device before its begin: a start before that is the anchor's error, and cut off."""
        to_end_ms = self._anchor.elapsed_time(end)
        start_ns = self._anchor_ns + round(self._anchor.elapsed_time(begin) * 1e6)
        end_ns = self._anchor_ns + round(to_end_ms * 1e6)
        shift_ns = max(0, issued_ns - start_ns)
        shift_ns -= max(0, end_ns + shift_ns - self._clock.now)
        if shift_ns or to_end_ms > REANCHOR_MS:
            self._anchor, self._anchor_ns = end, end_ns + shift_ns
        if self._last.elapsed_time(begin) >= 0:
            after_ns = max(after_ns, self._last_ns)
        start_ns = max(start_ns + shift_ns, after_ns)
        end_ns = max(start_ns, end_ns + shift_ns)
        if end_ns > self._last_ns:
            self._last, self._last_ns = end, end_ns
        return start_ns, end_ns
