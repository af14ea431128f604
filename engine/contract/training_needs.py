"""Places that a training launch must name and find, and the last use of a job's places."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from engine.contract.footprint import Exchange, LaunchFootprint, launches_of
from engine.contract.plan import HOST_LANE, Compute, Slice
from engine.contract.regions import (
    FLOW,
    GATHERED,
    INPUT_GRADIENT,
    NORM,
    TIED_GRADIENT,
    UNREDUCED,
    Kind,
    Place,
    Tier,
    Work,
    gradient,
    later,
    optimizer,
    unreduced,
    weight,
)
from engine.contract.training_progress import TrainingProgress, layout_of
from engine.contract.windows import last_use_in_sample

Key = tuple[int, Work, int, int, bool, str, int, bool]


class Needs(NamedTuple):
    """Places of a launch, for one microbatch of a step.

    Attributes:
        reads: places that hold the newest contents.
        writes: places that are written.
        changes: places among them that are read first.
        begins: gradients that must hold nothing of the step yet.
        sums: gradients that hold the sum of earlier backwards.
        sizes: least bytes of places that are not written yet.
        kept: least bytes of activations that it writes, by their index in `writes`.
        moving: indices in `reads` of activations.
        gathered: weights of other devices, each with the place of the own part.
        state: optimizer states, which may begin with the first update.
        due: exchanges that follow at once.
    """

    reads: tuple[Place, ...]
    writes: tuple[Place, ...]
    changes: tuple[Place, ...]
    begins: tuple[Place, ...]
    sums: tuple[Place, ...]
    sizes: tuple[tuple[Place, int], ...]
    kept: tuple[tuple[int, int], ...]
    moving: tuple[int, ...]
    gathered: tuple[tuple[Place, Place], ...]
    state: Place | None
    due: tuple[Exchange, ...]

    def reads_later(self, microbatches: int) -> tuple[Place, ...]:
        """Places that the launch reads some microbatches later.

        Args:
            microbatches: how many microbatches later.

        Returns:
            `reads` with the activations of that microbatch.
        """
        return _later(self.reads, self.moving, microbatches)

    def writes_later(self, microbatches: int) -> tuple[Place, ...]:
        """Places that the launch writes some microbatches later.

        Args:
            microbatches: how many microbatches later.

        Returns:
            `writes` with the activations of that microbatch.
        """
        return _later(self.writes, [i for i, _ in self.kept], microbatches)


def _later(places: tuple[Place, ...], moving: Sequence[int], count: int) -> tuple[Place, ...]:
    if not (count and moving):
        return places
    found = [*places]
    for i in moving:
        found[i] = later(found[i], count)
    return tuple(found)


def counted_from(training: TrainingProgress) -> int:
    """The microbatch from which needs count theirs: a step later they are those of equal numbers.

    Args:
        training: the progress of the job.

    Returns:
        The first microbatch of the step; 0 of a pipeline, where versions of weights take turns.
    """
    return 0 if training.is_pipelined else training.first_microbatch


def reuses_weights(op: Compute, piece: Slice, training: TrainingProgress) -> bool:
    """Whether a backward puts gradients over weights: it writes weights, and no gradients.

    Args:
        op: the launch.
        piece: its slice of training.
        training: the progress of the job, which has a layout.

    Returns:
        True for such a backward alone.
    """
    layout, job_id = layout_of(training), piece.job.job_id
    if piece.work is not Work.BACKWARD or piece.layers is None:
        return False
    trained = layout.units[piece.layers.start].trained
    if not trained or weight(job_id, trained[0], device=op.device) not in op.writes:
        return False
    apart = {place(job_id, c, device=op.device) for c in trained for place in (gradient, unreduced)}
    return apart.isdisjoint(op.writes)


def needs_of(piece: Slice, training: TrainingProgress, op: Compute, reuses: bool) -> Needs:
    """The needs of one launch of a task.

    Args:
        piece: the slice of the launch.
        training: the progress of its job, which has a layout.
        op: the launch.
        reuses: whether gradients lie over weights.

    Returns:
        The places of the launch, for the microbatch of the slice.

    Raises:
        ValueError: the job's recipe does not allow `reuses`.
    """
    task = piece._replace(work=Work.BACKWARD) if op.again else piece
    launch = next(x for x in launches_of(task, op.device, op.on, reuses) if x.again == op.again)
    layout, job_id, at = layout_of(training), piece.job.job_id, op.device
    sizes = {**dict(launch.brought), **{grow.place: grow.nbytes for grow in launch.grows}}
    assert piece.layers is not None, "a task has one part"
    part, reads = piece.layers.start, launch.reads
    changes, begins, sums = tuple[Place, ...](), tuple[Place, ...](), tuple[Place, ...]()
    state: Place | None = None
    if piece.work is Work.UPDATE:
        tier, device = (Tier.HOST, 0) if op.on == HOST_LANE else (Tier.GPU, at)
        changes = (weight(job_id, part, tier, device),) if layout.versions == 1 else ()
        if layout.chunks[part].optimizer_bytes:
            state = optimizer(job_id, part, tier, device)
    elif piece.work is Work.BACKWARD:
        begins, sums, changes = _added(launch, piece, training, reuses, at)
    for exchange in launch.reduces:  # into the sum of the step, which is held
        for place in () if reuses else exchange.writes:
            sizes.setdefault(place, layout.chunks[place.region.part].gradient_bytes)
    gathered = [(p, weight(job_id, p.region.part, device=at)) for p in reads if is_gathered(p)]
    for place, own in gathered:
        sizes[place] = layout.chunks[own.region.part].remote_bytes
    return Needs(
        reads,
        launch.writes,
        changes,
        begins,
        sums,
        tuple([pair for pair in sizes.items() if not _moves(pair[0])]),
        tuple([(i, sizes[p]) for i, p in enumerate(launch.writes) if _moves(p)]),
        tuple([i for i, place in enumerate(reads) if _moves(place)]),
        tuple(gathered),
        state,
        launch.reduces,
    )


def _moves(place: Place) -> bool:
    """Whether a place is another one in each microbatch."""
    return place.region.kind is Kind.ACTIVATION


def _added(
    launch: LaunchFootprint, piece: Slice, training: TrainingProgress, reuses: bool, device: int
) -> tuple[tuple[Place, ...], ...]:
    """The gradients that begin with a backward, those that it adds to, and weights under them."""
    layout, job_id = layout_of(training), piece.job.job_id
    assert piece.layers is not None, "a task has one part"
    u, k = piece.layers.start, piece.microbatch % training.spec.microbatches
    own = layout.units[u].trained
    if reuses:
        return (), (), tuple([weight(job_id, c, device=device) for c in own])
    begins, sums = list[Place](), list[Place]()
    for c in own:
        is_top, is_apart = u == max(training.trained_by[c]), bool(layout.chunks[c].remote_bytes)
        place = (unreduced if is_apart else gradient)(job_id, c, device=device)
        (begins if is_top and (is_apart or not k) else sums).append(place)
    for exchange in launch.reduces:  # the sum of a microbatch goes to the sum of the step
        if exchange.reads != exchange.writes:
            (sums if k else begins).extend(exchange.writes)
    return tuple(begins), tuple(sums), ()


def task_name(piece: Slice) -> str:
    """A task in words, for messages.

    Args:
        piece: a unit, or the update of a chunk.

    Returns:
        Such as `the forward of unit 1 in microbatch 0`.
    """
    part = "chunk" if piece.work is Work.UPDATE else "unit"
    at = piece.layers.start if piece.layers else 0
    return f"the {piece.work} of {part} {at} in microbatch {piece.microbatch}"


def is_gathered(place: Place) -> bool:
    """Whether a place holds weights of other devices.

    Args:
        place: any place.

    Returns:
        True for a buffer that a gather fills.
    """
    return place.region.kind is Kind.BUFFER and place.region.slot == GATHERED


def last_use(place: Place, training: TrainingProgress) -> str:
    """The last use of the contents of a place, in words for messages.

    Weights and optimizer states always have a use, and gathered weights can be gathered again:
    neither is answered here.

    Args:
        place: a place of the job.
        training: the progress of the job.

    Returns:
        "" where no task under way uses the contents.
    """
    _, kind, part, slot = place.region
    if training.spec.finetunes:
        return last_use_in_sample(place, training)
    if kind is Kind.GRADIENT:
        return _of_gradient(part, training)
    if kind is Kind.ACTIVATION:
        return _of_activation(part, slot, training)
    if kind is not Kind.BUFFER:
        return ""
    if slot == INPUT_GRADIENT or slot >= FLOW:
        return _of_input_gradient(part, slot, training)
    if slot == TIED_GRADIENT:
        return _of_tied_gradient(training)
    if slot == NORM:
        return _of_norm(training)
    if slot == UNREDUCED:
        return _of_unreduced(part, training)
    return ""


def _of_gradient(chunk: int, training: TrainingProgress) -> str:
    """From the first backward that adds to it until its update, or the end of the step's last."""
    spec = training.spec
    if chunk not in training.trained_by or training.is_complete:
        return ""
    first = training.first_microbatch
    if spec.has_update:  # a stage of a pipeline may be at the next step
        first = training.updated[chunk] * spec.microbatches
    adders, own = _adders(chunk, training), range(first, first + spec.microbatches)
    done = [training.frontier(k)[1][u] for k in own for u in adders]
    if not any(done) or (not spec.has_update and min(done) >= spec.microbatch_tokens):
        return ""  # a job without updates has microbatches of one size
    return f"before the update of chunk {chunk}" if spec.has_update else "before its last backward"


