"""Several machines behind one face: what executors drive where a run has replicas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine.executor import Launch, Meter, Reading
from engine.plan import Pool
from runtime.machine import Machine, Prepared


class Replicas:
    """Sends every launch to the machine of its device. A job stays on one of them."""

    def __init__(self, machines: Sequence[Machine]) -> None:
        self.machines = tuple(machines)
        self.arenas = {pool: arena for m in self.machines for pool, arena in m.arenas.items()}
        self.graph_bytes = {i: nbytes for m in self.machines for i, nbytes in m.graph_bytes.items()}

    def prepare(self, launch: Launch) -> Prepared:
        """See Machine, as for all below."""
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

    def _of(self, prepared: Prepared) -> Machine:
        return self.machines[prepared.launch.op.lane[0]]


class Meters:
    """The meters of several devices as one."""

    def __init__(self, meters: Sequence[Meter]) -> None:
        self._meters = tuple(meters)

    def read(self) -> Mapping[Pool, Reading]:
        """The readings of all of them."""
        return {pool: reading for m in self._meters for pool, reading in m.read().items()}
