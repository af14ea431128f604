"""A ModelSpec as Hugging Face modules with seeded random weights, driven layer by layer."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from models.spec import ModelSpec
from runtime.serving.attention import NAME, register
from runtime.serving.gated import GatedLayer, signed

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no model is ever fetched: weights are random


def hf_config(spec: ModelSpec, spread: float = 0.02) -> Any:
    """The Hugging Face config of a spec. `spread` is the standard deviation of its weights."""
    from transformers import AutoConfig

    shared = {
        "vocab_size": spec.vocab_size,
        "tie_word_embeddings": spec.tie_embeddings,
        "use_cache": False,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
        "init_std" if spec.family == "opt" else "initializer_range": spread,
    }
    fields = FIELDS.get(spec.family, _llama_fields)(spec)
    return AutoConfig.for_model(spec.family, **shared, **fields)


def _gpt2_fields(spec: ModelSpec) -> dict[str, Any]:
    return {
        "n_positions": spec.max_positions,
        "n_embd": spec.hidden_size,
        "n_layer": spec.num_layers,
        "n_head": spec.num_heads,
        "n_inner": spec.intermediate_size,
        "layer_norm_epsilon": spec.norm_eps,
    }


def _opt_fields(spec: ModelSpec) -> dict[str, Any]:
    return {
        "max_position_embeddings": spec.max_positions,
        "hidden_size": spec.hidden_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "ffn_dim": spec.intermediate_size,
    }


FIELDS = {"gpt2": _gpt2_fields, "opt": _opt_fields}


def _llama_fields(spec: ModelSpec) -> dict[str, Any]:
    fields = {
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "max_position_embeddings": spec.max_positions,
        "rms_norm_eps": spec.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": spec.rope_theta},
    }
    if spec.family == "mistral":
        return fields | {"sliding_window": None}
    return fields if spec.family == "qwen2" else fields | {"attention_bias": spec.attention_bias}


def build_model(
    spec: ModelSpec,
    seed: int = 0,
    device: str = "cpu",
    attention: str = NAME,
    spread: float = 0.02,
) -> Any:
    """The model of a spec in evaluation mode: equal seeds give equal weights.

    `attention` names the implementation; "sdpa" gives the plain model that generate() can run.
    """
    from transformers import AutoModelForCausalLM

    register()
    config = hf_config(spec, spread)
    with torch.random.fork_rng(), torch.device(device):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, spec.dtype), attn_implementation=attention
        )
    return model.eval().requires_grad_(False)


class Decoder:
    """Embedding, layers, norm and head of a Hugging Face model, alike for all families.

    Rows are packed: hidden states are [1, T, hidden], whatever jobs the T rows belong to. Layers
    like Llama's run merged (runtime/serving/gated.py), other layers run as their modules. The model
    keeps all weights; the weights of merged products are laid next to each other.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        body = model.base_model
        body = getattr(body, "decoder", body)  # OPT's body is one level deeper
        self._norm = first_of(body, "ln_f", "norm", "final_layer_norm")
        self._tokens = model.get_input_embeddings()
        self._head = model.get_output_embeddings()
        self._rotary = getattr(body, "rotary_emb", None)
        self._positions = learned_positions(body)
        modules = first_of(body, "h", "layers")
        self.layers = [
            partial(module, attention_mask=None)
            if self._rotary is None
            else GatedLayer(module, index)
            for index, module in enumerate(modules)
        ]

    def embed(self, ids: Tensor, positions: Tensor) -> Tensor:
        """[1, T] ids and positions -> [1, T, hidden]."""
        hidden: Tensor = self._tokens(ids)
        return hidden if self._positions is None else hidden + self._positions(positions)

    def angles(self, hidden: Tensor, positions: Tensor) -> dict[str, Any]:
        """What every layer reads of positions; computed once per launch."""
        if self._rotary is None:
            return {}
        return {"angles": signed(*self._rotary(hidden, positions))}

    def layer(self, index: int, hidden: Tensor, angles: dict[str, Any], meta: Any) -> Tensor:
        """One transformer layer over all rows; `meta` is for runtime.serving.attention.attend."""
        return self.layers[index](hidden, meta=meta, **angles)

    def logits(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """[1, T, hidden] -> [R, vocab] of the given rows."""
        found: Tensor = self._head(self._norm(hidden[0].index_select(0, rows)))
        return found


def first_of(body: Any, *names: str) -> Any:
    """The first of these attributes that a module has: families name one thing differently."""
    return next(getattr(body, name) for name in names if hasattr(body, name))


def learned_positions(body: Any) -> Callable[[Tensor], Tensor] | None:
    """[1, T] positions -> [1, T, hidden], where they are learned: GPT-2, OPT."""
    table: Callable[[Tensor], Tensor] | None = getattr(body, "wpe", None)
    if table is not None or not hasattr(body, "embed_positions"):
        return table
    return lambda positions: body.embed_positions(None, position_ids=positions)
