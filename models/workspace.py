"""What a launch allocates and gives back on a CPU, by arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Sizes(Protocol):
    """The sizes of a model that its workspaces follow from: a ModelSpec has them."""

    @property
    def family(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def is_gated(self) -> bool: ...
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


# Keys and values gathered at once. Less costs more calls; 4 MiB and more, beyond a core's caches,
# was slower for 64 decodes of mean 235 tokens (6.0 ms a layer at 64 MiB, 3.4 at 1, 4.1 one by one).
GATHER_BYTES = 1 << 20


def gathers(counts: Sequence[int], page_bytes: int) -> list[slice]:
    """Runs of neighbouring decodes whose pages, so many each, are gathered at once.

    A run takes at most GATHER_BYTES, or is a single decode. `page_bytes` are of one layer.
    """
    most, found, start, total = GATHER_BYTES // page_bytes, list[slice](), 0, 0
    for stop, count in enumerate(counts):
        if total + count > most and stop > start:
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
    """Peak of what a greedy launch without autograd allocates and gives back on a CPU.

    `tokens` and `contexts` (tokens in KV before) are per slice. The largest of four moments of
    runtime/serving/gated.py, or of the modules of transformers 5 for GPT-2 and OPT, around
    runtime/serving/attention.py, where T rows run together. Beside each but the head lie what all
    layers share: cosines and sines of the T rows (where positions are rotated), the place for
    gathered pages of decodes and, per slice of several tokens behind a context, a mask of the size
    of a number. Equal to what runtime/measure/tracker.py counts (tests/models/test_workspace.py),
    but for a few numbers per row.
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
    # The last layer's rows; of the sampled ones the norm and the logits.
    head = (rows * spec.hidden_size + samples * (spec.hidden_size + spec.vocab_size)) * item
    return shared + max(layers + masks + gathered * page_bytes, head)


def _projection_row_bytes(spec: Sizes) -> int:
    """Before attention: the layer's input and q, k, v, with either of three beside them.

    The normed input; q and k with their halves swapped; and, where heads are normed (Qwen3), the
    squares of q and k in float32, beside their float32 copies if they are not. GPT-2 and OPT hold
    nothing here that attention and MLP do not exceed.
    """
    if not spec.is_gated:
        return 0
    turned = spec.query_size + spec.kv_size
    beside = max(spec.hidden_size, turned) * spec.item_bytes
    if spec.family == "qwen3":
        beside = max(beside, 4 * turned * (1 if spec.dtype == "float32" else 2))
    return (spec.hidden_size + spec.query_size + 2 * spec.kv_size) * spec.item_bytes + beside


def _held_row_bytes(spec: Sizes) -> int:
    """While jobs are attended: the layer's input, q, k, v and the output; GPT-2's normed input."""
    inputs = 1 if spec.is_gated else 2
    return (inputs * spec.hidden_size + 2 * spec.query_size + 2 * spec.kv_size) * spec.item_bytes


def _mlp_row_bytes(spec: Sizes) -> int:
    """The layer's input, its sum with attention's output, the normed sum, and the inner rows.

    Inner rows: gate and up, of which the product takes the place. GPT-2 keeps attention's output
    too, and its GELU holds four inner rows at once; OPT's ReLU two, without the normed sum.
    """
    hidden, inner = spec.hidden_size, spec.intermediate_size
    if spec.is_gated:
        return (3 * hidden + 2 * inner) * spec.item_bytes
    if spec.family == "gpt2":
        return 4 * (hidden + inner) * spec.item_bytes
    return max(3 * hidden + inner, 2 * hidden + 2 * inner) * spec.item_bytes


def _attended_bytes(
    spec: Sizes, slices: Sequence[tuple[int, int]], decodes: int, page_tokens: int
) -> int:
    """What attending job by job takes at its peak, beside the rows of all.

    Slices (tokens, context) come first. Each takes its gathered pages (none where a prompt starts),
    its own output and a float32 sum per row and head; the outputs of decodes are kept until the
    last.
    """
    output, sums = spec.query_size * spec.item_bytes, 4 * spec.num_heads
    page_bytes = 2 * spec.kv_size * spec.item_bytes * page_tokens
    most = decodes * output + sums if decodes else 0
    for n, c in slices:
        pages = -(-(n + c) // page_tokens) if c else 0
        most = max(most, pages * page_bytes + n * (output + sums))
    return most
