"""The real work of one training job: its units' forwards and backwards, its chunks' updates."""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from engine.contract import regions
from engine.contract.layout import Mode
from engine.contract.regions import Tier
from models.spec import ModelSpec
from runtime.serving.model import hf_config
from runtime.training.activations import Activations
from runtime.training.checkpoint import CheckpointWriter, SavedStates
from runtime.training.model_states import ModelStates
from runtime.training.optimizer import Gradients, Optimizer, Sums
from runtime.training.saved import Graph, Stash
from runtime.training.store import RegionStore, typed
from runtime.training.units import Draws, Units
from traces.training.batches import Batches
from traces.training.recipe import Recipe

DROPOUTS = {  # names of the probabilities in the configs of Hugging Face
    "gpt2": ("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    "opt": ("dropout", "attention_dropout"),
}


def build_trainee(spec: ModelSpec, recipe: Recipe, seed: int = 0) -> Any:
    """The model of a spec with seeded random weights, in training mode: see `prepare`.

    Built on the CPU in the recipe's dtype; master weights begin as these.
    """
    from transformers import AutoModelForCausalLM

    config = hf_config(spec)
    for name in DROPOUTS.get(spec.family, ("attention_dropout",)):
        setattr(config, name, recipe.dropout)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, recipe.dtype), attn_implementation="sdpa"
        )
    return prepare(model, recipe)


def prepare(model: Any, recipe: Recipe) -> Any:
    """Freezes units of a model and adds peft's adapters, seeded by the recipe.

    Args:
        model: A Hugging Face model; changed in place.
        recipe: Says which units are frozen, and the rank of adapters, if any.

    Returns:
        The model in training mode, wrapped by peft where it has adapters.

    Raises:
        ValueError: No parameter is left to train, or adapters need peft and it is missing.
    """
    if recipe.lora_rank is not None:
        model = _with_adapters(model, recipe)
    parameters = list(model.parameters())
    units = Units(model)
    for unit in range(recipe.frozen_units):
        for index in units.parameters[unit]:
            parameters[index].requires_grad_(False)
    Units(model)  # raises where no parameter is left to train
    return model.train()


def _with_adapters(model: Any, recipe: Recipe) -> Any:
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ValueError("recipe.lora_rank needs peft: pip install 'tandem[lora]'") from error

    adapters: dict[str, Any] = {
        "r": recipe.lora_rank,
        "lora_alpha": recipe.lora_alpha,
        "lora_dropout": recipe.lora_dropout,
        "target_modules": list(recipe.lora_targets) or None,
        "fan_in_fan_out": model.config.model_type == "gpt2",  # its projections are transposed
    }
    with torch.random.fork_rng(devices=()), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft 0.21 asks transformers by an old name
        torch.manual_seed(recipe.seed)
        return get_peft_model(model, LoraConfig(**adapters), autocast_adapter_dtype=False)


