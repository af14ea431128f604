"""The predicted peak of a whole training step against the tracker around loops of plain torch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from models.spec import ModelSpec
from models.training.shape import TrainingShape, training_shape
from runtime.measure.tracker import StorageTracker, storage_bytes
from tests.support.hand_made import FAMILIES
from tests.support.plain_units import PlainUnits, build
from tests.support.step_peak import step_peak
from traces.serving.request import TrainingJob
from traces.training.recipe import Recipe

SPECS = {
    "llama": FAMILIES["llama"],
    "tied": replace(FAMILIES["qwen3"], num_layers=5),
    "gpt2": replace(FAMILIES["gpt2"], tie_embeddings=False),
    "large vocabulary": replace(FAMILIES["llama"], vocab_size=3000),
}
RECIPES = {
    "full": Recipe(),
    "bf16": Recipe(dtype="bfloat16"),
    "adapters": Recipe(lora_rank=8),
    "frozen": Recipe(frozen_units=2, optimizer="sgd", momentum=0.9),
}


class Step:
    """Forwards and backwards of one step, unit by unit; gradient sums appear when needed."""

    def __init__(self, spec: ModelSpec, job: TrainingJob, recomputed: set[int]) -> None:
        self.plain, self.job, self.recomputed = PlainUnits(spec, job), job, recomputed
        self.sums: dict[Tensor, Tensor] = {}
        owned = [self.plain.parameters(u) for u in range(job.num_units)]
        self.trained = [[p for p in own if p.requires_grad] for own in owned]
        self.first = next(u for u, own in enumerate(self.trained) if own)

    def run(self) -> None:
        for _ in range(self.job.microbatches):
            self._backward(self._forward())

    def _forward(self) -> dict[int, tuple[Tensor | None, GradientEdge | None]]:
        """Per unit that has a backward: its input, and its graph where the forward recorded one."""
        kept, hidden = dict[int, tuple[Tensor | None, GradientEdge | None]](), None
        for u in range(self.job.num_units):
            given = None if hidden is None else hidden.detach().requires_grad_(u > self.first)
            out, edge = self._run(u, given, u >= self.first and u not in self.recomputed)
            if u >= self.first:
                kept[u] = given, edge
            hidden = out
        return kept

    def _run(
        self, unit: int, given: Tensor | None, records: bool
    ) -> tuple[Tensor, GradientEdge | None]:
        with torch.set_grad_enabled(records):
            out = self.plain.run(unit, given)
        return out.detach(), get_gradient_edge(out) if records else None

    def _backward(self, kept: dict[int, tuple[Tensor | None, GradientEdge | None]]) -> None:
        gradient = None
        for u in reversed(range(self.first, self.job.num_units)):
            (given, edge), targets = kept.pop(u), list(self.trained[u])
            for p in targets:
                if p not in self.sums:
                    self.sums[p] = torch.zeros_like(p)
            if edge is None:
                edge = self._run(u, given, records=True)[1]
            if u > self.first:
                assert given is not None
                targets.append(given)
            outer = None if gradient is None else [gradient]
            found = list(torch.autograd.grad([edge], targets, outer))
            gradient = found.pop() if u > self.first else None
            for p in self.trained[u]:
                self.sums[p].add_(found.pop(0))


@pytest.mark.broad(6)
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("mode", ["keep", "recompute", "every second"])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", SPECS)
def test_the_peak_of_a_step(name: str, recipe: str, mode: str, microbatches: int) -> None:
    spec = SPECS[name]
    num_units = spec.num_layers + 2
    job = TrainingJob(
        0, 0, num_units, 40, sequences=2, microbatches=microbatches, recipe=RECIPES[recipe]
    )
    every = {"keep": num_units, "recompute": 1, "every second": 2}[mode]
    recomputed = set(range(num_units)[::every]) - {0, num_units - 1}
    step = Step(spec, job, recomputed)
    with StorageTracker() as tracker:
        step.run()
    predicted = step_peak(training_shape(spec, job), microbatches, recomputed)
    weights = storage_bytes(step.plain.model.parameters())
    assert predicted.weight_bytes == weights
    assert predicted.total_bytes - predicted.optimizer_bytes == weights + tracker.peak_bytes


@pytest.mark.broad(4)
@pytest.mark.parametrize("recipe", ["full", "adapters", "frozen"])
@pytest.mark.parametrize("name", SPECS)
def test_the_peak_of_a_plain_training_loop(name: str, recipe: str) -> None:
    """The model's own forward, loss.backward() and torch.optim, all states counted.

    Such a loop takes a first gradient as it comes, where a job adds it to its region: with one
    microbatch it needs less, by what the unit at the peak has fresh.
    """
    spec, loop = SPECS[name], RECIPES[recipe]
    num_units = spec.num_layers + 2
    for microbatches in (1, 2):
        job = TrainingJob(0, 0, num_units, 40, sequences=2, microbatches=microbatches, recipe=loop)
        shape = training_shape(spec, job)
        predicted, measured = step_peak(shape, microbatches), plain_peak_bytes(spec, job)
        if microbatches == 1:
            fresh = max(unit_gradient_bytes(shape, unit.parameters) for unit in shape.units)
            assert measured <= predicted.total_bytes <= measured * 1.03 + fresh
        else:
            assert predicted.total_bytes == pytest.approx(measured, rel=0.03)


def unit_gradient_bytes(shape: TrainingShape, own: tuple[int, ...]) -> int:
    trained = [shape.parameters[p] for p in own if shape.parameters[p].trains]
    return sum(p.elements for p in trained) * shape.item_bytes


def plain_peak_bytes(spec: ModelSpec, job: TrainingJob) -> int:
    """Bytes of weights, optimizer states and all else at the peak of a second step."""
    model, recipe = build(spec, job.recipe), job.recipe
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(trained, fused=True)
    if recipe.optimizer == "sgd":
        optimizer = torch.optim.SGD(trained, lr=0.1, momentum=recipe.momentum, fused=True)
    ids = torch.randint(spec.vocab_size, (job.sequences, job.sequence_tokens))

    def step() -> None:
        for _ in range(job.microbatches):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            (loss / job.microbatches).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()
    with StorageTracker() as tracker:
        step()
    states = [x for own in optimizer.state.values() for x in own.values() if x.numel() > 1]
    return storage_bytes([*model.parameters(), *states]) + tracker.peak_bytes
