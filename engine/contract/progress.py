"""How jobs move on, and the check of the order of training work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NoReturn

from engine.contract.job import NO_RECORD, Job
from engine.contract.layout import Mode, Stage, TrainingLayout
from engine.contract.plan import Slice
from engine.contract.records import is_stale
from engine.contract.regions import Work
from engine.contract.rules import ContractError, Rule
from engine.contract.training_progress import TrainingProgress


def advance_serving(piece: Slice) -> bool:
    """Moves a serving job on.

    Args:
        piece: a slice that has passed the check of plans.

    Returns:
        Whether the slice yields the next token.
    """
    job, tokens = piece.job, piece.tokens
    left = job.remaining_tokens - tokens
    assert piece.work is Work.FORWARD, f"job {job.job_id} is served, it has no {piece.work}"
    assert piece.layers is None, f"job {job.job_id}: serving slices run through all layers"
    assert tokens > 0 and left >= 0, f"job {job.job_id}: {tokens} tokens, {left + tokens} remain"
    if piece.record:
        assert job.may_record, "a record has no gap"
        job._record_to(job.computed_tokens + tokens)
    job._advance(tokens, not left)
    return not left


def start_behind(job: Job, tokens: int) -> None:
    """Starts a job behind `tokens` that kept pages hold (prefix caching).

    Args:
        job: a job that has not begun.
        tokens: tokens of its beginning in these pages; fewer than it knows.
    """
    assert not job.computed_tokens, f"job {job.job_id} has begun already"
    assert tokens < job.known_tokens, f"job {job.job_id}: its last token must be computed"
    job._compute_from(tokens)


def restart(job: Job) -> None:
    """Forgets the computed tokens of a job; generated tokens stay known, and are prefilled.

    Nothing is recorded of a request any more.

    Args:
        job: a job that has started.
    """
    job._compute_from(0)
    if job.training is not None:
        job.training._forget()
    else:
        job._record_to(NO_RECORD)


def advance_training(piece: Slice, training: TrainingProgress | None = None) -> bool:
    """Moves a training job on.

    Args:
        piece: a slice that has passed `check_order`.
        training: the progress to move; None: that of the slice's job.

    Returns:
        Whether a step is complete with it.
    """
    if training is None:
        training = piece.job.training
        assert training is not None, f"job {piece.job.job_id} does not train"
    if piece.work is Work.UPDATE:
        for chunk in piece.layers or training.trained_by:
            training._count_update(chunk)
        return training._complete_steps()
    is_forward, head = piece.work is Work.FORWARD, training.spec.num_units - 1
    units = piece.layers or range(training.spec.num_units)
    if piece.record:
        record = training.adoptable(piece.microbatch)
        assert record is not None, "a sample that starts behind a record has one"
        training._adopt(piece.microbatch, record)
    training._move(piece.microbatch, is_forward, units, piece.tokens)
    if is_forward and training.spec.finetunes and head in units:
        training._move(piece.microbatch, False, (head,), piece.tokens)
    return not is_forward and training._complete_steps()


def context_of(piece: Slice) -> int:
    """The tokens before a slice: in the KV of its job, or in the sample of a finetuning job.

    Args:
        piece: a slice that is not issued yet.

    Returns:
        The computed tokens of a served job; `start_of` a slice that trains.
    """
    training = piece.job.training
    return piece.job.computed_tokens if training is None else start_of(piece, training)


def start_of(piece: Slice, training: TrainingProgress) -> int:
    """The first token of a window in the sample of its job.

    Args:
        piece: a slice that trains, and is not issued yet.
        training: the progress of its job.

    Returns:
        Tokens before the window; 0 where a job does not finetune.
    """
    if not training.spec.finetunes or piece.work is Work.UPDATE:
        return 0
    forward, backward = training.frontier(piece.microbatch)
    if piece.work is Work.FORWARD:
        if piece.record and (record := training.adoptable(piece.microbatch)) is not None:
            return 0 if record.start else record.stop
        return forward[piece.layers.start if piece.layers else 0]
    assert piece.layers is not None, "a backward names its units"
    left = training.spec.tokens_of(piece.microbatch) - backward[piece.layers.start]
    return left - piece.tokens  # windows go from the last token to the first


def check_order(piece: Slice, training: TrainingProgress, again: bool = False) -> None:
    """Checks that a slice of training may be issued now.

    Where chunks are laid out a slice is one unit of a whole microbatch, or one chunk's update. A
    finetuning job goes through its units by windows of a sample instead: forward through all units,
    in the order of its tokens, and back in the reverse order, by one unit or more.

    Args:
        piece: the slice.
        training: the progress of its job.
        again: whether it is a forward that is repeated for its backward, which moves no frontier.

    Raises:
        ContractError: the slice is out of order.
    """
    job, tokens, work, _, microbatch, version, is_behind = piece
    job_id = job.job_id
    if not isinstance(work, Work):
        _refuse(job_id, f"{work!r} is no work: take Work.FORWARD, BACKWARD or UPDATE")
    is_cut = training.spec.finetunes and work is not Work.UPDATE  # in windows
    whole = 1 if work is Work.UPDATE else training.spec.microbatch_tokens
    if type(tokens) is not int or tokens < 1:
        _refuse(job_id, f"a slice of {tokens!r} tokens: a whole number from 1 on")
    if training.layout is not None and tokens != whole and not is_cut:
        _refuse(job_id, f"{work} of {tokens} tokens: always {whole} where chunks are laid out")
    if training.is_complete:
        _refuse(job_id, f"{work} behind the last of its {training.spec.num_steps} steps")
    if type(version) is not int or type(microbatch) is not int:
        _refuse(job_id, f"microbatch {microbatch!r} on version {version!r}: whole numbers")
    parts = _parts(piece, training)
    if version:
        _check_version(job_id, parts, version, training, work is Work.UPDATE)
    own = training.microbatches if work is Work.UPDATE else training.open_microbatches
    if microbatch not in own:
        _refuse(job_id, f"microbatch {microbatch}: the step has {own.start} to {own.stop - 1}")
    if again and (work is not Work.FORWARD or is_cut):
        what = "a backward of windows repeats it" if is_cut else "only a forward is repeated"
        _refuse(job_id, f"{work} again: {what}")
    if is_cut:
        _check_sample(job_id, microbatch, training)
    if is_behind:
        training = _behind_record(piece, training)
    if again:
        _check_again(job_id, parts, microbatch, training)
    elif work is Work.FORWARD:
        _check_forward(job_id, parts, tokens, microbatch, training)
    elif work is Work.BACKWARD:
        _check_backward(job_id, parts, tokens, microbatch, training)
    else:
        _check_update(job_id, parts, training)


def _refuse(job_id: int, what: str) -> NoReturn:
    raise ContractError(Rule.TRAINING_ORDER, what, job_id)


def _check_version(
    job_id: int, parts: Iterable[int], version: int, training: TrainingProgress, is_update: bool
) -> None:
    for part in parts:
        newest = training.updated[part] if is_update else training.version(part)
        if not 0 <= version <= newest:
            name = "chunk" if is_update else "unit"
            _refuse(job_id, f"weight version {version} of {name} {part} does not exist")


def _parts(piece: Slice, training: TrainingProgress) -> range | tuple[int, ...]:
    """Units of a slice, or chunks of an update."""
    job_id, layers, work = piece.job.job_id, piece.layers, piece.work
    if layers is None and training.layout is None:
        if work is Work.UPDATE:
            return tuple(training.trained_by)
        return range(training.spec.num_units)
    if not isinstance(layers, range) or layers.step != 1 or not layers:
        _refuse(job_id, f"{work} of layers {layers!r}: a range of units, or of chunks to update")
    if training.layout is not None and len(layers) != 1 and not training.spec.finetunes:
        _refuse(job_id, f"{work} of {len(layers)} units: one, where chunks are laid out")
    if work is Work.UPDATE:
        for chunk in layers:
            if chunk not in training.trained_by:
                _refuse(job_id, f"update of {chunk}, which is no chunk that trains")
    elif layers.start < 0 or layers.stop > training.spec.num_units:
        _refuse(job_id, f"{work} of {layers}: there are {training.spec.num_units} units")
    return layers


def _check_sample(job_id: int, microbatch: int, training: TrainingProgress) -> None:
    """A finetuning job is at one sample, which has been released."""
    if microbatch != training.sample:
        at = "updates are due" if training.sample is None else f"it is at {training.sample}"
        _refuse(job_id, f"sample of microbatch {microbatch}: one at a time, and {at}")
    if not training.is_released(microbatch):
        _refuse(job_id, f"the sample of microbatch {microbatch} is not there yet")


def _behind_record(piece: Slice, training: TrainingProgress) -> TrainingProgress:
    """A copy of a job's progress whose sample uses the record of its request, if it may."""
    job_id, microbatch = piece.job.job_id, piece.microbatch
    if not training.spec.finetunes or piece.work is not Work.FORWARD:
        _refuse(job_id, f"{piece.work} behind a record: a sample's first window forward is")
    if any(training.frontier(microbatch)[0]):
        _refuse(job_id, f"microbatch {microbatch} behind a record: its sample has begun already")
    record = training.adoptable(microbatch)
    if record is None:
        _refuse(job_id, f"microbatch {microbatch} behind a record: there is none of its request")
    if is_stale(record.adapter, training):
        behind = training.updates_behind(record.adapter)
        what = f"a record of request {record.request}, which is {behind} updates behind"
        _refuse(job_id, what)
    found = training.copy()
    found._adopt(microbatch, record)
    return found


