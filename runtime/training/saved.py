"""The graph that a unit's forward keeps for its backward, and the storages that it saves."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks


def saved_storages(edge: GradientEdge) -> Iterator[UntypedStorage]:
    """Storages of all tensors that the graph below an edge has saved, some of them repeatedly.

    Not for graphs with hooks on saved tensors: a read would call the hooks. Not for graphs of a
    running backward, which frees on its thread what is read here.
    """
    seen, waiting = set[Any](), list[Any]([edge.node])
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for name in _names(node):
            try:
                value = getattr(node, name)
            except RuntimeError:  # used up by an earlier backward
                continue
            for tensor in value if isinstance(value, tuple | list) else (value,):
                if isinstance(tensor, Tensor):
                    yield tensor.untyped_storage()
        waiting += [following for following, _ in node.next_functions]


_KNOWN: dict[type, tuple[str, ...]] = {}


def _names(node: Any) -> tuple[str, ...]:
    """The attributes of saved tensors of a node."""
    kind = type(node)
    if kind not in _KNOWN:
        _KNOWN[kind] = tuple(name for name in dir(node) if name.startswith("_saved_"))
    return _KNOWN[kind]


class PackedTensor(NamedTuple):
    """A saved tensor as a graph with a stash holds it: storage `number`, and the view of it."""

    number: int
    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]
    start: int


class Stash:
    """Holds the storages that autograd saves in one forward, so that a plan may move them.

    Each storage counts once, however many views of it are saved. `known` storages (parameters, the
    input, constants) stay where they are. A storage is dropped when its last view has been
    unpacked, as by a graph.
    """

    def __init__(self, known: Collection[Tensor]) -> None:
        self.storages: list[UntypedStorage | None] = []
        self._uses: list[int] = []
        self._index: dict[int, int] = {}  # by identity of the storage
        self._known = {tensor.untyped_storage()._cdata for tensor in known}

    def hooks(self) -> AbstractContextManager[None]:
        """The context in which the forward runs."""
        return saved_tensors_hooks(self._pack, self._unpack)

    def seal(self) -> list[UntypedStorage | None]:
        """Ends the forward and hands its storages over; to return them, set `storages`."""
        storages, self.storages = self.storages, []
        self._index.clear()
        return storages

    def _pack(self, tensor: Tensor) -> Tensor | PackedTensor:
        storage = tensor.untyped_storage()
        if storage._cdata in self._known:
            return tensor.detach()
        index = self._index.setdefault(storage._cdata, len(self.storages))
        if index == len(self.storages):
            self.storages.append(storage)
            self._uses.append(0)
        self._uses[index] += 1
        shape, strides = tensor.size(), tensor.stride()
        return PackedTensor(index, tensor.dtype, shape, strides, int(tensor.storage_offset()))

    def _unpack(self, packed: Tensor | PackedTensor) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        storage = self.storages[packed.number]
        assert storage is not None, "a saved tensor is asked for more often than it was saved"
        self._uses[packed.number] -= 1
        if not self._uses[packed.number]:
            self.storages[packed.number] = None
        empty = torch.empty(0, dtype=packed.dtype, device=storage.device)
        found = empty.set_(storage, packed.start, packed.shape, packed.strides)
        if found.is_cuda:  # a copy's stream has made the storage, and this stream still reads it
            found.record_stream(torch.cuda.current_stream(found.device))
        return found


@dataclass(slots=True, eq=False)
class Graph:
    """One recorded forward. Holds no output: the output may be freed before the backward.

    A running backward frees what its graph has saved, and autograd lets no other thread read it
    meanwhile. So a read of the saved storages and the begin of a backward exclude each other.
    """

    edge: GradientEdge  # of the output
    input: Tensor | None  # the leaf that stands for the unit's input
    stash: Stash | None = None
    _reading: Lock = field(default_factory=Lock)
    _is_used: bool = False  # by a backward, which may be running

    @classmethod
    def of(cls, output: Tensor, input: Tensor | None, stash: Stash | None) -> Graph:
        return cls(get_gradient_edge(output), input, stash)

    def gradients(self, inputs: list[Tensor], output_gradient: Tensor | None) -> tuple[Tensor, ...]:
        """The gradients of `inputs`, new tensors. Without an `output_gradient`, of a scalar."""
        given = None if output_gradient is None else [output_gradient]
        with self._reading:
            self._is_used = True
        return torch.autograd.grad([self.edge], inputs, given)

    def saved(self) -> list[UntypedStorage]:
        """Storages of all saved tensors, some of them repeatedly; none once a backward has begun.

        Safe to call on any thread. Not for graphs with a stash: its owner has their storages.
        """
        with self._reading:
            return [] if self._is_used else [*saved_storages(self.edge)]
