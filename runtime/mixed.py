"""Serving and training on one device: each launch goes to whoever it belongs to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.executor import Launch
from engine.plan import Pool
from runtime.machine import Machine
from runtime.store import Store
from runtime.training_machine import Trained, TrainingMachine


class MixedMachine:
    """A runtime.streams.Machine of two; a launch is served or trains, never both."""

    def __init__(self, serving: Machine, training: TrainingMachine) -> None:
        self.serving, self.training = serving, training
        self.arenas, self.graph_bytes = serving.arenas, serving.graph_bytes
        self.decoder, self.packer, self.spec = serving.decoder, serving.packer, serving.spec

    @property
    def store(self) -> Store:
        """Where training's places have memory."""
        return self.training.store

    def prepare(self, launch: Launch) -> Any:
        """See Machine. NotImplementedError for slices of both in one launch."""
        if not self.training.takes(launch):
            return self.serving.prepare(launch)
        pieces = getattr(launch.op, "slices", ())
        if any(piece.job.training is None for piece in pieces):
            raise NotImplementedError("the runtime cannot fuse serving and training yet")
        return self.training.prepare(launch)

    def execute(self, prepared: Any) -> tuple[int, ...]:
        """See Machine."""
        return self._of(prepared).execute(prepared)

    def start(self, prepared: Any) -> Sequence[Any]:
        """See Machine."""
        return self._of(prepared).start(prepared)

    def collect(self, prepared: Any, tokens: Any) -> tuple[int, ...]:
        """See Machine."""
        return self._of(prepared).collect(prepared, tokens)

    def release(self, pool: Pool, pages: Sequence[int]) -> None:
        """See Machine."""
        self.serving.release(pool, pages)

    def outputs(self, job_id: int) -> list[int]:
        """Token ids that a request has generated."""
        return self.serving.outputs(job_id)

    def loss(self, job_id: int, microbatch: int) -> float:
        """The mean loss of a training job's microbatch."""
        return self.training.loss(job_id, microbatch)

    def _of(self, prepared: Any) -> Any:
        return self.training if isinstance(prepared, Trained) else self.serving
