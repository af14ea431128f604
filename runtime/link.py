"""How long a link takes to carry bytes: the one formula of every executor with throttled copies."""

from __future__ import annotations

from typing import NamedTuple


class Link(NamedTuple):
    """One direction of one link. Its time counts from the start of a copy."""

    bytes_per_s: float
    latency_ns: int = 0

    def duration_ns(self, nbytes: int) -> int:
        """Time from a copy's start until its last byte has arrived."""
        return self.latency_ns + round(nbytes * 1e9 / self.bytes_per_s)
