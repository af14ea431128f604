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
        self._sum = states.weight if reuses else states.gradient  # the region of a chunk's sums
        at = {p: i for own in states.chunks for i, p in enumerate(own)}
        self._at = [[(p, states.chunk_of[p], at[p]) for p in own] for own in trained_of]
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
        free = _free_storages(gradients, others)
        written = set[int]()  # chunks whose sums are others now
        for (p, chunk, at), gradient, own in zip(self._at[unit], gradients, free, strict=False):
            if self._add(p, chunk, at, found[chunk], gradient, own):
                written.add(chunk)
        for chunk in written:
            self._store.wrote(self._sum(chunk), Tier.GPU)
            if not self._reuses:
                self._states.pending.add(chunk)

    def _add(
        self,
        p: int,
        chunk: int,
        at: int,
        storages: Sequence[UntypedStorage | None],
        gradient: Tensor,
        own: UntypedStorage | None,
    ) -> bool:
        """Adds a gradient, which may have a storage of its own, to the sum that is the chunk's
        number `at`; whether it is in there now."""
        becomes_sum = own is not None and not self._reuses and self._gradients.begins(p)
        total = gradient if becomes_sum else self._total(chunk, at, storages, gradient.shape)
        if not self._gradients.add(p, gradient, total):
            waiting = self._gradients.aside.values()
            self._store.put(self._aside, [tensor.untyped_storage() for tensor in waiting])
            return False
        if self._reuses:
            self.overwritten.add(p)
        elif becomes_sum:
            self._store.replace(self._sum(chunk), at, present(own))
        return True

    def _total(
        self, chunk: int, at: int, storages: Sequence[UntypedStorage | None], shape: torch.Size
    ) -> Tensor:
        if not self._reuses:
            return typed(present(storages[at]), self._states.dtype, shape)
        (storage,) = storages
        return self._states.numbers(chunk, present(storage))[at].view(shape)


def _free_storages(
    fresh: Sequence[Tensor], others: Sequence[Tensor]
) -> list[UntypedStorage | None]:
    """Of each fresh tensor its storage, if it fills that alone, in order, so that whoever wants
    the numbers can have it."""
    storages = [tensor.untyped_storage() for tensor in fresh]
    uses = Counter([storage._cdata for storage in storages])
    uses.update([tensor.untyped_storage()._cdata for tensor in others])
    return [
        storage if uses[storage._cdata] == 1 and _fills(tensor, storage) else None
        for tensor, storage in zip(fresh, storages, strict=True)
    ]


def _fills(tensor: Tensor, storage: UntypedStorage) -> bool:
    return tensor.is_contiguous() and storage.nbytes() == tensor.nbytes
