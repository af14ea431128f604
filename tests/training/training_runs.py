"""Training by hand: plain torch as the reference, and plans carried out as tightly as can be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from engine.contract import regions
from engine.contract.layout import Mode
from engine.contract.regions import Kind, Place, Tier
from models.spec import ModelSpec
from runtime.training.store import RegionStore
from runtime.training.trainer import Trainer, build_trainee
from runtime.training.units import Units
from traces.training.recipe import Recipe

GPU, HOST = Tier.GPU, Tier.HOST
DEFAULT = Recipe()
MODEL_STATES = (Kind.WEIGHT, Kind.GRADIENT, Kind.OPTIMIZER)


def tiny(family: str = "llama", **fields: Any) -> ModelSpec:
    """A model of a family that trains within milliseconds; no size is a multiple of 16."""
    sizes = {
        "num_layers": 3,
        "hidden_size": 36,
        "num_heads": 3,
        "num_kv_heads": 3 if family in ("gpt2", "opt") else 1,
        "head_dim": 12,
        "intermediate_size": 50,
        "vocab_size": 101,
        "max_positions": 40,
        "attention_bias": family in ("qwen2", "gpt2", "opt"),
    }
    return ModelSpec(family, family, **{**sizes, **fields})


@dataclass(frozen=True)
class Task:
    """The model, recipe and random text of a job."""

    spec: ModelSpec
    recipe: Recipe = DEFAULT
    num_steps: int = 2
    microbatches: int = 1
    sequences: int = 2
    tokens: int = 19
    seed: int = 0

    def ids(self, microbatch: int) -> np.ndarray:
        draw = np.random.default_rng([self.seed, microbatch])
        return draw.integers(0, self.spec.vocab_size, (self.sequences, self.tokens))

    def build(self) -> Any:
        return build_trainee(self.spec, self.recipe, self.seed)


Result = tuple[list[float], dict[str, torch.Tensor]]


def plainly(task: Task, device: str = "cpu") -> Result:
    """Losses and final weights of a plain loop over transformers' model and torch's optimizer."""
    model, recipe = task.build().to(device), task.recipe
    own = [p for p in model.parameters() if p.requires_grad]
    is_wide = recipe.dtype == "float32"
    masters = own if is_wide else [p.detach().float().requires_grad_() for p in own]
    optimizer = _torch_optimizer(masters, recipe)
    losses = []
    with torch.random.fork_rng():
        torch.manual_seed(recipe.seed)
        for step in range(task.num_steps):
            for k in range(task.microbatches):
                ids = torch.tensor(task.ids(step * task.microbatches + k), device=device)
                loss = model(input_ids=ids, labels=ids, use_cache=False).loss
                (loss / task.microbatches).backward()
                losses.append(loss.item())
            for group in optimizer.param_groups:
                group["lr"] = recipe.learning_rate_at(step, task.num_steps)
            _update(own, masters, optimizer, recipe.clip_norm)
    return losses, model.state_dict()


def _torch_optimizer(parameters: list[Any], recipe: Recipe) -> torch.optim.Optimizer:
    shared = {"lr": recipe.learning_rate, "weight_decay": recipe.weight_decay, "fused": True}
    if recipe.optimizer == "sgd":
        return torch.optim.SGD(parameters, momentum=recipe.momentum, **shared)
    return torch.optim.AdamW(parameters, betas=recipe.betas, eps=recipe.eps, **shared)


def _update(own: list[Any], masters: list[Any], optimizer: Any, clip_norm: float | None) -> None:
    for parameter, master in zip(own, masters, strict=True):
        if master is not parameter:
            master.grad = parameter.grad.float()
    if clip_norm is not None:
        torch.nn.utils.clip_grad_norm_(masters, clip_norm)
    optimizer.step()
    with torch.no_grad():
        for parameter, master in zip(own, masters, strict=True):
            parameter.grad = None
            if master is not parameter:
                parameter.copy_(master)


def by_unit(model: Any) -> list[list[int]]:
    """A chunk per unit, frozen parameters apart; a tied table is in the embedding's."""
    parameters, found, seen = list(model.parameters()), [], set()
    for own in Units(model).parameters:
        for trains in (True, False):
            chunk = [p for p in own if p not in seen and parameters[p].requires_grad is trains]
            seen.update(chunk)
            found += [chunk] if chunk else []
    return found


def by_size(elements: int) -> Callable[[Any], list[list[int]]]:
    """Parameters in order, in chunks of about equal size, which do not follow units."""

    def chunks(model: Any) -> list[list[int]]:
        found: list[list[int]] = []
        for trains in (True, False):
            full = elements
            for p, parameter in enumerate(model.parameters()):
                if parameter.requires_grad is not trains:
                    continue
                if full >= elements:
                    found.append([])
                    full = 0
                found[-1].append(p)
                full += parameter.numel()
        return found

    return chunks


