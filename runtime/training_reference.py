"""The yardstick of paced clocks where a device only trains: what its launches are made of."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from engine.model import ModelSpec
from engine.plan import Slice, Work
from runtime.optimizer import Optimizer
from runtime.reference import Pace
from runtime.trainee import build_trainee
from runtime.units import Units
from traces.recipe import Recipe

ROWS = 96  # tokens of the one sequence that goes through a layer
NUMBERS = 1 << 20  # of an update: more than caches hold
VOCABULARY = 64  # of a model of which only its layer is of use


class Timed:
    """A fixed piece of work; `tokens` is how large it is."""

    tokens: int

    def work(self) -> object:
        """Does it."""
        raise NotImplementedError

    def timed_ns(self) -> int:
        """What it takes just now, in thread time."""
        start = time.thread_time_ns()
        self.work()
        return time.thread_time_ns() - start


class UnitWork(Timed):
    """Forward and backward of one layer as wide as the trainee's, on weights of its own."""

    tokens = ROWS

    def __init__(self, spec: ModelSpec, recipe: Recipe) -> None:
        small = replace(spec, num_layers=1, vocab_size=VOCABULARY)
        model = build_trainee(small, Recipe(dtype=recipe.dtype))
        self._units, rows = Units(model), min(ROWS, spec.max_positions)
        parameters = list(model.parameters())
        self._ids = torch.zeros(1, rows, dtype=torch.int64)
        shape, dtype = (1, rows, spec.hidden_size), getattr(torch, recipe.dtype)
        self._hidden = torch.linspace(-1, 1, rows * spec.hidden_size, dtype=dtype).view(shape)
        self._hidden.requires_grad_()
        self._flow = torch.ones(shape, dtype=dtype)
        self._wanted = [*(parameters[p] for p in self._units.parameters[1]), self._hidden]

    def work(self) -> Sequence[torch.Tensor]:
        """The gradients, the same every time."""
        with torch.enable_grad():
            out = self._units.run(1, self._hidden, self._ids)
            return torch.autograd.grad(out, self._wanted, self._flow)


class UpdateWork(Timed):
    """AdamW over NUMBERS."""

    tokens = NUMBERS

    def __init__(self, recipe: Recipe) -> None:
        dtype = getattr(torch, recipe.dtype)
        self._optimizer = Optimizer(Recipe(dtype=recipe.dtype), num_steps=1)
        self._weights = [torch.ones(NUMBERS, dtype=dtype)]
        self._gradients = [torch.full((NUMBERS,), 1e-3, dtype=dtype)]
        count = self._optimizer.num_sections
        self._sections = [[torch.full((NUMBERS,), 1e-3)] for _ in range(count)]

    def work(self) -> None:
        """One update."""
        with torch.no_grad():
            self._optimizer.update(0, self._weights, self._gradients, self._sections, None)


def training_references(spec: ModelSpec, recipe: Recipe) -> tuple[UnitWork, UpdateWork]:
    """The two kinds of work, which a neighbour slows unlike: products compute, updates wait for
    memory."""
    return UnitWork(spec, recipe), UpdateWork(recipe)


class TrainingPace(Pace):
    """The pace of a clock by these two works. The host and all else goes by the unit's."""

    def factor_of(self, slices: Sequence[Slice]) -> float:
        """Of a launch."""
        if any(piece.work is Work.UPDATE for piece in slices):
            return 1 / self._prompt.slowdown
        return self.factor
