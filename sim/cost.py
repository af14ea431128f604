"""What every cost model answers, whichever form it rests on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.executor import Launch, Piece
from engine.plan import Compute, Copy, Op, Place, Work


class LaunchCost(Protocol):
    """Predicted durations in integer ns. `form` is "table" or "roofline" and goes into results."""

    @property
    def form(self) -> str: ...

    @property
    def provenance(self) -> str:
        """Where the numbers come from, in one line."""

    def compute_ns(self, launch: Launch) -> int: ...

    def copy_ns(self, launch: Launch, contended: bool = False) -> int:
        """`contended`: the other direction of the same link is busy."""

    def host_ns(self, launches: Sequence[Launch]) -> int:
        """Deciding and preparing one plan."""

    def peak_bytes(self, launch: Launch) -> int | None:
        """Workspace at the peak of a launch."""


def forward_pieces(launch: Launch) -> Sequence[Piece]:
    """The pieces of a whole forward launch. ValueError for training units: they have no cost."""
    op = launch.op
    assert isinstance(op, Compute)
    if any(s.work is not Work.FORWARD or s.layers is not None for s in op.slices):
        raise ValueError("no cost is known for training units or single layers yet; serve only")
    return launch.pieces


@dataclass(frozen=True)
class PolicyCost:
    """The engine's Cost for policies: prices an operation that has not been issued.

    `nbytes` gives the bytes a place holds now (the ledger knows).
    """

    cost: LaunchCost
    nbytes: Callable[[Place], int]

    def op_ns(self, op: Op) -> int:
        """Predicted duration, with the jobs as they are."""
        if isinstance(op, Copy):
            return self.cost.copy_ns(Launch(op, nbytes=self.nbytes(op.src)))
        pieces = tuple(
            Piece(s.job.job_id, s.tokens, s.job.computed_tokens, s.tokens == left, ())
            for s in op.slices
            for left in (s.job.remaining_tokens,)
        )
        return self.cost.compute_ns(Launch(op, pieces=pieces))
