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
    Placement,
    block_chunks,
    blocks_of,
    modes_of_blocks,
    searched_size,
)
from policies.planners.search import UNPRICED, Space, TierBytes, TimedConfiguration
from policies.planners.step_memory import Placements
from policies.planners.step_model import StepModel
from policies.planners.step_quotes import QuotedStep
from policies.training.out_of_memory import OutOfMemory, remedies_of_launch, remedies_of_states
from policies.training.streaming import GRADIENTS_OUT
from traces.serving.request import TrainingJob

MOST_NUMBERS = 80  # of a knob, so that a search of a deeper model takes seconds, too
# What the search has tried already.
SEARCHED = (Remedy.RECOMPUTE, Remedy.OFFLOAD_INPUTS, Remedy.KEEP_INPUTS, Remedy.SMALLER_CHUNKS)


@dataclass(frozen=True)
class ProTrainLayout:
    """The fastest configuration that fits (Yang et al., ProTrain, MLSys'26).

    All configurations are searched: chunks that persist, buffers, blocks that offload and blocks
    that compute again. Each of these may be given instead, and the others are searched. Of a model
    with more than 80 blocks every second number is tried, with more than 160 every third one, and
    always those of the configuration that needs least.

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
        levels: memories for which layouts are searched as well: each 1/levels of the device. By
            these a job may go on between steps when keys and values rise or fall (ProTrain with
            `headroom`); 0: none.

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
    levels: int = 0

    def __post_init__(self) -> None:
        for name in ("device_share", "host_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"protrain: {name} is {getattr(self, name)}, not in [0, 1]")
        names = ("persistent", "buffers", "swaps", "checkpoints", "interval", "chunk_elements")
        for name in (*names, "gradients_out", "levels"):
            if (getattr(self, name) or 0) < 0:
                raise ValueError(f"protrain: {name} is {getattr(self, name)}, not at least 0")

    @property
    def is_given(self) -> bool:
        """Whether every knob is fixed by hand, so that nothing is searched."""
        return None not in (self.persistent, self.buffers, self.swaps, self.checkpoints)

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
        layouts, others = dict[int, TrainingLayout](), dict[int, tuple[TrainingLayout, ...]]()
        for job in jobs:
            shape = shapes[job.job_id]
            of_job = _Layouts(self, *self.space(shape, job, cost), job, shape)
            if self.levels:
                whole = room._replace(device_bytes=capacity_bytes[Tier.GPU, 0])
                found, others[job.job_id] = of_job.by_level(room, whole, self.levels)
            else:
                found = of_job.best(room)
            layouts[job.job_id] = found
        most = capacity_bytes[Tier.GPU, 0] if self.levels else room.device_bytes
        own = {(Tier.GPU, 0): most, (Tier.HOST, 0): room.host_bytes}
        places = held_places(layouts, jobs, own)
        return Layout(places=places, training=layouts, alternatives=others)

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
        if self.buffers is None:
            buffers = sorted({*buffers, min(1, chunks)})  # the least with which chunks pass
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
            given = {"swaps": self.swaps, "checkpoints": self.checkpoints}
            asked = " and ".join([f"{name}={n}" for name, n in given.items() if n is not None])
            raise ValueError(f"protrain: {asked}, and {units} blocks have a backward")


@dataclass(frozen=True)
class _Layouts:
    """The layouts of one job, whose configurations are searched in one space."""

    planner: ProTrainLayout
    space: Space
    plain: TrainingLayout
    job: TrainingJob
    shape: TrainingShape

    def best(self, room: TierBytes) -> TrainingLayout:
        """The fastest layout in so much memory, or the one that is fixed by hand.

        Raises:
            ValueError: the host cannot update what does not persist.
            OutOfMemory: no configuration fits.
        """
        if self.planner.is_given:
            (fixed,) = self.space.everything()
            return self._of(fixed)
        search = self.space.search(room)
        if not search.found:
            raise _out_of_memory(search.lacks, self.job, self.plain, self.space.updates_on_host)
        return self._of(*search.found)

    def by_level(
        self, room: TierBytes, whole: TierBytes, levels: int
    ) -> tuple[TrainingLayout, tuple[TrainingLayout, ...]]:
        """The layout to begin with, and the fastest ones in each part of the device.

        The first is the fastest in `room`, or where that holds none, the one that needs least.
        Levels in which nothing fits are left out, and so are layouts that are found again.

        Raises:
            OutOfMemory: no configuration fits in the whole device.
        """
        found = dict[TrainingLayout, None]()
        for i in range(1, levels + 1):
            part = whole._replace(device_bytes=whole.device_bytes * i // levels)
            found.update({self._of(one): None for one in self.space.search(part).found})
        try:
            first = self.best(room)
        except OutOfMemory:
            first = min(found, key=lambda one: one.peak_bytes, default=None) or self.best(whole)
        return first, tuple(sorted({**found, first: None}, key=lambda one: -one.peak_bytes))

    def _of(self, timed: TimedConfiguration) -> TrainingLayout:
        """Chunks, units and stage of a configuration, on one device of its group."""
        chosen = timed.knobs
        blocks, interval = self.space.model.blocks, self.space.model.swaps_ahead
        units = len(self.plain.units)
        modes = modes_of_blocks(chosen, blocks, units, interval, self.planner.placement)
        chunks = [chunk.parameters for chunk in self.plain.chunks]
        share = equal_share(self.job.ranks if self.planner.shards else 1)
        made = lay_out(self.shape, chunks, modes, ranks=self.job.ranks, share=share)
        passing = {*blocks.chunks[chosen.persistent :]}
        return replace(
            eager(made, self.job),
            persistent=frozenset(range(len(chunks))) - passing,
            buffers=min(chosen.buffers, len(passing)),
            swaps_ahead=interval,
            peak_bytes=timed.peak_bytes,
            step_ns=timed.step_ns,
        )


def _numbers(given: int | None, most: int) -> Sequence[int]:
    """The numbers that a knob may take: all of them, or some at equal distances, and the last."""
    step = max(1, -(-most // MOST_NUMBERS))
    return sorted({*range(0, most + 1, step), most}) if given is None else (given,)


def _out_of_memory(
    lacks: TierBytes, job: TrainingJob, layout: TrainingLayout, updates_on_host: bool
) -> OutOfMemory:
    """The error of a job of which no configuration fits: what the nearest one lacks."""
    tier = Tier.GPU if lacks.device_bytes else Tier.HOST
    known = remedies_of_launch(tier, Work.BACKWARD, job, layout)
    remedies = [remedy for remedy in known if remedy not in SEARCHED]
    what = "the nearest of the configurations of ProTrain that its knobs allow"
    if not updates_on_host:
        what += f", all of which persist: {UNPRICED}"
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
