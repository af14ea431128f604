"""Sums of gradients, their norm, and AdamW and SGD over the parameters of a chunk."""

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
    """Counts the gradients of each parameter in a step, and holds those that are in no sum yet.

    Autograd adds the gradients of one microbatch before it accumulates them. So the head's gradient
    of a tied table waits in `tied` for the embedding's gradient. In the first microbatch the sum
    itself is where it waits.
    """

    def __init__(
        self,
        uses: Counter[int],
        microbatches: int,
        clip_norm: float | None = None,
        reuses_weights: bool = False,
    ) -> None:
        """
        Args:
            uses: How many units use each parameter: 2 for a tied table.
            microbatches: Of a step.
            clip_norm: Largest norm of all gradients of a step; None: no clipping.
            reuses_weights: Sums lie in the storages of weights, which must not be written to
                before the weights' last use.
        """
        self._uses, self._microbatches = uses, microbatches
        self._clip_norm, self._reuses_weights = clip_norm, reuses_weights
        self._count: Counter[int] = Counter()
        self.tied: dict[int, Tensor] = {}  # gradients of tied tables that wait for the other unit's
        self._norms: dict[int, Tensor] = {}

    def begins(self, parameter: int) -> bool:
        """Whether the next gradient of a parameter is its first one of the step."""
        return parameter not in self._count

    def add(self, parameter: int, gradient: Tensor, total: Tensor) -> bool:
        """Adds one unit's gradient to `total`, or keeps it in `tied`.

        Args:
            parameter: Index of the parameter.
            gradient: Of its shape.
            total: The sum, of its shape; for a first gradient it may be the gradient itself.

        Returns:
            Whether the gradient is in the sum.
        """
        before, uses = self._count.get(parameter, 0), self._uses[parameter]
        self._count[parameter] = before + 1
        share, is_first = gradient, before < uses
        if (before + 1) % uses and (not is_first or self._reuses_weights):
            self.tied[parameter] = share  # the other unit's gradient follows
            return False
        if parameter in self.tied:
            share = self.tied.pop(parameter).add_(share)
        if before and not (is_first and self._reuses_weights):
            total.add_(share)
        elif total is not share:
            total.copy_(share)
        if self._clip_norm is not None and self.is_whole(parameter):
            self._norms[parameter] = torch.linalg.vector_norm(total, dtype=torch.float32)
        return True

    def is_whole(self, parameter: int) -> bool:
        """Whether a parameter has all its gradients of this step."""
        return self._count[parameter] == self._uses[parameter] * self._microbatches

    @property
    def clips(self) -> bool:
        return self._clip_norm is not None

    def norm(self) -> Tensor:
        """The norm of all gradients of the step: a scalar in memory of its own.

        Computed as by torch.nn.utils.clip_grad_norm_, from norms in the order of the parameters.
        AssertionError where a gradient is not whole.
        """
        missing = self._uses.keys() - self._norms.keys()
        assert not missing, f"clipping waits for the gradients of {len(missing)} parameters"
        norms = torch.stack([self._norms[p] for p in sorted(self._uses)])
        whole: Tensor = torch.linalg.vector_norm(norms)
        return whole

    def scale(self, norm: Tensor) -> Tensor:
        """The factor by which clipping multiplies gradients of a norm, at most 1; as in torch."""
        assert self._clip_norm is not None, "nothing is clipped"
        return torch.clamp(self._clip_norm / (norm + 1e-6), max=1.0)

    def begin_step(self) -> None:
        """Begins a step: all gradients have been used."""
        assert not self.tied, "a tied table's gradient waits for its other half"
        self._count.clear()
        self._norms.clear()


Found = Mapping[int, Sequence[UntypedStorage | None]]  # by chunk: a storage per parameter


class Sums:
    """The sums of a job's gradients on the device, parameter by parameter.

    A first gradient is not copied: its storage, which autograd has made, becomes that of the sum.
    With `reuses` the sums lie in the storages of weights instead, and `overwritten` are the
    parameters whose weights are lost for that. A gradient of a tied table that waits for the other
    unit's gradient lies in a region of its own. `trained_of` are the trained parameters by unit.
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
        self._tied = regions.tied_gradient(states.job_id).region
        self.overwritten: set[int] = set()
        self.chunks = frozenset(chunk for own in self._grown for chunk in own)  # that train

    def find(self, unit: int, launch: str) -> Found:
        """The storages of a unit's sums, by chunk. AssertionError where a plan has made no room."""
        states, store = self._states, self._store
        if not self._gradients.tied.keys().isdisjoint(self._trained_of[unit]):
            store.find(self._tied, Tier.GPU, launch)
        if self._reuses:
            places = [(states.weight(chunk), True) for chunk in self._grown[unit]]
        else:
            pending = states.pending
            places = [(states.gradient(chunk), chunk in pending) for chunk in self._grown[unit]]
        return {
            region.part: store.find(region, Tier.GPU, launch, is_new).storages
            for region, is_new in places
        }

    def add(
        self, unit: int, found: Found, gradients: Sequence[Tensor], others: Sequence[Tensor]
    ) -> None:
        """Adds the gradients of a unit's parameters to their sums.

        Args:
            unit: The unit of the backward.
            found: What `find` has returned.
            gradients: Of the unit's trained parameters; behind them, if any, of its input.
            others: Gradients of other regions, whose storages no sum may take.
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
        """Adds a gradient to sum `at` of a chunk; returns whether it is in the sum now.

        `own` is the gradient's storage where no other tensor shares it.
        """
        becomes_sum = own is not None and not self._reuses and self._gradients.begins(p)
        total = gradient if becomes_sum else self._total(chunk, at, storages, gradient.shape)
        if not self._gradients.add(p, gradient, total):
            waiting = self._gradients.tied.values()
            self._store.put(self._tied, [tensor.untyped_storage() for tensor in waiting])
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
    """Per fresh tensor its storage, if the tensor fills it alone: then the storage may be taken."""
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

    Parameters are updated one by one, never as one flat run: kernels compute the elements behind
    the last whole vector by other instructions, and results must equal torch.optim's to the bit.
    """

    def __init__(self, recipe: Recipe, num_steps: int) -> None:
        self._recipe, self._num_steps = recipe, num_steps
        self._apply = self._adamw if recipe.optimizer == "adamw" else self._sgd

    @property
    def num_sections(self) -> int:
        """Optimizer states per parameter: master weights if any, then moments."""
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
        """Updates weights and states in place, and overwrites gradients.

        Args:
            step: Number of the step, from 0.
            weights: Flat, one per parameter, as all tensors here on one device.
            gradients: Flat, one per parameter.
            sections: Per optimizer state, flat, one per parameter; of 16-bit weights the first
                are the master weights.
            scale: Factor of the gradients by clipping; None: no clipping.
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