def _adders(chunk: int, training: TrainingProgress) -> tuple[int, ...]:
    return tuple(training.trained_by[chunk])


def _of_activation(part: int, microbatch: int, training: TrainingProgress) -> str:
    """A unit's input, or what its forward kept: until its backward, or its only forward."""
    units = training.spec.num_units
    unit = part - units if part >= units else part
    if microbatch not in training.open_microbatches or unit >= units:
        return ""
    forward, backward = training.frontier(microbatch)
    total = training.spec.tokens_of(microbatch)
    has_backward = unit >= training.first
    if (backward if has_backward else forward)[unit] >= total:
        return ""
    work = "backward" if has_backward else "forward"
    return f"before the {work} of unit {unit}"


def _of_input_gradient(unit: int, slot: int, training: TrainingProgress) -> str:
    below = unit - 1
    for microbatch in training.microbatches if slot < FLOW else (slot - FLOW,):
        done = training.frontier(microbatch)[1]
        if below >= training.first and done[unit] > done[below]:
            return f"before the backward of unit {below}"
    return ""


def _of_tied_gradient(training: TrainingProgress) -> str:
    """Between the backward of the upper unit of a tied table and that of the lowest unit."""
    first = training.first
    uppers = [
        u
        for u, unit in enumerate(layout_of(training).units)
        if unit.tied_gradient_bytes and u > first
    ]
    for microbatch in training.microbatches:
        done = training.frontier(microbatch)[1]
        if any([done[u] > done[first] for u in uppers]):
            return f"before the backward of unit {first}"
    return ""


def _of_norm(training: TrainingProgress) -> str:
    """Between a step's last backward and its last update."""
    clips = training.spec.has_update and training.spec.recipe.clip_norm is not None
    if not clips or training.is_complete or not training.is_trained(training.microbatches[-1]):
        return ""
    return "before the last update of the step"


def _of_unreduced(chunk: int, training: TrainingProgress) -> str:
    """Between the first and the last backward of a microbatch that adds to it."""
    for microbatch in training.microbatches:
        backward, total = training.frontier(microbatch)[1], training.spec.tokens_of(microbatch)
        done = [backward[u] for u in training.trained_by.get(chunk, ())]
        if any(done) and min(done) < total:
            return f"before gradients of chunk {chunk} are complete"
    return ""
