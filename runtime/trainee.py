"""A model made ready to be trained by a recipe: dropout, adapters, and what of it stays frozen."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from engine.model import ModelSpec
from runtime.model import hf_config
from runtime.units import Units
from traces.recipe import Recipe

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
    """The model with adapters by peft (seeded by the recipe), frozen units, in training mode.

    Changed in place, and wrapped by peft if there are adapters. ValueError where nothing is left
    to train.
    """
    if recipe.lora_rank is not None:
        model = _with_adapters(model, recipe)
    parameters = list(model.parameters())
    units = Units(model)
    for unit in range(recipe.frozen_units):
        for index in units.parameters[unit]:
            parameters[index].requires_grad_(False)
    Units(model)  # something must be left to train
    return model.train()


def _with_adapters(model: Any, recipe: Recipe) -> Any:
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ValueError("recipe.lora_rank needs peft: pip install 'tandem[lora]'") from error

    config = LoraConfig(
        r=recipe.lora_rank,
        lora_alpha=recipe.lora_alpha,
        lora_dropout=recipe.lora_dropout,
        target_modules=list(recipe.lora_targets) or None,
        fan_in_fan_out=model.config.model_type == "gpt2",  # its projections are transposed
    )
    with torch.random.fork_rng(devices=()), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft 0.21 asks transformers by an old name
        torch.manual_seed(recipe.seed)
        return get_peft_model(model, config, autocast_adapter_dtype=False)
