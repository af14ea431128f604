"""What each operator of torch allocates, saves, and takes in its backward.

The source is torch's derivatives.yaml. An input is saved where the gradient of another input needs
it. The backwards of elementwise products, powers and means allocate one tensor per gradient, of the
size of the result, and then sum it down to the size of the input.

A tensor has its size in `elements` and `item_bytes`; the shapes [...] below say what these count.
"""

from __future__ import annotations

from models.training.tape import PART, SAME, Storage, Tape, Value

WIDE_BYTES = 4  # float32: norms and losses are computed in it
INDEX_BYTES = 8


def _saved_for(receiver: Value, factor: Value) -> Storage | None:
    """The storage of a factor that the gradient of `receiver` needs; None where it needs none."""
    return factor.storage if receiver.edge else None


def cast(tape: Tape, x: Value, item_bytes: int) -> Value:
    """A conversion to a type of `item_bytes`; x itself where it has that type already.

    Args:
        tape: Records the operator.
        x: The input.
        item_bytes: Bytes of one number of the result.

    Returns:
        The converted tensor, of as many numbers.
    """
    if x.item_bytes == item_bytes:
        return x
    return tape.make(x.elements, item_bytes, (x,), (x.nbytes,))


def copy(tape: Tape, x: Value) -> Value:
    """A copy, a negation, or a product with a number.

    Args:
        tape: Records the operator.
        x: The input.

    Returns:
        A tensor of the size of x.
    """
    return tape.make(x.elements, x.item_bytes, (x,), (x.nbytes,))


def plus(tape: Tape, x: Value, y: Value) -> Value:
    """The sum; the smaller input is broadcast.

    Args:
        tape: Records the operator.
        x: An input; the result has its type.
        y: The other input.

    Returns:
        A tensor of as many numbers as the larger input.
    """
    return tape.make(max(x.elements, y.elements), x.item_bytes, (x, y), (SAME, SAME))


def plus_number(tape: Tape, x: Value) -> Value:
    """The sum with a number; it passes its gradient on.

    Args:
        tape: Records the operator.
        x: The input.

    Returns:
        A tensor of the size of x.
    """
    return tape.make(x.elements, x.item_bytes, (x,), (SAME,))


def times(tape: Tape, x: Value, y: Value) -> Value:
    """The elementwise product; the smaller input is broadcast.

    Args:
        tape: Records the operator.
        x: A factor.
        y: The other factor.

    Returns:
        A tensor of as many numbers as the larger factor, in the wider type of both.
    """
    elements = max(x.elements, y.elements)
    item_bytes = max(x.item_bytes, y.item_bytes)
    size = elements * item_bytes
    saved = (_saved_for(y, x), _saved_for(x, y))
    return tape.make(elements, item_bytes, (x, y), (size, size), saved)


def power(tape: Tape, x: Value) -> Value:
    """x to a number; grad * (n * x ** (n - 1)) has two tensors beside its result.

    Args:
        tape: Records the operator.
        x: The base.

    Returns:
        A tensor of the size of x.
    """
    return tape.make(
        x.elements, x.item_bytes, (x,), (x.nbytes,), (x.storage,), (x.nbytes, x.nbytes)
    )