def _check_forward(
    job_id: int,
    units: range | tuple[int, ...],
    tokens: int,
    microbatch: int,
    training: TrainingProgress,
) -> None:
    if training.spec.finetunes and len(units) != training.spec.num_units:
        _refuse(job_id, f"a window goes forward through all units at once, not {units}")
    total, done = training.spec.tokens_of(microbatch), training.frontier(microbatch)[0]
    below = total if units[0] == 0 else done[units[0] - 1]
    if (record := training.adopted(microbatch)) is not None and done[-1] < record.start:
        below = min(below, record.start)  # the window behind it begins behind the record
    for unit in units:
        after = done[unit] + tokens
        if after > below:
            _refuse(job_id, f"forward of unit {unit} out of order in microbatch {microbatch}")
        below = after
    if training.layout is not None:
        for unit in units:
            _check_updated(job_id, unit, microbatch, training)
        recipe, is_first = training.spec.recipe, microbatch == training.microbatches.start
        draws = (recipe.dropout or recipe.lora_dropout) and not is_first
        if draws and training.frontier(microbatch - 1)[0][-1] < total:
            _refuse(job_id, f"forward of microbatch {microbatch}: dropout draws in their order")


def _check_updated(job_id: int, unit: int, microbatch: int, training: TrainingProgress) -> None:
    """A unit computes with weights of its microbatch's version, which no update has overwritten."""
    assert training.layout is not None
    if not training.spec.has_update:
        return
    version = training.version_for(microbatch)
    for chunk in training.layout.units[unit].chunks:
        updates = training.updated.get(chunk, version)
        if updates >= version + training.layout.versions:
            _refuse(job_id, f"unit {unit}: chunk {chunk} has its update of this step already")
        if updates < version:
            what = f"chunk {chunk} has had {updates} updates of {version}"
            _refuse(job_id, f"unit {unit} in microbatch {microbatch}: {what}")


