"""Several machines behind one face: serving beside training on a device, and replicas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine.contract.executor import Launch, Meter, Reading
from engine.contract.regions import Pool
from runtime.serving.machine import Prepared, ServingMachine
from runtime.training.machine import IssuedTraining, TrainingMachine
from runtime.training.store import RegionStore


class MixedMachine:
    """A runtime.executors.streams.Machine of two; a launch is served or trains, never both."""

    def __init__(self, serving: ServingMachine, training: TrainingMachine) -> None:
        self.serving, self.training = serving, training
        self.arenas, self.graph_bytes = serving.arenas, serving.graph_bytes
        self.decoder, self.packer, self.spec = serving.decoder, serving.packer, serving.spec

    @property
    def store(self) -> RegionStore:
        """Where training's places have memory."""
        return self.training.store

    def prepare(self, launch: Launch) -> Any:
        """See ServingMachine. NotImplementedError for slices of both in one launch."""
        if not self.training.takes(launch):
            return self.serving.prepare(launch)
        pieces = getattr(launch.op, "slices", ())
        if any(piece.job.training is None for piece in pieces):
            raise NotImplementedError("the runtime cannot fuse serving and training yet")
        return self.training.prepare(launch)

    def execute(self, prepared: Any) -> tuple[int, ...]:
        """See ServingMachine."""
        return self._of(prepared).execute(prepared)

    def start(self, prepared: Any) -> Sequence[Any]:
        """See ServingMachine."""
        return self._of(prepared).start(prepared)

    def collect(self, prepared: Any, tokens: Any) -> tuple[int, ...]:
        """See ServingMachine."""
        return self._of(prepared).collect(prepared, tokens)

    def release(self, pool: Pool, pages: Sequence[int]) -> None:
        """See ServingMachine."""
        self.serving.release(pool, pages)

    def outputs(self, job_id: int) -> list[int]:
        """Token ids that a request has generated."""
        return self.serving.outputs(job_id)

    def loss(self, job_id: int, microbatch: int) -> float:
        """The mean loss of a training job's microbatch."""
        return self.training.loss(job_id, microbatch)

    def _of(self, prepared: Any) -> Any:
        return self.training if isinstance(prepared, IssuedTraining) else self.serving


class Replicas:
    """Sends every launch to the machine of its device. A job stays on one of them."""

    def __init__(self, machines: Sequence[ServingMachine]) -> None:
        self.machines = tuple(machines)
        self.arenas = {pool: arena for m in self.machines for pool, arena in m.arenas.items()}
        self.graph_bytes = {i: nbytes for m in self.machines for i, nbytes in m.graph_bytes.items()}

    def prepare(self, launch: Launch) -> Prepared:
        """See ServingMachine, as for all below."""
        return self.machines[launch.op.lane[0]].prepare(launch)

    def execute(self, prepared: Prepared) -> tuple[int, ...]:
        return self._of(prepared).execute(prepared)

    def start(self, prepared: Prepared) -> Any:
        return self._of(prepared).start(prepared)

    def collect(self, prepared: Prepared, tokens: Any) -> tuple[int, ...]:
        return self._of(prepared).collect(prepared, tokens)

    def release(self, pool: Pool, pages: Sequence[int]) -> None:
        self.machines[pool[1]].release(pool, pages)

    def outputs(self, job_id: int) -> list[int]:
        """The token ids a job has generated so far, wherever it was served."""
        holders = (m for m in self.machines if job_id in m.packer.transcripts)
        return next(holders, self.machines[0]).outputs(job_id)

    def _of(self, prepared: Prepared) -> ServingMachine:
        return self.machines[prepared.launch.op.lane[0]]


class Meters:
    """The meters of several devices as one."""

    def __init__(self, meters: Sequence[Meter]) -> None:
        self._meters = tuple(meters)

    def read(self) -> Mapping[Pool, Reading]:
        """The readings of all of them."""
        return {pool: reading for m in self._meters for pool, reading in m.read().items()}
