"""What one forward launch computes and moves, operator by operator. Arithmetic only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from models.spec import ModelSpec

# Kernels per layer beside matrices and attention. Llama and Qwen3: 40 and 52 non-view aten
# operations were counted in eager Hugging Face layers (2026-11), of which 7 matrix
# products and 7 views; two KV writes are added. GPT-2 counted by hand: fused norms, 8 for GELU.
# OPT has 1 for ReLU and 1 that scales the queries.
ELEMENTWISE_KERNELS = {"llama": 28, "mistral": 28, "qwen2": 28, "qwen3": 40, "gpt2": 15, "opt": 9}
KV_WRITES = 2  # of these


class Operator(NamedTuple):
    """Equal kernels. `flops`, `nbytes` and `size`, which efficiency depends on, are of one.

    `kind` is linear, elementwise, prefill, decode, head or embed. `size` is rows for matrices and
    the side of the square with as many query-key pairs for prefill attention.
    """

    kind: str
    repeats: int
    flops: int
    nbytes: int
    size: float


def operators(
    spec: ModelSpec,
    tokens: Sequence[int],
    contexts: Sequence[int],
    samples: int,
    fused_decode: bool = True,
) -> list[Operator]:
    """All kernels of a launch over whole slices: `tokens` new ones behind `contexts` in KV each.

    A slice of one token behind a context is a decode; `fused_decode` handles all decodes of a
    layer in one kernel, else each sequence has its own.
    """
    total = sum(tokens)
    past = [c for n, c in zip(tokens, contexts, strict=True) if n == 1 and c]
    chunks = [(n, c) for n, c in zip(tokens, contexts, strict=True) if n > 1 or not c]
    layers = spec.num_layers
    ops = [product(spec, "linear", layers, total, *shape) for shape in _matrices(spec)]
    ops.append(elementwise(spec, layers, total))
    ops += [prefill_operator(spec, layers, n, c) for n, c in chunks]
    groups = [past] if fused_decode and past else [[c] for c in past]
    ops += [decode_operator(spec, group) for group in groups]
    if samples:
        ops.append(product(spec, "head", 1, samples, spec.hidden_size, spec.vocab_size))
    row_bytes = 2 * spec.hidden_size * spec.item_bytes
    return [*ops, Operator("embed", 1, 0, total * row_bytes, total)]


def _matrices(spec: ModelSpec) -> list[tuple[int, int]]:
    """Shapes (in, out) of one layer's products, unmerged as Hugging Face runs them."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    if spec.family == "gpt2":
        return [(hidden, 3 * hidden), (hidden, hidden), (hidden, inner), (inner, hidden)]
    heads = [(hidden, spec.query_size), (hidden, spec.kv_size), (hidden, spec.kv_size)]
    rising = [(hidden, inner)] * (2 if spec.is_gated else 1)
    return [*heads, (spec.query_size, hidden), *rising, (inner, hidden)]


def product(
    spec: ModelSpec, kind: str, repeats: int, rows: int, inputs: int, outputs: int
) -> Operator:
    """Rows times a matrix; with rows, inputs and outputs in any roles the same work."""
    moved = (inputs * outputs + rows * (inputs + outputs)) * spec.item_bytes
    return Operator(kind, repeats, 2 * rows * inputs * outputs, moved, rows)


def elementwise(spec: ModelSpec, layers: int, total: int, writes_kv: bool = True) -> Operator:
    """Norms, residuals, rotation, activation and KV writes, by passes over their rows."""
    hidden, inner, heads = spec.hidden_size, spec.intermediate_size, spec.query_size + spec.kv_size
    if spec.is_gated:
        passes = 2 * 7 * hidden + 6 * hidden + 11 * heads + 5 * inner
    else:
        passes = 2 * 2 * hidden + 6 * hidden + (18 if spec.family == "gpt2" else 2) * inner
    passes += 2 * hidden if spec.family == "opt" else 0
    passes += 7 * heads if spec.family == "qwen3" else 0
    passes += 4 * spec.kv_size if writes_kv else 0
    kernels = ELEMENTWISE_KERNELS[spec.family] - (0 if writes_kv else KV_WRITES)
    nbytes = total * passes * spec.item_bytes // kernels
    return Operator("elementwise", layers * kernels, 0, nbytes, total)


def prefill_operator(spec: ModelSpec, layers: int, n: int, context: int) -> Operator:
    """Causal attention of n new tokens over themselves and a context: pairs, not a square."""
    pairs = n * context + n * (n + 1) // 2
    nbytes = (2 * (context + n) * spec.kv_size + 2 * n * spec.query_size) * spec.item_bytes
    flops = 4 * pairs * spec.query_size
    return Operator("prefill", layers, flops, nbytes, (2 * pairs) ** 0.5)


def decode_operator(spec: ModelSpec, contexts: Sequence[int]) -> Operator:
    """Attention of one new token per sequence over its context and itself, one layer."""
    keys = sum(contexts) + len(contexts)
    nbytes = (2 * keys * spec.kv_size + 2 * len(contexts) * spec.query_size) * spec.item_bytes
    return Operator("decode", spec.num_layers, 4 * keys * spec.query_size, nbytes, keys)
