"""Sums of a step's gradients, added up as autograd does, and their norm."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor


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
        return torch.linalg.vector_norm(torch.stack([self._norms[p] for p in sorted(self._uses)]))

    def scale(self, norm: Tensor) -> Tensor:
        """What clipping by that norm multiplies gradients with, at most 1; as torch does it."""
        assert self._clip_norm is not None, "nothing is clipped"
        return torch.clamp(self._clip_norm / (norm + 1e-6), max=1.0)

    def begin_step(self) -> None:
        """All gradients were used: the next ones are the first of a step."""
        assert not self.aside, "a tied table's gradient waits for its other half"
        self._count.clear()
        self._norms.clear()
