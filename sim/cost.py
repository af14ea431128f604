"""What every cost model answers, whichever form it rests on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from engine.cohort import Behind
from engine.executor import Launch, Piece, Pieces
from engine.model import ModelSpec
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


class ShapeCost(Protocol):
    """The same in terms of shapes, as a table of steps records them."""

    def shape_ns(self, tokens: Sequence[int], contexts: Sequence[int], samples: int) -> int:
        """One launch: new tokens and tokens in KV per slice, rows of the head."""

    def transfer_ns(self, direction: str, nbytes: int, contended: bool = False) -> int:
        """One copy; `direction` is the lane's name, such as gpu->host."""

    def plan_ns(self, items: int, prompts: int = 0) -> int:
        """The host's part of a plan of so many slices and copies, and prompts among them."""


class ShapePriced:
    """Prices launches by their shapes: how a ShapeCost becomes a LaunchCost."""

    model: ModelSpec

    @property
    def page_tokens(self) -> int:
        """Tokens in a page of KV, where workspace depends on it."""
        return 16

    def compute_ns(self: _Shapes, launch: Launch) -> int:
        """Duration of a forward launch."""
        return self.shape_ns(*forward_shape(launch))

    def repeat_ns(self, launch: Launch, count: int) -> Any:
        """Durations of a launch issued `count` times, each behind the tokens of the one before."""
        tokens, contexts, samples = forward_shape(launch)
        price = cast(ShapeCost, self).shape_ns
        return [price(tokens, shifted(tokens, contexts, i), samples) for i in range(count)]

    def copy_ns(self: _Shapes, launch: Launch, contended: bool = False) -> int:
        """Duration of a copy."""
        return self.transfer_ns(launch.op.lane[1], launch.nbytes, contended)

    def host_ns(self: _Shapes, launches: Sequence[Launch]) -> int:
        """Deciding and preparing one plan."""
        items = sum([len(launch.pieces) or 1 for launch in launches])
        return self.plan_ns(items, sum([prompts_of(launch) for launch in launches]))

    def peak_bytes(self: _Shapes, launch: Launch) -> int | None:
        """The model's workspace formula; none for copies."""
        if isinstance(launch.op, Copy):
            return None
        return self.model.workspace_bytes(*forward_shape(launch), self.page_tokens)


class _Shapes(ShapeCost, Protocol):
    model: ModelSpec

    @property
    def page_tokens(self) -> int: ...


def shifted(tokens: Sequence[int], contexts: Sequence[int], steps: int) -> list[int]:
    """Contexts after so many steps of a repeated launch."""
    return [context + steps * n for n, context in zip(tokens, contexts, strict=True)]


def prompts_of(launch: Launch) -> int:
    """Slices of several tokens: whoever brings them was admitted, which keeps the host busy."""
    pieces = launch.pieces
    tokens = pieces.tokens if isinstance(pieces, Pieces) else [piece.tokens for piece in pieces]
    return len(tokens) - tokens.count(1)


def forward_shape(launch: Launch) -> tuple[list[int], list[int], int]:
    """Tokens and contexts per slice, and sampled rows.

    ValueError for training units and single layers: they have no cost yet.
    """
    op, pieces = launch.op, launch.pieces
    assert isinstance(op, Compute)
    is_serving = isinstance(pieces, Pieces) and isinstance(pieces.contexts, Behind)
    for piece in () if is_serving else op.slices:
        if piece.layers is not None or piece.work is not Work.FORWARD:
            raise ValueError("no cost is known for training units or single layers yet; only serve")
    if isinstance(pieces, Pieces):
        return list(pieces.tokens), list(pieces.contexts), sum(pieces.samples)
    tokens = [piece.tokens for piece in pieces]
    return tokens, [piece.context_tokens for piece in pieces], sum(p.samples for p in pieces)


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
