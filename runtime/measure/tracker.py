"""Counts the bytes of tensor storages as torch makes and drops them, and those alive now."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine.contract.plan import Compute, Op


class StorageTracker(TorchDispatchMode):
    """While active: bytes of the storages made since it began, now and at their peak.

    Storages that existed before (weights, arenas, inputs) do not count, whatever views are made
    of them. A storage counts from the operator that returned it until its last tensor is gone;
    scratch that one kernel takes and gives back within itself is not seen. Sees its own thread
    only. Costs about 25 us per operator: sample with it, never leave it on.
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
    """Bytes of the distinct storages below some tensors: what is shared or viewed counts once."""
    return sum({s._cdata: s.nbytes() for s in _storages(tensors)}.values())


def census(device: str = "cpu") -> dict[int, int]:
    """Every storage that Python can reach now, by a tensor or by itself: address -> bytes.

    Found by walking the garbage collector's objects, so nobody has to report anything. Takes
    ~0.1 s.
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


class Repeatable(Protocol):
    """A machine whose forwards may run again: same rows, same pages, same ring slots."""

    def start(self, prepared: Any) -> Any: ...


class Workspace:
    """Every `every`-th compute launch is started once more under the tracker, for Span.peak_bytes.

    The repeat writes what the launch has just written (equal KV into equal pages, equal tokens
    into equal ring slots), so it changes nothing; the measured launch itself runs untracked. A
    repeat takes about twice the time of its launch (measured on a CPU: 2.2 times for one
    sequence, 1.8 for 16), which a service clock leaves out; in real time it delays its lane, so
    it is off (0) unless asked for.
    Launches over some of the layers only are left alone: those hand rows on, once.
    """

    def __init__(self, machine: Repeatable, every: int = 0) -> None:
        if every < 0:
            raise ValueError(f"workspace: every is {every}; 0 measures none, 1 every launch")
        self._machine, self._every = machine, every
        self._calls = 0

    def is_due(self, op: Op) -> bool:
        """Whether a launch that has just ended is one of those to be repeated; asked once each."""
        if not self._every or not isinstance(op, Compute):
            return False
        self._calls += 1
        return (self._calls - 1) % self._every == 0 and all(s.layers is None for s in op.slices)

    def peak_bytes(self, prepared: Any) -> int:
        """Bytes of a launch's own storages at their peak.

        Call it on the thread that ran the launch, right after it.
        """
        tracker = StorageTracker()
        with tracker:
            self._machine.start(prepared)
        return tracker.peak_bytes
