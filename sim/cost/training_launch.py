"""Shapes of training launches: all that their durations depend on."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from engine.contract.layout import TrainingLayout
from engine.contract.plan import COMPUTE_LANE, COMPUTE_LANES, Compute, Slice
from engine.contract.regions import Kind, Work
from models.parameters import Parameter, model_parameters
from models.spec import DTYPE_BYTES, ModelSpec
from traces.serving.request import TrainingJob
from traces.training.recipe import Recipe

FORWARD, LIGHT, AGAIN, BACKWARD, UPDATE = "forward", "light", "again", "backward", "update"
EMBEDDING, LAYER, HEAD, CHUNK = "embedding", "layer", "head", "chunk"
FULL, ADAPTERS, FROZEN = "full", "adapters", "frozen"
READERS = ("q_proj", "k_proj", "v_proj", "c_attn")  # products of a layer's normed input
STATES = {"adamw": 2, "sgd": 0}  # optimizer states per trained number; momentum adds one


class Product(NamedTuple):
    """A matrix of a unit, as rows are multiplied with it.

    inputs       length of a row before the product
    outputs      length of a row after it
    trains       whether its weights get a gradient
    reads_input  whether the rows are the unit's normed input
    """

    inputs: int
    outputs: int
    trains: bool
    reads_input: bool = False


class Trained(NamedTuple):
    """One unit's work on one microbatch, or the update of one chunk.

    work           forward; light: a forward that keeps nothing; again: recompute; backward; update
    kind           embedding, layer, head (with the loss), or chunk
    dtype          of weights and gradients
    sequences      sequences of the microbatch
    tokens         tokens of each sequence
    products       the unit's matrices, adapters among them
    elements       trained numbers of the unit, or of the chunk
    element_bytes  bytes that an update reads and writes per trained number
    lane           the lane that it runs on
    is_lowest      a backward of the lowest unit with adapters: nothing below it trains, so its
                   input needs no gradient (a layer that trains itself trains its first norm too,
                   which needs nearly that gradient)
    """

    work: str
    kind: str
    dtype: str
    sequences: int = 0
    tokens: int = 0
    products: tuple[Product, ...] = ()
    elements: int = 0
    element_bytes: int = 0
    lane: str = COMPUTE_LANE
    is_lowest: bool = False

    @property
    def rows(self) -> int:
        """Tokens of the microbatch."""
        return self.sequences * self.tokens

    @property
    def update_bytes(self) -> int:
        """Bytes that an update reads and writes."""
        return self.elements * self.element_bytes

    @property
    def trains(self) -> str:
        """The trained part of the unit: full, adapters (some of its products), or frozen."""
        found = {product.trains for product in self.products} or {self.elements > 0}
        return ADAPTERS if len(found) == 2 else FULL if found.pop() else FROZEN

    @property
    def group(self) -> str:
        """The class under which errors are reported."""
        return f"{self.kind} {self.work}" if self.work != UPDATE else f"update {self.lane}"


def trained_of(op: Compute, piece: Slice, model: ModelSpec) -> list[Trained]:
    """The shapes of a training slice: one per unit, or one per chunk of an update.

    Args:
        op: the operation that holds the slice.
        piece: the slice.
        model: the model that the job trains.

    Returns:
        Shapes in the order of units or chunks.

    Raises:
        ValueError: the job has other units than the model, or the slice is part of a microbatch.
    """
    training = piece.job.training
    assert training is not None, "a slice that serves"
    job, layout = training.spec, training.layout
    if piece.work is Work.UPDATE:
        chunks = piece.layers or training.trained_by
        return [update_of(model, job, layout, chunk, op.on) for chunk in chunks]
    if piece.tokens != job.microbatch_tokens:
        raise ValueError(
            f"training job {job.job_id}: {piece.tokens} of a microbatch's {job.microbatch_tokens} "
            "tokens have no price yet; take whole microbatches"
        )
    units = range(job.num_units) if piece.layers is None else piece.layers
    return [unit_of(model, job, unit, _work(op, piece), op.on) for unit in units]


def _work(op: Compute, piece: Slice) -> str:
    if piece.work is Work.BACKWARD:
        return BACKWARD
    return AGAIN if op.again else LIGHT if is_light(op, piece) else FORWARD


def is_light(op: Compute, piece: Slice) -> bool:
    """Whether a slice is a forward that keeps nothing for its backward.

    Args:
        op: the operation that holds the slice.
        piece: a training slice.

    Returns:
        True where a forward writes no activations but inputs of units.
    """
    assert piece.job.training is not None, "a slice that serves"
    if piece.work is not Work.FORWARD or op.again:
        return False
    units = piece.job.training.spec.num_units  # parts from here on are inputs of units
    regions = (place.region for place in op.writes)
    return not any([r.kind is Kind.ACTIVATION and r.part < units for r in regions])


def unit_of(
    model: ModelSpec, job: TrainingJob, unit: int, work: str, lane: str = COMPUTE_LANE
) -> Trained:
    """The shape of a unit's work on a microbatch.

    Args:
        model: the model that the job trains.
        job: the training job.
        unit: number of the unit: 0 is the embedding, the last is the head.
        work: forward, light, again or backward.
        lane: the lane that it runs on.

    Returns:
        The shape.

    Raises:
        ValueError: the model has other units than the job.
    """
    parameters, units = _parameters(model, job.recipe)
    if len(units) != job.num_units:
        raise ValueError(
            f"training job {job.job_id} has {job.num_units} units, but {model.name} has "
            f"{len(units)}: embedding, {model.num_layers} layers and head"
        )
    kind = EMBEDDING if unit == 0 else LAYER if unit < len(units) - 1 else HEAD
    own = [parameters[p] for p in units[unit]]
    products = tuple(_product(p) for p in own if len(p.shape) == 2)
    is_adapted = kind == LAYER and job.recipe.lora_rank is not None
    below = (p for number in range(unit) for p in units[number])
    is_lowest = work == BACKWARD and is_adapted and not any(parameters[p].trains for p in below)
    return Trained(
        work,
        kind,
        job.recipe.dtype,
        job.sequences,
        job.sequence_tokens,
        () if kind == EMBEDDING else products,
        sum(p.elements for p in own if p.trains),
        lane=lane,
        is_lowest=is_lowest,
    )


@lru_cache(maxsize=1 << 12)
def _product(parameter: Parameter) -> Product:
    module, _, adapter = parameter.name.partition(".lora_")
    name = module.removesuffix(".weight").removesuffix(".base_layer").rpartition(".")[2]
    reads_input = name in READERS and not adapter.startswith("B")  # that reads what A made
    return Product(parameter.shape[1], parameter.shape[0], parameter.trains, reads_input)


def update_of(
    model: ModelSpec, job: TrainingJob, layout: TrainingLayout | None, chunk: int, lane: str
) -> Trained:
    """The shape of a chunk's update.

    Args:
        model: the model that the job trains.
        job: the training job.
        layout: the job's chunks; without one each unit is a chunk.
        chunk: number of the chunk.
        lane: the lane that it runs on.

    Returns:
        The shape, of this device's part where the group shares the chunk.
    """
    parameters, units = _parameters(model, job.recipe)
    own = units[chunk] if layout is None else layout.chunks[chunk].parameters
    elements = sum(parameters[p].elements for p in own if parameters[p].trains)
    if layout is not None:
        of_chunk = layout.chunks[chunk]  # a device of a group may hold a part of it
        elements = -(-elements * of_chunk.weight_bytes // of_chunk.whole_bytes)
    moved, dtype = element_bytes(job.recipe), job.recipe.dtype
    lane = COMPUTE_LANE if lane in COMPUTE_LANES else lane  # both are of one device
    return Trained(UPDATE, CHUNK, dtype, elements=elements, element_bytes=moved, lane=lane)


def element_bytes(recipe: Recipe) -> int:
    """Memory traffic of an optimizer step in one pass.

    It reads the gradient, reads and writes the float32 states, and reads and writes the float32
    number. With another dtype that number is the master weight, and the weight is written too.
    Float32 gradients that are clipped are scaled in place before.

    Args:
        recipe: optimizer, dtype, momentum and clipping.

    Returns:
        Bytes read and written per trained number.
    """
    item = DTYPE_BYTES[recipe.dtype]
    states = STATES[recipe.optimizer] + (recipe.momentum > 0)
    is_wide = item == 4
    scaled = 2 * item if is_wide and recipe.clip_norm is not None else 0
    return item + scaled + 2 * 4 * states + 2 * 4 + (0 if is_wide else item)


def workspace_of(op: Compute, piece: Slice, page_tokens: int) -> int | None:
    """Workspace of a training slice by its job's layout.

    Args:
        op: the operation that holds the slice.
        piece: a training slice; a window forward of a finetuning job takes none here.
        page_tokens: tokens in a page of KV.

    Returns:
        Bytes taken and given back, the largest over its units or chunks; None without a layout.
    """
    training = piece.job.training
    assert training is not None, "a slice that serves"
    if (layout := training.layout) is None:
        return None
    if piece.work is Work.UPDATE:
        return max(layout.chunks[c].update_bytes for c in piece.layers or training.trained_by)
    if layout.windows is not None:
        own = piece.layers or range(layout.num_units)
        if piece.work is not Work.BACKWARD:
            return 0
        total = training.spec.tokens_of(piece.microbatch)
        keys = -(-total // page_tokens) * page_tokens
        return layout.windows.backward.of(own, piece.tokens, keys)
    work, numbers = _work(op, piece), piece.layers or range(layout.num_units)
    return max(_workspace(layout, unit, work) for unit in numbers)


def loss_workspace(piece: Slice, labels: int) -> int:
    """Workspace of the loss of a window forward.

    Args:
        piece: a slice of a finetuning job.
        labels: rows of its window that the head computes.

    Returns:
        Bytes; 0 without a layout.
    """
    training = piece.job.training
    assert training is not None, "a slice that serves"
    layout = training.layout
    if layout is None or layout.windows is None:
        return 0
    return layout.windows.backward.of_loss(labels)


def _workspace(layout: TrainingLayout, number: int, work: str) -> int:
    unit = layout.units[number]
    if work == AGAIN:  # the ledger books no output: the unit above is done with it
        output = layout.units[number + 1].input_bytes if number + 1 < layout.num_units else 0
        return unit.forward_bytes + output
    sizes = {FORWARD: unit.forward_bytes, LIGHT: unit.light_bytes, BACKWARD: unit.backward_bytes}
    return sizes[work]


@lru_cache(maxsize=16)
def _parameters(
    model: ModelSpec, recipe: Recipe
) -> tuple[Sequence[Parameter], Sequence[Sequence[int]]]:
    return model_parameters(model, recipe)
