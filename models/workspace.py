"""Temporary memory of a forward launch on a CPU, in bytes by arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

Ints: TypeAlias = npt.NDArray[np.int64]


class Sizes(Protocol):
    """The sizes of a model that its workspaces follow from; see ModelSpec, which has them."""

    @property
    def dtype(self) -> str: ...
    @property
    def is_gated(self) -> bool: ...
    @property
    def norms_heads(self) -> bool: ...
    @property
    def activation(self) -> str: ...
    @property
    def item_bytes(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def query_size(self) -> int: ...
    @property
    def kv_size(self) -> int: ...


# Keys and values gathered at once. Smaller gathers cost more calls, and larger ones leave the
# caches of a core: 64 decodes of mean 235 tokens took 3.4 ms a layer at 1 MiB, 6.0 ms at 64 MiB,
# and 4.1 ms with a gather per decode.
GATHER_BYTES = 1 << 20


def gathers(counts: Sequence[int], page_bytes: int) -> list[slice]:
    """Groups of neighbouring decodes whose pages are gathered at once.

    Args:
        counts: KV pages that each decode reads.
        page_bytes: Bytes of keys and values of one page in one layer.

    Returns:
        Slices of `counts`, in order and without gaps. The pages of a group take at most
        GATHER_BYTES; a decode that takes more is a group alone.
    """
    max_pages, found, start, total = GATHER_BYTES // page_bytes, list[slice](), 0, 0
    for stop, count in enumerate(counts):
        if total + count > max_pages and stop > start:
            found.append(slice(start, stop))
            start, total = stop, 0
        total += count
    return [*found, slice(start, len(counts))] if counts else found


def peak_bytes(
    spec: Sizes,
    tokens: Sequence[int],
    contexts: Sequence[int],
    samples: int,
    page_tokens: int,
) -> int:
    """Peak of what a greedy launch without autograd allocates and frees on a CPU.

    The peak is the largest of four moments of runtime/serving/gated.py, or of the modules of
    transformers 5 for GPT-2 and OPT, around runtime/serving/attention.py: the projections,
    attention, the MLP, and the head. The cosines and sines of all rows stand beside each of them,
    where positions are rotated. The buffer of gathered pages and a mask per slice of several tokens
    behind a context, a number per query-key pair, stand beside the first three. The sum equals what
    runtime/measure/tracker.py counts but for a few numbers per row
    (tests/models/test_workspace.py).

    Args:
        spec: The model.
        tokens: New tokens of each slice; a slice of one token is a decode.
        contexts: Tokens that each slice has in KV before; empty: none has any.
        samples: Rows that the head computes logits of.
        page_tokens: Tokens of a KV page.

    Returns:
        Bytes beside weights and KV.

    Raises:
        ValueError: `contexts` is not empty and differs from `tokens` in length.
    """
    pairs = list(zip(tokens, contexts or [0] * len(tokens), strict=True))
    slices, decodes = [s for s in pairs if s[0] > 1], [c for n, c in pairs if n == 1]
    rows, item = sum(tokens), spec.item_bytes
    shared = 2 * rows * spec.head_dim * item if spec.is_gated else 0
    masks = sum(n * (n + c) for n, c in slices if c) * item
    page_bytes = 2 * spec.kv_size * item * page_tokens
    counts = [c // page_tokens + 1 for c in decodes]
    gathered = max((sum(counts[run]) for run in gathers(counts, page_bytes)), default=0)
    attended = _attended_bytes(spec, slices, len(decodes), page_tokens)
    if not spec.is_gated:  # GPT-2 and OPT keep q, k and v until the output is projected
        attended = max(attended, rows * spec.hidden_size * item)
    layers = max(
        rows * _projection_row_bytes(spec),
        rows * _held_row_bytes(spec) + attended,
        rows * _mlp_row_bytes(spec),
    )
    # The rows of the last layer; norm and logits of the sampled rows.
    head = (rows * spec.hidden_size + samples * (spec.hidden_size + spec.vocab_size)) * item
    return shared + max(layers + masks + gathered * page_bytes, head)


def peaks_bytes(
    spec: Sizes, tokens: Ints, contexts: Ints, starts: Ints, samples: Ints, page_tokens: int
) -> Ints:
    """`peak_bytes` of many launches at once.

    Args:
        spec: The model.
        tokens: New tokens of each slice, launch by launch.
        contexts: Tokens that each slice has in KV before.
        starts: The first slice of each launch, and behind them the number of all slices.
        samples: Rows of each launch that the head computes logits of.
        page_tokens: Tokens of a KV page.

    Returns:
        Bytes of each launch beside weights and KV.
    """
    begins, item = starts[:-1], spec.item_bytes
    if not len(begins):
        return np.empty(0, np.int64)
    is_decode, has_past = tokens == 1, contexts > 0
    rows = np.add.reduceat(tokens, begins)
    num_decodes = np.add.reduceat(is_decode, begins, dtype=np.int64)
    shared = 2 * rows * spec.head_dim * item if spec.is_gated else 0
    pairs = np.where(~is_decode & has_past, tokens * (tokens + contexts), 0)
    masks = np.add.reduceat(pairs, begins) * item
    page_bytes = 2 * spec.kv_size * item * page_tokens
    counts = contexts[is_decode] // page_tokens + 1
    gathered = _most_gathered(counts, num_decodes, GATHER_BYTES // page_bytes)
    output, sums = spec.query_size * item, 4 * spec.num_heads
    pages = np.where(has_past, -(-(tokens + contexts) // page_tokens), 0)
    sliced = np.where(is_decode, 0, pages * page_bytes + tokens * (output + sums))
    attended = np.where(num_decodes > 0, num_decodes * output + sums, 0)
    attended = np.maximum(attended, np.maximum.reduceat(sliced, begins))
    if not spec.is_gated:
        attended = np.maximum(attended, rows * spec.hidden_size * item)
    layers = np.maximum(
        np.maximum(rows * _projection_row_bytes(spec), rows * _held_row_bytes(spec) + attended),
        rows * _mlp_row_bytes(spec),
    )
    head = (rows * spec.hidden_size + samples * (spec.hidden_size + spec.vocab_size)) * item
    found: Ints = shared + np.maximum(layers + masks + gathered * page_bytes, head)
    return found


def _most_gathered(counts: Ints, num_decodes: Ints, max_pages: int) -> Ints:
    """The pages of the largest of each launch's `gathers`, all launches decode by decode."""
    order = np.argsort(-num_decodes, kind="stable")  # those with most decodes first
    begins = (np.cumsum(num_decodes) - num_decodes)[order]
    still = np.searchsorted(-num_decodes[order], -np.arange(num_decodes.max(initial=0)), "left")
    most, total = np.zeros(len(order), np.int64), np.zeros(len(order), np.int64)
    for i, count in enumerate(still):  # launches that have an i-th decode
        more, now = counts[begins[:count] + i], total[:count]
        is_full = (now > 0) & (now + more > max_pages)
        np.maximum(most[:count], now, out=most[:count])
        total[:count] = np.where(is_full, more, now + more)
    found = np.empty(len(order), np.int64)
    found[order] = np.maximum(most, total)
    return found


