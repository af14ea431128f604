"""What a training job takes, in bytes by arithmetic: parameters, activations and workspaces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from models.parameters import Parameter, layer_name, model_parameters
from models.spec import DTYPE_BYTES, ModelSpec
from models.training.tape import Tape, Value
from models.training.tape_layers import Pass
from traces.serving.request import TrainingJob
from traces.training.recipe import Recipe

STATE_BYTES = 4  # optimizer states and master weights are float32


@dataclass(frozen=True, slots=True)
class UnitShape:
    """One unit and one microbatch, on a CPU.

    Saved is what a forward keeps for the backward beside the unit's input, its parameters and its
    output. Workspaces are peaks beside all that is booked then: `forward_bytes` of a forward that
    keeps, beside input, output, saved and parameters; `light_bytes` of one under no_grad, beside
    input, output and parameters; `backward_bytes` beside input, saved, parameters and the gradients
    that come in and go out (not those of weights: fresh ones are in it). A forward that comes again
    for a backward makes an output that nobody booked: add the bytes of the next unit's input.
    """

    parameters: tuple[int, ...]  # of TrainingShape.parameters; a tied table is in both its units
    input_bytes: int  # hidden states that come in; 0 of the embedding
    saved_bytes: int
    forward_bytes: int
    light_bytes: int
    backward_bytes: int


@dataclass(frozen=True, slots=True)
class TrainingShape:
    """The parameters of a job in the order of named_parameters(), and its chain of units."""

    parameters: tuple[Parameter, ...]
    units: tuple[UnitShape, ...]
    item_bytes: int  # of a weight or a gradient
    optimizer_item_bytes: int  # per number that trains: moments, and master weights where needed


def training_shape(spec: ModelSpec, job: TrainingJob) -> TrainingShape:
    """The shape of a job on a model, computed in the recipe's dtype.

    Attention is torch's SDPA without a mask: the CPU's flash kernel, or the math path where dropout
    rules that out. Token ids, cosines and sines belong to no unit. Equal to the byte to what
    autograd keeps and to what runtime/measure/tracker.py counts around Hugging Face's modules
    (tests/models/test_training_shape.py). ValueError where the job does not fit the model.
    """
    _check(spec, job)
    parameters, owned = model_parameters(spec, job.recipe)
    trains = [any(parameters[p].trains for p in own) for own in owned]
    first = trains.index(True)
    known, units = dict[tuple[bool, bool, bool], _Sizes](), list[UnitShape]()
    for u, own in enumerate(owned):
        is_layer, wanted = 0 < u <= spec.num_layers, u > first
        key = (is_layer, trains[u], wanted)
        if not is_layer or key not in known:
            known[key] = _sizes(spec, job, u, [parameters[p] for p in own], wanted)
        units.append(UnitShape(own, *known[key]))
    item_bytes = DTYPE_BYTES[job.recipe.dtype]
    return TrainingShape(parameters, tuple(units), item_bytes, optimizer_item_bytes(job.recipe))


def optimizer_item_bytes(recipe: Recipe) -> int:
    """Bytes of optimizer states per number that trains."""
    moments = 2 if recipe.optimizer == "adamw" else int(recipe.momentum > 0)
    masters = int(recipe.dtype != "float32")
    return STATE_BYTES * (moments + masters)


_Sizes = tuple[int, int, int, int, int]


def _sizes(
    spec: ModelSpec, job: TrainingJob, unit: int, parameters: Sequence[Parameter], wanted: bool
) -> _Sizes:
    """Those of a UnitShape. `wanted`: something below trains, so the input needs a gradient."""
    tape = Tape(keeps=False)
    output, _ = _forward(tape, spec, job, unit, parameters, wanted)
    light_bytes = tape.peak_bytes - output.nbytes
    tape = Tape()
    output, leaves = _forward(tape, spec, job, unit, parameters, wanted)
    saved_bytes = tape.live_bytes - output.nbytes
    forward_bytes = tape.peak_bytes - tape.live_bytes
    is_head, trains = unit > spec.num_layers, output.edge is not None
    del output  # what is above has freed it
    input_bytes = job.microbatch_tokens * spec.hidden_size * DTYPE_BYTES[job.recipe.dtype]
    backward_bytes = 0
    if trains:
        tape.restart_peak()
        seed = tape.storage(STATE_BYTES if is_head else 0)  # of the loss: nobody booked it
        tape.backward(seed)
        booked_bytes = saved_bytes + (input_bytes if wanted else 0)
        backward_bytes = max(0, tape.peak_bytes - booked_bytes)
    del leaves  # had the gradients
    return input_bytes if unit else 0, saved_bytes, forward_bytes, light_bytes, backward_bytes


def _forward(
    tape: Tape,
    spec: ModelSpec,
    job: TrainingJob,
    unit: int,
    parameters: Sequence[Parameter],
    wanted: bool,
) -> tuple[Value, Sequence[Value]]:
    """A unit's output, and the leaves of its graph."""
    prefix = layer_name(spec, unit - 1)
    run = Pass(tape, spec, job, parameters, prefix)
    hidden = tape.outside(run.rows * spec.hidden_size, run.item_bytes, wanted)
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
