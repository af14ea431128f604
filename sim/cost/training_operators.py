"""What a training launch computes and moves, operator by operator, and the tables of its cost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

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
)

# A fused backward of attention runs five products over the pairs where its forward runs two: the
# scores again, and gradients of queries, keys, values and probabilities (FlashAttention's count).
ATTENTION_BACKWARD = 2.5
# An elementwise backward reads the gradient and what was saved and writes a gradient, three passes
# for a forward's two, and where paths meet gradients are added: about twice as much in all.
ELEMENTWISE_BACKWARD = 2
ACCUMULATION_PASSES = 3  # fresh gradients of weights are added to those of the step
ADAPTER_PASSES = 5  # its output is scaled and added: two passes, and three


def training_operators(model: ModelSpec, launch: Trained) -> list[Operator]:
    """All kernels of a launch. Light forwards and recomputes are forwards; dropout is left out."""
    spec = replace(model, dtype=launch.dtype)
    if launch.work == UPDATE:
        return [Operator("elementwise", 1, 0, launch.update_bytes, launch.elements)]
    if launch.kind == EMBEDDING:
        return list(_embedding(spec, launch))
    return [*_products(spec, launch), *_beside(spec, launch), *_accumulation(spec, launch)]


def _products(spec: ModelSpec, launch: Trained) -> Iterator[Operator]:
    """Forward once each; backward once for the inputs' gradient, if anything below wants it, and
    once more where it trains."""
    is_backward = launch.work == BACKWARD
    kind = "linear" if launch.kind == LAYER else "head"
    for inputs, outputs, trains, reads_input in launch.products:
        is_wanted = not (launch.is_lowest and reads_input)
        if repeats := is_wanted + trains if is_backward else 1:
            yield product(spec, kind, repeats, launch.rows, inputs, outputs)


def _beside(spec: ModelSpec, launch: Trained) -> Iterator[Operator]:
    """What a layer or the head does beside products."""
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
    """All sequences in one kernel: it fills a device as the square of as many pairs does."""
    op, count = prefill_operator(spec, 1, launch.tokens, 0), launch.sequences
    work = count * (ATTENTION_BACKWARD if launch.work == BACKWARD else 1)
    return op._replace(
        flops=round(work * op.flops), nbytes=round(work * op.nbytes), size=op.size * count**0.5
    )


def _loss(spec: ModelSpec, launch: Trained) -> Operator:
    """Cross-entropy over the logits in float32, as Hugging Face has it.

    Forward a cast where they are narrower, and the logarithms of their softmax; backward zeros
    with a gradient each, the softmax's gradient from both, and the cast back.
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
ANY = "any"  # a forward is the same whatever of its unit trains, but for adapters
LIKE = {LIGHT: (FORWARD, AGAIN), AGAIN: (FORWARD, LIGHT), FORWARD: (AGAIN, LIGHT)}

Terms = list[tuple[str, tuple[int, ...]]]


def training_terms(launch: Trained) -> Terms:
    """Tables with the points at which they add up to a launch's time.

    A unit's work by its rows and, in a layer, by its pairs of queries and keys (sequences times
    their length squared), where a straight line will do; an update by its bytes, straight as well.
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
    """Whether two values say all of a table: at nothing, and at the largest that was seen."""
    return name.endswith(PAIRS) or f" {UPDATE} " in name


def is_of_training(name: str) -> bool:
    """Whether a table is one of these."""
    return name.endswith((ROWS, PAIRS)) or is_straight(name)


def likenesses(launch: Trained) -> Iterator[Trained]:
    """What may be taken for a launch, itself first: all forwards compute the same, and the lowest
    adapters' backward lacks but a little of the others'."""
    yield launch
    if launch.work == BACKWARD and launch.trains == ADAPTERS:
        yield launch._replace(is_lowest=not launch.is_lowest)
    for work in LIKE.get(launch.work, ()):
        yield launch._replace(work=work)
