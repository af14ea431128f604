"""The machine that trains: units of a chain, updates and copies of regions, without a clock."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor, UntypedStorage

from engine.contract.executor import Launch
from engine.contract.plan import HOST_LANE, Compute, Copy, Slice
from engine.contract.regions import Kind, Place, Pool, Tier, Work
from runtime.executors.machine import Machine, Tokens
from runtime.serving.kv import Arena
from runtime.training.checkpoint import CheckpointWriter
from runtime.training.saved import Graph
from runtime.training.store import RegionStore
from runtime.training.trainer import Trainer


class IssuedTraining(NamedTuple):
    """A launch of training, which needs no preparation."""

    launch: Launch


class TrainingMachine(Machine[IssuedTraining]):
    """One device with its host, and the jobs that train on it."""

    arenas: Mapping[Pool, Arena] = {}  # no KV
    graph_bytes: Mapping[int, int] = {}  # nor CUDA graphs
    store: RegionStore

    def __init__(
        self, trainers: Mapping[int, Trainer], store: RegionStore, places: Mapping[Place, int]
    ) -> None:
        """
        Args:
            trainers: The trainer of each job.
            store: The memory of all of them.
            places: Bytes at each place before the first step.
        """
        self._trainers, self.store = trainers, store
        for place, nbytes in places.items():
            if place.region.owner in trainers:
                store.grow(place, nbytes)

    def takes(self, launch: Launch) -> bool:
        """Whether a launch belongs to a training job."""
        op = launch.op
        if isinstance(op, Copy):
            return op.src.region.kind is not Kind.KV
        assert isinstance(op, Compute), "a machine takes groups of one device"
        return op.slices[0].job.training is not None

    def prepare(self, launch: Launch) -> IssuedTraining:
        """See Machine."""
        return IssuedTraining(launch)

    def execute(self, prepared: IssuedTraining) -> tuple[int, ...]:
        """See Machine; no launch of training samples a token."""
        self.start(prepared)
        return ()

    def start(self, prepared: IssuedTraining) -> tuple[()]:
        """See Machine."""
        op = prepared.launch.op
        if isinstance(op, Copy):
            self.store.copy(op.src, op.dst)
        elif isinstance(op, Compute):
            for piece in op.slices:
                self._run(op, piece)
        return ()

    def _run(self, op: Compute, piece: Slice) -> None:
        trainer, (part,) = self._trainers[piece.job.job_id], piece.layers or range(0)
        if piece.work is Work.UPDATE:
            tier = Tier.HOST if op.on == HOST_LANE else Tier.GPU
            assert piece.job.training is not None
            step = piece.microbatch // piece.job.training.spec.microbatches
            trainer.update(part, step, tier)
        elif piece.work is Work.BACKWARD:
            trainer.backward(part, piece.microbatch)
        else:
            assert piece.job.training is not None and piece.job.training.layout is not None
            mode = piece.job.training.layout.units[part].mode
            trainer.forward(part, piece.microbatch, mode, op.again)

    def collect(self, prepared: IssuedTraining, tokens: Tokens) -> tuple[int, ...]:
        """See Machine; no launch of training samples a token."""
        return ()

    def held(self, tier: Tier) -> Iterator[UntypedStorage]:
        """The storages of all stays in a tier and of all that graphs have saved; some repeatedly.

        What the model keeps for good is left out: its buffers, positions and angles.
        """
        tables = (t for trainer in self._trainers.values() for t in trainer.units.tables())
        known = {table.untyped_storage()._cdata for table in tables}
        for stay in self.store.stays(tier):
            yield from stay.storages_held()
            graph = stay.graph  # read once: a lane may take it at any time
            if isinstance(graph, Graph):
                yield from (s for s in graph.saved() if s._cdata not in known)

    def release(self, pool: Pool, pages: Sequence[int]) -> None:
        """See Machine: training holds no KV."""

    def outputs(self, job_id: int) -> list[int]:
        """See Machine: training generates no tokens."""
        return []

    @property
    def untimed_ns(self) -> int:
        """See Machine: checkpoints, which are written as an update ends."""
        return sum([trainer.untimed_ns for trainer in self._trainers.values()])

    def write_checkpoints(self, job_id: int, writer: CheckpointWriter) -> None:
        """Has a job write checkpoints behind its steps."""
        self._trainers[job_id].checkpoints = writer

    def weights(self, job_id: int) -> Mapping[str, Tensor]:
        """The newest weights of a job by the model's names."""
        return self._trainers[job_id].state_dict()

    def loss(self, job_id: int, microbatch: int) -> float:
        """See Machine."""
        return self._trainers[job_id].loss(microbatch)
