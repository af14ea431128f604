"""Models that papers describe by width and depth alone."""

from __future__ import annotations

from models.spec import ModelSpec


def gpt2_shape(
    hidden_size: int,
    num_layers: int,
    num_heads: int = 16,
    vocab_size: int = 50257,
    max_positions: int = 1024,
    dtype: str = "bfloat16",
) -> ModelSpec:
    """A GPT-2-like model, its MLP four times as wide. ValueError for heads that do not divide."""
    name = f"gpt2_{hidden_size}x{num_layers}"
    if num_heads < 1 or hidden_size % num_heads:
        raise ValueError(f"model {name}: {num_heads} heads do not divide its width {hidden_size}")
    return ModelSpec(
        name,
        "gpt2",
        num_layers,
        hidden_size,
        num_heads,
        num_heads,
        hidden_size // num_heads,
        4 * hidden_size,
        vocab_size,
        max_positions,
        tie_embeddings=True,
        dtype=dtype,
        norm_eps=1e-5,
        attention_bias=True,
    )
