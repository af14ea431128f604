"""ProTrain's layout: chunks that persist, buffers for the others, and a mode for each block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from engine.contract.layout import Layout, Mode, TrainingLayout, eager, equal_share, lay_out
from engine.contract.regions import Place, Pool, Tier, Work, optimizer, weight
from engine.contract.rules import Remedy
from engine.contract.view import Cost
from models.training.shape import TrainingShape
from policies.planners.blocks import (
    Blocks,
    Configuration,
    Placement,
    block_chunks,
    blocks_of,
    modes_of_blocks,
    searched_size,
)
from policies.planners.search import Space, TierBytes
from policies.planners.step_model import Placements, StepModel
from policies.planners.step_quotes import QuotedStep
from policies.training.out_of_memory import OutOfMemory, remedies_of_launch, remedies_of_states
from policies.training.streaming import GRADIENTS_OUT
from traces.serving.request import TrainingJob

# What the search has tried already.
SEARCHED = (Remedy.RECOMPUTE, Remedy.OFFLOAD_INPUTS, Remedy.KEEP_INPUTS, Remedy.SMALLER_CHUNKS)


@dataclass(frozen=True)
class ProTrainLayout:
    """The fastest configuration that fits (Yang et al., ProTrain, MLSys'26).

    All configurations are searched: chunks that persist, buffers, blocks that offload and blocks
    that compute again. Each of these may be given instead, and the others are searched.

    Args:
        persistent: block chunks, from the first, whose states stay on the device; None: searched.
        buffers: other chunks that have weights on the device at once; None: searched.
        swaps: blocks whose activations are offloaded; None: searched.
        checkpoints: blocks whose activations are computed again; None: searched.
        placement: which blocks offload: one in each `interval`, or the first ones (`swaps_first`).
        interval: a block that offloads and those that compute again behind it; 0: as many as take
            as long forward as the copy of its activations.
        chunk_elements: numbers in a chunk; 0: the size that wastes least, see `searched_size`.
        shards: in a group each device has a part of every chunk; false: all of it.
        gradients_out: of the memory policy; see ProTrain.
        device_share: of the device, that training may take: its share beside requests.
        host_share: of the host.

    Raises:
        ValueError: a number is below 0, or a share is not in [0, 1].
    """

    persistent: int | None = None
    buffers: int | None = None
    swaps: int | None = None
    checkpoints: int | None = None
    placement: Placement = "interval"
    interval: int = 0
    chunk_elements: int = 0
    shards: bool = True
    gradients_out: int = GRADIENTS_OUT
    device_share: float = 1.0
    host_share: float = 1.0

    def __post_init__(self) -> None:
        for name in ("device_share", "host_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"protrain: {name} is {getattr(self, name)}, not in [0, 1]")
        names = ("persistent", "buffers", "swaps", "checkpoints", "interval", "chunk_elements")
        for name in (*names, "gradients_out"):
            if (getattr(self, name) or 0) < 0:
                raise ValueError(f"protrain: {name} is {getattr(self, name)}, not at least 0")

    def prepare(
        self,
        shapes: Mapping[int, TrainingShape],
        jobs: Sequence[TrainingJob],
        capacity_bytes: Mapping[Pool, int],
        cost: Cost,
    ) -> Layout:
        """See Planner.

        Raises:
            ValueError: there are fewer blocks or chunks than the knobs ask for.
            OutOfMemory: no configuration fits; the deficit is that of the one that lacks least.
        """
        room = self.room(capacity_bytes)
        layouts = {job.job_id: self.laid_out(shapes[job.job_id], job, room, cost) for job in jobs}
        own = {(Tier.GPU, 0): room.device_bytes, (Tier.HOST, 0): room.host_bytes}
        return Layout(places=held_places(layouts, jobs, own), training=layouts)

    def room(self, capacity_bytes: Mapping[Pool, int]) -> TierBytes:
        """What training may use of a device and its host.

        Args:
            capacity_bytes: per pool.

        Returns:
            Its shares of them.
        """
        host_bytes = capacity_bytes.get((Tier.HOST, 0), 0)
        device_bytes = capacity_bytes[Tier.GPU, 0]
        return TierBytes(int(device_bytes * self.device_share), int(host_bytes * self.host_share))

    def laid_out(
        self, shape: TrainingShape, job: TrainingJob, room: TierBytes, cost: Cost
    ) -> TrainingLayout:
        """The layout of one job.

        Args:
            shape: of its model.
            job: the training job.
            room: what it may use.
            cost: predicted durations.

        Returns:
            Chunks, units and stage, on one device of its group.

        Raises:
            ValueError: there are fewer blocks or chunks than the knobs ask for.
            OutOfMemory: no configuration fits.
        """
        space, plain = self.space(shape, job, cost)
        blocks, interval = space.model.blocks, space.model.swaps_ahead
        knobs = (self.persistent, self.buffers, self.swaps, self.checkpoints)
        if None in knobs:
            search = space.search(room)
            if not search.found:
                raise _out_of_memory(search.lacks, job, plain)
            chosen = search.found[0].knobs
        else:
            space.pairs()  # raises where the host cannot update
            chosen = Configuration(*[knob or 0 for knob in knobs])
        modes = modes_of_blocks(chosen, blocks, len(shape.units), interval, self.placement)
        chunks = [chunk.parameters for chunk in plain.chunks]
        share = equal_share(job.ranks if self.shards else 1)
        made = eager(lay_out(shape, chunks, modes, ranks=job.ranks, share=share), job)
        passing = {*blocks.chunks[chosen.persistent :]}
        return replace(
            made,
            persistent=frozenset(range(len(chunks))) - passing,
            buffers=min(chosen.buffers, len(passing)),
            swaps_ahead=interval,
        )

    def space(
        self, shape: TrainingShape, job: TrainingJob, cost: Cost
    ) -> tuple[Space, TrainingLayout]:
        """The configurations that the knobs allow, and the layout whose units all keep.

        Args:
            shape: of the model.
            job: the training job.
            cost: predicted durations.

        Returns:
            The space, with the model of a step that times its configurations.

        Raises:
            ValueError: there are fewer blocks or chunks than the knobs ask for.
        """
        share = equal_share(job.ranks if self.shards else 1)
        size = self.chunk_elements or searched_size(shape)
        keeps = [Mode.KEEP] * len(shape.units)
        plain = lay_out(shape, block_chunks(shape, size), keeps, ranks=job.ranks, share=share)
        blocks, quotes = blocks_of(plain), QuotedStep(plain, job, cost)
        self._check(blocks)
        interval = self.interval or quotes.swap_interval(blocks.units)
        count, chunks = len(blocks.units), len(blocks.chunks)
        most = count if self.placement == "swaps_first" else -(-count // interval)
        placements = Placements.of(
            _numbers(self.swaps, most),
            _numbers(self.checkpoints, count),
            blocks,
            len(shape.units),
            interval,
            self.placement,
        )
        model = StepModel(quotes, blocks, placements, interval, self.gradients_out)
        persistent, buffers = _numbers(self.persistent, chunks), _numbers(self.buffers, chunks)
        on_host = all([chunk.host_ns is not None for chunk in quotes.chunks])
        return Space(model, persistent, buffers, on_host), plain

    def _check(self, blocks: Blocks) -> None:
        """ValueError where there are fewer blocks or chunks than the knobs ask for."""
        chunks, units = len(blocks.chunks), len(blocks.units)
        persistent = self.persistent or 0
        if persistent > chunks:
            asked = f"persistent={persistent}"
            raise ValueError(f"protrain: {asked}, and blocks have {chunks} chunks")
        if self.persistent is not None and persistent < chunks and self.buffers == 0:
            raise ValueError(
                f"protrain: buffers=0, and {chunks - persistent} chunks pass through buffers: "
                "give 1 or more"
            )
        if (self.swaps or 0) + (self.checkpoints or 0) > units:
            asked = f"swaps={self.swaps} and checkpoints={self.checkpoints}"
            raise ValueError(f"protrain: {asked}, and {units} blocks have a backward")


def _numbers(given: int | None, most: int) -> Sequence[int]:
    """The numbers that a knob may take."""
    return range(most + 1) if given is None else (given,)


def _out_of_memory(lacks: TierBytes, job: TrainingJob, layout: TrainingLayout) -> OutOfMemory:
    """The error of a job of which no configuration fits: what the nearest one lacks."""
    tier = Tier.GPU if lacks.device_bytes else Tier.HOST
    known = remedies_of_launch(tier, Work.BACKWARD, job, layout)
    remedies = [remedy for remedy in known if remedy not in SEARCHED]
    what = "the nearest of all configurations of ProTrain"
    return OutOfMemory((tier, 0), lacks.device_bytes or lacks.host_bytes, what, remedies)


def held_places(
    layouts: Mapping[int, TrainingLayout],
    jobs: Sequence[TrainingJob],
    capacity_bytes: Mapping[Pool, int],
) -> dict[Place, int]:
    """The states before the first step: those that persist on the device, the others on the host.

    Args:
        layouts: by job.
        jobs: all training jobs.
        capacity_bytes: per pool.

    Returns:
        Bytes by place.

    Raises:
        OutOfMemory: they do not fit.
    """
    found, room = dict[Place, int](), dict(capacity_bytes)
    for job_id, layout in layouts.items():
        for c, chunk in enumerate(layout.chunks):
            tier = Tier.GPU if c in layout.persistent else Tier.HOST
            states = ((optimizer, chunk.optimizer_bytes), (weight, chunk.weight_bytes))
            found |= {kind(job_id, c, tier): nbytes for kind, nbytes in states if nbytes}
    for pool in dict.fromkeys([place.pool for place in found]):
        lacks = sum([n for place, n in found.items() if place.pool == pool]) - room.get(pool, 0)
        if lacks > 0:
            raise OutOfMemory(pool, lacks, "the model states", remedies_of_states(jobs))
    return found