@dataclass
class Hand:
    """A driver that keeps on the device only what the operation at hand needs.

    All chunks start and end on the host. `is_exclusive`: a chunk is in one tier at a time, else
    its weights stay on the host too. `updates_on`: the tier of each chunk's update.
    `spills_inputs`: inputs of units wait for the backward on the host. `padding`: elements behind
    each chunk's own. `run` calls what computes or copies: here, or on some thread.
    """

    task: Task
    store: RegionStore
    modes: Sequence[Mode]
    chunks_of: Callable[[Any], list[list[int]]] = by_unit
    job_id: int = 0
    is_exclusive: bool = True
    updates_on: Callable[[int], Tier] = lambda chunk: HOST if chunk % 2 else GPU
    spills_inputs: bool = False
    reuses: bool = False
    has_update: bool = True
    padding: int = 0
    peak_bytes: Counter[Kind] = field(default_factory=Counter)  # on the device
    peak_state_bytes: int = 0  # weights, gradients and optimizer states together
    waiting: set[int] = field(default_factory=set)  # chunks whose gradients are on the host
    norms: list[Place] = field(default_factory=list)  # of the step's gradients, on both tiers
    run: Callable[..., None] = field(default=lambda work, *args: work(*args))

    def __post_init__(self) -> None:
        model, task = self.task.build(), self.task
        chunks, parameters = self.chunks_of(model), list(model.parameters())
        self.trains = [parameters[own[0]].requires_grad for own in chunks]
        counts = [sum(parameters[p].numel() for p in own) + self.padding for own in chunks]
        self.trainer = Trainer(
            self.job_id, model, chunks, task.recipe, task, self.store,
            task.num_steps, task.microbatches, self.reuses, self.has_update,
        )  # fmt: skip
        self.units, self.chunks = self.trainer.units, range(len(chunks))
        item_bytes = 4 if task.recipe.dtype == "float32" else 2
        self.weight_bytes = [count * item_bytes for count in counts]
        numbers = self.trainer._optimizer.num_sections
        self.optimizer_bytes = [count * 4 * numbers for count in counts]
        where = {p: c for c, own in enumerate(chunks) for p in own}
        self.read = [sorted({where[p] for p in own}) for own in self.units.parameters]
        self.grown = [sorted({where[p] for p in own}) for own in self.units.trained_of]

    # ---- places
    def weight(self, chunk: int, tier: Tier) -> Place:
        return regions.weight(self.job_id, chunk, tier)

    def gradient(self, chunk: int, tier: Tier) -> Place:
        return regions.gradient(self.job_id, chunk, tier)

    def optimizer(self, chunk: int, tier: Tier) -> Place:
        return regions.optimizer(self.job_id, chunk, tier)

    def saved(self, unit: int, k: int, tier: Tier = GPU) -> Place:
        return regions.saved(self.job_id, unit, k, tier)

    def hidden(self, unit: int, k: int, tier: Tier = GPU) -> Place:
        return regions.hidden(self.job_id, unit, self.units.num_units, k, tier)

    def input_gradient(self, unit: int) -> Place:
        return regions.input_gradient(self.job_id, unit)

    def norm(self, tier: Tier = GPU) -> Place:
        return regions.norm(self.job_id, tier)

    def end_norm(self) -> None:
        while self.norms:
            self.store.free(self.norms.pop())

    @property
    def clips(self) -> bool:
        return self.has_update and self.task.recipe.clip_norm is not None

    def tied_gradient(self, k: int) -> list[Place]:
        """Where a tied table's gradient waits in a microbatch; nowhere if the sum may be begun."""
        trained = self.units.trained_of
        is_tied = sum(map(len, trained)) > len({p for own in trained for p in own})
        waits = is_tied and (self.reuses or k % self.task.microbatches > 0)
        return [regions.tied_gradient(self.job_id)] if waits else []

    # ---- moves
    def move(self, src: Place, tier: Tier, keeps: bool = False) -> None:
        self.run(self.store.copy, src, src._replace(tier=tier))
        if not keeps:
            self.store.free(src)

    def fetch(self, chunk: int) -> None:
        self.move(self.weight(chunk, HOST), GPU, keeps=not self.is_exclusive)

    def shed(self, chunk: int, is_changed: bool = False) -> None:
        if self.is_exclusive or is_changed:
            self.move(self.weight(chunk, GPU), HOST)
        else:
            self.store.free(self.weight(chunk, GPU))

    # ---- the plan
    def operations(self) -> Iterator[None]:
        """The whole job; yields behind each operation."""
        for chunk in self.chunks:
            self.store.grow(self.weight(chunk, HOST), self.weight_bytes[chunk])
            if self.is_updated(chunk) and self.optimizer_bytes[chunk]:
                self.store.grow(self.optimizer(chunk, HOST), self.optimizer_bytes[chunk])
        yield from self.steps(0)
        for chunk in self.chunks:
            self.store.free(self.weight(chunk, HOST))
            if self.is_updated(chunk) and self.optimizer_bytes[chunk]:
                self.store.free(self.optimizer(chunk, HOST))

    def steps(self, first: int) -> Iterator[None]:
        """All steps from one on."""
        for step in range(first, self.task.num_steps):
            for k in range(step * self.task.microbatches, (step + 1) * self.task.microbatches):
                for unit in range(self.units.num_units):
                    self.forward(unit, k)
                    yield
                for unit in reversed(range(self.units.first, self.units.num_units)):
                    self.backward(unit, k)
                    yield
            for chunk in filter(self.is_updated, self.chunks):
                self.update(chunk, step)
                yield
            self.end_norm()
            while self.waiting:  # where nothing is updated
                self.store.free(self.gradient(self.waiting.pop(), HOST))

    def is_updated(self, chunk: int) -> bool:
        return self.trains[chunk] and self.has_update

    def forward(self, unit: int, k: int) -> None:
        mode, is_head = self.mode(unit), unit == self.units.num_units - 1
        for chunk in self.read[unit]:
            self.fetch(chunk)
        if not is_head:
            self.store.grow(self.hidden(unit + 1, k), 1)
        if mode is not Mode.RECOMPUTE:
            self.store.grow(self.saved(unit, k), 1)
        self.run(self.trainer.forward, unit, k, mode)
        self.look()
        if mode is Mode.OFFLOAD:
            self.move(self.saved(unit, k), HOST)
        for chunk in self.read[unit]:
            self.shed(chunk)
        if unit and unit < self.units.first:
            self.store.free(self.hidden(unit, k))
        elif unit and self.spills_inputs and not is_head:
            self.move(self.hidden(unit, k), HOST)

    def backward(self, unit: int, k: int) -> None:
        mode, first, is_head = self.mode(unit), self.units.first, unit == self.units.num_units - 1
        for chunk in self.read[unit]:
            self.fetch(chunk)
        if unit and self.spills_inputs and not is_head:
            self.move(self.hidden(unit, k, HOST), GPU)
        if mode is Mode.RECOMPUTE:
            self.store.grow(self.saved(unit, k), 1)
            self.run(self.trainer.forward, unit, k, mode, True)
        elif mode is Mode.OFFLOAD:
            self.move(self.saved(unit, k, HOST), GPU)
        for chunk in () if self.reuses else self.grown[unit]:
            self.fetch_gradient(chunk)
        if unit > first:
            self.store.grow(self.input_gradient(unit), 1)
        for place in self.tied_gradient(k) if is_head else ():
            self.store.grow(place, 1)
        makes_norm = self.clips and unit == first and (k + 1) % self.task.microbatches == 0
        if makes_norm:
            self.end_norm()
            self.store.grow(self.norm(), regions.NORM_BYTES)
        self.run(self.trainer.backward, unit, k)
        if makes_norm:
            self.move(self.norm(), HOST, keeps=True)
            self.norms = [self.norm(), self.norm(HOST)]
        self.look()
        for place in self.tied_gradient(k) if unit == first else ():
            self.store.free(place)
        self.store.free(self.saved(unit, k))
        if unit:
            self.store.free(self.hidden(unit, k))
        if not is_head:
            self.store.free(self.input_gradient(unit + 1))
        for chunk in () if self.reuses else self.grown[unit]:
            self.move(self.gradient(chunk, GPU), HOST)
        for chunk in self.read[unit]:
            self.shed(chunk, is_changed=self.reuses)

    def fetch_gradient(self, chunk: int) -> None:
        if chunk in self.waiting:
            self.move(self.gradient(chunk, HOST), GPU)
        else:
            self.store.grow(self.gradient(chunk, GPU), self.weight_bytes[chunk])
        self.waiting.add(chunk)

    def update(self, chunk: int, step: int) -> None:
        tier = self.updates_on(chunk)
        own = [self.weight(chunk, HOST)]
        own += [] if self.reuses else [self.gradient(chunk, HOST)]
        own += [self.optimizer(chunk, HOST)] if self.optimizer_bytes[chunk] else []
        if tier is GPU:
            for place in own:
                self.move(place, GPU)
        self.run(self.trainer.update, chunk, step, tier)
        self.look()
        if tier is GPU:
            for place in own:
                if place.region.kind is not Kind.GRADIENT:
                    self.move(place._replace(tier=GPU), HOST)
        if not self.reuses:
            self.store.free(self.gradient(chunk, tier))
            self.waiting.remove(chunk)

    def mode(self, unit: int) -> Mode:
        if unit < self.units.first:
            return Mode.RECOMPUTE
        return Mode.KEEP if unit == self.units.num_units - 1 else self.modes[unit % len(self.modes)]

    def look(self) -> None:
        now = {kind: self.store.held((GPU, 0), [kind]) for kind in Kind}
        self.peak_bytes |= Counter(now)
        states = sum(now[kind] for kind in MODEL_STATES)
        self.peak_state_bytes = max(self.peak_state_bytes, states)

    def finish(self) -> Result:
        """Carries all operations out."""
        for _ in self.operations():
            pass
        return self.result()

    def result(self) -> Result:
        count = self.task.num_steps * self.task.microbatches
        losses = [self.trainer.loss(k) for k in range(count)]
        return losses, dict(self.trainer.state_dict())


def assert_equal(own: Result, plain: Result) -> None:
    """To the bit."""
    assert own[0] == plain[0]
    assert own[1].keys() == plain[1].keys()
    differing = [name for name, weight in plain[1].items() if not torch.equal(own[1][name], weight)]
    assert not differing
