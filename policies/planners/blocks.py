"""Chunks and blocks of ProTrain: what its four knobs are about."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from engine.contract.layout import Mode, TrainingLayout
from models.training.shape import TrainingShape
from policies.planners.placement import apart

MEBI = 1 << 20
SIZES = tuple([mebi * MEBI // 2 for mebi in (32, 64, 128, 256)])  # 16-bit numbers: the original's
Placement = Literal["interval", "swaps_first"]


class Configuration(NamedTuple):
    """The four knobs of ProTrain.

    Attributes:
        persistent: block chunks, from the first, whose states stay on the device.
        buffers: other chunks that have weights on the device at once.
        swaps: blocks whose activations are offloaded.
        checkpoints: blocks whose activations are computed again.
    """

    persistent: int
    buffers: int
    swaps: int
    checkpoints: int


class Blocks(NamedTuple):
    """What the knobs are about.

    Attributes:
        units: layers that have a backward, from the lowest.
        chunks: chunks of layers, in the order of the forward; all others always persist.
    """

    units: range
    chunks: tuple[int, ...]


def modes_of_blocks(
    chosen: Configuration, blocks: Blocks, num_units: int, interval: int, placement: Placement
) -> tuple[Mode, ...]:
    """The mode of each unit.

    Blocks that keep their activations are the last ones: the backward begins with them and so makes
    room for what is fetched. Before them lie those that offload, each followed by blocks that
    compute again, as many as hide its copy (the patent's swapping interval); or all that offload
    come first.

    Args:
        chosen: how many blocks of each kind.
        blocks: the blocks.
        num_units: layers, embedding and head.
        interval: a block that offloads, and those that compute again behind it.
        placement: `interval`, or `swaps_first`.

    Returns:
        One mode per unit; units that are no blocks keep.
    """
    modes = [Mode.KEEP] * num_units
    swaps, checkpoints = chosen.swaps, chosen.checkpoints
    for i, unit in enumerate(blocks.units):
        is_due = placement == "swaps_first" or i % interval == 0 or not checkpoints
        if swaps and is_due:
            modes[unit], swaps = Mode.OFFLOAD, swaps - 1
        elif checkpoints:
            modes[unit], checkpoints = Mode.RECOMPUTE, checkpoints - 1
    return tuple(modes)


def block_chunks(shape: TrainingShape, size: int) -> list[list[int]]:
    """Chunks in the order of execution: a block's parameters lie in one, as far as it holds them.

    A parameter lies with the first unit that uses it. Embedding and head have chunks of their own,
    and what trains shares none with what is frozen: adapters of all blocks are one chunk.

    Args:
        shape: of the model.
        size: numbers in a chunk; a block that is larger is a chunk of its own.

    Returns:
        Per chunk, its parameters by number.
    """
    seen: set[int] = set()
    own = list[list[int]]()
    for unit in shape.units:
        own.append([p for p in unit.parameters if p not in seen])
        seen.update(own[-1])
    adapters = [p for new in own for p in new if ".lora_" in shape.parameters[p].name]
    own = [[p for p in new if p not in {*adapters}] for new in own]
    chunks, filled, kind = apart(shape, own[0]), 0, None
    for new in own[1:-1]:
        for part in apart(shape, new):
            elements = sum([shape.parameters[p].elements for p in part])
            trains = shape.parameters[part[0]].trains
            if kind is trains and filled + elements <= size:
                chunks[-1] += part
                filled += elements
            else:
                chunks.append([*part])
                filled, kind = elements, trains
    return [*chunks, *apart(shape, own[-1]), *([adapters] if adapters else [])]


def searched_size(shape: TrainingShape, sizes: Sequence[int] = SIZES) -> int:
    """The chunk size that wastes least: a chunk is as large as the largest one, but for the last.

    Args:
        shape: of the model.
        sizes: numbers in a chunk to choose from, beside those of the largest block.

    Returns:
        Numbers in a chunk; of equally good sizes the smallest.
    """
    largest = max([_elements(shape, unit.parameters) for unit in shape.units[1:-1]])

    def waste(size: int) -> tuple[int, int]:
        layers = {p for unit in shape.units[1:-1] for p in unit.parameters}
        filled = [_elements(shape, c) for c in block_chunks(shape, size) if layers & {*c}]
        return sum([size - n for n in filled[:-1]]), size

    return min([largest, *[size for size in sizes if size > largest]], key=waste)


def _elements(shape: TrainingShape, parameters: Sequence[int]) -> int:
    return sum([shape.parameters[p].elements for p in parameters])


def blocks_of(layout: TrainingLayout) -> Blocks:
    """The blocks of a layout.

    Args:
        layout: with the chunks of `block_chunks`.

    Returns:
        Its blocks; chunks that embedding or head read are none of theirs.
    """
    last = len(layout.units) - 1
    outside = {c for u in (0, last) for c in layout.units[u].chunks}
    sole = {c for u in range(1, last) for c in layout.units[u].chunks if _is_of_blocks(layout, c)}
    return Blocks(range(max(1, layout.first), last), tuple(sorted(sole - outside)))


def _is_of_blocks(layout: TrainingLayout, chunk: int) -> bool:
    """Whether a chunk is no adapter: adapters train beside frozen weights, and always persist."""
    users = [unit for unit in layout.units if chunk in unit.chunks]
    beside = [c for unit in users for c in unit.chunks if c != chunk]
    is_adapter = any([not layout.chunks[c].trains for c in beside])
    return not (layout.chunks[chunk].trains and is_adapter)
