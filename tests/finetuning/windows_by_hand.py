"""Windows of samples without an engine, beside what plain torch makes of the whole samples."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.contract import regions
from engine.contract.executor import Launch, Piece
from engine.contract.job import Job
from engine.contract.layout import Mode, lay_out_windows
from engine.contract.plan import Compute, Slice
from engine.contract.regions import Kind, Place, Work
from engine.contract.training_progress import TrainingProgress
from models.spec import DTYPE_BYTES, ModelSpec
from models.training.kept import finetuning_shape
from policies.planners.unit_chunks import trained_chunks
from runtime.finetuning.finetuner import Finetuner
from runtime.finetuning.machine import FinetuningMachine
from runtime.finetuning.model import NO_LABEL, FinetunedModel
from runtime.serving.machine import GPU
from runtime.training.store import RegionStore
from runtime.training.trainer import build_trainee
from tests.support.hand_made import FAMILIES, HandMade, make_prompts, own_model
from traces.serving.request import Sample, TrainingJob
from traces.training.recipe import CHOICES, Recipe

JOB = 1000  # its number; requests have smaller ones
ALL = {
    "gpt2": ("c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"),
    "opt": ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"),
}
GATED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
DOWN = {"gpt2": ("mlp.c_proj",), "opt": ("fc2",)}
ATTENTION = {"gpt2": ("c_attn",)}
Gradients = dict[str, Tensor]


@contextmanager
def float64() -> Iterator[None]:
    """Models, recipes and pages may be of float64, which no configuration names."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(DTYPE_BYTES, "float64", 8)
        patch.setitem(CHOICES, "dtype", (*CHOICES["dtype"], "float64"))
        yield


def recipe_of(family: str, kind: str, **fields: Any) -> Recipe:
    """A recipe of SGD: `kind` is lora_all, lora_attention, lora_down or full."""
    fields = {"optimizer": "sgd", "learning_rate": 0.02, "weight_decay": 0.0, **fields}
    if kind == "full":
        return Recipe(**fields)
    targets = {
        "lora_all": ALL.get(family, GATED),
        "lora_attention": ATTENTION.get(family, ("q_proj", "v_proj")),
        "lora_down": DOWN.get(family, ("down_proj",)),
    }[kind]
    return Recipe(lora_rank=4, lora_alpha=8.0, lora_targets=targets, **fields)


class Ids:
    """Random tokens of samples."""

    def __init__(self, samples: Sequence[Sample], vocab_size: int) -> None:
        self._samples, self._vocab_size = samples, vocab_size

    def ids(self, microbatch: int) -> np.ndarray:
        number = microbatch % len(self._samples)
        draw = np.random.default_rng([7, number])
        return draw.integers(0, self._vocab_size, (1, self._samples[number].tokens))

    def account(self) -> dict[str, int]:
        return {}


