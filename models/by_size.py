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
    """A GPT-2-like model of any width and depth, such as PatrickStar trains.

    The MLP is four times as wide as the model, and the output projection is tied to the token
    embedding, as in GPT-2.

    Args:
        hidden_size: Width of the hidden states, in numbers.
        num_layers: Decoder layers.
        num_heads: Attention heads; they must divide the width.
        vocab_size: Tokens of the vocabulary; 50257 is GPT-2's own.
        max_positions: Longest sequence, in tokens; 1024 is GPT-2's own.
        dtype: "float32", "bfloat16" or "float16": the type of weights and activations.

    Returns:
        The spec, named "gpt2_<hidden_size>x<num_layers>".

    Raises:
        ValueError: The heads do not divide the width, or a size is below 1.
    """
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