def _check_backward(
    job_id: int,
    units: range | tuple[int, ...],
    tokens: int,
    microbatch: int,
    training: TrainingProgress,
) -> None:
    total, last = training.spec.tokens_of(microbatch), training.spec.num_units - 1
    forward, done = training.frontier(microbatch)
    if forward[-1] != total:
        _refuse(job_id, f"backward before the forward is complete in microbatch {microbatch}")
    if units[0] < training.first:
        _refuse(job_id, f"nothing below unit {training.first} trains")
    above = total if units[-1] == last else done[units[-1] + 1]
    if training.spec.finetunes:
        _check_reverse(job_id, units, tokens, total, training)
    for unit in reversed(units):
        after = done[unit] + tokens
        if after > above:
            _refuse(job_id, f"backward of unit {unit} out of order in microbatch {microbatch}")
        above = after
    if training.layout is None or training.spec.finetunes:
        return
    if training.is_pipelined:  # each unit adds to its gradients in the order of microbatches
        before = training.frontier(microbatch - 1)[1] if microbatch else ()
        for unit in units if before else ():
            if before[unit] < total:
                what = f"microbatch {microbatch} before that of {microbatch - 1}"
                _refuse(job_id, f"backward of unit {unit} in {what}")
        return
    for other in range(training.microbatches.start, microbatch):
        if not training.is_trained(other):  # microbatches share the buffers of input gradients
            _refuse(job_id, f"backward of microbatch {microbatch} before that of {other} is done")


