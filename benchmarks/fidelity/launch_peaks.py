"""Measured workspace of the launches of a training run, by torch's own storages.

The measurement is independent of the ledger: a tracker sees every storage that torch makes in a
launch, and weak references tell which of the earlier storages are still alive.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import pandas as pd
import torch

from engine.contract.footprint import launches_of
from engine.contract.plan import Compute
from engine.contract.regions import Tier, Work
from engine.results.recorder import Recorder
from runtime.measure.tracker import StorageTracker
from tandem.config.composed_config import ComposedConfig
from tandem.wiring.backends import backend_of
from tandem.wiring.experiment import engine_of
from tandem.wiring.run_spec import run_spec_of

ID_BYTES = 8  # of a token id, and of the loss's count of them


class Watched(NamedTuple):
    """A run with the peak bytes of each watched launch, and its MEMORY rows."""

    launches: pd.DataFrame  # columns work, unit, predicted, measured
    memory: pd.DataFrame
    ids_bytes: int  # token ids of a microbatch, which the ledger does not book

    @property
    def transient_errors(self) -> pd.Series:
        """Signed, relative to the measurement."""
        return self.launches["predicted"] / self.launches["measured"] - 1

    @property
    def off_bytes(self) -> pd.Series:
        """The meter's bytes beyond the ledger's, at each reading, in either tier. Each tier is read
        at least once in ten rows, when nothing is in flight."""
        rows = self.memory.dropna(subset=["measured_bytes"])
        for tier, all_of_it in self.memory.groupby("tier"):
            read = int(rows["tier"].eq(tier).sum())
            assert 10 * read >= len(all_of_it), f"{read} of {len(all_of_it)} rows read: {tier}"
        booked = rows["capacity_bytes"] - rows["free_bytes"] - rows["coming_bytes"]
        return rows["measured_bytes"] - booked

    @property
    def is_exact(self) -> bool:
        """Whether `off_bytes` are 0 to a microbatch's token ids."""
        return bool(self.off_bytes.between(0, self.ids_bytes).all())


def watched(point: ComposedConfig) -> Watched:
    """Runs a training job in lockstep, which does the real work in issue order."""
    setting = run_spec_of(point)
    torch.set_num_threads(1)
    with backend_of(setting, point.config["backend"]) as world:
        machine = PeakWatchedMachine(world.machine)
        world.executor.machine = machine
        recorder = Recorder(world.meter)
        engine_of(setting, world, recorder).replay(setting.work)
    launches = pd.DataFrame(machine.rows, columns=["work", "unit", "predicted", "measured"])
    ids_bytes = ID_BYTES * (setting.trainees[0].job.microbatch_tokens + 1)
    return Watched(launches, recorder.tables()["memory"].to_pandas(), ids_bytes)


class PeakWatchedMachine:
    """A machine that measures launches of units, and passes everything else on."""

    def __init__(self, machine: Any) -> None:
        self._machine = machine
        self.rows: list[tuple[str, int, int, int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._machine, name)

    def execute(self, prepared: Any) -> Any:
        """See runtime.executors.machine.Machine."""
        op = prepared.launch.op
        if not isinstance(op, Compute) or op.slices[0].work is Work.UPDATE:
            return self._machine.execute(prepared)
        with PeakTracker(self._machine.held(Tier.GPU)) as tracker:
            done = self._machine.execute(prepared)
        (piece,) = op.slices
        work = "again" if op.again else str(piece.work)
        self.rows.append((work, piece.layers.start, _predicted(op), tracker.most - tracker.begun))
        return done


class PeakTracker(StorageTracker):
    """A tracker that also subtracts earlier storages that are freed or smaller at the peak."""

    def __init__(self, before: Any) -> None:
        super().__init__()
        self._before = [weakref.ref(s) for s in {s._cdata: s for s in before}.values()]
        self.begun = self.most = self._left_bytes()

    def _add(self, storage: torch.UntypedStorage) -> None:
        super()._add(storage)
        self.most = max(self.most, self.live_bytes + self._left_bytes())

    def _left_bytes(self) -> int:
        alive = (ref() for ref in self._before)
        return sum(storage.nbytes() for storage in alive if storage is not None)


def _predicted(op: Compute) -> int:
    """The bytes that policies book for a launch: all places that begin with it."""
    (piece,) = op.slices
    task = piece._replace(work=Work.BACKWARD) if op.again else piece
    found = [launch for launch in launches_of(task, op.device) if launch.again is op.again]
    return sum(grow.nbytes for grow in found[0].grows)
