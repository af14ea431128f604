"""What one forward launch computes and moves, operator by operator. Arithmetic only.

A multiplication and an addition count as two FLOPs. Bytes are those of a kernel's operands, each
read or written once. What a device makes of both is in sim/cost/roofline.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from models.spec import ModelSpec

# Kernels per layer beside matrix products and attention. Llama and Qwen3: 40 and 52 aten operations
# of an eager Hugging Face layer, less 7 matrix products and 7 views, plus two KV writes. GPT-2:
# counted by hand, with fused norms and 8 kernels for GELU. OPT: as GPT-2, with 1 for ReLU and 1
# that scales the queries.
ELEMENTWISE_KERNELS = {"llama": 28, "mistral": 28, "qwen2": 28, "qwen3": 40, "gpt2": 15, "opt": 9}
KV_WRITES = 2  # of these kernels


class Operator(NamedTuple):
    """A group of equal kernels of one launch.

    Attributes:
        kind: "linear", "elementwise", "prefill", "decode", "head" or "embed".
        repeats: How many equal kernels the launch runs.
        flops: Floating-point operations of one kernel; 0 where bytes alone decide.
        nbytes: Bytes that one kernel moves.
        size: What the efficiency of one kernel depends on. Rows of a matrix product or of an
            elementwise kernel; keys that a decode reads; for prefill attention the side of a square
            with as many query-key pairs.
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
    """All kernels of one launch over whole slices.

    A slice of one token behind a context is a decode; any other slice is prefill.

    Args:
        spec: The model.
        tokens: New tokens of each slice.
        contexts: Tokens that each slice has in KV before the launch; as long as `tokens`.
        samples: Rows that the head computes logits of.
        fused_decode: Whether one kernel per layer attends all decodes; else each decode has its
            own.

    Returns:
        The kernels of the layers, grouped by kind and shape; then head and embedding.

    Raises:
        ValueError: `tokens` and `contexts` differ in length.
    """
    total = sum(tokens)
    pairs = list(zip(tokens, contexts, strict=True))
    decodes = [c for n, c in pairs if n == 1 and c]
    slices = [(n, c) for n, c in pairs if n > 1 or not c]
    layers = spec.num_layers
    ops = [product(spec, "linear", layers, total, *shape) for shape in matrices(spec)]
    ops.append(elementwise(spec, layers, total))
    ops += [prefill_operator(spec, layers, n, c) for n, c in slices]
    groups = [decodes] if fused_decode and decodes else [[c] for c in decodes]
    ops += [decode_operator(spec, group) for group in groups]
    if samples:
        ops.append(product(spec, "head", 1, samples, spec.hidden_size, spec.vocab_size))
    row_bytes = 2 * spec.hidden_size * spec.item_bytes
    return [*ops, Operator("embed", 1, 0, total * row_bytes, total)]


def matrices(spec: ModelSpec) -> list[tuple[int, int]]:
    """Shapes of the products of a layer, unmerged as Hugging Face runs them.

    Args:
        spec: The model.

    Returns:
        Numbers of a row before and behind each product.
    """
    hidden, inner = spec.hidden_size, spec.intermediate_size
    if spec.family == "gpt2":
        return [(hidden, 3 * hidden), (hidden, hidden), (hidden, inner), (inner, hidden)]
    heads = [(hidden, spec.query_size), (hidden, spec.kv_size), (hidden, spec.kv_size)]
    rising = [(hidden, inner)] * (2 if spec.is_gated else 1)
    return [*heads, (spec.query_size, hidden), *rising, (inner, hidden)]


def product(
    spec: ModelSpec, kind: str, repeats: int, rows: int, inputs: int, outputs: int
) -> Operator:
    """Matrix products [rows, inputs] x [inputs, outputs].

    The three sizes may trade places: a backward's products do the work of the forward's.

    Args:
        spec: The model; its dtype sizes the operands.
        kind: "linear" or "head".
        repeats: How many equal products there are.
        rows: Tokens that are multiplied.
        inputs: Numbers of a row before the product.
        outputs: Numbers of a row behind it.

    Returns:
        2 * rows * inputs * outputs FLOPs; the bytes of matrix, input and output.
    """
    moved = (inputs * outputs + rows * (inputs + outputs)) * spec.item_bytes
    return Operator(kind, repeats, 2 * rows * inputs * outputs, moved, rows)


def elementwise(spec: ModelSpec, layers: int, total: int, writes_kv: bool = True) -> Operator:
    """Norms, residuals, rotation, activation and KV writes, as passes over their rows.

    Args:
        spec: The model; its family decides the kernels of a layer (ELEMENTWISE_KERNELS).
        layers: Layers that the launch runs.
        total: Tokens of the launch.
        writes_kv: Whether keys and values are written to pages; a training forward writes none.

    Returns:
        layers * kernels equal kernels that share the bytes of a layer evenly, without FLOPs.
    """
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
    """Causal attention of one prefill slice over its context and itself.

    Args:
        spec: The model.
        layers: Layers that the launch runs; each has one such kernel.
        n: New tokens of the slice.
        context: Tokens of the slice's job in KV before it.

    Returns:
        4 * pairs * query_size FLOPs (scores, and their product with the values), where
        pairs = n * context + n * (n + 1) / 2; the bytes of queries, keys, values and output.
    """
    pairs = n * context + n * (n + 1) // 2
    nbytes = (2 * (context + n) * spec.kv_size + 2 * n * spec.query_size) * spec.item_bytes
    flops = 4 * pairs * spec.query_size
    return Operator("prefill", layers, flops, nbytes, (2 * pairs) ** 0.5)


def decode_operator(spec: ModelSpec, contexts: Sequence[int]) -> Operator:
    """Attention of one new token per sequence over its context and itself.

    Args:
        spec: The model; each of its layers has one such kernel.
        contexts: Tokens in KV before the launch, per sequence that the kernel attends.

    Returns:
        4 * keys * query_size FLOPs, where keys counts all contexts and the new tokens; the bytes of
        keys, values, queries and output.
    """
    return decode_of(spec, sum(contexts), len(contexts))


def decode_of(spec: ModelSpec, past: int, decodes: int) -> Operator:
    """`decode_operator` of so many sequences with so many tokens in KV in all."""
    keys = past + decodes
    nbytes = (2 * keys * spec.kv_size + 2 * decodes * spec.query_size) * spec.item_bytes
    return Operator("decode", spec.num_layers, 4 * keys * spec.query_size, nbytes, keys)