def _check_reverse(
    job_id: int,
    units: range | tuple[int, ...],
    tokens: int,
    total: int,
    training: TrainingProgress,
) -> None:
    """A window of a sample's backward is of one unit: each has gradients of keys and values."""
    if units[-1] == training.spec.num_units - 1:
        _refuse(job_id, "backward of the head, which comes with its forward")
    if tokens < total and len(units) > 1:
        _refuse(job_id, f"backward of {len(units)} units in a window: one, or the whole sample")


def _check_again(
    job_id: int, units: range | tuple[int, ...], microbatch: int, training: TrainingProgress
) -> None:
    total, layout = training.spec.tokens_of(microbatch), training.layout
    if layout is None:
        return
    forward, backward = training.frontier(microbatch)
    unit = units[0]
    if layout.units[unit].mode is not Mode.RECOMPUTE or unit < training.first:
        _refuse(job_id, f"forward of unit {unit} again, which keeps what its backward needs")
    if forward[unit] < total or backward[unit] >= total:
        _refuse(job_id, f"forward of unit {unit} again, but not between forward and backward")


def _check_update(job_id: int, chunks: range | tuple[int, ...], training: TrainingProgress) -> None:
    spec, step = training.spec, training.step
    if spec.finetunes and len(chunks) < len(training.trained_by):
        _refuse(job_id, f"update of {len(chunks)} chunks: all in one launch, so that none is old")
    if not spec.has_update:
        _refuse(job_id, "an update of a job that has none")
    for chunk in chunks:
        if training.updated[chunk] != step:
            _refuse(job_id, f"update of {chunk} out of order: it has one in this step")
        # the norm of all gradients needs every backward
        clips = spec.recipe.clip_norm is not None
        units = (training.first,) if clips else training.trained_by[chunk]
        for microbatch in training.microbatches:
            done, total = training.frontier(microbatch)[1], spec.tokens_of(microbatch)
            if not all([done[u] == total for u in units]):
                _refuse(job_id, f"chunk {chunk} updated too early: microbatch {microbatch} is left")


def _check_alternatives(training: TrainingProgress, others: Sequence[TrainingLayout]) -> None:
    """Checks that a job can go on by other layouts: its chunks and its order are theirs."""
    own = training.layout
    if others and (own is None or training.spec.finetunes):
        _refuse(training.spec.job_id, "alternatives of a layout without an order of tasks")
    for number, other in enumerate(others):
        assert own is not None
        pairs = zip(own.units, other.units, strict=False)
        is_like = (
            (own.chunks, own.stages, own.first) == (other.chunks, other.stages, other.first)
            and (own.ranks, own.versions) == (other.ranks, other.versions)
            and len(own.units) == len(other.units)
            and all([one.chunks == two.chunks and one.trained == two.trained for one, two in pairs])
        )
        if not is_like:
            what = f"layout {number} has other chunks, units or stages than the first"
            _refuse(training.spec.job_id, what)


