"""One step of a training job, launch by launch: what its chain of tasks makes certain."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from engine.contract.footprint import LaunchFootprint, goes_out
from engine.contract.job import Job
from engine.contract.layout import Mode, TrainingLayout
from engine.contract.regions import Place, Work, gradient, optimizer, weight
from engine.contract.training_progress import TrainingProgress, layout_of
from engine.contract.view import View

CYCLES = 64  # training jobs whose cycle is remembered; an object each, compared by identity


class CycleLaunch(NamedTuple):
    """A launch of a step: a task, or the forward that is repeated before a backward."""

    work: Work
    part: int  # a unit; of an update, a chunk
    microbatch: int  # of the step, from 0
    again: bool = False


def training_jobs(view: View) -> Iterator[Job]:
    """Training jobs, in service and waiting, in the order of arrival.

    Args:
        view: the view of the device.

    Returns:
        Jobs in service, then waiting ones.
    """
    yield from view.training
    yield from (job for job in view.waiting if job.training is not None)


@lru_cache(maxsize=CYCLES)
def cycle_of(training: TrainingProgress) -> tuple[CycleLaunch, ...]:
    """The launches of one step in the order of the job's tasks, recomputation included.

    Args:
        training: a job's progress; the cycle is that of its layout and tasks.

    Returns:
        The launches, numbered from 0 as in a View's profile.
    """
    units, links = layout_of(training).units, list[CycleLaunch]()
    for work, part, microbatch in training.tasks:
        if work is Work.BACKWARD and units[part].mode is Mode.RECOMPUTE:
            links.append(CycleLaunch(Work.FORWARD, part, microbatch, again=True))
        links.append(CycleLaunch(work, part, microbatch))
    return tuple(links)


@lru_cache(maxsize=CYCLES)
def last_update(training: TrainingProgress) -> int | None:
    """The chunk whose update is the last one of a step.

    Args:
        training: a job's progress.

    Returns:
        The number of the chunk; None of a job without updates.
    """
    updates = [link.part for link in cycle_of(training) if link.work is Work.UPDATE]
    return updates[-1] if updates else None


def number_of(launch: LaunchFootprint, training: TrainingProgress) -> int:
    """The number of a launch in its step.

    It is told by the task, not by the launches that were issued: these may be more than a step has,
    where a forward was repeated more than once for its backward.

    Args:
        launch: a launch of a task of the job.
        training: the progress of the job.

    Returns:
        The index in `cycle_of`; 0 for a task that no step has, which no check of plans lets pass.
    """
    piece, is_update = launch.piece, launch.piece.work is Work.UPDATE
    assert piece.layers is not None, "a task has one part"
    microbatch = 0 if is_update else piece.microbatch % training.spec.microbatches
    link = CycleLaunch(piece.work, piece.layers.start, microbatch, launch.again)
    return _numbers(training).get(link, 0)


@lru_cache(maxsize=CYCLES)
def _numbers(training: TrainingProgress) -> Mapping[CycleLaunch, int]:
    """The launches of a step by number; the microbatch of an update is 0, whichever it names."""
    links = enumerate(cycle_of(training))
    return {k._replace(microbatch=0) if k.work is Work.UPDATE else k: n for n, k in links}


@lru_cache(maxsize=CYCLES)
def uses_of(
    training: TrainingProgress, device: int, updates_here: bool
) -> tuple[Mapping[Place, Sequence[int]], int]:
    """When the launches of a step use each place of model states on a device.

    Args:
        training: a job's progress.
        device: whose places are meant.
        updates_here: updates run on the device; on the host's lane they use no place of the device.

    Returns:
        Per place the numbers of the launches that use it, ascending; and the number of launches.
    """
    layout, job_id = layout_of(training), training.spec.job_id
    uses: dict[Place, list[int]] = {}
    links = cycle_of(training)
    for moment, (work, part, _, _) in enumerate(links):
        if work is Work.UPDATE:
            kinds = (weight, gradient, optimizer) if updates_here else ()
            places = [kind(job_id, part, device=device) for kind in kinds]
        else:
            places = [weight(job_id, c, device=device) for c in layout.units[part].chunks]
            if work is Work.BACKWARD:
                trained = layout.units[part].trained
                places += [gradient(job_id, c, device=device) for c in trained]
        for place in places:
            uses.setdefault(place, []).append(moment)
    return uses, len(links)


Turn = tuple[Work, int, int]  # of a unit: forward or backward, unit, microbatch of the step


class Ahead(NamedTuple):
    """What follows a launch: turns of units, and the chunks and gradients that they use."""

    turns: tuple[Turn, ...]
    chunks: frozenset[int]
    trained: frozenset[int]


@lru_cache(maxsize=CYCLES)
def lookahead(training: TrainingProgress, turns: int) -> tuple[Ahead, ...]:
    """Per launch of a step, the next turns of units in it, and what they use.

    Args:
        training: a job's progress.
        turns: how many turns to look ahead.

    Returns:
        One Ahead per launch, in the order of `cycle_of`.
    """
    links, found = cycle_of(training), list[Ahead]()
    for moment, link in enumerate(links):
        coming = list[Turn]()
        for later in links[moment + 1 :]:
            if later.work is Work.UPDATE:
                continue
            turn = _turn(later)
            if turn != _turn(link) and turn not in coming:
                if len(coming) == turns:
                    break
                coming.append(turn)
        rest = [_turn(link)] if link.again else []  # its backward follows at once
        found.append(_ahead(layout_of(training), coming, rest))
    return tuple(found)


@lru_cache(maxsize=CYCLES)
def trained_before(training: TrainingProgress, turns: int) -> tuple[tuple[int, ...], ...]:
    """Per backward of a step, the chunks that the backward some turns before it trains.

    Args:
        training: a job's progress.
        turns: 1 means the backward just before. Backwards that train no chunk do not count.

    Returns:
        One entry per launch: empty where it is no backward, or fewer backwards came before it.
    """
    units, found, behind = layout_of(training).units, list[tuple[int, ...]](), list[Sequence[int]]()
    for work, part, _, _ in cycle_of(training):
        is_backward = work is Work.BACKWARD
        found.append(tuple(behind[-turns]) if is_backward and len(behind) >= turns else ())
        if is_backward and units[part].trained:
            behind.append(units[part].trained)
    return tuple(found)


@lru_cache(maxsize=CYCLES)
def coming_chunks(training: TrainingProgress) -> tuple[tuple[int, ...], ...]:
    """Per launch of a step, the chunks whose weights the launches behind it read, first ones first.

    Those of the step come first, then those of the next step as far as their updates come before:
    the weights of the others are not made yet. Chunks that stay on the device are left out.

    Args:
        training: a job's progress, whose layout says what stays and how many buffers there are.

    Returns:
        Per launch, as many different chunks as there are buffers, or fewer.
    """
    layout, links = layout_of(training), cycle_of(training)
    reads = [_reads(layout, link) for link in links]
    is_made = {c: not (training.spec.has_update and chunk.trains)
               for c, chunk in enumerate(layout.chunks)}  # fmt: skip
    found = list[tuple[int, ...]]()
    for moment, link in enumerate(links):
        if link.work is Work.UPDATE:
            is_made[link.part] = True
        next_step = [c for own in reads for c in own if is_made[c]]
        rest = [c for own in reads[moment + 1 :] for c in own]
        coming = dict.fromkeys((*rest, *next_step))
        found.append(tuple(coming)[: layout.buffers])
    return tuple(found)


def _reads(layout: TrainingLayout, link: CycleLaunch) -> Sequence[int]:
    """The chunks that a launch reads, without those that stay on the device."""
    if link.work is Work.UPDATE:
        return ()
    return [c for c in layout.units[link.part].chunks if c not in layout.persistent]


@lru_cache(maxsize=CYCLES)
def coming_swaps(training: TrainingProgress) -> tuple[tuple[Turn, ...], ...]:
    """Per launch of a step, the backwards whose offloaded activations are to be fetched by then.

    None is fetched before the backward of its microbatch begins.

    Args:
        training: a job's progress, whose layout says how many turns before.

    Returns:
        Per launch, the next backwards of units that offload, in their order.
    """
    layout, found = layout_of(training), list[tuple[Turn, ...]]()
    pairs = zip(cycle_of(training), lookahead(training, layout.swaps_ahead), strict=True)
    for link, ahead in pairs:
        work, _, microbatch = _turn(link)
        found.append(
            tuple(
                [
                    turn
                    for turn in ahead.turns
                    if work is not Work.FORWARD
                    and turn[0] is Work.BACKWARD
                    and turn[2] == microbatch
                    and goes_out(layout.units[turn[1]])
                ]
            )
        )
    return tuple(found)


@lru_cache(maxsize=CYCLES)
def leaving_swaps(training: TrainingProgress) -> tuple[tuple[Turn, ...], ...]:
    """Per launch of a step, the forwards whose offloaded activations leave the device behind it.

    They stay while their copy takes as long as the layout says, one copy after another. Given back
    at once, their bytes would be taken by launches that need not wait for the copy. What would
    leave when it is to be fetched again stays.

    Args:
        training: a job's progress, whose layout says how many turns a copy takes.

    Returns:
        Per launch, forwards of units that offload, in their order.
    """
    layout, links = layout_of(training), cycle_of(training)
    found = [list[Turn]() for _ in links]
    turns = dict.fromkeys([_turn(link) for link in links if link.work is not Work.UPDATE])
    number, last = {turn: i for i, turn in enumerate(turns)}, dict[int, int]()
    for moment, link in enumerate(links):
        if link.work is not Work.UPDATE:
            last.setdefault(number[_turn(link)], moment)  # the first launch of each turn
    done_at = -1
    for turn, at in number.items():
        work, unit, k = turn
        if work is Work.FORWARD and goes_out(layout.units[unit]):
            done_at = max(done_at, at) + layout.swaps_ahead
            if done_at < fetch_turn(number[Work.BACKWARD, unit, k], layout, k):
                found[last[done_at]].append(turn)
    return tuple([tuple(turns) for turns in found])


@lru_cache(maxsize=CYCLES)
def leaving_gradients(training: TrainingProgress) -> tuple[tuple[int, ...], ...]:
    """Per launch of a step, chunks whose gradients leave the device behind it.

    Gradients are copied behind the last backward of a microbatch that adds to them, and stay for
    the next turn: given back at once, their bytes would be taken by launches that then wait.

    Args:
        training: a job's progress.

    Returns:
        Per launch, chunks that train.
    """
    links, found = cycle_of(training), list[tuple[int, ...]]()
    ended, due = list[int](), list[int]()
    for moment, link in enumerate(links):
        is_turn = link.work is not Work.UPDATE and not link.again
        if is_turn:
            due, ended = ended, []
        if link.work is Work.BACKWARD:
            users = training.trained_by
            ended = [c for c, own in users.items() if min(own) == link.part]
        is_last = moment == len(links) - 1
        found.append((*due, *(ended if is_last else ())))
        due = []
    return tuple(found)


def fetch_turn(backward: int, layout: TrainingLayout, microbatch: int = 0) -> int:
    """The turn behind whose launch offloaded activations are fetched for a backward.

    Args:
        backward: the number of the turn that needs them, in its step.
        layout: says how many turns before, and that all backwards follow all forwards.
        microbatch: of the step.

    Returns:
        The number of the turn: at the earliest that of the microbatch's first backward.
    """
    units = layout.num_units
    each = 2 * units - layout.first
    return max(microbatch * each + units, backward - layout.swaps_ahead)


def _turn(link: CycleLaunch) -> Turn:
    return (Work.BACKWARD if link.again else link.work), link.part, link.microbatch


def _ahead(layout: TrainingLayout, coming: Sequence[Turn], rest: Sequence[Turn]) -> Ahead:
    units, turns = layout.units, (*rest, *coming)
    chunks = {c for _, unit, _ in turns for c in units[unit].chunks}
    trained = {c for work, u, _ in turns if work is Work.BACKWARD for c in units[u].trained}
    return Ahead(tuple(coming), frozenset(chunks), frozenset(trained))
