"""What every cost model answers, whichever form it rests on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, cast

from engine.cohort import Behind
from engine.executor import Launch, Piece, Pieces
from engine.model import ModelSpec
from engine.plan import HOST_LANE, Collective, Compute, Copy, Op, Pattern, Place, Slice, Tier, Work
from sim.prices import Prices
from sim.trained import Trained, workspace_of


class LaunchCost(Protocol):
    """Predicted durations in integer ns. `form` is "table" or "roofline" and goes into results.

    May have `host_bandwidth_bytes_per_s`, that of the host's memory, and `host_traffic(launch)`,
    the bytes of it that a launch reads and writes: who runs at once then shares it.
    """

    @property
    def form(self) -> str: ...

    @property
    def provenance(self) -> str:
        """Where the numbers come from, in one line."""

    def compute_ns(self, launch: Launch) -> int: ...

    def copy_ns(self, launch: Launch, contended: bool = False) -> int:
        """`contended`: the other direction of the same link is busy."""

    def collective_ns(self, launch: Launch) -> int:
        """An exchange of the device's group."""

    def host_ns(self, launches: Sequence[Launch]) -> int:
        """Deciding and preparing one plan."""

    def peak_bytes(self, launch: Launch) -> int | None:
        """Workspace at the peak of a launch."""


class ShapeCost(Protocol):
    """The same in terms of shapes, as a table of steps records them."""

    def shape_ns(self, tokens: Sequence[int], contexts: Sequence[int], samples: int) -> int:
        """One launch that serves: new tokens and tokens in KV per slice, rows of the head."""

    def trained_ns(self, trained: Trained) -> int:
        """One launch that trains."""

    def transfer_ns(self, direction: str, nbytes: int, contended: bool = False) -> int:
        """One copy; `direction` is the lane's name, such as gpu->host."""

    def exchange_ns(self, pattern: Pattern, nbytes: int) -> int:
        """One collective of the device's group over so many bytes."""

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
        """Duration of a launch. Slices that train cost their sum, also beside serving ones."""
        training = training_slices(launch)
        if not training:
            return self.served_ns(launch)
        op = _op(launch)
        ns = sum([self.prices.ns(op, piece) for piece in training])
        return ns + (0 if len(training) == len(op.slices) else self.served_ns(served_part(launch)))

    def served_ns(self: _Shapes, launch: Launch) -> int:
        """Duration of a launch that serves."""
        return self.shape_ns(*forward_shape(launch))

    def trained_ns(self, trained: Trained) -> int:
        """ValueError: whoever knows nothing of training has no price for it."""
        raise ValueError(
            f"{cast(LaunchCost, self).provenance} has no training; take the device's roofline "
            "(profile=null) or a profile that was calibrated with training"
        )

    @cached_property
    def prices(self) -> Prices:
        """Of slices that train, remembered."""
        return Prices(self.model, cast(ShapeCost, self).trained_ns)

    def repeat_ns(self, launch: Launch, count: int) -> Any:
        """Durations of a launch issued `count` times, each behind the tokens of the one before."""
        tokens, contexts, samples = forward_shape(launch)
        price = cast(ShapeCost, self).shape_ns
        return [price(tokens, shifted(tokens, contexts, i), samples) for i in range(count)]

    def copy_ns(self: _Shapes, launch: Launch, contended: bool = False) -> int:
        """Duration of a copy."""
        return self.transfer_ns(launch.op.lane[1], launch.nbytes, contended)

    def collective_ns(self, launch: Launch) -> int:
        """Duration of an exchange of the device's group."""
        op = launch.op
        assert isinstance(op, Collective)
        return self.exchange_ns(op.pattern, launch.nbytes)

    def exchange_ns(self, pattern: Pattern, nbytes: int) -> int:
        """ValueError: whoever knows no groups has no price for it."""
        raise ValueError(
            f"{cast(LaunchCost, self).provenance} knows no groups; take the device's roofline "
            "(profile=null), or group.devices=1"
        )

    def host_traffic(self, launch: Launch) -> int:
        """Bytes of the host's memory that a copy or a launch on the host's lane goes through."""
        op = launch.op
        if isinstance(op, Copy):
            return launch.nbytes if Tier.HOST in (op.src.tier, op.dst.tier) else 0
        if isinstance(op, Collective) or op.on != HOST_LANE:
            return 0
        return sum([self.prices.moved_bytes(op, s) for s in op.slices])

    def host_ns(self: _Shapes, launches: Sequence[Launch]) -> int:
        """Deciding and preparing one plan."""
        items = sum([len(launch.pieces) or 1 for launch in launches])
        return self.plan_ns(items, sum([prompts_of(launch) for launch in launches]))

    def peak_bytes(self: _Shapes, launch: Launch) -> int | None:
        """Workspace: the model's formula where it serves, and what was laid out where it trains.

        None for copies and collectives, and for training that nobody laid out.
        """
        if not isinstance(launch.op, Compute):
            return None
        op, training = launch.op, training_slices(launch)
        nbytes = [workspace_of(op, piece) for piece in training]
        if not training or len(training) < len(op.slices):
            shape = forward_shape(served_part(launch) if training else launch)
            nbytes.append(self.model.workspace_bytes(*shape, self.page_tokens))
        known = [n for n in nbytes if n is not None]
        return sum(known) if len(known) == len(nbytes) else None


