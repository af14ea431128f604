"""What every cost model answers, whichever form it rests on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol, cast

from engine.contract.executor import Contexts, Launch, Piece, Pieces
from engine.contract.plan import HOST_LANE, Collective, Compute, Copy, Op, Pattern, Slice
from engine.contract.regions import Place, Tier, Work
from models.spec import ModelSpec
from sim.cost.training_launch import Trained, is_light, trained_of, workspace_of
from sim.cost.training_operators import training_operators

Key = tuple[Any, ...]


class Prices:
    """What slices that train take, and what they move: one look-up after the first.

    The key is all that a price depends on. The job is in it by its own progress: of another run
    with the same id it is another.
    """

    def __init__(self, model: ModelSpec, price: Callable[[Trained], int]) -> None:
        self._model, self._price = model, price
        self._ns: dict[Key, int] = {}
        self._moved: dict[Key, int] = {}

    def ns(self, op: Compute, piece: Slice) -> int:
        """Duration of a slice."""
        key = _key(op, piece)
        ns = self._ns.get(key)
        if ns is None:
            found = trained_of(op, piece, self._model)
            ns = self._ns[key] = sum(self._price(trained) for trained in found)
        return ns

    def moved_bytes(self, op: Compute, piece: Slice) -> int:
        """What it reads and writes."""
        key = _key(op, piece)
        nbytes = self._moved.get(key)
        if nbytes is None:
            found = trained_of(op, piece, self._model)
            kernels = [k for trained in found for k in training_operators(self._model, trained)]
            nbytes = self._moved[key] = sum(k.repeats * k.nbytes for k in kernels)
        return nbytes


def _key(op: Compute, piece: Slice) -> Key:
    job, tokens, work, layers = piece[:4]
    return job.training, tokens, work, layers, op.on, op.again, is_light(op, piece)


class Load(NamedTuple):
    """What attention costs by: prompt slices as one, and decodes with the token in hand."""

    chunk: int  # prompt tokens
    behind: int  # tokens in KV before them
    decodes: int
    past: int  # sum of their contexts
    most: int
    least: int

    @classmethod
    def of(
        cls,
        slices: Iterable[tuple[int, int]],
        lead: int = 0,
        total: int = 0,
        ends: Sequence[int] = (),
    ) -> Load:
        """Of slices by tokens and context; before them decodes, of which sum and ends are known."""
        past: list[int] = []
        chunk = behind = 0
        for n, context in slices:
            if n == 1 and context:
                past.append(context + 1)
            else:
                chunk += n
                behind += context
        seen = [*ends, *past]
        most, least = max(seen, default=0), min(seen, default=0)
        return cls(chunk, behind, lead + len(past), total + sum(past), most, least)


def sizes(launch: Launch) -> tuple[int, int]:
    """New tokens and sampled rows of a launch."""
    pieces = launch.pieces
    if isinstance(pieces, Pieces):
        return sum(pieces.tokens), sum(pieces.samples)
    return sum([piece.tokens for piece in pieces]), sum([piece.samples for piece in pieces])


def load_of(launch: Launch, steps: int) -> Load:
    """What a repeated launch loads attention with after so many steps."""
    pieces = launch.pieces
    if isinstance(pieces, Pieces) and isinstance(pieces.contexts, Contexts):
        behind, lead, more = pieces.contexts, pieces.contexts.lead, 1 + steps
        tail = zip(pieces.tokens[lead:], behind.tail, strict=True)
        rest = [(n, context + steps * n) for n, context in tail]
        return Load.of(rest, lead, behind.total + lead * more, [x + more for x in behind.ends])
    tokens, contexts, _ = forward_shape(launch)
    return Load.of(zip(tokens, shifted(tokens, contexts, steps), strict=True))


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
    if isinstance(pieces, Pieces) and isinstance(pieces.contexts, Contexts):
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
