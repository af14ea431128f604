"""PatrickStar's budgets: what chunks may take of a device while everything else rises and falls."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from engine.plan import Place, Work
from engine.view import Profile

WARMUP_SHARE = 0.1  # of the device, for chunks, while nothing is known of the rest: the original's


class Tide(NamedTuple):
    """What the last complete step has shown, per launch: its statistics of warm-up."""

    other_bytes: tuple[int, ...]  # on the device beside chunks
    uses: Mapping[Place, Sequence[int]]  # launches that used a place


def tide_of(profile: Profile, job_id: int) -> Tide | None:
    """The tide of a job; None in its warm-up."""
    moments = profile.moments(job_id)
    if not moments:
        return None
    return Tide(tuple([moment.other_bytes for moment in moments]), profile.uses(job_id))


@dataclass(frozen=True)
class Budget:
    """How many bytes of a device chunks may take.

    device_bytes   all that may be used
    buffer_bytes   set aside in forward and backward (the original's for collectives)
    staging_bytes  set aside in updates (the original's, to cast gradients and weights)
    warmup_share   of the device, for chunks, while nothing is known of the rest
    is_static      as in warm-up for ever
    """

    device_bytes: int
    buffer_bytes: int = 0
    staging_bytes: int = 0
    warmup_share: float = WARMUP_SHARE
    is_static: bool = False

    def available(self, work: Work, moment: int, other_bytes: Sequence[int]) -> int:
        """At a launch: what is left at this and at the next moment. No `other_bytes`: warm-up."""
        if work is Work.UPDATE:
            return self.device_bytes - self.staging_bytes
        if self.is_static or not other_bytes:
            return int(self.device_bytes * self.warmup_share)
        now, then = other_bytes[moment], other_bytes[(moment + 1) % len(other_bytes)]
        return self.device_bytes - max(now, then) - self.buffer_bytes

    def ahead(self, moment: int, other_bytes: Sequence[int]) -> int:
        """Behind a launch: what the next one leaves, so that it finds its room made."""
        if self.is_static or not other_bytes:
            return self.device_bytes
        return self.device_bytes - other_bytes[(moment + 1) % len(other_bytes)]

    def margin(self, other_bytes: Sequence[int], chunk_bytes: int) -> int:
        """What is left beside all weights and gradients when everything else is at its peak; may
        be negative. There is none in warm-up."""
        if not other_bytes:
            return 0
        return self.device_bytes - max(other_bytes) - chunk_bytes - self.buffer_bytes


def device_updates(margin_bytes: int, share: float, optimizer_bytes: Iterable[int]) -> int:
    """How many chunks, from the first, are updated on the device: as many as have room for their
    optimizer states in this share of the margin."""
    left, count = int(margin_bytes * share), 0
    for nbytes in optimizer_bytes:
        left -= nbytes
        if left < 0:
            break
        count += 1
    return count
