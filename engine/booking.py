"""What booking an operation says of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from engine.plan import Kind, Op

NO_STATES = (Kind.KV, Kind.ACTIVATION, Kind.BUFFER)  # memory that no training policy may move


class Booking(NamedTuple):
    """What booking an operation derived. `copied`: bytes and both page tables of a Copy; of a
    Collective its bytes.

    `other_bytes`: of a launch, what its device held then that is no model state.
    """

    waits: tuple[Op, ...]
    copied: tuple[int, Sequence[int], Sequence[int]] = (0, (), ())
    other_bytes: int = 0
