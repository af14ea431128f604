"""Windows of tokens: the layout of jobs that finetune on samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.contract.layout import Layout, Mode, TrainingLayout, lay_out_windows
from engine.contract.regions import Pool
from engine.contract.view import Cost
from models.training.shape import TrainingShape
from policies.planners.placement import prepared
from policies.planners.unit_chunks import unit_chunks
from traces.serving.request import TrainingJob


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