def check_stages(training: TrainingProgress, others: Sequence[TrainingLayout] = ()) -> None:
    """Checks that the orders of a job's stages name each of its tasks once.

    Args:
        training: the progress of a job that arrives, with its layout.
        others: its alternatives, whose chunks, units and stages are those of its layout.

    Raises:
        ContractError: a unit is in no stage or in two, an order lacks a task or names one twice,
            several stages have what they cannot share (a table, clipping, dropout, or a group), or
            an alternative differs in more than where states and activations are.
    """
    _check_alternatives(training, others)
    spec, layout = training.spec, training.layout
    units = [unit for stage in training.stages for unit in stage.units]
    if layout is None or spec.finetunes:
        return
    if sorted(units) != [*range(spec.num_units)]:
        _refuse(spec.job_id, f"stages of units {units}: each unit is in one stage")
    owners = dict[int, int]()
    for chunk, users in training.trained_by.items():
        stages = {training.stage_of(unit) for unit in users}
        if len(stages) > 1:
            _refuse(spec.job_id, f"chunk {chunk} is trained by stages {sorted(stages)}: by one")
        (owners[chunk],) = stages
    recipe = spec.recipe
    shared = {
        "clipping": recipe.clip_norm is not None,
        "dropout": bool(recipe.dropout or recipe.lora_dropout),
        "a group of devices": layout.ranks > 1,
    }
    if training.is_pipelined and (found := [name for name, is_on in shared.items() if is_on]):
        _refuse(spec.job_id, f"{len(training.stages)} stages with {', '.join(found)}")
    for number, stage in enumerate(training.stages):
        chunks = [c for c, owner in owners.items() if owner == number and spec.has_update]
        _check_stage(number, stage, chunks, training)


def _check_stage(
    number: int, stage: Stage, chunks: Iterable[int], training: TrainingProgress
) -> None:
    """An order has each task of a step once: in a period, and in its beginning and end together."""
    spec, own = training.spec, list[tuple[Work, int, int]]()
    for k in range(spec.microbatches):
        own += [(Work.FORWARD, unit, k) for unit in stage.units]
        own += [(Work.BACKWARD, unit, k) for unit in stage.units if unit >= training.first]
    own += [(Work.UPDATE, chunk, spec.microbatches - 1) for chunk in chunks]
    end = stage.period if stage.end is None else stage.end
    orders = [(*stage.beginning, *end)]
    if spec.num_steps > 1:
        orders.append(stage.period)
    for order in orders:
        named = Counter([(w, part, k % spec.microbatches) for w, part, k in order])
        if wrong := [*(Counter(own) - named), *(named - Counter(own))]:
            work, part, k = wrong[0]
            what = f"the {work} of {part} in microbatch {k} of a step: once, and no other task"
            _refuse(spec.job_id, f"the order of stage {number} has {named[wrong[0]]} times {what}")


def check_device(piece: Slice, device: int, training: TrainingProgress) -> None:
    """Checks that a task runs on the device of its stage.

    Args:
        piece: a unit, or the update of a chunk.
        device: where it runs.
        training: the progress of its job.

    Raises:
        ContractError: its stage runs on another one.
    """
    if not training.is_pipelined or piece.layers is None:
        return
    at = piece.layers.start
    unit = training.trained_by[at][0] if piece.work is Work.UPDATE else at
    number = training.stage_of(unit)
    if training.stages[number].device not in (None, device):
        what = f"{piece.work} of {at} on device {device}: stage {number} runs on another"
        raise ContractError(Rule.DEVICE, what, piece.job.job_id)
