"""A Hugging Face or peft model in training, run unit by unit by plain torch: what shapes must say.

Nothing of ours takes part but hf_config, which names a spec's sizes as Hugging Face does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from models.spec import ModelSpec
from runtime.measure.tracker import StorageTracker, storage_bytes
from runtime.serving.model import hf_config
from traces.serving.request import TrainingJob
from traces.training.recipe import Recipe

DROPOUTS = ("dropout", "attention_dropout", "attn_pdrop", "resid_pdrop", "embd_pdrop")


class Measured(NamedTuple):
    """Bytes of one unit, as torch has them: see models.training.shape.UnitShape."""

    input_bytes: int
    saved_bytes: int
    forward_bytes: int
    light_bytes: int
    backward_bytes: int


def build(spec: ModelSpec, recipe: Recipe, device: str = "cpu") -> Any:
    """The model of a recipe, its frozen units frozen, in training mode."""
    from transformers import AutoModelForCausalLM

    config = hf_config(spec)
    for name in DROPOUTS:
        if hasattr(config, name):
            setattr(config, name, recipe.dropout)
    with torch.random.fork_rng(), torch.device(device):
        torch.manual_seed(0)
        dtype = getattr(torch, recipe.dtype)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
        if recipe.lora_rank is not None:
            model = _adapted(model, spec, recipe)
    for unit in _modules(model)[: recipe.frozen_units]:
        for module in unit:
            module.requires_grad_(False)
    return model.train()


def _adapted(model: Any, spec: ModelSpec, recipe: Recipe) -> Any:
    from peft import inject_adapter_in_model

    model = inject_adapter_in_model(adapter_config(spec, recipe), model)
    for parameter in model.parameters():  # peft adapts a 16-bit model in 32 bits
        parameter.data = parameter.data.to(getattr(torch, recipe.dtype))
    return model


def adapter_config(spec: ModelSpec, recipe: Recipe) -> Any:
    """What peft is given for the adapters of a recipe."""
    from peft import LoraConfig

    return LoraConfig(
        r=recipe.lora_rank,
        lora_alpha=recipe.lora_alpha,
        lora_dropout=recipe.lora_dropout,
        target_modules=list(recipe.lora_targets) or None,
        fan_in_fan_out=spec.family == "gpt2",
    )


def _body(model: Any) -> Any:
    body = model.base_model
    return getattr(body, "decoder", body)


def _modules(model: Any) -> list[list[Any]]:
    """Of every unit."""
    body = _body(model)
    first = [
        getattr(body, n)
        for n in ("embed_tokens", "embed_positions", "wte", "wpe")
        if n in dir(body)
    ]
    last = [getattr(body, n) for n in ("norm", "ln_f", "final_layer_norm") if n in dir(body)]
    layers = body.h if hasattr(body, "h") else body.layers
    return [first, *[[layer] for layer in layers], [*last, model.lm_head]]


class PlainUnits:
    """Runs and measures units on random microbatches of a job."""

    def __init__(self, spec: ModelSpec, job: TrainingJob) -> None:
        self.spec, self.job = spec, job
        self.model = build(spec, job.recipe)
        self.units = _modules(self.model)
        body = _body(self.model)
        self.ids = torch.randint(spec.vocab_size, (job.sequences, job.sequence_tokens))
        self.positions = torch.arange(job.sequence_tokens)[None]
        dtype = getattr(torch, job.recipe.dtype)
        self.shape = (job.sequences, job.sequence_tokens, spec.hidden_size)
        self.dtype = dtype
        self.angles: Any = None
        if hasattr(body, "rotary_emb"):
            self.angles = body.rotary_emb(torch.zeros(1, dtype=dtype), self.positions)

    def parameters(self, unit: int) -> list[Tensor]:
        return [p for module in self.units[unit] for p in module.parameters()]

    def trains_below(self, unit: int) -> bool:
        return any(p.requires_grad for u in range(unit) for p in self.parameters(u))

    def measure(self, unit: int) -> Measured:
        """All figures of a unit; those that come twice (saved) are compared."""
        is_first = unit == 0
        hidden = None if is_first else torch.randn(self.shape).to(self.dtype)
        if hidden is not None:
            hidden.requires_grad_(self.trains_below(unit))
        run = partial(self.run, unit, hidden)
        saved = self._saved_bytes(unit, hidden, run)
        with StorageTracker() as tracker, torch.no_grad():
            output = run()
        light = tracker.peak_bytes - output.untyped_storage().nbytes()
        flow = None if unit == len(self.units) - 1 else torch.randn_like(output)
        del output
        forward, backward = self._peaks(unit, hidden, run, flow, saved)
        given = 0 if hidden is None else hidden.untyped_storage().nbytes()
        return Measured(given, saved, forward, light, backward)

    def _peaks(
        self,
        unit: int,
        hidden: Tensor | None,
        run: Callable[[], Tensor],
        flow: Tensor | None,
        saved: int,
    ) -> tuple[int, int]:
        """Workspace of a forward that keeps, and of the backward behind it."""
        wanted = [p for p in self.parameters(unit) if p.requires_grad]
        flow_bytes = 0
        if hidden is not None and hidden.requires_grad:
            wanted.append(hidden)
            flow_bytes = hidden.untyped_storage().nbytes()
        with StorageTracker() as tracker:
            output = run()
            put_out = output.untyped_storage().nbytes()
            forward = tracker.peak_bytes - tracker.live_bytes
            assert tracker.live_bytes - put_out == saved, "hooks and tracker disagree"
            if not output.requires_grad:
                return forward, 0
            tracker.peak_bytes = tracker.live_bytes
            torch.autograd.grad(output, wanted, flow)
        return forward, max(0, tracker.peak_bytes - put_out - saved - flow_bytes)

    def _saved_bytes(self, unit: int, hidden: Tensor | None, run: Callable[[], Tensor]) -> int:
        """Of the storages that autograd holds beside input, output, parameters and constants."""
        kept = dict[int, Tensor]()

        def pack(tensor: Tensor) -> Tensor:
            kept[tensor.untyped_storage()._cdata] = tensor.detach()
            return tensor.detach()

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = run()
        there = [output, self.ids, self.positions, *self.parameters(unit), *(self.angles or ())]
        if hidden is not None:
            there.append(hidden)
        for tensor in there:
            kept.pop(tensor.untyped_storage()._cdata, None)
        return storage_bytes(kept.values())

    def run(self, unit: int, hidden: Tensor | None) -> Tensor:
        """The output of a unit, of the head the loss."""
        if hidden is None:
            return self._embed()
        if unit == len(self.units) - 1:
            return self._loss(hidden) / self.job.microbatches
        return self._layer(unit, hidden)

    def _embed(self) -> Tensor:
        modules = self.units[0]
        hidden = modules[0](self.ids)
        if self.spec.is_gated:
            return hidden
        positions = torch.arange(self.ids.shape[1])[None]
        if self.spec.family == "opt":  # counts them for each sequence
            return hidden + modules[1](None, position_ids=positions.expand(self.ids.shape))
        hidden = hidden + modules[1](positions)
        return _body(self.model).drop(hidden)

    def _layer(self, unit: int, hidden: Tensor) -> Tensor:
        layer = self.units[unit][0]
        if self.angles is None:
            return layer(hidden, attention_mask=None, position_ids=self.positions)
        return layer(
            hidden,
            attention_mask=None,
            position_ids=self.positions,
            position_embeddings=self.angles,
        )

    def _loss(self, hidden: Tensor) -> Tensor:
        norm, head = self.units[-1]
        logits = head(norm(hidden))
        vocab_size = self.spec.vocab_size
        return self.model.loss_function(logits=logits, labels=self.ids, vocab_size=vocab_size)
