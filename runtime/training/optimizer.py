"""Gradients as they add up, their norm, and AdamW and SGD over the parameters of a chunk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, UntypedStorage

from engine.contract import regions
from engine.contract.layout import WIDENED
from engine.contract.regions import Tier
from runtime.training.model_states import ModelStates
from runtime.training.store import RegionStore, present, typed
from traces.training.recipe import Recipe


class Gradients:
    """How often each parameter has got gradients in this step, and what is not in its sum yet.

    `uses[p]`: by how many units p is used, 2 for a tied table. Autograd adds the gradients of one
    microbatch before it accumulates them, so the head's share waits aside for the embedding's,
    but for the first microbatch: there the sum itself is the place to wait.
    `fills_late`: sums lie in the storages of weights, which must not be written to before their
    last use.
    """

    def __init__(
        self,
        uses: Counter[int],
        microbatches: int,
        clip_norm: float | None = None,
        fills_late: bool = False,
    ) -> None:
        self._uses, self._microbatches = uses, microbatches
        self._clip_norm, self._fills_late = clip_norm, fills_late
        self._count: Counter[int] = Counter()
        self.aside: dict[int, Tensor] = {}  # shares of tied tables, waiting
        self._norms: dict[int, Tensor] = {}

    def begins(self, parameter: int) -> bool:
        """Whether the next share is the first one of the step."""
        return parameter not in self._count

    def add(self, parameter: int, gradient: Tensor, total: Tensor) -> bool:
        """Adds one unit's share to `total`, both shaped like the parameter; a first share may be
        the total itself. Returns whether it is in there: else it waits aside.
        """
        before, uses = self._count.get(parameter, 0), self._uses[parameter]
        self._count[parameter] = before + 1
        share, is_first = gradient, before < uses
        if (before + 1) % uses and (not is_first or self._fills_late):
            self.aside[parameter] = share  # others of this microbatch follow
            return False
        if parameter in self.aside:
            share = self.aside.pop(parameter).add_(share)
        if before and not (is_first and self._fills_late):
            total.add_(share)
        elif total is not share:
            total.copy_(share)
        if self._clip_norm is not None and self.is_whole(parameter):
            self._norms[parameter] = torch.linalg.vector_norm(total, dtype=torch.float32)
        return True

    def is_whole(self, parameter: int) -> bool:
        """Whether nothing more is to come in this step."""
        return self._count[parameter] == self._uses[parameter] * self._microbatches

    @property
    def clips(self) -> bool:
        return self._clip_norm is not None

    def norm(self) -> Tensor:
        """Of all gradients of the step, which are whole: a scalar in memory of its own.

        As torch.nn.utils.clip_grad_norm_ computes it, norms in the order of the parameters.
        """
        missing = self._uses.keys() - self._norms.keys()
        assert not missing, f"clipping waits for the gradients of {len(missing)} parameters"
        norms = torch.stack([self._norms[p] for p in sorted(self._uses)])
        whole: Tensor = torch.linalg.vector_norm(norms)
        return whole

    def scale(self, norm: Tensor) -> Tensor:
        """What clipping by that norm multiplies gradients with, at most 1; as torch does it."""
        assert self._clip_norm is not None, "nothing is clipped"
        return torch.clamp(self._clip_norm / (norm + 1e-6), max=1.0)

    def begin_step(self) -> None:
        """All gradients were used: the next ones are the first of a step."""
        assert not self.aside, "a tied table's gradient waits for its other half"
        self._count.clear()
        self._norms.clear()


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
        store: RegionStore,
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


class Optimizer:
    """The update rule of a recipe. It has no state: a chunk's states come with each call.

    Parameters are updated one by one, never as one flat run: the kernels treat what is left behind
    whole vectors otherwise, and results are to be those of torch.optim, to the bit.
    """

    def __init__(self, recipe: Recipe, num_steps: int) -> None:
        self._recipe, self._num_steps = recipe, num_steps
        self._apply = self._adamw if recipe.optimizer == "adamw" else self._sgd

    @property
    def num_sections(self) -> int:
        """Numbers of state per parameter: master weights if any, then moments."""
        moments = 2 if self._recipe.optimizer == "adamw" else int(self._recipe.momentum > 0)
        return moments + (self._recipe.dtype != "float32")

    def update(
        self,
        step: int,
        weights: Sequence[Tensor],
        gradients: Sequence[Tensor],
        sections: Sequence[Sequence[Tensor]],
        scale: Tensor | None,
    ) -> None:
        """Updates weights and states in place; gradients are spoiled.

        All flat, one per parameter (`sections`: per section), on one device. `scale` is what
        clipping multiplies the gradients with. Behind 16-bit weights the first section is the
        master weights.
        """
        if self._recipe.dtype == "float32":
            if scale is not None:
                torch._foreach_mul_(list(gradients), scale)
            self._apply(step, weights, gradients, sections)
            return
        for weight, gradient, *states in zip(weights, gradients, *sections, strict=True):
            for piece in _pieces(weight.numel()):
                wide = gradient[piece].float()
                if scale is not None:
                    wide.mul_(scale)
                master, *moments = (state[piece] for state in states)
                self._apply(step, [master], [wide], [[moment] for moment in moments])
                del wide  # before the next one is made: one at a time is booked
            weight.copy_(states[0])

    def _adamw(
        self,
        step: int,
        weights: Sequence[Tensor],
        gradients: Sequence[Tensor],
        moments: Sequence[Sequence[Tensor]],
    ) -> None:
        first, second = moments
        count = torch.full((), step + 1.0, device=weights[0].device)
        torch._fused_adamw_(
            list(weights), list(gradients), list(first), list(second), [], [count] * len(weights),
            lr=self._recipe.learning_rate_at(step, self._num_steps),
            beta1=self._recipe.betas[0], beta2=self._recipe.betas[1],
            weight_decay=self._recipe.weight_decay, eps=self._recipe.eps,
            amsgrad=False, maximize=False,
        )  # fmt: skip

    def _sgd(
        self,
        step: int,
        weights: Sequence[Tensor],
        gradients: Sequence[Tensor],
        moments: Sequence[Sequence[Tensor]],
    ) -> None:
        torch._fused_sgd_(
            list(weights), list(gradients), list(moments[0]) if moments else [],
            lr=self._recipe.learning_rate_at(step, self._num_steps),
            momentum=self._recipe.momentum, weight_decay=self._recipe.weight_decay,
            dampening=0.0, nesterov=False, maximize=False, is_first_step=step == 0,
        )  # fmt: skip


def _pieces(count: int) -> Iterator[slice]:
    return (slice(at, min(count, at + WIDENED)) for at in range(0, count, WIDENED))