class Trainer:
    """Computes what a plan says, on what the plan has put in place; decides and moves nothing.

    Results equal those of plain training of the job alone: the operators and their order are equal,
    and so are the draws of dropout. All that an operation needs must be on its tier and newest
    there; else an AssertionError names what is not. Calls of one job may come from several threads,
    one after the other; updates of different chunks also at once.
    """

    def __init__(
        self,
        job_id: int,
        model: Any,
        chunks: Sequence[Sequence[int]],
        recipe: Recipe,
        batches: Batches,
        store: RegionStore,
        num_steps: int = 1,
        microbatches: int = 1,
        reuses_weights: bool = False,
        has_update: bool = True,
        begun_steps: int = 0,
        saved: SavedStates | None = None,
    ) -> None:
        """
        Args:
            job_id: The training job.
            model: What `prepare` has returned.
            chunks: Per chunk, indices into model.parameters(); each parameter is in one chunk.
            recipe: Dtype, optimizer, clipping and seed of the job.
            batches: Token ids of each microbatch.
            store: Where regions have memory.
            num_steps: Steps of the job.
            microbatches: Of a step.
            reuses_weights: Gradients take the storages of their weights until the update, as in
                PatrickStar.
            has_update: False: a step ends with its last backward and its gradients are dropped.
            begun_steps: Steps that were done before.
            saved: The states then; None where the job begins anew.

        Raises:
            ValueError: Gradients cannot take the storages of weights, or the chunks do not hold
                each parameter once.
        """
        if reuses_weights and (recipe.dtype == "float32" or microbatches > 1):
            raise ValueError(
                "gradients can take the place of weights only where master weights bring these "
                "back (dtype=bfloat16) and nothing accumulates (microbatches=1)"
            )
        for buffer in model.buffers():
            buffer.data = buffer.data.to(store.device)
        self.job_id, self._store, self._batches = job_id, store, batches
        self._num_steps, self._microbatches, self._reuses = num_steps, microbatches, reuses_weights
        self.units = units = Units(model.train())
        self._optimizer = Optimizer(recipe, num_steps)
        dtype, sections = getattr(torch, recipe.dtype), self._optimizer.num_sections
        self._states = ModelStates(job_id, model, chunks, store, dtype, sections, saved=saved)
        self._activations = Activations(job_id, units.num_units, units.hidden_size, dtype, store)
        chunk_of = self._states.chunk_of
        self._read = [sorted({chunk_of[p] for p in own}) for own in units.parameters]
        uses = Counter(p for own in units.trained_of for p in own)
        self._gradients = Gradients(uses, microbatches, recipe.clip_norm, reuses_weights)
        self._sums = Sums(self._states, self._gradients, store, units.trained_of, reuses_weights)
        self._norm = regions.norm(job_id).region
        drawn = None if saved is None else saved.draws
        self._draws = Draws(recipe.seed, store.device, units.first, drawn)
        self._drawn: dict[int, Tensor] = {}  # by step, what its first forward draws from
        self.checkpoints: CheckpointWriter | None = None
        self.untimed_ns = 0  # thread time of checkpoints, which is none of the update's
        self._ids: dict[int, Tensor] = {}  # of microbatches in flight
        # Pinned on the host, so that copies without a wait can write them.
        self._losses = torch.full(
            (num_steps * microbatches,), torch.nan, pin_memory=store.device.type == "cuda"
        )
        trained = [c for c, trains in enumerate(self._states.trains) if trains]
        self._updates = Counter(dict.fromkeys(trained, begun_steps))  # per chunk
        self._due = set(self._sums.chunks)  # still to be updated in this step
        self._has_update, self._lock = has_update, Lock()

    # ---- the work
    @torch.no_grad()
    def forward(self, unit: int, microbatch: int, keeps: Mode, again: bool = False) -> None:
        """Runs a unit: leaves the next unit's input, and what `keeps` says for its backward.

        KEEP leaves a graph as the saved activation, OFFLOAD a graph whose tensors can be copied to
        the host and back, RECOMPUTE nothing. With `again` the forward is a recompute: it leaves
        only the saved activation, which is a graph unless the unit offloads.
        """
        launch = f"F({unit}, {microbatch}) of job {self.job_id}"
        self._check_weights(unit, microbatch, launch)
        step, behind = divmod(microbatch, self._microbatches)
        if not (unit or behind or again):
            self._drawn = {step: self._draws.state}
        ids, first = self._ids_of(microbatch), self.units.first
        hidden = self._activations.input(unit, microbatch, ids.shape, launch) if unit else None
        records = unit >= first and (again or keeps is not Mode.RECOMPUTE)
        if hidden is not None and records:
            hidden.requires_grad_(unit > first)
        stash = self._stash(unit, hidden, ids) if records and keeps is Mode.OFFLOAD else None
        draws = (self._draws.again if again else self._draws.first)(unit, microbatch)
        with torch.set_grad_enabled(records), draws, stash.hooks() if stash else nullcontext():
            out = self.units.run(unit, hidden, ids)
            root = out / self._microbatches if self._is_head(unit) else out
        if records:
            self._activations.keep(unit, microbatch, Graph.of(root, hidden, stash))
        if self._is_head(unit):
            self._losses[microbatch].copy_(out.detach(), non_blocking=True)
        elif not again:
            self._activations.hand_on(unit, microbatch, out.detach())

    @torch.no_grad()
    def backward(self, unit: int, microbatch: int) -> None:
        """Adds a unit's gradients to their sums; puts its input's gradient for the unit below."""
        launch, first = f"B({unit}, {microbatch}) of job {self.job_id}", self.units.first
        assert unit >= first, f"{launch}: no parameter trains in unit {unit} or below it"
        if unit:  # the embedding's backward reads no weights
            self._check_weights(unit, microbatch, launch)
        sums, shape = self._sums.find(unit, launch), self._ids_of(microbatch).shape
        given: Tensor | None = None  # the gradient of the unit's output
        if not self._is_head(unit):
            given = self._activations.input_gradient(unit + 1, shape, launch)
        graph = self._activations.take(unit, microbatch, launch)
        own = self.units.trained_of[unit]
        inputs: list[Tensor] = [self._states.parameters[p] for p in own]
        if unit > first:
            assert graph.input is not None
            inputs.append(graph.input)
        gradients = graph.gradients(inputs, given)
        if unit > first:
            self._activations.hand_down(unit, gradients[-1])
        self._sums.add(unit, sums, gradients, () if given is None else (given,))
        self._draws.forget(unit, microbatch)
        if unit == first:
            self._end_microbatch(microbatch)

    @torch.no_grad()
    def update(self, chunk: int, step: int, tier: Tier) -> None:
        """Updates a chunk's weights and optimizer states on a tier with its gradients there."""
        launch, states, read = f"U({chunk}) of job {self.job_id}", self._states, self._store.storage
        self._check_update(chunk, step, launch)
        storage = read(states.weight(chunk), tier, launch)
        weights = gradients = states.numbers(chunk, storage)
        if not self._reuses:
            held = self._store.find(states.gradient(chunk), tier, launch)
            gradients = states.gradients(chunk, held.storages)
        sections: Sequence[Sequence[Tensor]] = ()
        if self._optimizer.num_sections:
            sections = states.sections(chunk, read(states.optimizer(chunk), tier, launch))
        scale: Tensor | None = None
        if self._gradients.clips:
            scale = self._gradients.scale(typed(read(self._norm, tier, launch), torch.float32, ()))
        self._optimizer.update(step, weights, gradients, sections, scale)
        self._store.wrote(states.weight(chunk), tier)
        if sections:
            self._store.wrote(states.optimizer(chunk), tier)
        self._end_update(chunk, step)

    # ---- results
    def loss(self, microbatch: int) -> float:
        """The mean loss of a microbatch, before its division for accumulation; NaN until known."""
        if self._store.device.type == "cuda":
            torch.cuda.synchronize(self._store.device)
        return float(self._losses[microbatch])

    def state_dict(self) -> Mapping[str, Tensor]:
        """Copies of the newest weights, from any tier, by the model's names."""
        return self._states.state_dict()

    # ---- what an operation needs
    def _check_weights(self, unit: int, microbatch: int, launch: str) -> None:
        states, step = self._states, microbatch // self._microbatches
        for chunk in self._read[unit]:
            self._store.find(states.weight(chunk), Tier.GPU, launch)
            waits = states.trains[chunk] and self._has_update
            is_due = not waits or self._updates[chunk] == step
            assert is_due, (
                f"{launch}: chunk {chunk} has had {self._updates[chunk]} updates of {step}"
            )
        lost = self._sums.overwritten.intersection(self.units.parameters[unit])
        assert not lost, f"{launch}: gradients lie in the place of {len(lost)} weights"

    def _check_update(self, chunk: int, step: int, launch: str) -> None:
        assert self._states.trains[chunk], f"{launch}: chunk {chunk} is frozen"
        is_due = self._updates[chunk] == step < self._num_steps
        assert is_due, f"{launch}: step {step} behind {self._updates[chunk]} updates"
        partial = [p for p in self._states.chunks[chunk] if not self._gradients.is_whole(p)]
        assert not partial, f"{launch}: gradients of {len(partial)} parameters are not whole yet"

    def _ids_of(self, microbatch: int) -> Tensor:
        if microbatch not in self._ids:
            ids = torch.tensor(self._batches.ids(microbatch), dtype=torch.int64)
            if self._store.device.type == "cuda":
                ids = ids.pin_memory()  # else the copy would wait for all that is on the stream
            self._ids[microbatch] = ids.to(self._store.device, non_blocking=True)
        return self._ids[microbatch]

    def _stash(self, unit: int, hidden: Tensor | None, ids: Tensor) -> Stash:
        own = [self._states.parameters[p] for p in self.units.parameters[unit]]
        inputs = [ids] if hidden is None else [ids, hidden]
        return Stash([*inputs, *self.units.constants(hidden, ids), *own])

    def _is_head(self, unit: int) -> bool:
        return unit == self.units.num_units - 1

    # ---- what it leaves
    def _end_microbatch(self, microbatch: int) -> None:
        del self._ids[microbatch]
        step, rest = divmod(microbatch + 1, self._microbatches)
        if rest:
            return
        if not self._has_update:
            self._states.pending.clear()
            self._end_step(step - 1)
        elif self._gradients.clips:
            self._store.put(self._norm, [self._gradients.norm().untyped_storage()])

    def _end_update(self, chunk: int, step: int) -> None:
        states = self._states
        with self._lock:  # the last chunk of a step ends it, once
            states.pending.discard(chunk)
            self._sums.overwritten.difference_update(states.chunks[chunk])
            self._updates[chunk] += 1
            self._due.remove(chunk)
            if not self._due:
                self._due = set(self._sums.chunks)
                self._end_step(step)

    def _end_step(self, step: int) -> None:
        writer, done = self.checkpoints, step + 1
        if writer is not None and writer.is_due(done):
            began_ns = time.thread_time_ns()
            drawn = self._drawn.get(done, self._draws.state)  # the next step may have begun
            writer.write(done, self._states.saved(drawn))
            self.untimed_ns += time.thread_time_ns() - began_ns
        self._gradients.begin_step()
        self._states.has_ended = step + 1 == self._num_steps
