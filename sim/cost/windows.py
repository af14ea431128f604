"""Shapes and operators of finetuning by windows: what their durations depend on."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from engine.contract.plan import Slice
from engine.contract.regions import Work
from models.operators import Operator, elementwise, matrices, prefill_operator, product
from models.parameters import model_parameters
from models.spec import ModelSpec
from models.training.kept import SUM_BYTES, kept_token_bytes
from sim.cost.training_launch import ADAPTERS, FULL
from traces.training.recipe import Recipe

# A fused backward of attention runs five products over the pairs where its forward runs two: the
# scores again, and gradients of queries, keys, values and probabilities (FlashAttention's count).
ATTENTION_BACKWARD = 2.5
# Elementwise work is done again from what was kept, and its backward moves twice as much.
ELEMENTWISE_BACKWARD = 3
ADAPTER_PASSES = 5  # an adapter's output is scaled (two passes) and added (three)
LOSS_BYTES = 8 + 12  # per logit in float32: the log-softmax, then its gradient


class WindowShape(NamedTuple):
    """A window of a sample, forward or back.

    work      forward or backward
    layers    decoder layers that it goes through
    tokens    tokens of the window
    context   tokens of the sample before it
    labels    rows that the head makes a loss of; 0 without the head
    trains    full, or adapters
    rank      of the adapters; else 0
    adapted   (inputs, outputs) of the products of a layer that have adapters
    again     layers whose forward is repeated, since they keep their inputs alone
    kept      bytes that a token keeps in a layer
    """

    work: str
    layers: int
    tokens: int
    context: int
    labels: int
    trains: str
    rank: int
    adapted: tuple[tuple[int, int], ...]
    again: int
    kept: int


def window_of(piece: Slice, context: int, model: ModelSpec) -> WindowShape:
    """The window of a finetuning slice.

    Args:
        piece: a slice of a job that finetunes, forward or back.
        context: the first token of its window in the sample.
        model: the model that the job trains.

    Returns:
        Its shape.

    Raises:
        ValueError: the job has other units than the model.
    """
    training = piece.job.training
    assert training is not None and piece.layers is not None, "a window of a finetuning job"
    spec, units = training.spec, piece.layers
    if spec.num_units != model.num_layers + 2:
        raise ValueError(
            f"training job {spec.job_id} has {spec.num_units} units, but {model.name} has "
            f"{model.num_layers + 2}: embedding, {model.num_layers} layers and head"
        )
    layers = len(range(max(units.start, 1), min(units.stop, spec.num_units - 1)))
    labels, again, kept = 0, 0, kept_token_bytes(model, spec.recipe)
    if piece.work is Work.FORWARD and units.stop == spec.num_units:
        labels = spec.sample(piece.microbatch).labels(context, context + piece.tokens)
    if training.layout is not None and training.layout.windows is not None:
        sizes = training.layout.windows.kept
        again = sum([sizes[u] < kept for u in units if 0 < u < spec.num_units - 1])
    adapted = _adapted(model, spec.recipe)
    trains, rank = (ADAPTERS, spec.recipe.lora_rank) if adapted else (FULL, None)
    return WindowShape(
        piece.work.value,
        layers,
        piece.tokens,
        context,
        labels,
        trains,
        rank or 0,
        adapted,
        again,
        kept,
    )


@lru_cache(maxsize=64)
def _adapted(model: ModelSpec, recipe: Recipe) -> tuple[tuple[int, int], ...]:
    """Inputs and outputs of the products of a layer that have adapters."""
    parameters, units = model_parameters(model, recipe)
    own = [parameters[p] for p in units[model.num_layers]]
    downs = [p for p in own if ".lora_A." in p.name]
    ups = [p for p in own if ".lora_B." in p.name]
    return tuple([(a.shape[1], b.shape[0]) for a, b in zip(downs, ups, strict=True)])


def extra_operators(model: ModelSpec, window: WindowShape) -> list[Operator]:
    """The kernels of a window forward beyond those of serving its tokens.

    Adapters, what is kept, and the loss with the gradient of the head's input.

    Args:
        model: the model in the dtype that it trains in.
        window: a window forward.

    Returns:
        Operators, as models.operators counts them.
    """
    rows, item = window.tokens, model.item_bytes
    ops = [*_adapters(model, window, 1)]
    ops.append(Operator("elementwise", window.layers, 0, rows * window.kept, rows))
    if window.labels:
        labels, hidden, vocabulary = window.labels, model.hidden_size, model.vocab_size
        ops.append(Operator("elementwise", 4, 0, labels * vocabulary * LOSS_BYTES // 4, labels))
        times = 2 if window.trains == FULL else 1  # the gradient of the head's weights, too
        ops.append(product(model, "head", times, labels, vocabulary, hidden))
        ops.append(Operator("elementwise", 1, 0, 6 * rows * hidden * item, rows))  # the norm
    return ops


def backward_operators(model: ModelSpec, window: WindowShape) -> list[Operator]:
    """The kernels of a window back.

    Each frozen product gives the gradient of its input, a trained one that of its weights as well.

    Args:
        model: the model in the dtype that it trains in.
        window: a window back.

    Returns:
        Operators, as models.operators counts them.
    """
    rows, item, layers = window.tokens, model.item_bytes, window.layers
    times = 2 if window.trains == FULL else 1
    ops = [product(model, "linear", times * layers, rows, *shape) for shape in matrices(model)]
    if window.again:
        again = [product(model, "linear", window.again, rows, *s) for s in matrices(model)]
        ops += [*again, prefill_operator(model, window.again, rows, window.context)]
    own = elementwise(model, layers, rows, writes_kv=False)
    ops.append(own._replace(repeats=ELEMENTWISE_BACKWARD * own.repeats))
    attends = prefill_operator(model, layers, rows, window.context)
    ops.append(
        attends._replace(
            flops=round(ATTENTION_BACKWARD * attends.flops),
            nbytes=round(ATTENTION_BACKWARD * attends.nbytes),
        )
    )
    ops += _adapters(model, window, 2)
    summed = 3 * 2 * model.kv_size * SUM_BYTES * (window.context + rows)
    read = rows * (window.kept + 2 * model.hidden_size * item)
    ops.append(Operator("elementwise", layers, 0, read + (summed if window.context else 0), rows))
    if window.trains == FULL:
        moved = 3 * model.layer_matrix_parameters * SUM_BYTES
        ops.append(Operator("elementwise", layers, 0, moved, rows))
    return ops


def _adapters(model: ModelSpec, window: WindowShape, times: int) -> Iterator[Operator]:
    """Both products of each adapter, and the passes over its output."""
    rows, rank = window.tokens, window.rank
    for inputs, outputs in window.adapted:
        yield product(model, "linear", times * window.layers, rows, inputs, rank)
        yield product(model, "linear", times * window.layers, rows, rank, outputs)
        moved = ADAPTER_PASSES * rows * outputs * model.item_bytes
        yield Operator("elementwise", times * window.layers, 0, moved, rows)
