"""What booking an operation says of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from engine.plan import Kind, Op

NO_STATES = (Kind.KV, Kind.ACTIVATION, Kind.BUFFER)  # memory that no training policy may move


class Beside(NamedTuple):
    """What a device held beside model states when a launch was issued; of that, KV."""

    other_bytes: int = 0
    kv_bytes: int = 0


NOTHING = Beside()


class Booking(NamedTuple):
    """What booking an operation derived. `copied`: bytes and both page tables of a Copy; of a
    Collective its bytes. `beside`: of a launch that trains.
    """

    waits: tuple[Op, ...]
    copied: tuple[int, Sequence[int], Sequence[int]] = (0, (), ())
    beside: Beside = NOTHING
