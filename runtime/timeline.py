"""A device's own time on the clock of a run."""

from __future__ import annotations

import threading
from typing import Any, Protocol

from runtime.clock import WallClock

REANCHOR_MS = 1000.0  # elapsed_time is a 32-bit float: up to here it resolves 61 ns


class Timed(Protocol):
    """A CUDA event with timing."""

    def elapsed_time(self, later: Any) -> float: ...


class Timeline:
    """Puts a device's events on the run's clock.

    Starts from one event whose moment on both clocks is known. The two drift apart by a few us a
    second, so a span that would start before its issue or end in the future moves the anchor.
    """

    def __init__(self, clock: WallClock, anchor: Timed) -> None:
        """`anchor` has just ended: its time is now. `lock`: to be held by whoever asks."""
        self.lock = threading.Lock()
        self._clock, self._anchor, self._anchor_ns = clock, anchor, clock.now

    def span_ns(self, begin: Timed, end: Timed, issued_ns: int) -> tuple[int, int]:
        """Start and end of what two past events enclose."""
        to_end_ms = self._anchor.elapsed_time(end)
        start_ns = self._anchor_ns + round(self._anchor.elapsed_time(begin) * 1e6)
        end_ns = self._anchor_ns + round(to_end_ms * 1e6)
        shift_ns = max(0, issued_ns - start_ns)
        shift_ns -= max(0, end_ns + shift_ns - self._clock.now)
        if shift_ns or to_end_ms > REANCHOR_MS:
            self._anchor, self._anchor_ns = end, end_ns + shift_ns
        return start_ns + shift_ns, end_ns + shift_ns
