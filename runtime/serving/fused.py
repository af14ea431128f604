"""Whole layers of Hugging Face models in few kernels, with Triton's norms and rotation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from runtime.kernels.norm import layer_norm, rms_norm, silu_product
from runtime.kernels.paged_attention import attend_stored
from runtime.kernels.rotate import rotate_and_store, store
from runtime.serving.gated import Merged
from runtime.serving.model import Decoder

Layer = Callable[..., Tensor]  # (hidden, meta, angles where it rotates) -> hidden


class FusedDecoder(Decoder):
    """A Decoder that runs its own layers over the modules' weights, for the families in LAYERS.

    For serving only: the kernels have no backward. A Llama layer of a decode step is eleven
    kernels, where the modules launch about forty.
    """

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        make, body = LAYERS.get(model.config.model_type), model.base_model
        blocks = () if make is None else getattr(body, "h", None) or body.layers
        self._fused = [make(block, index) for index, block in enumerate(blocks) if make]

    def angles(self, hidden: Tensor, positions: Tensor) -> dict[str, Any]:
        """Cosines and sines, [T, D] each, for fused layers that rotate."""
        if not self._fused or self._rotary is None:
            return super().angles(hidden, positions)
        cos, sin = self._rotary(hidden, positions)
        return {"angles": (cos[0], sin[0])}

    def layer(self, index: int, hidden: Tensor, angles: dict[str, Any], meta: Any) -> Tensor:
        """One layer over all rows, equal to the module's up to rounding."""
        if not self._fused:
            return super().layer(index, hidden, angles, meta)
        return self._fused[index](hidden, meta, **angles)


def _llama_layer(block: Any, index: int) -> Layer:
    """A layer with q, k and v as one product, and gate and up as another."""
    attention, mlp = block.self_attn, block.mlp
    qkv = Merged(attention.q_proj, attention.k_proj, attention.v_proj)
    gate_up = Merged(mlp.gate_proj, mlp.up_proj)
    before, between, size = (
        block.input_layernorm,
        block.post_attention_layernorm,
        attention.head_dim,
    )
    eps = before.variance_epsilon
    heads, kv_heads = (p.out_features // size for p in (attention.q_proj, attention.k_proj))
    norms = None
    if hasattr(attention, "q_norm"):  # Qwen3
        norms = (attention.q_norm.weight, attention.k_norm.weight)

    def attend(hidden: Tensor, meta: Any, angles: Any) -> Tensor:
        packed = qkv(rms_norm(hidden, before.weight, eps)[0]).unflatten(-1, (-1, size))
        q, k, v = packed.split((heads, kv_heads, kv_heads), 1)
        rotate_and_store(q, k, v, meta.arena.rows(index), meta.slots, angles, norms, eps)
        out: Tensor = attention.o_proj(attend_stored(q, meta, index, attention.scaling).flatten(1))
        return out

    def layer(hidden: Tensor, meta: Any, angles: Any) -> Tensor:
        # Each tensor is dropped before the next is made: q, k and v end with attend().
        x, summed = rms_norm(attend(hidden[0], meta, angles), between.weight, eps, residual=hidden)
        gate, up = gate_up(x).chunk(2, -1)
        del x
        out: Tensor = mlp.down_proj(silu_product(gate, up)).add_(summed)
        return out.unsqueeze(0)

    return layer


def _gpt2_layer(block: Any, index: int) -> Layer:
    attention, before, between = block.attn, block.ln_1, block.ln_2

    def layer(hidden: Tensor, meta: Any) -> Tensor:
        x, _ = layer_norm(hidden, before.weight, before.bias, before.eps)
        q, k, v = attention.c_attn(x)[0].unflatten(-1, (3, -1, attention.head_dim)).unbind(1)
        store(k, v, meta.arena.rows(index), meta.slots)
        attended = attend_stored(q, meta, index).flatten(1).unsqueeze(0)
        x, summed = layer_norm(
            attention.c_proj(attended), between.weight, between.bias, between.eps, residual=hidden
        )
        out: Tensor = summed + block.mlp(x)
        return out

    return layer


LAYERS = dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), _llama_layer)
LAYERS["gpt2"] = _gpt2_layer
