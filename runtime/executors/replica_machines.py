"""Replicas of a served model, a machine per device, behind the face of one."""

from __future__ import annotations

from collections.abc import Sequence

from engine.contract.executor import Launch
from engine.contract.regions import Pool
from runtime.executors.machine import Machine, Tokens
from runtime.serving.machine import Prepared, ServingMachine


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
