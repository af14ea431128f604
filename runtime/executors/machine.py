"""The one protocol between executors and the machines that carry launches out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from torch import Tensor, UntypedStorage

from engine.contract.executor import Launch
from engine.contract.regions import Pool, Tier
from runtime.serving.kv import Arena
from runtime.training.store import RegionStore

Tokens = Sequence[Tensor | None]
"""What a launch sampled: [R] token ids per part of it, None where a part samples nothing."""

PreparedT = TypeVar("PreparedT")


class Machine(Protocol[PreparedT]):
    """Does the real work of launches, without a clock: an executor says when, and measures.

    `PreparedT` is what the machine makes of a launch beforehand; an executor hands it back as it
    is. `prepare` and `collect` run on the engine's thread, `prepare` once per launch and in issue
    order. `start` may run on one thread per lane. The machines of Tandem: ServingMachine,
    TrainingMachine, CoLocatedMachine and ReplicaMachines.

    Attributes:
        arenas: The KV pages of each pool; empty where nothing is served.
        graph_bytes: Per device, what CUDA graphs hold beside what torch's allocator counts.
        store: Where places that are no KV have memory; None where nothing trains.
    """

    arenas: Mapping[Pool, Arena]
    graph_bytes: Mapping[int, int]
    store: RegionStore | None

    @property
    def parts(self) -> Sequence[Machine[Any]]:
        """The machines that it is made of, in the order of their devices; itself if it is one."""
        return (self,)

    @property
    def untimed_ns(self) -> int:
        """Thread time so far of what launches did beside work; service clocks leave it out."""
        return 0

    def prepare(self, launch: Launch) -> PreparedT:
        """Builds what a launch needs before it can start.

        Args:
            launch: An operation as the engine has issued it.

        Returns:
            The launch with its index tensors, on their way to the device.

        Raises:
            NotImplementedError: The machine does no such work.
            DeviceOOM: The launch names a KV page beyond the budget of its pool.
        """
        ...

    def start(self, prepared: PreparedT) -> Tokens:
        """Carries a launch out; on a GPU, puts it on the current stream and does not wait.

        Args:
            prepared: What `prepare` has returned for the launch.

        Returns:
            The sampled tokens per part, on the device.
        """
        ...

    def collect(self, prepared: PreparedT, tokens: Tokens) -> tuple[int, ...]:
        """Adds the sampled tokens of an ended launch to their jobs.

        Args:
            prepared: What `prepare` has returned for the launch.
            tokens: What `start` has returned, or a copy of it on the host.

        Returns:
            Ids of the jobs that sampled an end of sequence.
        """
        ...

    def execute(self, prepared: PreparedT) -> tuple[int, ...]:
        """Starts a launch, waits for its end and collects its tokens; returns as `collect`."""
        ...

    def release(self, pool: Pool, pages: Sequence[int]) -> None:
        """Gives the memory of unused KV pages of a pool back to the system."""
        ...

    def outputs(self, job_id: int) -> list[int]:
        """The token ids that a job has generated so far; none for a training job."""
        ...

    def held(self, tier: Tier) -> Iterable[UntypedStorage]:
        """What training holds in a tier of device 0.

        Args:
            tier: The tier.

        Returns:
            Storages, some repeatedly; none where nothing trains.
        """
        return ()

    def loss(self, job_id: int, microbatch: int) -> float:
        """The mean loss of a training job's microbatch.

        Args:
            job_id: The job.
            microbatch: Its number, from 0 over all steps.

        Raises:
            LookupError: The machine trains nothing.
        """
        raise LookupError(f"job {job_id} has no loss: this machine only serves")
