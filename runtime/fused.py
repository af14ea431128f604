"""Whole layers of Hugging Face models in few kernels: norms, rotation and activation are ours."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from runtime.kernels.activate import silu_product
from runtime.kernels.attention import attend_stored
from runtime.kernels.norm import layer_norm, rms_norm
from runtime.kernels.rotate import rotate_and_store, store
from runtime.model import Decoder


class FusedDecoder(Decoder):
    """A Decoder that takes the modules' weights and leaves their forwards out, where it knows how.

    For serving only: the kernels have no backward. A Llama layer of a decode step is fourteen
    kernels, where the modules launch some forty (RUNTIME.md 6).
    """

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        body = model.base_model
        self._fused = LAYERS.get(model.config.model_type)
        self._blocks = None if self._fused is None else getattr(body, "h", None) or body.layers

    def angles(self, hidden: Tensor, positions: Tensor) -> dict[str, Any]:
        """Cosines and sines, [T, D] each, where layers are ours and rotate."""
        if self._fused is None or self._rotary is None:
            return super().angles(hidden, positions)
        cos, sin = self._rotary(hidden, positions)
        return {"angles": (cos[0], sin[0])}

    def layer(self, index: int, hidden: Tensor, angles: dict[str, Any], meta: Any) -> Tensor:
        """As the modules compute it, up to rounding."""
        if self._fused is None or self._blocks is None:
            return super().layer(index, hidden, angles, meta)
        return self._fused(self._blocks[index], index, hidden, meta, **angles)


def _llama_layer(block: Any, index: int, hidden: Tensor, meta: Any, angles: Any) -> Tensor:
    attention, mlp, norm = block.self_attn, block.mlp, block.input_layernorm
    eps = norm.variance_epsilon
    x, _ = rms_norm(hidden, norm.weight, eps)
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    q, k, v = (p(x)[0].unflatten(-1, (-1, attention.head_dim)) for p in projections)
    norms = None
    if hasattr(attention, "q_norm"):  # Qwen3
        norms = (attention.q_norm.weight, attention.k_norm.weight)
    rotate_and_store(q, k, v, meta.arena.rows(index), meta.slots, angles, norms, eps)
    mixed = attend_stored(q, meta, index, attention.scaling).flatten(1).unsqueeze(0)
    norm = block.post_attention_layernorm
    x, hidden = rms_norm(attention.o_proj(mixed), norm.weight, eps, residual=hidden)
    return hidden + mlp.down_proj(silu_product(mlp.gate_proj(x), mlp.up_proj(x)))


def _gpt2_layer(block: Any, index: int, hidden: Tensor, meta: Any) -> Tensor:
    attention, norm = block.attn, block.ln_1
    x, _ = layer_norm(hidden, norm.weight, norm.bias, norm.eps)
    q, k, v = attention.c_attn(x)[0].unflatten(-1, (3, -1, attention.head_dim)).unbind(1)
    store(k, v, meta.arena.rows(index), meta.slots)
    mixed = attend_stored(q, meta, index).flatten(1).unsqueeze(0)
    norm = block.ln_2
    x, hidden = layer_norm(
        attention.c_proj(mixed), norm.weight, norm.bias, norm.eps, residual=hidden
    )
    return hidden + block.mlp(x)


LAYERS = dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), _llama_layer)
LAYERS["gpt2"] = _gpt2_layer