def mean(tape: Tape, x: Value, width: int) -> Value:
    """The mean over the last dimension, of `width` numbers.

    Args:
        tape: Records the operator.
        x: The input [..., width].
        width: Numbers of its last dimension.

    Returns:
        A tensor with one number per row, in the type of x.
    """
    return tape.make(x.elements // width, x.item_bytes, (x,), (x.nbytes,))


def rsqrt(tape: Tape, x: Value) -> Value:
    """1 / sqrt(x); -grad / 2 * result ** 3 has two tensors beside its result.

    Args:
        tape: Records the operator.
        x: The input.

    Returns:
        A tensor of the size of x.
    """
    beside = (x.nbytes, x.nbytes)
    return tape.make(x.elements, x.item_bytes, (x,), (x.nbytes,), scratch=beside, saves_result=True)


def silu(tape: Tape, x: Value) -> Value:
    """x * sigmoid(x); the backward reads the input.

    Args:
        tape: Records the operator.
        x: The input.

    Returns:
        A tensor of the size of x.
    """
    return tape.make(x.elements, x.item_bytes, (x,), (x.nbytes,), (x.storage,))


def by_result(tape: Tape, x: Value) -> Value:
    """An elementwise operator whose backward reads the result alone.

    Args:
        tape: Records the operator.
        x: The input.

    Returns:
        A tensor of the size of x.
    """
    return tape.make(x.elements, x.item_bytes, (x,), (x.nbytes,), saves_result=True)


tanh = relu = softmax = log_softmax = by_result


def half(tape: Tape, x: Value) -> Value:
    """One half of a tensor as a view; its gradient lies in zeros of the size of the whole.

    Args:
        tape: Records the operator.
        x: The whole.

    Returns:
        A view of half of its numbers.
    """
    return tape.make(x.elements // 2, x.item_bytes, (x,), (x.nbytes,), view_of=x)


def concatenated(tape: Tape, x: Value, y: Value) -> Value:
    """Two tensors joined; their gradients are views of the gradient of the whole.

    Args:
        tape: Records the operator.
        x: The first part; the result has its type.
        y: The second part.

    Returns:
        A tensor of the numbers of both.
    """
    return tape.make(x.elements + y.elements, x.item_bytes, (x, y), (PART, PART))


def contiguous(tape: Tape, x: Value) -> Value:
    """A copy in another memory order; it passes its gradient on.

    Args:
        tape: Records the operator.
        x: The input.

    Returns:
        A tensor of the size of x.
    """
    return tape.make(x.elements, x.item_bytes, (x,), (SAME,))


def relaid(tape: Tape, x: Value) -> Value:
    """A view in another memory order; its gradient is copied back.

    Args:
        tape: Records the operator.
        x: The input.

    Returns:
        A view of all its numbers.
    """
    return tape.make(x.elements, x.item_bytes, (x,), (x.nbytes,), view_of=x)


def linear(tape: Tape, x: Value, weight: Value, bias: Value | None, rows: int) -> Value:
    """x times a weight [fan-out, fan-in] or its transpose, plus a bias.

    Args:
        tape: Records the operator.
        x: The input [rows, fan-in].
        weight: The matrix.
        bias: [fan-out]; None for a product alone.
        rows: Tokens of the microbatch.

    Returns:
        The product [rows, fan-out], in the type of x.
    """
    fan_out = weight.elements // (x.elements // rows)
    inputs = (x, weight) if bias is None else (x, weight, bias)
    makes = (x.nbytes, weight.nbytes, SAME)[: len(inputs)]
    saved = (_saved_for(weight, x),)
    return tape.make(rows * fan_out, x.item_bytes, inputs, makes, saved)


def layer_norm(tape: Tape, x: Value, weight: Value, bias: Value, rows: int) -> Value:
    """torch's layer_norm; it saves a mean and a deviation per row beside its input.

    Args:
        tape: Records the operator.
        x: The input [rows, width].
        weight: [width].
        bias: [width].
        rows: Tokens of the microbatch.

    Returns:
        The normed tensor [rows, width].
    """
    stats = tape.storage(rows * x.item_bytes), tape.storage(rows * x.item_bytes)
    makes = (x.nbytes, weight.nbytes, bias.nbytes)
    return tape.make(x.elements, x.item_bytes, (x, weight, bias), makes, (x.storage, *stats))


def rms_norm(tape: Tape, x: Value, weight: Value) -> Value:
    """RMSNorm as Hugging Face composes it, in float32.

    Args:
        tape: Records the operator.
        x: The input [..., width].
        weight: [width].

    Returns:
        The normed tensor [..., width], in the wider type of x and weight.
    """
    wide = cast(tape, x, WIDE_BYTES)
    variance = mean(tape, power(tape, wide), weight.elements)
    wide = times(tape, wide, rsqrt(tape, plus_number(tape, variance)))
    return times(tape, weight, cast(tape, wide, x.item_bytes))


def gelu_new(tape: Tape, x: Value) -> Value:
    """0.5 x (1 + tanh(c (x + 0.044715 x^3))), composed of one operator each.

    Args:
        tape: Records the operator.
        x: The input.

    Returns:
        A tensor of the size of x.
    """
    return times(
        tape,
        copy(tape, x),
        plus_number(tape, tanh(tape, copy(tape, plus(tape, x, copy(tape, power(tape, x)))))),
    )


def embedding(tape: Tape, weight: Value, elements: int, ids: Storage | None = None) -> Value:
    """Rows of a table; `ids` are saved where the forward has made them itself.

    Args:
        tape: Records the operator.
        weight: The table [entries, width].
        elements: Numbers of the result: rows times width.
        ids: The indices that pick the rows; None where they exist before the forward.

    Returns:
        The rows [rows, width], in the type of the table.
    """
    return tape.make(elements, weight.item_bytes, (weight,), (weight.nbytes,), (ids,))


def dropout(tape: Tape, x: Value, probability: float) -> Value:
    """On a CPU a product with a tensor of noise, which is saved; x itself at probability 0.

    CUDA saves a mask instead, a byte per number.

    Args:
        tape: Records the operator.
        x: The input.
        probability: Share of the numbers that become 0.

    Returns:
        A tensor of the size of x.
    """
    if not probability:
        return x
    return times(tape, x, tape.make(x.elements, x.item_bytes))


def flash_attention(tape: Tape, q: Value, k: Value, v: Value, rows: int, heads: int) -> Value:
    """The CPU's flash kernel: it saves q, k, v, its result, and a float32 sum per row and head.

    CUDA's kernel saves the state of its random generator too.

    Args:
        tape: Records the operator.
        q: Queries [rows, heads * head size].
        k: Keys [rows, KV heads * head size].
        v: Values, of the size of k.
        rows: Tokens of the microbatch.
        heads: Query heads.

    Returns:
        The attended values, of the size of q.
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
    """SDPA on a CPU with dropout: a float32 score per head and pair of tokens.

    It saves softmax, noise, their product, and q, k and v.

    Args:
        tape: Records the operator.
        q: Queries [sequences * tokens, heads * head size].
        k: Keys [sequences * tokens, KV heads * head size].
        v: Values, of the size of k.
        shape: Sequences, query heads, and tokens of a sequence.
        probability: Share of the scores that dropout makes 0.

    Returns:
        The attended values, of the size and type of q.
    """
    sequences, heads, tokens = shape
    is_grouped, many = k.elements < q.elements, sequences > 1 and heads > 1
    wide_q, wide_k, wide_v = (cast(tape, x, WIDE_BYTES) for x in (q, k, v))
    scaled = copy(tape, wide_q)
    mask = tape.make(tokens * tokens, WIDE_BYTES)
    keys = _repeated(tape, wide_k, q.elements) if is_grouped else wide_k
    values = _repeated(tape, wide_v, q.elements) if is_grouped else wide_v
    # Several sequences and several heads make one batch by a copy, unless their memory order fits.
    copied = (many, many and not is_grouped)
    pairs = sequences * heads * tokens * tokens
    scores = _product(tape, scaled, copy(tape, keys), pairs, copied)
    scores = plus(tape, scores, mask)
    scores = softmax(tape, scores)
    scores = dropout(tape, scores, probability)
    # SDPA's math path returns the scores too, in the dtype of q; no caller reads them.
    returned = scores if q.item_bytes == WIDE_BYTES else tape.make(pairs, q.item_bytes)
    result = _product(tape, scores, values, q.elements, (False, many and not is_grouped))
    result = relaid(tape, result) if many else result
    result = cast(tape, result, q.item_bytes)
    del returned  # they live up to here, as in torch
    return result


def _repeated(tape: Tape, x: Value, elements: int) -> Value:
    """KV heads, repeated for each query head that shares them."""
    return tape.make(elements, x.item_bytes, (x,), (x.nbytes,))


def _product(tape: Tape, x: Value, y: Value, elements: int, copied: tuple[bool, bool]) -> Value:
    """The product of two batches of matrices; `copied` says which are copied into a batch first."""
    left = contiguous(tape, x) if copied[0] else x
    right = contiguous(tape, y) if copied[1] else y
    saved = (_saved_for(right, left), _saved_for(left, right))
    makes = (left.nbytes, right.nbytes)
    return tape.make(elements, x.item_bytes, (left, right), makes, saved)


def cross_entropy(tape: Tape, logits: Value, rows: int, sequences: int) -> Value:
    """The mean cross-entropy of shifted labels.

    Args:
        tape: Records the operator.
        logits: [rows, vocabulary].
        rows: Tokens of the microbatch.
        sequences: Sequences of the microbatch.

    Returns:
        The loss: one number of float32.
    """
    wide = cast(tape, logits, WIDE_BYTES)
    padded = tape.storage((rows + sequences) * INDEX_BYTES)
    # The labels of one sequence are contiguous without the padding; those of several are copied.
    labels = padded if sequences == 1 else tape.storage(rows * INDEX_BYTES)
    scores = log_softmax(tape, wide)
    count = tape.storage(WIDE_BYTES)
    return tape.make(1, WIDE_BYTES, (scores,), (scores.nbytes,), (scores.storage, labels, count))
