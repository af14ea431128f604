"""Bytes of tensor storages: as torch makes and drops them, and of all that are alive now."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine.contract.plan import Compute, Op
from runtime.executors.machine import Machine


class StorageTracker(TorchDispatchMode):
    """While active, counts the bytes of the storages made inside: `live_bytes` and `peak_bytes`.

    Storages that existed before (weights, arenas, inputs) do not count, nor do new views of them. A
    storage counts from the operator that returned it until its last tensor is gone. Scratch that a
    kernel takes and gives back within itself is not seen, nor is another thread. Costs about 25 us
    per operator: sample with it, never leave it on.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch gives it no types
        self.live_bytes = 0
        self.peak_bytes = 0
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        inputs: set[int] | None = None
        for storage in _storages(tree_leaves(out)):
            if storage._cdata in self._known:
                continue
            if inputs is None:
                inputs = {s._cdata for s in _storages(tree_leaves((args, kwargs)))}
            if storage._cdata not in inputs:
                self._add(storage)
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = storage._cdata, storage.nbytes()

        def drop(_: weakref.ref[torch.UntypedStorage]) -> None:
            del self._known[key]
            self.live_bytes -= nbytes

        self._known[key] = weakref.ref(storage, drop)
        self.live_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Sums the distinct storages below some tensors.

    Args:
        tensors: Strided tensors; others are passed over. Views of one storage count once.

    Returns:
        Bytes of the whole storages, by torch's own sizes.
    """
    return sum({s._cdata: s.nbytes() for s in _storages(tensors)}.values())


def census(device: str = "cpu") -> dict[int, int]:
    """Finds every storage that Python can reach now, by a tensor or by itself.

    Walks the garbage collector's objects after a full collection: about 0.1 s.

    Args:
        device: Type of the device whose storages count, such as "cpu".

    Returns:
        Bytes per address; empty storages are left out.
    """
    gc.collect()
    found: dict[int, int] = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor) and thing.device.type == device:
            storages = _storages([thing])
        elif issubclass(type(thing), torch.UntypedStorage) and thing.device.type == device:
            storages = iter([thing])
        else:
            continue
        for storage in storages:
            found[storage.data_ptr()] = max(storage.nbytes(), found.get(storage.data_ptr(), 0))
    found.pop(0, None)  # meta and empty storages
    return found


def _storages(leaves: Iterable[Any]) -> Iterator[torch.UntypedStorage]:
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
            yield leaf.untyped_storage()


class Workspace:
    """Starts every `every`-th compute launch once more under the tracker, for Span.peak_bytes.

    The repeat writes what the launch has just written (equal KV into equal pages, equal tokens into
    equal ring slots), so it changes nothing; the measured launch itself runs untracked. A repeat
    takes about twice the time of its launch (measured on a CPU: 2.2 times for one sequence, 1.8 for
    16). A service clock leaves that time out. In real time it delays its lane, so the default is
    off. Launches over some of the layers are never repeated: the next layers take their rows once.
    """

    def __init__(self, machine: Machine[Any], every: int = 0) -> None:
        """
        Args:
            machine: The machine whose launches are repeated.
            every: 0 repeats none, 1 every compute launch.

        Raises:
            ValueError: `every` is negative.
        """
        if every < 0:
            raise ValueError(f"workspace: every is {every}; 0 measures none, 1 every launch")
        self._machine, self._every = machine, every
        self._calls = 0

    def is_due(self, op: Op) -> bool:
        """Counts a launch that has just ended; call it once per launch.

        Args:
            op: The operation of the launch.

        Returns:
            Whether the launch is to be repeated.
        """
        if not self._every or not isinstance(op, Compute):
            return False
        self._calls += 1
        return (self._calls - 1) % self._every == 0 and all(s.layers is None for s in op.slices)

    def peak_bytes(self, prepared: Any) -> int:
        """Repeats a launch under the tracker, on the thread that ran it and right after it.

        Args:
            prepared: What Machine.prepare has returned for the launch.

        Returns:
            Bytes of the launch's own storages at their peak.
        """
        tracker = StorageTracker()
        with tracker:
            self._machine.start(prepared)
        return tracker.peak_bytes
