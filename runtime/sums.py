"""Where a job's gradients add up: in the regions that a plan has made room for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from torch import Tensor

from engine import regions
from engine.plan import Tier
from runtime.gradients import Gradients
from runtime.model_states import ModelStates
from runtime.store import Store


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
        self._aside = regions.aside(states.job_id).region
        self.overwritten: set[int] = set()
        self.chunks = frozenset(chunk for own in self._grown for chunk in own)  # that train

    def of(self, unit: int, who: str) -> dict[int, Tensor]:
        """Where those of a unit are now or are to begin, shaped like the parameters."""
        states, parts = self._states, dict[int, Tensor]()
        for chunk in self._grown[unit]:
            parts.update(zip(states.chunks[chunk], self._found(chunk, who), strict=True))
        own = self._trained_of[unit]
        if not self._gradients.aside.keys().isdisjoint(own):
            self._store.find(self._aside, Tier.GPU, who)
        return {p: parts[p].view(states.parameters[p].shape) for p in own}

    def _found(self, chunk: int, who: str) -> Sequence[Tensor]:
        states, store = self._states, self._store
        if self._reuses:
            return states.numbers(chunk, store.storage(states.weight(chunk), Tier.GPU, who))
        is_begun = chunk in states.pending
        stay = store.find(states.gradient(chunk), Tier.GPU, who, as_new=is_begun)
        return states.gradients(chunk, stay.storages)

    def add(
        self, totals: Mapping[int, Tensor], gradients: Sequence[Tensor], others: Sequence[Tensor]
    ) -> None:
        """Adds what a backward has made for these parameters to where `of` has found their sums.

        Behind their gradients there may be one more, of the unit's input; like `others` it is
        somebody's already.
        """
        free = _lie_alone(gradients, others)
        for (p, total), gradient, is_free in zip(totals.items(), gradients, free, strict=False):
            self._add(p, total, gradient, is_free)

    def _add(self, p: int, total: Tensor, gradient: Tensor, is_free: bool) -> None:
        states, store, chunk = self._states, self._store, self._states.chunk_of[p]
        added = self._gradients.add(p, gradient, total, is_free)
        if added is None:
            waiting = self._gradients.aside.values()
            store.put(self._aside, [tensor.untyped_storage() for tensor in waiting])
        elif self._reuses:
            self.overwritten.add(p)
            store.wrote(states.weight(chunk), Tier.GPU)
        else:
            states.pending.add(chunk)
            if added is not total:
                place = states.chunks[chunk].index(p)
                store.replace(states.gradient(chunk), place, added.untyped_storage())
            store.wrote(states.gradient(chunk), Tier.GPU)


def _lie_alone(fresh: Sequence[Tensor], others: Sequence[Tensor]) -> list[bool]:
    """Of each fresh tensor: whether it fills a storage of its own, in order, so that whoever wants
    the numbers can have the storage."""
    uses = Counter([tensor.untyped_storage()._cdata for tensor in (*fresh, *others)])
    return [_fills(tensor) and uses[tensor.untyped_storage()._cdata] == 1 for tensor in fresh]


def _fills(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