class _Shapes(ShapeCost, Protocol):
    model: ModelSpec

    @property
    def page_tokens(self) -> int: ...

    @property
    def prices(self) -> Prices: ...

    def served_ns(self, launch: Launch) -> int: ...


def _op(launch: Launch) -> Compute:
    assert isinstance(launch.op, Compute)
    return launch.op


def training_slices(launch: Launch) -> Sequence[Slice]:
    """Those of training jobs. ValueError where serving is cut by layers: it has no price yet."""
    op, pieces, lead = _op(launch), launch.pieces, 0
    if isinstance(pieces, Pieces) and isinstance(pieces.contexts, Behind):
        lead = pieces.contexts.lead  # a cohort serves
    found = []
    for piece in op.slices[lead:]:
        if piece.job.training is not None:
            found.append(piece)
        elif piece.layers is not None or piece.work is not Work.FORWARD:
            raise ValueError("no cost is known for single layers of serving yet; serve all at once")
    return found


def served_part(launch: Launch) -> Launch:
    """The same without the slices of training jobs."""
    op = _op(launch)
    rows = zip(op.slices, launch.pieces, strict=True)
    served = [(s, piece) for s, piece in rows if s.job.training is None]
    slices = tuple([s for s, _ in served])
    return Launch(op.again_as(slices), pieces=tuple([piece for _, piece in served]))


def shifted(tokens: Sequence[int], contexts: Sequence[int], steps: int) -> list[int]:
    """Contexts after so many steps of a repeated launch."""
    return [context + steps * n for n, context in zip(tokens, contexts, strict=True)]


def prompts_of(launch: Launch) -> int:
    """Slices of several tokens: whoever brings them was admitted, which keeps the host busy."""
    pieces = launch.pieces
    tokens = pieces.tokens if isinstance(pieces, Pieces) else [piece.tokens for piece in pieces]
    prompts = len(tokens) - tokens.count(1)
    return prompts - sum([s.tokens > 1 for s in training_slices(launch)]) if prompts else 0


def forward_shape(launch: Launch) -> tuple[list[int], list[int], int]:
    """Tokens and contexts per slice of a launch that serves, and sampled rows."""
    pieces = launch.pieces
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
        if isinstance(op, Collective):
            return self.cost.collective_ns(Launch(op, nbytes=op.nbytes))
        pieces = tuple(
            Piece(s.job.job_id, s.tokens, s.job.computed_tokens, s.tokens == left, ())
            for s in op.slices
            for left in (s.job.remaining_tokens,)
        )
        return self.cost.compute_ns(Launch(op, pieces=pieces))
