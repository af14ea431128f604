"""A training job's activations as regions of a store: inputs, graphs, input gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.contract import regions
from engine.contract.regions import Region, Tier
from runtime.training.saved import Graph
from runtime.training.store import RegionStore, typed


class Activations:
    """Puts what a unit computes where a plan has made room, and finds it for the next unit.

    The input of a unit has one storage on the device as long as it lives, also if it goes to the
    host and comes back: a kept graph holds views of it.
    """

    def __init__(
        self, job_id: int, num_units: int, hidden_size: int, dtype: torch.dtype, store: RegionStore
    ) -> None:
        self._job_id, self._num_units = job_id, num_units
        self._hidden_size, self._dtype, self._store = hidden_size, dtype, store
        self._graphs: dict[tuple[int, int], Graph] = {}  # their saved tensors are in the store

    # ---- inputs
    def input(self, unit: int, microbatch: int, shape: torch.Size, launch: str) -> Tensor:
        """The input of a unit, [sequences, tokens, hidden], for ids of that shape."""
        return self._read(self._hidden(unit, microbatch), shape, launch)

    def hand_on(self, unit: int, microbatch: int, out: Tensor) -> None:
        """Puts the output of a unit as the input of the next unit."""
        self._put(self._hidden(unit + 1, microbatch), out, is_home=True)

    # ---- gradients
    def input_gradient(self, unit: int, shape: torch.Size, launch: str) -> Tensor:
        """The gradient of the input of a unit, [sequences, tokens, hidden]."""
        return self._read(regions.input_gradient(self._job_id, unit).region, shape, launch)

    def hand_down(self, unit: int, gradient: Tensor) -> None:
        """Puts the gradient of a unit's input for the unit below."""
        self._put(regions.input_gradient(self._job_id, unit).region, gradient)

    # ---- graphs
    def keep(self, unit: int, microbatch: int, graph: Graph) -> None:
        """Puts what a forward leaves for its backward: the graph, or the storages in its stash."""
        region = self._saved(unit, microbatch)
        self._graphs.pop((unit, microbatch), None)
        if graph.stash is None:
            self._store.put(region, graph=graph)
            return
        self._graphs[unit, microbatch] = graph
        self._store.put(region, graph.stash.seal())

    def take(self, unit: int, microbatch: int, launch: str) -> Graph:
        """Takes the graph of a forward out of the store, for its backward."""
        stay = self._store.find(self._saved(unit, microbatch), Tier.GPU, launch)
        if unit:
            self._store.find(self._hidden(unit, microbatch), Tier.GPU, launch)
        graph = self._graphs.pop((unit, microbatch), None) or stay.graph
        assert isinstance(graph, Graph), f"{launch}: its forward has been used already"
        if graph.stash is not None:
            graph.stash.storages = stay.storages
        stay.graph, stay.storages = None, []
        return graph

    # ---- storages
    def _read(self, region: Region, shape: torch.Size, launch: str) -> Tensor:
        storage = self._store.storage(region, Tier.GPU, launch)
        return typed(storage, self._dtype, (*shape, self._hidden_size))

    def _put(self, region: Region, tensor: Tensor, is_home: bool = False) -> None:
        """Puts a tensor as a storage of its own."""
        storage = tensor.untyped_storage()
        if not tensor.is_contiguous() or storage.nbytes() != tensor.nbytes:
            storage = tensor.clone(memory_format=torch.contiguous_format).untyped_storage()
        self._store.put(region, [storage], is_home=is_home)

    def _saved(self, unit: int, microbatch: int) -> Region:
        return regions.saved(self._job_id, unit, microbatch).region

    def _hidden(self, unit: int, microbatch: int) -> Region:
        return regions.hidden(self._job_id, unit, self._num_units, microbatch).region
