"""AdamW and SGD by torch's fused kernels, over the parameters of a chunk on either tier."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from engine.training_layout import WIDENED
from traces.recipe import Recipe


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
