"""Chunks of one size, filled in module order, as PatrickStar lays them out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from engine.contract.layout import (
    ALL,
    Layout,
    Mode,
    TrainingLayout,
    equal_share,
    lay_out,
    owners_share,
)
from engine.contract.regions import Pool, Tier
from engine.contract.rules import Advised, Remedy
from engine.contract.view import Cost
from models.training.shape import TrainingShape
from policies.planners.placement import Start, States, Updates, apart, modes_of, prepared
from policies.training.out_of_memory import DoesNotFit, OutOfMemory
from policies.training.patrickstar import WARMUP_SHARE
from traces.serving.request import TrainingJob

MEBI = 1 << 20
SIZES = tuple(mebi * MEBI for mebi in range(312, 56, -32))  # 312 to 88 Mi, those of the original


class OversizeModule(Advised, ValueError):
    """A module that is larger than a chunk, where chunks of their own are not allowed."""

    remedies = (Remedy.LARGER_CHUNKS, Remedy.OVERSIZE_ALONE)


@dataclass(frozen=True)
class FixedChunks:
    """Chunks of one size, filled module by module (Fang et al., PatrickStar, TPDS'23).

    The parameters of a module lie in one chunk: in the last one if it has room, else in a new one.
    Frozen and trained parameters fill chunks of their own. In a group, a chunk is that of all
    devices together.

    Args:
        chunk_elements: numbers in a chunk; 0: the size among `sizes` with the smallest footprint
            that fits, see `searched`.
        sizes: numbers in a chunk, to search among.
        padded: a chunk takes its full size, as the original's buffers; false: what is in it.
        oversize: a module larger than a chunk is an `error`, or a chunk of its own (`alone`).
        device_share: of the device that the memory policy uses at all, for the search of a size.
        warmup_share: of that, for chunks in warm-up; a size is taken only if two chunks fit there.
        modes: see UnitChunks.
        start: see UnitChunks.
        shards: see UnitChunks.
        offloads_inputs: see UnitChunks.
        owned: devices of a group have whole chunks by turns, as in the original, and the plan is
            that of the device with the most, ceil(chunks / devices); false: all have equal parts.
        states: of the optimizer, `given` at the start, or made at the `first_update`, as in the
            original: they take no memory before it.
        updates: see UnitChunks.
    """

    chunk_elements: int = 0
    sizes: tuple[int, ...] = SIZES
    padded: bool = True
    oversize: Literal["error", "alone"] = "error"
    device_share: float = 1.0
    warmup_share: float = WARMUP_SHARE
    modes: Mode | tuple[Mode, ...] = Mode.KEEP
    start: Start = "host"
    shards: bool = True
    owned: bool = True
    states: States = "given"
    offloads_inputs: bool = False
    updates: Updates = "last"

    def prepare(
        self,
        shapes: Mapping[int, TrainingShape],
        jobs: Sequence[TrainingJob],
        capacity_bytes: Mapping[Pool, int],
        cost: Cost | None = None,
    ) -> Layout:
        """See Planner.

        Raises:
            ValueError: the modes do not match the layers of a job.
            OversizeModule: a module is larger than a chunk of the given size.
            OutOfMemory: a pool lacks memory for the states, or for a chunk size.
            DoesNotFit: no chunk size fits, whatever the memory.
        """

        def fixed(shape: TrainingShape, modes: Sequence[Mode], ranks: int) -> TrainingLayout:
            size = self.chunk_elements or self.searched(shape, capacity_bytes, ranks)
            return self.laid_out(shape, size, modes, ranks)

        how = (self.states, self.offloads_inputs, False, self.updates)
        return prepared(shapes, jobs, self.modes, self.start, capacity_bytes, fixed, *how)

    def laid_out(
        self, shape: TrainingShape, size: int, modes: Sequence[Mode], ranks: int = 1
    ) -> TrainingLayout:
        """The layout by chunks of one size.

        Args:
            shape: of the model.
            size: numbers in a chunk.
            modes: of activations, one per unit.
            ranks: devices that share the chunks.

        Returns:
            The chunks and units of the job, on one device.

        Raises:
            OversizeModule: a module is larger than a chunk, and `oversize` is an error.
        """
        chunks = list[list[int]]()
        for part in apart(shape, _in_order_of_use(shape)):
            chunks += self._filled(shape, part, size)
        share = ALL
        if self.shards:
            share = owners_share(ranks, len(chunks)) if self.owned else equal_share(ranks)
        return lay_out(shape, chunks, modes, size if self.padded else 0, ranks, share)

    def _filled(
        self, shape: TrainingShape, parameters: Sequence[int], size: int
    ) -> list[list[int]]:
        chunks, room = list[list[int]](), 0
        for name, group in groupby(parameters, key=lambda p: _module(shape.parameters[p].name)):
            module = [*group]
            elements = sum([shape.parameters[p].elements for p in module])
            if elements > size and self.oversize == "error":
                raise OversizeModule(
                    f"module {name} has {elements:,} parameters, more than a chunk of {size:,}"
                )
            if not chunks or elements > room:
                chunks.append([])
                room = max(size, elements)
            chunks[-1] += module
            room -= elements
        return chunks

    def searched(
        self, shape: TrainingShape, capacity_bytes: Mapping[Pool, int], ranks: int = 1
    ) -> int:
        """The chunk size with the smallest footprint; of equals the first.

        Two chunks must fit into the share of the device that warm-up leaves them, and all states
        into device and host together. (The original compares bytes with twice the number of
        elements.) `sizes` are for large devices: where the smallest of them is too large for
        warm-up, all are halved together until one fits.

        Args:
            shape: of the model.
            capacity_bytes: per pool.
            ranks: devices that share the chunks.

        Returns:
            Numbers in a chunk.

        Raises:
            OutOfMemory: of the device, warm-up has no room for two chunks of any size; or, of the
                tier where states start, no size leaves room for them.
            DoesNotFit: more memory would not help.
        """
        whole = capacity_bytes.get((Tier.GPU, 0), 0)
        device = int(whole * self.device_share)
        most = int(device * self.warmup_share) // (2 * shape.item_bytes)
        modes = modes_of(Mode.KEEP, len(shape.units), 0)
        footprints = dict[int, int]()
        for size in [size for size in _halved(self.sizes, most) if size <= most]:
            with suppress(OversizeModule):
                footprints[size] = footprint_bytes(self.laid_out(shape, size, modes, ranks))
        if not footprints:
            raise self._too_small(shape, most, whole)
        best = min(footprints, key=footprints.__getitem__)
        lacks = footprints[best] - device - capacity_bytes.get((Tier.HOST, 0), 0)
        if lacks > 0:
            pool = (Tier.GPU if self.start == "device" else Tier.HOST, 0)
            what = f"the model states in chunks of {best:,} numbers, on device and host together"
            raise OutOfMemory(pool, lacks, what, (Remedy.SMALLER_MODEL,))
        return best

    def _too_small(self, shape: TrainingShape, most: int, device_bytes: int) -> DoesNotFit:
        """Why no size fits into warm-up, which leaves a chunk `most` numbers."""
        name, largest = _biggest_module(shape) if self.oversize == "error" else ("", 1)
        sizes = [n for size in self.sizes for n in _halvings(size) if n >= max(largest, most + 1)]
        if not sizes:
            return DoesNotFit(
                f"module {name} has {largest:,} parameters, more than a chunk of any size",
                (Remedy.LARGER_SIZES, Remedy.OVERSIZE_ALONE),
            )
        if not (share := self.warmup_share * self.device_share):
            return DoesNotFit(
                "no size of chunks can be searched where warm-up has no share of the device",
                (Remedy.LARGER_SHARES, Remedy.NAMED_SIZE),
            )
        needs = 2 * shape.item_bytes * min(sizes)
        lacks = max(1, int(needs / share) - device_bytes)
        what = f"two chunks of {min(sizes):,} numbers in warm-up, in {share:.0%} of it"
        what += f" (module {name} has {largest:,})" if name else ""
        room = int(device_bytes * self.device_share)  # for two chunks, if warm-up had all of it
        remedies = {
            Remedy.LARGER_WARMUP_SHARE: needs <= room,
            Remedy.NAMED_SIZE: needs <= room,
            Remedy.OVERSIZE_ALONE: bool(name) and largest * shape.item_bytes <= room,
        }
        found = [remedy for remedy, helps in remedies.items() if helps]
        return OutOfMemory((Tier.GPU, 0), lacks, what, found)


def footprint_bytes(layout: TrainingLayout) -> int:
    """Bytes of all states of a layout: weights, gradients and optimizer.

    Args:
        layout: chunks and units of a job.

    Returns:
        Bytes of one device, with the padding of chunks.
    """
    return sum([c.weight_bytes + c.gradient_bytes + c.optimizer_bytes for c in layout.chunks])


def _in_order_of_use(shape: TrainingShape) -> list[int]:
    """Parameters by the first unit that uses them.

    The order of registration differs: OPT registers its last norm, which the head uses, before its
    layers.
    """
    first = {p: u for u in reversed(range(len(shape.units))) for p in shape.units[u].parameters}
    return sorted(range(len(shape.parameters)), key=first.__getitem__)


def _halved(sizes: tuple[int, ...], most: int) -> tuple[int, ...]:
    while most and min(sizes) > most:
        sizes = tuple([size // 2 for size in sizes])
    return sizes


def _halvings(size: int) -> list[int]:
    return [size >> times for times in range(size.bit_length())]


def _biggest_module(shape: TrainingShape) -> tuple[str, int]:
    """The name and the numbers of the largest module, frozen and trained ones counted apart."""
    numbers = Counter[tuple[str, bool]]()
    for parameter in shape.parameters:
        numbers[_module(parameter.name), parameter.trains] += parameter.elements
    ((name, _), largest) = max(numbers.items(), key=lambda item: item[1])
    return name, largest


def _module(parameter: str) -> str:
    return parameter.rpartition(".")[0]