class ByHand:
    """One job beside requests; every place that a sample may hold is there from its begin."""

    def __init__(
        self,
        family: str,
        recipe: Recipe,
        samples: Sequence[Sample],
        steps: int = 1,
        microbatches: int = 1,
        modes: Mode = Mode.KEEP,
        lengths: Sequence[int] = (9, 21, 33),
        spec: ModelSpec | None = None,
    ) -> None:
        spec = self.spec = replace(spec or FAMILIES[family], dtype=recipe.dtype)
        self.recipe = recipe
        longest = max(sample.tokens for sample in samples)
        self.job = TrainingJob(
            JOB, 0, spec.num_layers + 2, longest, num_steps=steps, microbatches=microbatches,
            recipe=recipe, samples=tuple(samples),
        )  # fmt: skip
        self.prompts = make_prompts(lengths, spec.vocab_size)
        self.served = HandMade(spec, self.prompts, model=own_model(spec))
        self.shape = shape = finetuning_shape(spec, self.job)
        self.layout = lay_out_windows(shape, trained_chunks(shape), [modes] * len(shape.units))
        self.ids = Ids(samples, spec.vocab_size)
        serving = self.served.machine
        self.trainee = FinetunedModel.of(serving.decoder.model, spec, recipe)
        with_adapters(self.trainee.model)
        self.first = {n: p.detach().clone() for n, p in self.trainee.model.named_parameters()}
        self.store = RegionStore()
        self.finetuner = Finetuner(
            self.job, self.trainee, self.layout, self.ids, self.store, serving.arenas[GPU]
        )
        places = dict[Place, int]()
        for c, chunk in enumerate(self.layout.chunks):
            places[regions.weight(JOB, c)] = chunk.weight_bytes
            if chunk.optimizer_bytes:
                places[regions.optimizer(JOB, c)] = chunk.optimizer_bytes
            if self.job.microbatches > 1:
                places[regions.gradient(JOB, c)] = chunk.gradient_bytes
        self.machine = FinetuningMachine(serving, {JOB: self.finetuner}, self.store, places)
        self.owner = Job(JOB, 0, longest, longest, training=TrainingProgress(self.job, self.layout))
        self.pages: list[int] = []

    # ---- places
    def begin(self) -> None:
        """All places of a sample, empty."""
        self.end()
        for place in self._places():
            if not self._holds(place):
                self.store.grow(place, 0)

    def end(self) -> None:
        """A sample's places are freed, but for the sums of a step of several samples."""
        for place in self._places():
            lasts = place.region.kind is Kind.GRADIENT and self.job.microbatches > 1
            if self._holds(place) and not lasts:
                self.store.free(place)
        self.served._give(GPU, self.pages)
        self.pages = []

    def _places(self) -> list[Place]:
        units = range(self.layout.num_units)
        found = [regions.hidden_gradient(JOB)]
        for chunk in self.layout.trained_by:
            found += [regions.gradient(JOB, chunk), regions.sample_gradient(JOB, chunk)]
        found += [regions.kept(JOB, u) for u in units]
        return found + [regions.kv_gradient(JOB, u) for u in units]

    def _holds(self, place: Place) -> bool:
        return any(stay.place == place for stay in self.store.stays(place.tier))

    # ---- launches
    def forward(self, microbatch: int, start: int, tokens: int, *served: tuple[int, int]) -> None:
        """A window, in the launch that serves where there are slices of requests."""
        while len(self.pages) * self.served.page_tokens < start + tokens:
            self.pages.append(self.served.free[GPU].pop())
        launch = self.served.launch(*served)
        own = Slice(self.owner, tokens, Work.FORWARD, range(self.job.num_units), microbatch)
        piece = Piece(JOB, tokens, start, False, self.pages)
        slices = (*launch.op.slices, own)  # type: ignore[union-attr]
        self._run(Launch(Compute(slices), pieces=(*launch.pieces, piece)))

    def backward(self, microbatch: int, start: int, tokens: int, units: range) -> None:
        own = Slice(self.owner, tokens, Work.BACKWARD, units, microbatch)
        piece = Piece(JOB, tokens, start, False, self.pages)
        self._run(Launch(Compute((own,)), pieces=(piece,)))

    def update(self, step: int) -> None:
        chunks = range(len(self.layout.chunks))
        microbatch = (step + 1) * self.job.microbatches - 1
        own = Slice(self.owner, 1, Work.UPDATE, chunks, microbatch)
        self._run(Launch(Compute((own,)), pieces=(Piece(JOB, 1, 0, False, ()),)))

    def _run(self, launch: Launch) -> None:
        self.machine.execute(self.machine.prepare(launch))

    def whole(self, microbatch: int = 0) -> None:
        """A sample as one window forward, and one back through all units."""
        self.begin()
        tokens = self.job.tokens_of(microbatch)
        self.forward(microbatch, 0, tokens)
        self.backward(microbatch, 0, tokens, range(self.trainee.first, self.job.num_units - 1))

    def randomly(
        self, rng: random.Random, microbatch: int = 0, most: int = 20, fused: bool = True
    ) -> None:
        """A sample in random windows among random slices of requests, and back in other windows."""
        self.begin()
        tokens = self.job.tokens_of(microbatch)
        for start, count in cuts(rng, tokens, most):
            served = dict.fromkeys(self.prompts, 12)
            slices = self.served.next_slices(served, rng.randint(1, 12)) if fused else []
            self.forward(microbatch, start, count, *slices[: rng.randint(0, 3)])
        for unit in reversed(range(self.trainee.first, self.job.num_units - 1)):
            for start, count in reversed(cuts(rng, tokens, most)):
                self.backward(microbatch, start, count, range(unit, unit + 1))

    def gradients(self) -> Gradients:
        """The sums of the gradients now, by the model's names."""
        found, names = dict[str, Tensor](), [n for n, _ in self.trainee.model.named_parameters()]
        for c, chunk in enumerate(self.layout.chunks):
            region = regions.gradient(JOB, c).region
            parts = self.finetuner._parts(region, c)
            shapes = [self.shape.parameters[p].shape for p in chunk.parameters]
            own = zip(chunk.parameters, parts, shapes, strict=True)
            found |= {names[p]: part.view(shape).clone() for p, part, shape in own}
        return found

    def trainable(self) -> list[str]:
        """The names of what trains; a tied table has one."""
        named = self.trainee.model.named_parameters()
        return [name for name, parameter in named if parameter.requires_grad]

    # ---- plain torch
    def plain_model(self, dtype: str | None = None) -> Any:
        """The model of the job as transformers and peft have it, with the first weights."""
        model = build_trainee(self.spec, self.recipe)
        model.load_state_dict(self.first, strict=False)
        return model if dtype is None else model.to(getattr(torch, dtype))

    def plainly(
        self, dtype: str | None = None, microbatches: Sequence[int] = (0,)
    ) -> tuple[float, Gradients]:
        """Loss and gradients by transformers, peft and torch.autograd, in a dtype."""
        return plain_gradients(self.plain_model(dtype), self, microbatches)