def _projection_row_bytes(spec: Sizes) -> int:
    """Bytes per row before attention: the layer's input, q, k and v, and the largest of three.

    The three are the normed input; q and k with their halves swapped; and, where heads are normed
    (Qwen3), the squares of q and k in float32, with float32 copies of q and k in other dtypes. In
    GPT-2 and OPT attention or MLP takes more than this moment, so it counts 0.
    """
    if not spec.is_gated:
        return 0
    turned = spec.query_size + spec.kv_size
    beside = max(spec.hidden_size, turned) * spec.item_bytes
    if spec.norms_heads:
        beside = max(beside, 4 * turned * (1 if spec.dtype == "float32" else 2))
    return (spec.hidden_size + spec.query_size + 2 * spec.kv_size) * spec.item_bytes + beside


def _held_row_bytes(spec: Sizes) -> int:
    """Bytes per row during attention: the layer's input, q, k, v, output; GPT-2's normed input."""
    inputs = 1 if spec.is_gated else 2
    return (inputs * spec.hidden_size + 2 * spec.query_size + 2 * spec.kv_size) * spec.item_bytes


def _mlp_row_bytes(spec: Sizes) -> int:
    """Bytes per row in the MLP: the layer's input, its sum with attention's output, the normed sum.

    Inner rows come on top: gate and up, whose product takes the place of one. GPT-2 keeps
    attention's output too, and its GELU holds four inner rows at once; OPT's ReLU holds two,
    without the normed sum.
    """
    hidden, inner = spec.hidden_size, spec.intermediate_size
    if spec.is_gated:
        return (3 * hidden + 2 * inner) * spec.item_bytes
    if spec.activation == "gelu_new":
        return 4 * (hidden + inner) * spec.item_bytes
    return max(3 * hidden + inner, 2 * hidden + 2 * inner) * spec.item_bytes


def _attended_bytes(
    spec: Sizes, slices: Sequence[tuple[int, int]], decodes: int, page_tokens: int
) -> int:
    """Peak bytes of attention, job by job, beside the rows of all jobs.

    Slices (tokens, context) come before decodes. A slice takes its gathered pages (none where a
    prompt starts), its output and a float32 sum per row and head. The outputs of decodes are kept
    until the last decode.
    """
    output, sums = spec.query_size * spec.item_bytes, 4 * spec.num_heads
    page_bytes = 2 * spec.kv_size * spec.item_bytes * page_tokens
    peak = decodes * output + sums if decodes else 0
    for n, c in slices:
        pages = -(-(n + c) // page_tokens) if c else 0
        peak = max(peak, pages * page_bytes + n * (output + sums))
    return peak
