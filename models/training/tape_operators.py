"""What each operator of torch makes, saves and takes in its backward, after derivatives.yaml.

An input is saved where the gradient of another needs it. Elementwise products, powers and means
make one tensor per gradient, of the size of the result, before it is summed down to the input.
"""

from __future__ import annotations

from models.training.tape import PART, SAME, Storage, Tape, Value

WIDE_BYTES = 4  # float32: norms and losses are computed in it
INDEX_BYTES = 8


def _if_wanted(by: Value, kept: Value) -> Storage | None:
    return kept.storage if by.edge else None


def cast(tape: Tape, x: Value, item_bytes: int) -> Value:
    """The same tensor where it has that type already."""
    if x.item_bytes == item_bytes:
        return x
    return tape.make(x.elements, item_bytes, (x,), (x.nbytes,))


def copy(tape: Tape, x: Value) -> Value:
    """Also: negated, or times a number."""
    return tape.make(x.elements, x.item_bytes, (x,), (x.nbytes,))


def plus(tape: Tape, x: Value, y: Value) -> Value:
    """The sum; the smaller one is repeated."""
    return tape.make(max(x.elements, y.elements), x.item_bytes, (x, y), (SAME, SAME))


def plus_number(tape: Tape, x: Value) -> Value:
    """Its gradient is that of the sum."""
    return tape.make(x.elements, x.item_bytes, (x,), (SAME,))


def times(tape: Tape, x: Value, y: Value) -> Value:
    """The product; the smaller one is repeated."""
    elements = max(x.elements, y.elements)
    item_bytes = max(x.item_bytes, y.item_bytes)
    size = elements * item_bytes
    saved = (_if_wanted(y, x), _if_wanted(x, y))
    return tape.make(elements, item_bytes, (x, y), (size, size), saved)


def power(tape: Tape, x: Value) -> Value:
    """By a number: grad * (n * x ** (n - 1)) has two tensors beside its result."""
    return tape.make(
        x.elements, x.item_bytes, (x,), (x.nbytes,), (x.storage,), (x.nbytes, x.nbytes)
    )


