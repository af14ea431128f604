"""What a planner decides once, before the first step: chunks, units, and where states lie."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from fractions import Fraction
from math import ceil
from types import MappingProxyType
from typing import TYPE_CHECKING

from engine.contract.regions import Place

if TYPE_CHECKING:
    from models.training.shape import TrainingShape


WIDENED = 1 << 22  # numbers: 16-bit gradients become float32 for an update in pieces of so many
WIDE_BYTES = 4
ALL = Fraction(1)


class Mode(StrEnum):
    """What becomes of a unit's activations between its forward and its backward."""

    KEEP = "keep"
    RECOMPUTE = "recompute"
    OFFLOAD = "offload"


@dataclass(frozen=True, slots=True)
class Chunk:
    """Parameters that are kept, moved and updated as one. Bytes include what fills it up.

    In a group a device may have a share of the chunks: then bytes are those of its own part of
    each, and units compute with `remote_bytes` of weights beside it.
    """

    parameters: tuple[int, ...]  # of the TrainingShape, in the order in which they lie
    weight_bytes: int
    gradient_bytes: int = 0  # none where nothing of it trains
    optimizer_bytes: int = 0
    update_bytes: int = 0  # workspace of an update
    remote_bytes: int = 0  # weights of it that other devices of the group have

    @property
    def trains(self) -> bool:
        return bool(self.gradient_bytes)

    @property
    def whole_bytes(self) -> int:
        """Weights of all devices' parts together."""
        return self.weight_bytes + self.remote_bytes


@dataclass(frozen=True, slots=True)
class Unit:
    """A link of the chain, for one microbatch: what it touches and what it takes."""

    chunks: tuple[int, ...]  # whose weights it reads
    trained: tuple[int, ...]  # whose gradients its backward adds to
    mode: Mode
    input_bytes: int
    saved_bytes: int
    forward_bytes: int  # workspace of a forward that keeps
    light_bytes: int  # of one that does not
    backward_bytes: int
    tied_gradient_bytes: int = 0  # gradients of tables that a unit below adds to as well
    sends_input: bool = False  # to the host, until its backward wants it


@dataclass(frozen=True, slots=True)
class TrainingLayout:
    """Chunks and units of one job, on one of its `ranks` devices. `first` is the unit at which a
    backward ends."""

    chunks: tuple[Chunk, ...]
    units: tuple[Unit, ...]
    first: int = 0
    ranks: int = 1

    def __repr__(self) -> str:
        return f"TrainingLayout({len(self.chunks)} chunks, {len(self.units)} units)"

    @property
    def num_units(self) -> int:
        return len(self.units)

    @property
    def trained_by(self) -> dict[int, tuple[int, ...]]:
        """Per chunk that trains: the units whose backwards add to its gradients."""
        found: dict[int, tuple[int, ...]] = {}
        for c, chunk in enumerate(self.chunks):
            if chunk.trains:
                found[c] = tuple(u for u, unit in enumerate(self.units) if c in unit.trained)
        return found


def sending_inputs(layout: TrainingLayout) -> TrainingLayout:
    """The same with inputs on the host until their backwards, of units that keep nothing else on
    the device."""

    def sends(number: int, unit: Unit) -> bool:
        return number >= layout.first and unit.mode is not Mode.KEEP and unit.input_bytes > 0

    units = [replace(unit, sends_input=sends(u, unit)) for u, unit in enumerate(layout.units)]
    return replace(layout, units=tuple(units))


def lay_out(
    shape: TrainingShape,
    chunks: Sequence[Sequence[int]],
    modes: Sequence[Mode],
    chunk_elements: int = 0,
    ranks: int = 1,
    share: Fraction = ALL,
) -> TrainingLayout:
    """The layout of a shape whose parameters lie in these chunks.

    `chunk_elements`: the size that every chunk is filled up to; 0: as large as its parameters.
    Frozen parameters share no chunk with trained ones: they would be updated with them. `share`:
    what a device has of every chunk, one of `ranks`.
    """
    made = tuple(_chunk(shape, parameters, chunk_elements, share) for parameters in chunks)
    where = {p: c for c, chunk in enumerate(made) for p in chunk.parameters}
    assert sorted(where) == list(range(len(shape.parameters))), "each parameter is in one chunk"
    trains = [any(shape.parameters[p].trains for p in unit.parameters) for unit in shape.units]
    first = trains.index(True)
    units, below = [], set[int]()  # parameters of the units so far
    for u, unit in enumerate(shape.units):
        own = _in_order(where[p] for p in unit.parameters)
        trained = _in_order(where[p] for p in unit.parameters if shape.parameters[p].trains)
        mode = Mode.KEEP if u == len(shape.units) - 1 else modes[u]  # the head's backward follows
        sizes = (unit.input_bytes, unit.saved_bytes, unit.forward_bytes)
        tied = [shape.parameters[p] for p in unit.parameters if p in below]
        tied_bytes = sum([p.elements for p in tied if p.trains]) * shape.item_bytes
        below.update(unit.parameters)
        units.append(
            Unit(own, trained, mode, *sizes, unit.light_bytes, unit.backward_bytes, tied_bytes)
        )
    return TrainingLayout(made, tuple(units), first, ranks)


def equal_share(ranks: int) -> Fraction:
    """Of a device that has a part of every chunk, as large as that of any other."""
    return Fraction(1, ranks)


def owners_share(ranks: int, chunks: int) -> Fraction:
    """Of the device that owns most where each owns whole chunks, in turn: on average over them, so
    that all that it holds, moves and updates of them is what it would be of its own."""
    return Fraction(-(-chunks // ranks), chunks)


def _chunk(
    shape: TrainingShape, parameters: Sequence[int], elements: int, share: Fraction
) -> Chunk:
    own = [shape.parameters[p] for p in parameters]
    count = ceil(share * max(elements, sum(p.elements for p in own)))  # of a device
    weight_bytes = count * shape.item_bytes
    remote_bytes = (ceil(count / share) - count) * shape.item_bytes
    kinds = {p.trains for p in own}
    assert len(kinds) == 1, "frozen and trained parameters share a chunk"
    if not kinds.pop():
        return Chunk(tuple(parameters), weight_bytes, remote_bytes=remote_bytes)
    widest = ceil(share * max(p.elements for p in own))
    widened = 0 if shape.item_bytes == WIDE_BYTES else widest
    return Chunk(
        tuple(parameters),
        weight_bytes,
        weight_bytes,
        count * shape.optimizer_item_bytes,
        min(WIDENED, widened) * WIDE_BYTES,
        remote_bytes,
    )


def _in_order(chunks: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(set(chunks)))


@dataclass(frozen=True, slots=True)
class Layout:
    """What a planner hands over, frozen."""

    places: Mapping[Place, int] = field(default_factory=dict)  # bytes held before the first step
    training: Mapping[int, TrainingLayout] = field(default_factory=dict)  # by job

    def shown(self) -> Layout:
        """The same, read-only: what policies see of it."""
        places, training = MappingProxyType(self.places), MappingProxyType(self.training)
        return replace(self, places=places, training=training)

    def __repr__(self) -> str:
        return f"Layout({len(self.places)} places, training {dict(self.training)})"
