"""Bytes of a finetuning job by arithmetic: what each token of a sample keeps for its backward.

The forward of a window keeps plain tensors and no graph: the input of a layer, the products that
its backward reads, and attention's output with the logarithm of its sum. Elementwise work is done
again by the backward, and keys and values lie in pages (FlexLLM, arXiv 2402.18789: graph pruning
and rematerialization).
"""

from __future__ import annotations

from models.parameters import lora_targets, model_parameters
from models.spec import DTYPE_BYTES, ModelSpec
from models.training.shape import TrainingShape, UnitShape, WindowBytes, optimizer_item_bytes
from models.training.tape_known import BackwardBytes, keeps_signs, packed_width
from traces.serving.request import TrainingJob
from traces.training.recipe import Recipe

SUM_BYTES = 4  # gradients of a sample, and of keys and values, are summed in float32


def finetuning_shape(spec: ModelSpec, job: TrainingJob) -> TrainingShape:
    """The bytes of a job that finetunes on samples, computed in the recipe's dtype.

    Args:
        spec: The model; its own dtype is not read.
        job: Its recipe and the number of its units are read.

    Returns:
        Parameters and units of the job. Units have no bytes of microbatches, but `windows`.

    Raises:
        ValueError: The job has another number of units than the model, its longest sample exceeds
            the positions of the model, or the recipe asks for what windows cannot do.
    """
    _check(spec, job)
    recipe = job.recipe
    parameters, owned = model_parameters(spec, recipe)
    item_bytes, layers = DTYPE_BYTES[recipe.dtype], spec.num_layers
    trains = [any(parameters[p].trains for p in own) for own in owned]
    kept = kept_token_bytes(spec, recipe)
    windows = WindowBytes(
        (0, *[kept] * layers, 0),
        spec.hidden_size * item_bytes,
        2 * spec.kv_size * SUM_BYTES,
        BackwardBytes(spec, recipe),
    )
    units = tuple([UnitShape(own, 0, 0, 0, 0, 0) for own in owned])
    assert any(trains), "the recipe leaves something to train"
    return TrainingShape(parameters, units, item_bytes, optimizer_item_bytes(recipe), windows)


def kept_token_bytes(spec: ModelSpec, recipe: Recipe) -> int:
    """What a layer keeps of one token between its forward and its backward.

    Numbers of the recipe's dtype: the layer's input and the product behind attention (their sum is
    the input of the second norm), queries, keys where each head is normed, attention's output, the
    products into the MLP's activation, and what the first matrix of each adapter makes. In float32:
    one logarithm of a sum per head. Of a ReLU into a product that does not train: a bit for each
    number instead.

    Args:
        spec: The model.
        recipe: Its dtype and adapters are read.

    Returns:
        Bytes of all of them.
    """
    signs = packed_width(spec.intermediate_size) if keeps_signs(spec, recipe) else 0
    inner = 0 if signs else (2 if spec.is_gated else 1) * spec.intermediate_size
    numbers = 2 * spec.hidden_size + 2 * spec.query_size + inner
    numbers += spec.kv_size if spec.norms_heads else 0
    numbers += len(adapted(spec, recipe)) * (recipe.lora_rank or 0)
    return numbers * DTYPE_BYTES[recipe.dtype] + spec.num_heads * SUM_BYTES + signs


def adapted(spec: ModelSpec, recipe: Recipe) -> tuple[str, ...]:
    """The products of a layer that have adapters.

    Args:
        spec: The model.
        recipe: Its targets; none without a rank.

    Returns:
        Endings of module names, one for each product.
    """
    return tuple(dict.fromkeys(lora_targets(spec, recipe)))


def _check(spec: ModelSpec, job: TrainingJob) -> None:
    where, recipe = f"training job {job.job_id}", job.recipe
    if job.num_units != spec.num_layers + 2:
        raise ValueError(
            f"{where}: {job.num_units} units, but {spec.name} has {spec.num_layers + 2}: "
            f"embedding, {spec.num_layers} layers, and head and loss"
        )
    if job.sequence_tokens > spec.max_positions:
        raise ValueError(
            f"{where}: samples of up to {job.sequence_tokens} tokens, but {spec.name} has "
            f"{spec.max_positions} positions; shorten sequence_tokens"
        )
    if recipe.frozen_units > spec.num_layers:
        raise ValueError(
            f"{where}: recipe.frozen_units={recipe.frozen_units} leaves the head alone to train, "
            f"which has no backward of its own in windows; freeze at most {spec.num_layers} units"
        )
    if recipe.dropout or recipe.lora_dropout:
        raise ValueError(
            f"{where}: a window draws no dropout; set recipe.dropout and recipe.lora_dropout to 0"
        )
