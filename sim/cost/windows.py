"""Shapes and operators of finetuning by windows: what their durations depend on."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from engine.contract.layout import TrainingLayout
from engine.contract.plan import Slice
from engine.contract.regions import Work
from models.operators import Operator, elementwise, matrices, prefill_operator, product
from models.parameters import model_parameters
from models.spec import ModelSpec
from models.training.kept import SUM_BYTES, kept_token_bytes
from sim.cost.training_launch import ADAPTERS, FULL
from sim.cost.training_operators import (
    ACCUMULATION_PASSES,
    ADAPTER_PASSES,
    ATTENTION_BACKWARD,
    PAIRS,
    ROWS,
    Terms,
)
from traces.serving.request import TrainingJob
from traces.training.recipe import Recipe

# Elementwise work is done again from what was kept, and its backward moves twice as much.
ELEMENTWISE_BACKWARD = 3
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
    is_part   whether it is a part of the sample, so that a backward sums gradients of KV
    embedding numbers of the embedding that the window back trains
    head      numbers of the head that the window forward trains
    ending    numbers of the sample whose gradients its last window adds to those of the step
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
    is_part: bool = False
    embedding: int = 0
    head: int = 0
    ending: int = 0

    @property
    def pairs(self) -> int:
        """Pairs of queries and keys of its attention."""
        return self.tokens * self.context + self.tokens * (self.tokens + 1) // 2

    @property
    def group(self) -> str:
        """The class under which errors are reported."""
        return f"window {self.work}"


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
    part = WindowPart(piece.work, piece.layers, piece.microbatch, piece.tokens, context)
    return shape_of(part, training.spec, training.layout, model)


class WindowPart(NamedTuple):
    """A window as a plan names it, and the first token of it in the sample."""

    work: Work
    units: range
    microbatch: int
    tokens: int
    context: int


def shape_of(
    part: WindowPart, job: TrainingJob, layout: TrainingLayout | None, model: ModelSpec
) -> WindowShape:
    """The shape of a window.

    Args:
        part: the window.
        job: the finetuning job.
        layout: its layout; None where nothing is laid out.
        model: the model that the job trains.

    Returns:
        All that its duration depends on.

    Raises:
        ValueError: the job has other units than the model.
    """
    work, units, microbatch, tokens, context = part
    if job.num_units != model.num_layers + 2:
        raise ValueError(
            f"training job {job.job_id} has {job.num_units} units, but {model.name} has "
            f"{model.num_layers + 2}: embedding, {model.num_layers} layers and head"
        )
    layers = range(max(units.start, 1), min(units.stop, job.num_units - 1))
    labels, again, kept = 0, 0, kept_token_bytes(model, job.recipe)
    if work is Work.FORWARD and units.stop == job.num_units:
        labels = job.sample(microbatch).loss_rows(context, context + tokens)
    if layout is not None and layout.windows is not None:
        again = sum([layout.windows.kept[unit] < kept for unit in layers])
    adapted = adapted_products(model, job.recipe)
    trains, rank = (ADAPTERS, job.recipe.lora_rank or 0) if adapted else (FULL, 0)
    trained = _trained(model, job.recipe)
    is_part = context > 0 or tokens < job.tokens_of(microbatch)
    embedding = head = ending = 0
    if labels:
        head = trained[-1]
    elif work is Work.BACKWARD:
        embedding = trained[0] if units.start == 0 else 0
        first = [count > 0 for count in trained].index(True)
        is_last = context == 0 and units.start == first
        ending = sum(trained) if is_last and job.microbatches > 1 else 0
    shape = (len(layers), tokens, context, labels)
    sums = (is_part, embedding, head, ending)
    return WindowShape(work.value, *shape, trains, rank, adapted, again, kept, *sums)


@lru_cache(maxsize=64)
def recorded_window(model: ModelSpec, recipe: Recipe) -> WindowShape:
    """The shape of a token of a prompt that is recorded while it is served.

    A layer that keeps its input alone is priced as one that keeps all.

    Args:
        model: the model that is served.
        recipe: of the adapter that the request runs through.

    Returns:
        A window of one token without labels; `tokens` and `context` are to be replaced.
    """
    kept, adapted = kept_token_bytes(model, recipe), adapted_products(model, recipe)
    shape = (Work.FORWARD.value, model.num_layers, 1, 0, 0)
    return WindowShape(*shape, ADAPTERS, recipe.lora_rank or 0, adapted, 0, kept)


@lru_cache(maxsize=64)
def _trained(model: ModelSpec, recipe: Recipe) -> tuple[int, ...]:
    """Numbers that train, by unit; a tied table counts in both of its units."""
    parameters, units = model_parameters(model, recipe)
    own = [[parameters[p] for p in unit] for unit in units]
    return tuple([sum([p.elements for p in unit if p.trains]) for unit in own])


@lru_cache(maxsize=64)
def adapted_products(model: ModelSpec, recipe: Recipe) -> tuple[tuple[int, int], ...]:
    """Inputs and outputs of the products of a layer that have adapters.

    Args:
        model: the model.
        recipe: its `lora_rank` and `lora_targets`.

    Returns:
        (inputs, outputs) pairs; () without adapters.
    """
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
        if window.head:
            ops.append(_accumulation(window.head, rows))
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
    ops.append(Operator("elementwise", layers, 0, read + (summed if window.is_part else 0), rows))
    if window.trains == FULL:
        ops.append(_accumulation(model.layer_matrix_parameters, rows)._replace(repeats=layers))
    if window.embedding:  # a fresh gradient of the whole table, of which few rows are not zero
        ops.append(Operator("elementwise", 1, 0, window.embedding * item, rows))
        ops.append(_accumulation(window.embedding, rows))
    if window.ending:
        ops.append(_accumulation(window.ending, rows))
    return ops


def _accumulation(numbers: int, rows: int) -> Operator:
    """Gradients that are added to sums of theirs."""
    return Operator("elementwise", 1, 0, ACCUMULATION_PASSES * numbers * SUM_BYTES, rows)


def _adapters(model: ModelSpec, window: WindowShape, times: int) -> Iterator[Operator]:
    """Both products of each adapter, and the passes over its output."""
    rows, rank = window.tokens, window.rank
    for inputs, outputs in window.adapted:
        yield product(model, "linear", times * window.layers, rows, inputs, rank)
        yield product(model, "linear", times * window.layers, rows, rank, outputs)
        moved = ADAPTER_PASSES * rows * outputs * model.item_bytes
        yield Operator("elementwise", times * window.layers, 0, moved, rows)


def extra_terms(window: WindowShape) -> Terms:
    """The tables whose values add up to what a window forward costs beyond serving its tokens.

    Args:
        window: a window forward.

    Returns:
        (name of table, point) pairs.
    """
    found: Terms = [(f"window {window.trains} {ROWS}", (window.tokens,))]
    if window.labels:
        found.append((f"window labels {ROWS}", (window.labels,)))
    return found


def back_terms(window: WindowShape) -> Terms:
    """The tables whose values add up to the duration of a window back: by layer, and embedding.

    Layers that repeat their forward have tables of their own.

    Args:
        window: a window back.

    Returns:
        (name of table, point) pairs.
    """
    found: Terms = []
    once = window.layers - window.again
    for how, layers in ((window.trains, once), (f"{window.trains} again", window.again)):
        rows, pairs = f"window back {how} {ROWS}", f"window back {how} {PAIRS}"
        found += [(rows, (window.tokens,)), (pairs, (window.pairs,))] * layers
    if window.embedding:
        found.append((f"window back embedding {ROWS}", (window.tokens,)))
    return found
