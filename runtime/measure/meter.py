"""Measured memory: read from torch's storages, the kernel and the driver, never from the ledger."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, UntypedStorage

from engine.contract.executor import Meter, Reading
from engine.contract.regions import Pool, Tier
from runtime.measure.tracker import census

_LIBC = ctypes.CDLL(None, use_errno=True)


class ProcessResidency:
    """How much of a tensor's memory the kernel holds in RAM, by mincore: 20-40 us per 64 MiB."""

    def __init__(self, tensor: Tensor) -> None:
        """
        Args:
            tensor: Any view of the memory; its whole storage is asked for.
        """
        self._tensor = tensor  # keeps the memory mapped
        self.address = tensor.untyped_storage().data_ptr()
        first, nbytes = self.address, tensor.untyped_storage().nbytes()
        self._start = first & ~(mmap.PAGESIZE - 1)
        self._nbytes = first + nbytes - self._start
        self._present = bytearray(max(1, -(-self._nbytes // mmap.PAGESIZE)))
        self._vector = (ctypes.c_ubyte * len(self._present)).from_buffer(self._present)

    def read_bytes(self) -> int:
        """Asks the kernel.

        Returns:
            Bytes of the system pages that are resident now, whole pages at both ends.

        Raises:
            OSError: mincore failed.
        """
        if not self._nbytes:
            return 0
        address, length = ctypes.c_void_p(self._start), ctypes.c_size_t(self._nbytes)
        if _LIBC.mincore(address, length, self._vector):
            raise OSError(ctypes.get_errno(), "mincore failed")
        return self._present.count(1) * mmap.PAGESIZE


class Alive:
    """Bytes of the distinct storages of some tensors, as long as they live."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        """
        Args:
            tensors: Views may share a storage, which counts once. No storage is kept alive.
        """
        storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}
        self._storages = [weakref.ref(storage) for storage in storages.values()]

    def read_bytes(self) -> int:
        """Adds up the storages that are still alive.

        Returns:
            Their bytes.
        """
        alive = (ref() for ref in self._storages)
        return sum(storage.nbytes() for storage in alive if storage is not None)

    def addresses(self) -> set[int]:
        """Finds the storages that are still alive.

        Returns:
            Their addresses in memory.
        """
        alive = (ref() for ref in self._storages)
        return {storage.data_ptr() for storage in alive if storage is not None}


def process_bytes() -> int:
    """Asks the kernel for the resident memory of this process.

    Returns:
        The RSS in bytes, of /proc/self/statm.

    Raises:
        OSError: The system has no /proc.
    """
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * mmap.PAGESIZE


class CpuMeter:
    """Reads both tiers of the CPU stand-in; an engine.contract.executor.Meter.

    `persistent_bytes` of a pool is the sum of its weights' live storages, of the resident pages of
    its KV arena, and of what training holds there. Weights that replicas share count for each
    replica. `process_bytes` is the RSS of the whole process and stands with the first GPU pool.
    A reading costs about 50 us for 64 MiB of arena. `spent_ns` is the thread CPU time of all
    readings.
    """

    def __init__(
        self,
        weights: Mapping[Pool, Iterable[Tensor]],
        arenas: Mapping[Pool, Tensor],
        every: int = 1,
        paused: Callable[[], AbstractContextManager[object]] = nullcontext,
        held: Callable[[Tier], Iterable[UntypedStorage]] | None = None,
    ) -> None:
        """
        Args:
            weights: The served parameters per pool.
            arenas: The KV arena of each pool, one tensor.
            every: Each every-th call of `read` reads memory. The calls between return nothing: a
                null in the table, not an old figure.
            paused: Surrounds each reading, so that a service clock can leave its time out.
            held: What training holds in a tier of device 0, the tensors of its graphs included.

        Raises:
            ValueError: `every` is below 1.
        """
        if every < 1:
            raise ValueError(f"meter: every is {every}; it must be at least 1")
        pools = {*weights, *arenas}
        if held is not None:
            pools |= {(Tier.GPU, 0), (Tier.HOST, 0)}
        self._held = held
        self._weights = {pool: Alive(weights.get(pool, ())) for pool in pools}
        self._arenas = {pool: ProcessResidency(tensor) for pool, tensor in arenas.items()}
        self._every, self._paused = every, paused
        self._calls = 0
        self.spent_ns = 0

    def read(self) -> Mapping[Pool, Reading]:
        """Reads all pools.

        Returns:
            A reading in bytes per pool; empty at a call that `every` leaves out.
        """
        with self._paused():
            self._calls += 1
            if (self._calls - 1) % self._every:
                return {}
            begin_ns = time.thread_time_ns()
            readings = {pool: self._reading(pool) for pool in self._weights}
            self.spent_ns += time.thread_time_ns() - begin_ns
        return readings

    def unclaimed_bytes(self) -> int:
        """Looks for memory that is held behind the ledger's back. Takes about 0.1 s: see census().

        Returns:
            Bytes of the CPU storages that Python can reach and that are neither weights nor an
            arena, nor held by training in a tier.
        """
        claimed = {arena.address for arena in self._arenas.values()}
        for alive in self._weights.values():
            claimed |= alive.addresses()
        if self._held is not None:
            held = (storage for tier in (Tier.GPU, Tier.HOST) for storage in self._held(tier))
            claimed |= {storage.data_ptr() for storage in held}
        return sum(nbytes for address, nbytes in census().items() if address not in claimed)

    def _reading(self, pool: Pool) -> Reading:
        arena = self._arenas.get(pool)
        persistent = self._weights[pool].read_bytes() + (arena.read_bytes() if arena else 0)
        if not pool[1]:
            persistent += _distinct_bytes(self._held, pool[0])
        return Reading(persistent, process_bytes() if pool == (Tier.GPU, 0) else None)


class CudaMeter:
    """Reads torch's CUDA allocator and the driver; an engine.contract.executor.Meter.

    `persistent_bytes` of the GPU pool is what clients of the caching allocator asked for and hold
    (`requested_bytes`; the allocator rounds each request to 512), and `graph_bytes`. An arena is
    taken whole at the start, so the figure is weights and arena, whatever is booked; a launch in
    flight adds its few index tensors. `process_bytes` is what the driver counts on the device for
    all processes. The HOST pool holds its pinned arena, which cannot leave RAM, and what training
    holds there by torch's own sizes; its `process_bytes` is the RSS.
    """

    def __init__(
        self,
        device: int = 0,
        host_arenas: Sequence[Tensor] = (),
        every: int = 1,
        paused: Callable[[], AbstractContextManager[object]] = nullcontext,
        graph_bytes: int = 0,
        held: Callable[[Tier], Iterable[UntypedStorage]] | None = None,
    ) -> None:
        """
        Args:
            device: Number of the GPU.
            host_arenas: Pinned KV arenas of the HOST pool.
            every: See CpuMeter.
            paused: See CpuMeter.
            graph_bytes: What CUDA graphs keep; the allocator counts it as reserved, not requested.
            held: See CpuMeter.

        Raises:
            ValueError: `every` is below 1.
        """
        if every < 1:
            raise ValueError(f"meter: every is {every}; it must be at least 1")
        self._device, self._every, self._calls, self._paused = device, every, 0, paused
        self._graph_bytes = graph_bytes
        pinned = [tensor.untyped_storage().nbytes() for tensor in host_arenas]
        self._pinned_bytes = sum(pinned) if pinned or held is not None else None
        self._held = held

    def read(self) -> Mapping[Pool, Reading]:
        """Reads the device's pools.

        Returns:
            A reading in bytes per pool; empty at a call that `every` leaves out.
        """
        self._calls += 1
        if (self._calls - 1) % self._every:
            return {}
        with self._paused():
            return self._readings()

    def _readings(self) -> Mapping[Pool, Reading]:
        requested = torch.cuda.memory_stats_as_nested_dict(self._device)["requested_bytes"]["all"]
        free, total = torch.cuda.mem_get_info(self._device)
        persistent = int(requested["current"]) + self._graph_bytes
        readings = {(Tier.GPU, self._device): Reading(persistent, total - free)}
        if self._pinned_bytes is not None:
            host_bytes = self._pinned_bytes + _distinct_bytes(self._held, Tier.HOST)
            readings[(Tier.HOST, self._device)] = Reading(host_bytes, process_bytes())
        return readings


class Meters:
    """The meters of several devices as one engine.contract.executor.Meter."""

    def __init__(self, meters: Sequence[Meter]) -> None:
        """
        Args:
            meters: One per device; no two read one pool.
        """
        self._meters = tuple(meters)

    def read(self) -> Mapping[Pool, Reading]:
        """Reads all devices.

        Returns:
            A reading in bytes per pool.
        """
        return {pool: reading for m in self._meters for pool, reading in m.read().items()}


def _distinct_bytes(held: Callable[[Tier], Iterable[UntypedStorage]] | None, tier: Tier) -> int:
    """Bytes that training holds in a tier, by torch's own sizes, each storage once."""
    storages = () if held is None else held(tier)
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def page_slack_bytes(num_pages: int, page_bytes: int) -> int:
    """Bounds by how much kernel residency may exceed the held KV pages of an arena.

    A system page that two KV pages share is resident for either of them, and may stay resident
    behind both.

    Args:
        num_pages: KV pages of the arena.
        page_bytes: Bytes of a KV page.

    Returns:
        The bound in bytes; 0 where KV pages are whole system pages.
    """
    shared = sum(1 for i in range(1, num_pages + 1) if i * page_bytes % mmap.PAGESIZE)
    return shared * mmap.PAGESIZE


assert os.name == "posix", "residency comes from a POSIX kernel"
