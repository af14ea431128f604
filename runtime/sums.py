"""Where a job's gradients add up: in the regions that a plan has made room for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, UntypedStorage

from engine import regions
from engine.plan import Tier
from runtime.gradients import Gradients
from runtime.model_states import ModelStates
from runtime.storages import present, typed
from runtime.store import Store

Found = Mapping[int, Sequence[UntypedStorage | None]]  # by chunk: a storage per parameter


class Sums:
    """The sums of a job's gradients on the device, parameter by parameter.

    A first gradient is not copied: the memory that autograd has made for it becomes that of the
    sum. With `reuses` sums lie in the storages of weights instead; `overwritten` are the parameters
    whose weights are gone for that. What waits for the other half of a tied table lies in a region
    of its own. `trained_of`: parameters by unit.
    """

    def __init__(
        self,
        states: ModelStates,
        gradients: Gradients,
        store: Store,
        trained_of: Sequence[Sequence[int]],
        reuses: bool,
    ) -> None:
        self._states, self._gradients, self._store = states, gradients, store
        self._trained_of, self._reuses = trained_of, reuses
        self._grown = [sorted({states.chunk_of[p] for p in own}) for own in trained_of]
        self._at = {p: i for own in states.chunks for i, p in enumerate(own)}
        self._aside = regions.aside(states.job_id).region
        self.overwritten: set[int] = set()
        self.chunks = frozenset(chunk for own in self._grown for chunk in own)  # that train

    def find(self, unit: int, who: str) -> Found:
        """Where those of a unit lie, or are to begin. AssertionError where there is no room."""
        states, store = self._states, self._store
        if not self._gradients.aside.keys().isdisjoint(self._trained_of[unit]):
            store.find(self._aside, Tier.GPU, who)
        if self._reuses:
            places = [(states.weight(chunk), True) for chunk in self._grown[unit]]
        else:
            pending = states.pending
            places = [(states.gradient(chunk), chunk in pending) for chunk in self._grown[unit]]
        return {
            region.part: store.find(region, Tier.GPU, who, is_new).storages
            for region, is_new in places
        }

    def add(
        self, unit: int, found: Found, gradients: Sequence[Tensor], others: Sequence[Tensor]
    ) -> None:
        """Adds what a backward has made for a unit's parameters, to what `find` has found.

        Behind their gradients there may be one more, of the unit's input; like `others` it is
        somebody's already.
        """
        free = _lie_alone(gradients, others)
        for p, gradient, is_free in zip(self._trained_of[unit], gradients, free, strict=False):
            self._add(p, found[self._states.chunk_of[p]], gradient, is_free)

    def _add(
        self, p: int, storages: Sequence[UntypedStorage | None], gradient: Tensor, is_free: bool
    ) -> None:
        states, store, chunk = self._states, self._store, self._states.chunk_of[p]
        becomes_sum = is_free and not self._reuses and self._gradients.begins(p)
        total = gradient if becomes_sum else self._total(p, storages, gradient.shape)
        if not self._gradients.add(p, gradient, total):
            waiting = self._gradients.aside.values()
            store.put(self._aside, [tensor.untyped_storage() for tensor in waiting])
        elif self._reuses:
            self.overwritten.add(p)
            store.wrote(states.weight(chunk), Tier.GPU)
        else:
            if becomes_sum:
                store.replace(states.gradient(chunk), self._at[p], gradient.untyped_storage())
            states.pending.add(chunk)
            store.wrote(states.gradient(chunk), Tier.GPU)

    def _total(
        self, p: int, storages: Sequence[UntypedStorage | None], shape: torch.Size
    ) -> Tensor:
        if not self._reuses:
            return typed(present(storages[self._at[p]]), self._states.dtype, shape)
        chunk, (storage,) = self._states.chunk_of[p], storages
        return self._states.numbers(chunk, present(storage))[self._at[p]].view(shape)


def _lie_alone(fresh: Sequence[Tensor], others: Sequence[Tensor]) -> list[bool]:
    """Of each fresh tensor: whether it fills a storage of its own, in order, so that whoever wants
    the numbers can have the storage."""
    uses = Counter([tensor.untyped_storage()._cdata for tensor in (*fresh, *others)])
    return [_fills(tensor) and uses[tensor.untyped_storage()._cdata] == 1 for tensor in fresh]


def _fills(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
