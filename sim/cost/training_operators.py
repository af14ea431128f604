"""Operators of training launches, the tables that a profile keeps for them, and their prices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from engine.contract.plan import Compute, Slice
from models.operators import Operator, elementwise, prefill_operator, product
from models.spec import ModelSpec
from sim.cost.training_launch import (
    ADAPTERS,
    AGAIN,
    BACKWARD,
    EMBEDDING,
    FORWARD,
    LAYER,
    LIGHT,
    UPDATE,
    Trained,
    is_light,
    trained_of,
)

Key = tuple[Any, ...]

# A fused backward of attention runs five products over the pairs where its forward runs two: the
# scores again, and gradients of queries, keys, values and probabilities (FlashAttention's count).
ATTENTION_BACKWARD = 2.5
# An elementwise backward reads the gradient and the saved input and writes a gradient: three passes
# for a forward's two. Where paths meet, gradients are added: about twice as much in all.
ELEMENTWISE_BACKWARD = 2
ACCUMULATION_PASSES = 3  # fresh gradients of weights are added to those of the step
ADAPTER_PASSES = 5  # an adapter's output is scaled (two passes) and added (three)


def training_operators(model: ModelSpec, launch: Trained) -> list[Operator]:
    """The kernels of training work: light forwards and recomputes are forwards, dropout is free.

    Args:
        model: the model; the dtype is the launch's.
        launch: the shape of the work.

    Returns:
        Operators with repeats, flops, bytes and size, as models.operators counts them.
    """
    spec = replace(model, dtype=launch.dtype)
    if launch.work == UPDATE:
        return [Operator("elementwise", 1, 0, launch.update_bytes, launch.elements)]
    if launch.kind == EMBEDDING:
        return list(_embedding(spec, launch))
    return [*_products(spec, launch), *_beside(spec, launch), *_accumulation(spec, launch)]


def _products(spec: ModelSpec, launch: Trained) -> Iterator[Operator]:
    """One product each forward. Backward one for the gradient of the inputs, unless nothing below
    trains, and one for the gradient of a matrix that trains."""
    is_backward = launch.work == BACKWARD
    kind = "linear" if launch.kind == LAYER else "head"
    for inputs, outputs, trains, reads_input in launch.products:
        needs_gradient = not (launch.is_lowest and reads_input)
        if repeats := needs_gradient + trains if is_backward else 1:
            yield product(spec, kind, repeats, launch.rows, inputs, outputs)


def _beside(spec: ModelSpec, launch: Trained) -> Iterator[Operator]:
    """Operators of a layer or the head beside products."""
    rows, item = launch.rows, spec.item_bytes
    more = ELEMENTWISE_BACKWARD if launch.work == BACKWARD else 1
    if launch.kind == LAYER:
        op = elementwise(spec, 1, rows, writes_kv=False)
        yield op._replace(repeats=more * op.repeats)
        yield _attention(spec, launch)
        if launch.trains == ADAPTERS:
            up = [p.outputs for p in launch.products if p.trains][1::2]  # down and up in turn
            moved = ADAPTER_PASSES * rows * sum(up) * item
            yield Operator("elementwise", more * 2 * len(up), 0, moved // (2 * len(up)), rows)
    else:
        yield Operator("elementwise", more, 0, 4 * rows * spec.hidden_size * item, rows)  # the norm
        yield _loss(spec, launch)


def _attention(spec: ModelSpec, launch: Trained) -> Operator:
    """Attention of all sequences in one kernel; its size is the side of a square of all pairs."""
    op, count = prefill_operator(spec, 1, launch.tokens, 0), launch.sequences
    work = count * (ATTENTION_BACKWARD if launch.work == BACKWARD else 1)
    return op._replace(
        flops=round(work * op.flops), nbytes=round(work * op.nbytes), size=op.size * count**0.5
    )


def _loss(spec: ModelSpec, launch: Trained) -> Operator:
    """Cross-entropy over the logits in float32, as Hugging Face computes it.

    Forward: a cast of narrower logits, and the log-softmax. Backward: zeros with one gradient per
    row, the softmax's gradient from both, and the cast back.
    """
    cast = 0 if spec.item_bytes == 4 else 4 + spec.item_bytes
    number = cast + (4 + 12 if launch.work == BACKWARD else 8)
    kernels = 3 if cast else 2
    nbytes = launch.rows * spec.vocab_size * number // kernels
    return Operator("elementwise", kernels, 0, nbytes, launch.rows)


def _embedding(spec: ModelSpec, launch: Trained) -> Iterator[Operator]:
    """Rows are gathered and positions added; backward they are scattered into zeros."""
    rows, row_bytes = launch.rows, spec.hidden_size * spec.item_bytes
    tables = 1 if spec.is_gated else 2
    if launch.work != BACKWARD:
        kernels, passes = 2 * tables - 1, 2 * tables + 3 * (tables - 1)
        yield Operator("embed", kernels, 0, passes * rows * row_bytes // kernels, rows)
        return
    yield Operator("embed", tables, 0, 3 * rows * row_bytes, rows)
    zeros = launch.elements * spec.item_bytes
    yield Operator("elementwise", tables, 0, zeros // tables, rows)
    yield from _accumulation(spec, launch)


def _accumulation(spec: ModelSpec, launch: Trained) -> Iterator[Operator]:
    if launch.work == BACKWARD and launch.elements:
        tensors = max(1, sum(p.trains for p in launch.products))
        moved = ACCUMULATION_PASSES * launch.elements * spec.item_bytes
        yield Operator("elementwise", tensors, 0, moved // tensors, launch.rows)


ROWS, PAIRS = "by rows", "by pairs"
ANY = "any"  # a forward without adapters costs as much whether its unit trains or not
LIKE = {LIGHT: (FORWARD, AGAIN), AGAIN: (FORWARD, LIGHT), FORWARD: (AGAIN, LIGHT)}

Terms = list[tuple[str, tuple[int, ...]]]


def training_terms(launch: Trained) -> Terms:
    """The tables whose values add up to a launch's duration, with the point in each.

    A unit's work has a table by rows. A layer also has one by pairs of queries and keys (sequences
    times their length squared), which is a straight line. An update has a straight line by bytes.

    Args:
        launch: the shape of the work.

    Returns:
        (name of table, point) pairs.
    """
    if launch.work == UPDATE:
        return [(f"{launch.dtype} {launch.group}", (launch.update_bytes,))]
    matters = launch.work == BACKWARD or launch.trains == ADAPTERS
    what = f"lowest {launch.trains}" if launch.is_lowest else launch.trains
    name = f"{launch.dtype} {what if matters else ANY} {launch.group}"
    found: Terms = [(f"{name} {ROWS}", (launch.rows,))]
    if launch.kind == LAYER:
        found.append((f"{name} {PAIRS}", (launch.sequences * launch.tokens**2,)))
    return found


def is_straight(name: str) -> bool:
    """Whether a table is a straight line from 0 to the largest point that was seen.

    Args:
        name: name of a table, as `training_terms` gives it.

    Returns:
        True for tables by pairs and of updates.
    """
    return name.endswith(PAIRS) or f" {UPDATE} " in name


def is_of_training(name: str) -> bool:
    """Whether a table is one of training.

    Args:
        name: name of any table of a profile.

    Returns:
        True for names that `training_terms` gives.
    """
    return name.endswith((ROWS, PAIRS)) or is_straight(name)


def likenesses(launch: Trained) -> Iterator[Trained]:
    """Launches whose price may stand in for a launch that was not calibrated.

    All forwards compute alike. The backward of the lowest unit with adapters lacks little of
    that of the other units.

    Args:
        launch: the shape of the work.

    Yields:
        The launch itself, then its substitutes, the nearest first.
    """
    yield launch
    if launch.work == BACKWARD and launch.trains == ADAPTERS:
        yield launch._replace(is_lowest=not launch.is_lowest)
    for work in LIKE.get(launch.work, ()):
        yield launch._replace(work=work)


class Prices:
    """Durations and traffic of training slices, each looked up once.

    The key holds all that a price depends on. It names the job by its own progress: a job of
    another run may have an equal id.
    """

    def __init__(self, model: ModelSpec, price: Callable[[Trained], int]) -> None:
        """A memory of one cost model.

        Args:
            model: the model that the jobs train.
            price: nanoseconds of one unit's work or one chunk's update.
        """
        self._model, self._price = model, price
        self._ns: dict[Key, int] = {}
        self._moved: dict[Key, int] = {}

    def ns(self, op: Compute, piece: Slice) -> int:
        """Duration of a training slice.

        Args:
            op: the operation that holds the slice.
            piece: the slice.

        Returns:
            Nanoseconds, summed over its units or chunks.

        Raises:
            ValueError: the slice has no price, see `trained_of` and the cost model.
        """
        key = _key(op, piece)
        ns = self._ns.get(key)
        if ns is None:
            found = trained_of(op, piece, self._model)
            ns = self._ns[key] = sum(self._price(trained) for trained in found)
        return ns

    def moved_bytes(self, op: Compute, piece: Slice) -> int:
        """Memory traffic of a training slice.

        Args:
            op: the operation that holds the slice.
            piece: the slice.

        Returns:
            Bytes that its kernels read and write.

        Raises:
            ValueError: the slice has no shape, see `trained_of`.
        """
        key = _key(op, piece)
        nbytes = self._moved.get(key)
        if nbytes is None:
            found = trained_of(op, piece, self._model)
            kernels = [k for trained in found for k in training_operators(self._model, trained)]
            nbytes = self._moved[key] = sum(k.repeats * k.nbytes for k in kernels)
        return nbytes


def _key(op: Compute, piece: Slice) -> Key:
    job, tokens, work, layers = piece[:4]
    return job.training, tokens, work, layers, op.on, op.again, is_light(op, piece)