def mean(tape: Tape, x: Value, width: int) -> Value:
    """Over the last `width` numbers."""
    return tape.make(x.elements // width, x.item_bytes, (x,), (x.nbytes,))


def rsqrt(tape: Tape, x: Value) -> Value:
    """-grad / 2 * result ** 3 has two tensors beside its result."""
    beside = (x.nbytes, x.nbytes)
    return tape.make(x.elements, x.item_bytes, (x,), (x.nbytes,), scratch=beside, saves_result=True)


def silu(tape: Tape, x: Value) -> Value:
    """Its backward needs its input."""
    return tape.make(x.elements, x.item_bytes, (x,), (x.nbytes,), (x.storage,))


def by_result(tape: Tape, x: Value) -> Value:
    """What it returns is all that its backward needs."""
    return tape.make(x.elements, x.item_bytes, (x,), (x.nbytes,), saves_result=True)


tanh = relu = softmax = log_softmax = by_result


def half(tape: Tape, x: Value) -> Value:
    """A slice; its gradient lies in zeros of the size of the whole."""
    return tape.make(x.elements // 2, x.item_bytes, (x,), (x.nbytes,), view_of=x)


def concatenated(tape: Tape, x: Value, y: Value) -> Value:
    """Gradients are views of that of the whole."""
    return tape.make(x.elements + y.elements, x.item_bytes, (x, y), (PART, PART))


def contiguous(tape: Tape, x: Value) -> Value:
    """A copy in another order; its gradient is that of the original."""
    return tape.make(x.elements, x.item_bytes, (x,), (SAME,))


def relaid(tape: Tape, x: Value) -> Value:
    """A view whose gradient lies in another order, and is copied."""
    return tape.make(x.elements, x.item_bytes, (x,), (x.nbytes,), view_of=x)


def linear(tape: Tape, x: Value, weight: Value, bias: Value | None, rows: int) -> Value:
    """`weight` has one row or column per number of a row of x."""
    fan_out = weight.elements // (x.elements // rows)
    inputs = (x, weight) if bias is None else (x, weight, bias)
    makes = (x.nbytes, weight.nbytes, SAME)[: len(inputs)]
    saved = (_if_wanted(weight, x),)
    return tape.make(rows * fan_out, x.item_bytes, inputs, makes, saved)


def layer_norm(tape: Tape, x: Value, weight: Value, bias: Value, rows: int) -> Value:
    """Keeps a mean and a deviation per row beside its input."""
    stats = tape.storage(rows * x.item_bytes), tape.storage(rows * x.item_bytes)
    makes = (x.nbytes, weight.nbytes, bias.nbytes)
    return tape.make(x.elements, x.item_bytes, (x, weight, bias), makes, (x.storage, *stats))


def rms_norm(tape: Tape, x: Value, weight: Value) -> Value:
    """As Hugging Face writes it, in float32."""
    wide = cast(tape, x, WIDE_BYTES)
    variance = mean(tape, power(tape, wide), weight.elements)
    wide = times(tape, wide, rsqrt(tape, plus_number(tape, variance)))
    return times(tape, weight, cast(tape, wide, x.item_bytes))


def gelu_new(tape: Tape, x: Value) -> Value:
    """0.5 x (1 + tanh(c (x + 0.044715 x^3))), an operator each."""
    return times(
        tape,
        copy(tape, x),
        plus_number(tape, tanh(tape, copy(tape, plus(tape, x, copy(tape, power(tape, x)))))),
    )


def embedding(tape: Tape, weight: Value, elements: int, ids: Storage | None = None) -> Value:
    """Rows of a table. `ids` is named where this pass has made them itself."""
    return tape.make(elements, weight.item_bytes, (weight,), (weight.nbytes,), (ids,))


def dropout(tape: Tape, x: Value, probability: float) -> Value:
    """On a CPU: times a tensor of noise, which is kept. CUDA keeps a mask, a byte per number."""
    if not probability:
        return x
    return times(tape, x, tape.make(x.elements, x.item_bytes))


def flash_attention(tape: Tape, q: Value, k: Value, v: Value, rows: int, heads: int) -> Value:
    """The CPU's kernel: keeps all it has read, its result, and a float32 sum per row and head.

    CUDA's keeps the same, and the state of its generator for dropout.
    """
    sums = tape.storage(rows * heads * WIDE_BYTES)
    makes = (q.nbytes, k.nbytes, v.nbytes)
    saved = (q.storage, k.storage, v.storage, sums)
    return tape.make(
        q.elements, q.item_bytes, (q, k, v), makes, saved, saves_result=True, computes_all=True
    )


def math_attention(
    tape: Tape, q: Value, k: Value, v: Value, shape: tuple[int, int, int], probability: float
) -> Value:
    """What SDPA does on a CPU where there is dropout: a float32 score per head and pair of tokens.

    Kept: softmax, noise, their product, and all three inputs. `shape`: sequences, heads, tokens.
    """
    sequences, heads, tokens = shape
    is_grouped, many = k.elements < q.elements, sequences > 1 and heads > 1
    wide_q, wide_k, wide_v = (cast(tape, x, WIDE_BYTES) for x in (q, k, v))
    scaled = copy(tape, wide_q)
    mask = tape.make(tokens * tokens, WIDE_BYTES)
    keys = _repeated(tape, wide_k, q.elements) if is_grouped else wide_k
    values = _repeated(tape, wide_v, q.elements) if is_grouped else wide_v
    # Several sequences and several heads make one batch by a copy, unless they lie so already.
    copied = (many, many and not is_grouped)
    pairs = sequences * heads * tokens * tokens
    scores = _product(tape, scaled, copy(tape, keys), pairs, copied)
    scores = plus(tape, scores, mask)
    scores = softmax(tape, scores)
    scores = dropout(tape, scores, probability)
    # Scores are returned, too, in the dtype of q; nobody reads them.
    returned = scores if q.item_bytes == WIDE_BYTES else tape.make(pairs, q.item_bytes)
    result = _product(tape, scores, values, q.elements, (False, many and not is_grouped))
    result = relaid(tape, result) if many else result
    result = cast(tape, result, q.item_bytes)
    del returned  # not before
    return result


def _repeated(tape: Tape, x: Value, elements: int) -> Value:
    """Heads that several queries share, once for each."""
    return tape.make(elements, x.item_bytes, (x,), (x.nbytes,))


def _product(tape: Tape, x: Value, y: Value, elements: int, copied: tuple[bool, bool]) -> Value:
    """Of two batches of matrices; which of them had to be copied together."""
    left = contiguous(tape, x) if copied[0] else x
    right = contiguous(tape, y) if copied[1] else y
    saved = (_if_wanted(right, left), _if_wanted(left, right))
    makes = (left.nbytes, right.nbytes)
    return tape.make(elements, x.item_bytes, (left, right), makes, saved)


def cross_entropy(tape: Tape, logits: Value, rows: int, sequences: int) -> Value:
    """The mean loss of shifted labels."""
    wide = cast(tape, logits, WIDE_BYTES)
    padded = tape.storage((rows + sequences) * INDEX_BYTES)
    # Without the padding those of one sequence are contiguous as they are.
    labels = padded if sequences == 1 else tape.storage(rows * INDEX_BYTES)
    scores = log_softmax(tape, wide)
    count = tape.storage(WIDE_BYTES)
    return tape.make(1, WIDE_BYTES, (scores,), (scores.nbytes,), (scores.storage, labels, count))
