"""Machines behind the face of one: replicas of a served model, and serving beside training."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import UntypedStorage

from engine.contract.executor import Launch
from engine.contract.plan import Compute
from engine.contract.regions import Pool, Tier
from runtime.executors.machine import Machine, Tokens
from runtime.serving.machine import Prepared, ServingMachine
from runtime.training.machine import IssuedTraining, TrainingMachine


class ReplicaMachines(Machine[Prepared]):
    """Sends every launch to the machine of its device. A job stays on one of them."""

    store = None

    def __init__(self, machines: Sequence[ServingMachine]) -> None:
        self.machines = tuple(machines)
        self.arenas = {pool: arena for m in self.machines for pool, arena in m.arenas.items()}
        self.graph_bytes = {i: nbytes for m in self.machines for i, nbytes in m.graph_bytes.items()}

    @property
    def parts(self) -> Sequence[ServingMachine]:
        """See Machine."""
        return self.machines

    def prepare(self, launch: Launch) -> Prepared:
        """See Machine."""
        return self.machines[launch.op.lane[0]].prepare(launch)

    def start(self, prepared: Prepared) -> Tokens:
        """See Machine."""
        return self._of(prepared).start(prepared)

    def collect(self, prepared: Prepared, tokens: Tokens) -> tuple[int, ...]:
        """See Machine."""
        return self._of(prepared).collect(prepared, tokens)

    def execute(self, prepared: Prepared) -> tuple[int, ...]:
        """See Machine."""
        return self._of(prepared).execute(prepared)

    def release(self, pool: Pool, pages: Sequence[int]) -> None:
        """See Machine."""
        self.machines[pool[1]].release(pool, pages)

    def outputs(self, job_id: int) -> list[int]:
        """See Machine: of the replica that has served the job."""
        holders = (m for m in self.machines if job_id in m.packer.transcripts)
        return next(holders, self.machines[0]).outputs(job_id)

    def _of(self, prepared: Prepared) -> ServingMachine:
        return self.machines[prepared.launch.op.lane[0]]


class CoLocatedMachine(Machine[Prepared | IssuedTraining]):
    """A ServingMachine and a TrainingMachine as one; a launch is served or trains, never both."""

    def __init__(self, serving: ServingMachine, training: TrainingMachine) -> None:
        self.serving, self.training = serving, training
        self.arenas, self.graph_bytes = serving.arenas, serving.graph_bytes
        self.store = training.store

    @property
    def parts(self) -> tuple[ServingMachine, TrainingMachine]:
        """See Machine: both of one device."""
        return self.serving, self.training

    def prepare(self, launch: Launch) -> Prepared | IssuedTraining:
        """See Machine. NotImplementedError where one launch holds slices of both."""
        if not self.training.takes(launch):
            return self.serving.prepare(launch)
        slices = launch.op.slices if isinstance(launch.op, Compute) else ()
        if any(piece.job.training is None for piece in slices):
            raise NotImplementedError("the runtime cannot fuse serving and training yet")
        return self.training.prepare(launch)

    def start(self, prepared: Prepared | IssuedTraining) -> Tokens:
        """See Machine."""
        if isinstance(prepared, IssuedTraining):
            return self.training.start(prepared)
        return self.serving.start(prepared)

    def collect(self, prepared: Prepared | IssuedTraining, tokens: Tokens) -> tuple[int, ...]:
        """See Machine."""
        if isinstance(prepared, IssuedTraining):
            return self.training.collect(prepared, tokens)
        return self.serving.collect(prepared, tokens)

    def execute(self, prepared: Prepared | IssuedTraining) -> tuple[int, ...]:
        """See Machine."""
        if isinstance(prepared, IssuedTraining):
            return self.training.execute(prepared)
        return self.serving.execute(prepared)

    def release(self, pool: Pool, pages: Sequence[int]) -> None:
        """See Machine."""
        self.serving.release(pool, pages)

    def outputs(self, job_id: int) -> list[int]:
        """See Machine."""
        return self.serving.outputs(job_id)

    @property
    def untimed_ns(self) -> int:
        """See Machine."""
        return self.training.untimed_ns

    def held(self, tier: Tier) -> Iterable[UntypedStorage]:
        """See Machine."""
        return self.training.held(tier)

    def loss(self, job_id: int, microbatch: int) -> float:
        """See Machine."""
        return self.training.loss(job_id, microbatch)