def plain_gradients(
    model: Any, made: ByHand, microbatches: Sequence[int]
) -> tuple[float, Gradients]:
    """The mean loss of samples and its gradients."""
    losses = list[Tensor]()
    model.zero_grad(set_to_none=True)
    for microbatch in microbatches:
        ids, prompt = (
            torch.tensor(made.ids.ids(microbatch)),
            made.job.sample(microbatch).prompt_tokens,
        )
        labels = ids.clone()
        for start, stop in ((0, prompt), *made.job.sample(microbatch).read):
            labels[:, start:stop] = NO_LABEL
        out = model(input_ids=ids, labels=labels, use_cache=False)
        loss = out.loss
        if out.logits.dtype == torch.float64:  # transformers rounds logits to float32
            loss = torch.nn.functional.cross_entropy(
                out.logits[0, :-1], labels[0, 1:], ignore_index=NO_LABEL
            )
        (loss / len(microbatches)).backward()
        losses.append(loss.detach())
    named = model.named_parameters()
    found = {n: p.grad.clone() for n, p in named if p.grad is not None}
    return float(torch.stack(losses).mean()), found


def with_adapters(model: Any) -> None:
    """Makes the second matrices of adapters random: at zero, gradients of the first ones are 0."""
    draw = torch.Generator().manual_seed(11)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=draw) * 0.1)


def cuts(rng: random.Random, tokens: int, most: int) -> list[tuple[int, int]]:
    """Random windows of at most so many tokens that cover a sample."""
    found, start = list[tuple[int, int]](), 0
    while start < tokens:
        count = min(rng.randint(1, most), tokens - start)
        found.append((start, count))
        start += count
    return found


def furthest(own: Gradients, other: Gradients) -> float:
    """The largest relative norm of a difference over tensors."""
    assert own.keys() == other.keys()
    return max(distance({n: own[n]}, {n: other[n]}) / norm({n: other[n]}) for n in own)


def distance(own: Gradients, other: Gradients) -> float:
    """The norm of the difference of all tensors, as one vector."""
    return norm({n: own[n].double() - other[n].double() for n in own})


def norm(gradients: Gradients) -> float:
    """The norm of all tensors as one vector."""
    return float(torch.stack([g.double().square().sum() for g in gradients.values()]).sum().sqrt())
