"""The real work of training jobs, without a clock: units of a chain, updates, copies of regions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor, UntypedStorage

from engine.contract.executor import Launch
from engine.contract.plan import HOST_LANE, Compute, Copy, Slice
from engine.contract.regions import Kind, Place, Pool, Tier, Work
from runtime.executors.machine import Machine, Tokens
from runtime.serving.kv import Arena
from runtime.training.saved import Graph
from runtime.training.store import RegionStore
from runtime.training.trainer import Trainer


class IssuedTraining(NamedTuple):
    """A launch of training: nothing has to be made ready beforehand."""

    launch: Launch


class TrainingMachine(Machine[IssuedTraining]):
    """One device with its host, and what is trained on it.

    `places` is what lies where before the first step, in bytes.
    """

    arenas: Mapping[Pool, Arena] = {}  # no KV
    graph_bytes: Mapping[int, int] = {}  # nor CUDA graphs
    store: RegionStore

    def __init__(
        self, trainers: Mapping[int, Trainer], store: RegionStore, places: Mapping[Place, int]
    ) -> None:
        self._trainers, self.store = trainers, store
        for place, nbytes in places.items():
            if place.region.owner in trainers:
                store.grow(place, nbytes)

    def takes(self, launch: Launch) -> bool:
        """Whether a launch is training's."""
        op = launch.op
        if isinstance(op, Copy):
            return op.src.region.kind is not Kind.KV
        assert isinstance(op, Compute), "measured worlds take groups of one"
        return op.slices[0].job.training is not None

    def prepare(self, launch: Launch) -> IssuedTraining:
        """See Machine."""
        return IssuedTraining(launch)

    def execute(self, prepared: IssuedTraining) -> tuple[int, ...]:
        """Carries a launch out; nobody samples."""
        self.start(prepared)
        return ()

    def start(self, prepared: IssuedTraining) -> tuple[()]:
        """Carries a launch out; on a GPU, puts it on the current stream."""
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
        """Nobody samples."""
        return ()

    def held(self, tier: Tier) -> Iterator[UntypedStorage]:
        """The storages of all that lies in a tier, what graphs have saved included; some come
        repeatedly. Not what belongs to the model for good: its buffers and tables of angles."""
        tables = (t for trainer in self._trainers.values() for t in trainer.units.tables())
        known = {table.untyped_storage()._cdata for table in tables}
        for stay in self.store.stays(tier):
            yield from stay.storages_held()
            graph = stay.graph  # a lane may take it at any time
            if isinstance(graph, Graph):
                yield from (s for s in graph.saved() if s._cdata not in known)

    def release(self, pool: Pool, pages: Sequence[int]) -> None:
        """No KV."""

    def outputs(self, job_id: int) -> list[int]:
        """No tokens."""
        return []

    def weights(self, job_id: int) -> Mapping[str, Tensor]:
        """The newest weights of a job by the model's names."""
        return self._trainers[job_id].state_dict()

    def loss(self, job_id: int, microbatch: int) -> float:
        """The mean loss of a job's microbatch."""
        return self._trainers[job_id].loss(microbatch)
