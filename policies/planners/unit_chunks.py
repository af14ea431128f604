"""A chunk for each unit: the parameters of a unit are moved together, or stay for windows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.contract.layout import (
    ALL,
    Layout,
    Mode,
    TrainingLayout,
    equal_share,
    lay_out,
    lay_out_windows,
)
from engine.contract.regions import Pool
from engine.contract.view import Cost
from models.training.shape import TrainingShape
from policies.planners.placement import Start, Updates, apart, prepared
from traces.serving.request import TrainingJob


@dataclass(frozen=True)
class UnitChunks:
    """The parameters of a unit in one chunk, frozen and trained ones apart.

    A tied table lies with the first unit that uses it.

    Args:
        modes: of activations, keep, recompute or offload; one for all layers, or one for each.
        start: where states lie before the first step: host, device or host_first.
        shards: in a group, each device has a part of every chunk; false: each has all of it.
        offloads_inputs: inputs of layers that recompute or offload wait on the host for the
            backward (DeepSpeed's cpu_checkpointing).
        updates: behind all backwards of a step (`last`), or each behind the last backward that adds
            to its gradients (`eager`); where gradients are clipped all of them are last.
    """

    modes: Mode | tuple[Mode, ...] = Mode.KEEP
    start: Start = "host"
    shards: bool = True
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
            OutOfMemory: the states do not fit.
        """

        def by_unit(shape: TrainingShape, modes: Sequence[Mode], ranks: int) -> TrainingLayout:
            share = equal_share(ranks) if self.shards else ALL
            return lay_out(shape, unit_chunks(shape), modes, ranks=ranks, share=share)

        how = (self.offloads_inputs, False, self.updates)
        return prepared(
            shapes, jobs, self.modes, self.start, capacity_bytes, by_unit, "given", *how
        )


@dataclass(frozen=True)
class Windows:
    """What a job trains lies on the device; frozen weights are those that are served.

    So do the sums of gradients of a step of several samples: what a sample holds may give way to
    keys and values, and what earlier samples have added may not. The adapters of a job are one
    chunk. Without adapters each unit is a chunk.

    Args:
        modes: of activations between forward and backward, one for all layers, or one for each.
    """

    modes: Mode | tuple[Mode, ...] = Mode.KEEP

    def prepare(
        self,
        shapes: Mapping[int, TrainingShape],
        jobs: Sequence[TrainingJob],
        capacity_bytes: Mapping[Pool, int],
        cost: Cost | None = None,
    ) -> Layout:
        """See Planner.

        Raises:
            ValueError: a job trains whole microbatches, or the modes do not match its layers.
            OutOfMemory: the states do not fit.
        """
        if whole := [job.job_id for job in jobs if not job.finetunes]:
            raise ValueError(
                f"training job {whole[0]} has no samples: windows are for jobs that finetune; "
                "take training=finetune"
            )

        def in_windows(shape: TrainingShape, modes: Sequence[Mode], ranks: int) -> TrainingLayout:
            return lay_out_windows(shape, trained_chunks(shape), modes)

        return prepared(shapes, jobs, self.modes, "device", capacity_bytes, in_windows, sums=True)


def unit_chunks(shape: TrainingShape) -> list[list[int]]:
    """Per unit, the parameters that no unit before it has, frozen and trained ones apart.

    Args:
        shape: the shape of the model.

    Returns:
        Per chunk, its parameters by number.
    """
    seen: set[int] = set()
    chunks: list[list[int]] = []
    for unit in shape.units:
        new = [p for p in unit.parameters if p not in seen]
        seen.update(new)
        chunks += apart(shape, new)
    return chunks


def trained_chunks(shape: TrainingShape) -> list[list[int]]:
    """What trains, in chunks: adapters together, else the parameters of each unit.

    Args:
        shape: the shape of the model.

    Returns:
        Per chunk, its parameters by number.
    """
    by_unit = [[p for p in own if shape.parameters[p].trains] for own in unit_chunks(shape)]
    if any(".lora_" in parameter.name for parameter in shape.parameters):
        return [[p for own in by_unit for p in own]]
    return [own for own in by_unit if own]
