"""Bytes of a training job by arithmetic: parameters, saved activations and workspaces per unit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from models.parameters import Parameter, layer_name, model_parameters
from models.spec import DTYPE_BYTES, ModelSpec
from models.training.tape import Tape, Value
from models.training.tape_known import BackwardBytes
from models.training.tape_layers import UnitForward
from traces.serving.request import TrainingJob
from traces.training.recipe import Recipe

STATE_BYTES = 4  # optimizer states and master weights are float32


@dataclass(frozen=True, slots=True)
class UnitShape:
    """Bytes of one unit for one microbatch, on a CPU.

    The three workspaces are peaks beside what is booked at that time. A recomputed forward makes an
    output that is booked nowhere: add the bytes of the next unit's input to its workspace.

    Attributes:
        parameters: Indices into TrainingShape.parameters; both units of a tied table have it.
        input_bytes: Hidden states that come in; 0 for the embedding.
        saved_bytes: What a forward keeps for its backward, beside input, parameters and output.
        forward_bytes: Workspace of a forward that keeps, beside input, output, saved activations
            and parameters.
        light_bytes: Workspace of a forward under no_grad, beside input, output and parameters.
        backward_bytes: Workspace of a backward, beside input, saved activations, parameters and the
            gradients of output and input. Fresh gradients of weights are part of it.
    """

    parameters: tuple[int, ...]
    input_bytes: int
    saved_bytes: int
    forward_bytes: int
    light_bytes: int
    backward_bytes: int


@dataclass(frozen=True, slots=True)
class WindowBytes:
    """Bytes of a finetuning job; all but workspace are per token of its sample.

    Attributes:
        kept: By unit, of what its forward keeps for its backward.
        hidden: Of the gradient of hidden states.
        kv_gradient: Of the float32 gradients of a layer's keys and values.
        backward: Workspace of a backward, by the size of its window.
    """

    kept: tuple[int, ...]
    hidden: int
    kv_gradient: int
    backward: BackwardBytes


@dataclass(frozen=True, slots=True)
class TrainingShape:
    """The parameters of a training job and its chain of units.

    Attributes:
        parameters: All parameters, in the order of named_parameters().
        units: Embedding, layers, and head with loss.
        item_bytes: Bytes of one number of a weight or a gradient.
        optimizer_item_bytes: Bytes of optimizer states per number that trains.
        windows: Of a job that finetunes on samples, its bytes per token; None of another.
    """

    parameters: tuple[Parameter, ...]
    units: tuple[UnitShape, ...]
    item_bytes: int
    optimizer_item_bytes: int
    windows: WindowBytes | None = None


def training_shape(spec: ModelSpec, job: TrainingJob) -> TrainingShape:
    """The bytes of a training job on a model, computed in the recipe's dtype.

    Attention is torch's SDPA without a mask: the CPU's flash kernel, or the math path where dropout
    rules that out. Token ids, cosines and sines belong to no unit. The result equals, to the byte,
    what autograd keeps and what runtime/measure/tracker.py counts around Hugging Face's modules
    (tests/models/test_training_shape.py).

    Args:
        spec: The model; its own dtype is not read.
        job: Sequences and tokens of a microbatch, the number of units, and the recipe.

    Returns:
        Parameters and units of the job.

    Raises:
        ValueError: The job has another number of units than the model, its sequences exceed the
            positions of the model, or a LoRA target is unknown.
    """
    _check(spec, job)
    parameters, owned = model_parameters(spec, job.recipe)
    trains = [any(parameters[p].trains for p in own) for own in owned]
    first = trains.index(True)
    known, units = dict[tuple[bool, bool, bool], _Sizes](), list[UnitShape]()
    for u, own in enumerate(owned):
        is_layer, has_input_gradient = 0 < u <= spec.num_layers, u > first
        key = (is_layer, trains[u], has_input_gradient)
        if not is_layer or key not in known:
            known[key] = _sizes(spec, job, u, [parameters[p] for p in own], has_input_gradient)
        units.append(UnitShape(own, *known[key]))
    item_bytes = DTYPE_BYTES[job.recipe.dtype]
    return TrainingShape(parameters, tuple(units), item_bytes, optimizer_item_bytes(job.recipe))


def optimizer_item_bytes(recipe: Recipe) -> int:
    """Bytes of optimizer states per number that trains.

    Args:
        recipe: Its optimizer, momentum and dtype are read.

    Returns:
        4 bytes per moment (two of AdamW, one of SGD with momentum, none of plain SGD), and 4 for a
        float32 master weight where weights are bfloat16.
    """
    moments = 2 if recipe.optimizer == "adamw" else int(recipe.momentum > 0)
    masters = int(recipe.dtype != "float32")
    return STATE_BYTES * (moments + masters)


_Sizes = tuple[int, int, int, int, int]


def _sizes(
    spec: ModelSpec,
    job: TrainingJob,
    unit: int,
    parameters: Sequence[Parameter],
    has_input_gradient: bool,
) -> _Sizes:
    """The bytes of a UnitShape, in its order; a unit below that trains needs an input gradient."""
    tape = Tape(keeps=False)
    output, _ = _forward(tape, spec, job, unit, parameters, has_input_gradient)
    light_bytes = tape.peak_bytes - output.nbytes
    tape = Tape()
    output, leaves = _forward(tape, spec, job, unit, parameters, has_input_gradient)
    saved_bytes = tape.live_bytes - output.nbytes
    forward_bytes = tape.peak_bytes - tape.live_bytes
    is_head, trains = unit > spec.num_layers, output.edge is not None
    del output  # the unit above has freed it before this backward
    input_bytes = job.microbatch_tokens * spec.hidden_size * DTYPE_BYTES[job.recipe.dtype]
    backward_bytes = 0
    if trains:
        tape.restart_peak()
        seed = tape.storage(STATE_BYTES if is_head else 0)  # the loss's is booked nowhere
        tape.backward(seed)
        booked_bytes = saved_bytes + (input_bytes if has_input_gradient else 0)
        backward_bytes = max(0, tape.peak_bytes - booked_bytes)
    del leaves  # they hold the gradients up to the peak
    return input_bytes if unit else 0, saved_bytes, forward_bytes, light_bytes, backward_bytes


def _forward(
    tape: Tape,
    spec: ModelSpec,
    job: TrainingJob,
    unit: int,
    parameters: Sequence[Parameter],
    has_input_gradient: bool,
) -> tuple[Value, Sequence[Value]]:
    """The output of a unit, and the leaves of its graph."""
    prefix = layer_name(spec, unit - 1)
    run = UnitForward(tape, spec, job, parameters, prefix)
    hidden = tape.outside(run.rows * spec.hidden_size, run.item_bytes, has_input_gradient)
    if unit == 0:
        output = run.embedding()
    elif unit <= spec.num_layers:
        output = run.layer(hidden)
    else:
        output = run.head(hidden)
    return output, [hidden, *run.own.values()]


def _check(spec: ModelSpec, job: TrainingJob) -> None:
    where = f"training job {job.job_id}"
    if job.num_units != spec.num_layers + 2:
        raise ValueError(
            f"{where}: {job.num_units} units, but {spec.name} has {spec.num_layers + 2}: "
            f"embedding, {spec.num_layers} layers, and head and loss"
        )
    if job.sequence_tokens > spec.max_positions:
        raise ValueError(
            f"{where}: sequences of {job.sequence_tokens} tokens, but {spec.name} has "
            f"{spec.max_positions} positions; shorten sequence_tokens"
        )
