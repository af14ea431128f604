"""Orders as data: pipelines, shards on any device and eager updates obey every law in a simulation.

The policies here are the smallest that follow the order of a stage. They decide nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from engine.contract.executor import Launch
from engine.contract.footprint import launches_of
from engine.contract.job import Job
from engine.contract.layout import (
    Chunk,
    Layout,
    Mode,
    Stage,
    TrainingLayout,
    TrainingTask,
    Unit,
    eager,
)
from engine.contract.plan import Compute, Copy, Free, Grow, Plan, Slice
from engine.contract.progress import advance_training, check_order, check_stages
from engine.contract.regions import (
    PageSize,
    Place,
    Tier,
    Work,
    hidden,
    input_gradient,
    is_workspace,
    optimizer,
    weight,
)
from engine.contract.rules import ContractError, Rule
from engine.contract.training_progress import TrainingProgress
from engine.contract.view import View
from tests.support.replays import Replay, replay
from traces.serving.request import TrainingJob
from traces.training.recipe import Recipe

PAGE = PageSize(tokens=1, nbytes=10)
F, B, U = Work.FORWARD, Work.BACKWARD, Work.UPDATE
NS = {F: 1000, B: 2000, U: 1}  # of a unit's task; a copy takes 1
CHUNK = Chunk((), 40, 40, 80)
Order = tuple[TrainingTask, ...]
Schedule = Callable[[range, int, int, int], Stage]  # of units, for stage s of d, m microbatches


def all_of(work: Work, units: range, k: int) -> list[TrainingTask]:
    parts = reversed(units) if work is B else units
    return [TrainingTask(work, unit, k) for unit in parts]


def gpipe(units: range, s: int, d: int, m: int) -> Stage:
    """All forwards, then all backwards (Huang et al., GPipe, NeurIPS'19)."""
    tasks = [task for work in (F, B) for k in range(m) for task in all_of(work, units, k)]
    return Stage(units, (*tasks, *all_of(U, units, m - 1)), device=s)


def flush(units: range, s: int, d: int, m: int) -> Stage:
    """One forward, one backward behind d - 1 - s forwards (PipeDream-Flush, ICML'21)."""
    ahead, tasks = min(m, d - 1 - s), list[TrainingTask]()
    for k in range(ahead):
        tasks += all_of(F, units, k)
    for k in range(m):
        tasks += all_of(F, units, k + ahead) if k + ahead < m else []
        tasks += all_of(B, units, k)
    return Stage(units, (*tasks, *all_of(U, units, m - 1)), device=s)


def two_versions(units: range, s: int, d: int, m: int) -> Stage:
    """As `flush`, but forwards of the next step fill the end of this one (PipeDream-2BW)."""
    ahead = d - 1 - s
    beginning = [task for k in range(ahead) for task in all_of(F, units, k)]

    def period(count: int) -> Order:
        tasks = list[TrainingTask]()
        for k in range(m):
            tasks += all_of(F, units, k + ahead) if k + ahead < count else []
            tasks += all_of(B, units, k)
        return (*tasks, *all_of(U, units, m - 1))

    return Stage(units, period(2 * m), tuple(beginning), period(m), device=s)


def chain(units: range, s: int, d: int, m: int) -> Stage:
    """A shard of a model that any device may train (Hydra)."""
    tasks = [task for k in range(m) for work in (F, B) for task in all_of(work, units, k)]
    return Stage(units, (*tasks, *all_of(U, units, m - 1)))


SCHEDULES: dict[str, Schedule] = {"gpipe": gpipe, "flush": flush, "2bw": two_versions}


def stages_of(schedule: Schedule, d: int, m: int, each: int) -> tuple[Stage, ...]:
    return tuple([schedule(range(s * each, (s + 1) * each), s, d, m) for s in range(d)])


def laid_out(stages: Sequence[Stage], versions: int = 1) -> TrainingLayout:
    """A chunk for each unit."""
    units = [unit for stage in stages for unit in stage.units]
    made = [Unit((u,), (u,), Mode.KEEP, 10 * (u > 0), 20, 0, 0, 0) for u in units]
    return TrainingLayout(
        (CHUNK,) * len(units), tuple(made), stages=tuple(stages), versions=versions
    )


def job_of(units: int, m: int, steps: int, job_id: int = 0, **more: Any) -> TrainingJob:
    return TrainingJob(job_id, 0, units, 8, microbatches=m, num_steps=steps, **more)


def piece_of(job: Job, task: TrainingTask) -> Slice:
    assert job.training is not None
    tokens = 1 if task.work is U else job.training.spec.microbatch_tokens
    return Slice(job, tokens, task.work, range(task.part, task.part + 1), task.microbatch)


def training_of(job: Job) -> TrainingProgress:
    assert job.training is not None
    return job.training


@dataclass(frozen=True)
class Pipeline:
    """Stage s runs on device s: its next task, once what it needs from its neighbours is here."""

    def plan(self, view: View) -> Plan:
        here = view.device
        for job in (*view.training, *view.waiting):
            for task in training_of(job).ahead(1, here):
                return Plan(tuple(self._ops(job, task, view)))
        return Plan()

    def _ops(self, job: Job, task: TrainingTask, view: View) -> Iterator[Any]:
        here, piece = view.device, piece_of(job, task)
        (launch,) = launches_of(piece, here)
        kept = {place for place, _ in launch.brought} | {op.place for op in launch.grows}
        if any([p not in kept and p not in view.held_bytes for p in launch.reads]):
            return  # a neighbour has not sent it yet
        yield from [Grow(*pair) for pair in launch.brought if pair[0] not in view.held_bytes]
        yield from launch.grows
        yield Compute((piece,), launch.reads, launch.writes, here)
        for sent, device in self._sent(job, task, here):
            yield Copy(sent, sent._replace(device=device))
            yield Free(sent)
        yield from map(Free, launch.frees)

    def _sent(self, job: Job, task: TrainingTask, here: int) -> Iterator[tuple[Place, int]]:
        """What goes to a neighbour behind a task."""
        training, (work, unit, k) = training_of(job), task
        units, count = training.stages[here].units, training.spec.num_units
        if work is F and unit == units[-1] and unit < count - 1:
            yield hidden(job.job_id, unit + 1, count, k, device=here), here + 1
        if work is B and unit == units[0] and unit:
            yield input_gradient(job.job_id, unit, here, k), here - 1


@dataclass(frozen=True)
class Spilled:
    """Any device runs the next task of any shard; all that it needs comes from the host and goes
    back there (Hydra's spilling, without its double buffer)."""

    def plan(self, view: View) -> Plan:
        jobs = sorted((*view.training, *view.waiting), key=lambda job: -num_left(job))
        for job in jobs:
            for shard in range(len(training_of(job).stages)):
                for task in training_of(job).ahead(1, shard):
                    is_open = task.microbatch in training_of(job).open_microbatches
                    if is_open and (ops := tuple(self._ops(job, task, view))):
                        return Plan(ops)
        return Plan()

    def _ops(self, job: Job, task: TrainingTask, view: View) -> Iterator[Any]:
        here, piece, held = view.device, piece_of(job, task), view.held_bytes
        (launch,) = launches_of(piece, here)
        sizes = {**dict(launch.brought), **{op.place: op.nbytes for op in launch.grows}}
        touched = dict.fromkeys((*launch.reads, *launch.writes))
        homes = {place: place._replace(tier=Tier.HOST, device=0) for place in touched}
        if any([homes[p] not in held and p not in sizes for p in launch.reads]):
            return
        for place, home in homes.items():
            yield Copy(home, place) if home in held else Grow(place, sizes[place])
        yield Compute((piece,), launch.reads, launch.writes, here)
        for place, home in homes.items():
            ends = place in launch.frees
            if place in launch.writes and not ends and not is_workspace(place):
                yield Copy(place, home)
            if ends and home in held:
                yield Free(home)
            yield Free(place)


def num_left(job: Job) -> int:
    training = training_of(job)
    return sum([training.num_left(shard) for shard in range(len(training.stages))])


def duration(launch: Launch) -> int:
    return NS[launch.op.slices[0].work] if isinstance(launch.op, Compute) else 1


def pipeline(
    name: str, d: int, m: int, steps: int = 3, each: int = 1, depth: int = 2, noise: float = 0.0
) -> Replay:
    layout = laid_out(stages_of(SCHEDULES[name], d, m, each), 2 if name == "2bw" else 1)
    places = dict[Place, int]()
    for s, stage in enumerate(layout.stages):
        places |= {weight(0, u, device=s): 40 for u in stage.units}
        places |= {optimizer(0, u, device=s): 80 for u in stage.units}
    run = replay(
        Pipeline(),
        [job_of(d * each, m, steps)],
        pages=1000,
        depth=depth,
        devices=d,
        noise=noise,
        seed=int(noise * 10),
        page=PAGE,
        layout=Layout(places, {0: layout}),
        duration=duration,
    ).check()
    tasks = m * steps * 2 + steps
    assert sum([isinstance(span.op, Compute) for span in run.recorder.spans]) == tasks * d * each
    return run


@pytest.mark.broad(6)
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("d", "m"), [(2, 2), (2, 4), (3, 4), (4, 4)])
@pytest.mark.parametrize("depth", [1, 2])
def test_pipelines_obey_the_laws_and_repeat_their_plans(
    name: str, d: int, m: int, depth: int
) -> None:
    runs = [pipeline(name, d, m, depth=depth, noise=noise) for noise in (0.0, 0.3, 0.6)]
    for device in range(d):
        logs = [[body for at, body in run.log() if at == device and body] for run in runs]
        assert all([log == logs[0] for log in logs])


def step_times(run: Replay) -> list[int]:
    return [row["end_ns"] for row in run.rows("training")]


@pytest.mark.parametrize(("d", "m"), [(2, 2), (2, 4), (3, 4), (4, 8)])
def test_a_flush_costs_the_bubble_and_two_versions_have_none(d: int, m: int) -> None:
    """With equal stages a step takes (m + d - 1) turns with a flush, m with two versions of the
    weights. Copies of 1 ns and updates come on top: 0.1 % is more than all of them."""
    turn = NS[F] + NS[B]
    for name, turns in (("gpipe", m + d - 1), ("flush", m + d - 1), ("2bw", m)):
        ends = step_times(pipeline(name, d, m, steps=6, each=2))
        steady = (ends[-2] - ends[1]) / (len(ends) - 3)
        assert steady == pytest.approx(turns * turn * 2, rel=1e-3), name


def test_a_flush_keeps_activations_of_d_microbatches_where_gpipe_keeps_all() -> None:
    """On the first stage; 20 bytes each."""

    def peak(name: str) -> int:
        layout = laid_out(stages_of(SCHEDULES[name], 2, 6, 1))
        training = TrainingProgress(job_of(2, 6, 1), layout)
        held = most = 0
        for task in training.ahead(99, stage=0):
            held += {F: 20, B: -20, U: 0}[task.work]
            most = max(most, held)
        return most

    assert (peak("gpipe"), peak("flush")) == (6 * 20, 2 * 20)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("devices", [1, 2, 3])
def test_shards_run_on_any_device(devices: int, depth: int) -> None:
    """Two models of three shards each: a device runs what is ready, whosever shard it is."""
    jobs = [job_of(6, 2, 2, job_id) for job_id in range(2)]
    layout = laid_out(stages_of(chain, 3, 2, 2))
    places = dict[Place, int]()
    for job in jobs:
        places |= {weight(job.job_id, u, Tier.HOST): 40 for u in range(6)}
        places |= {optimizer(job.job_id, u, Tier.HOST): 80 for u in range(6)}

    def run(noise: float) -> Replay:
        return replay(
            Spilled(),
            jobs,
            pages=40,
            host_pages=1000,
            depth=depth,
            devices=devices,
            noise=noise,
            page=PAGE,
            layout=Layout(places, {job.job_id: layout for job in jobs}),
            duration=duration,
        ).check()

    done = run(0.0)
    used = {span.op.device for span in done.recorder.spans if isinstance(span.op, Compute)}
    assert used == set(range(devices))
    assert len(step_times(done)) == 4
    run(0.4)


# ---- what is refused
def refused(training: TrainingProgress) -> str:
    with pytest.raises(ContractError) as told:
        check_stages(training)
    assert told.value.rule is Rule.TRAINING_ORDER
    return told.value.what


def test_orders_name_each_task_of_a_step_once() -> None:
    stages = stages_of(flush, 2, 4, 1)
    job = job_of(2, 4, 3)
    check_stages(TrainingProgress(job, laid_out(stages)))
    lacks = replace(stages[1], period=stages[1].period[:-1])
    assert "stage 1 has 0 times the update of 1" in refused(
        TrainingProgress(job, laid_out((stages[0], lacks)))
    )
    twice = replace(stages[0], period=(*stages[0].period, stages[0].period[0]))
    assert "stage 0 has 2 times the forward of 0" in refused(
        TrainingProgress(job, laid_out((twice, stages[1])))
    )
    early = replace(stages[0], beginning=stages[0].period[:1])
    assert "stage 0 has 2 times" in refused(TrainingProgress(job, laid_out((early, stages[1]))))
    layout = replace(laid_out(stages), stages=(stages[0], stages[0]))
    assert "each unit is in one stage" in refused(TrainingProgress(job, layout))


@pytest.mark.parametrize(
    ("recipe", "told"), [(Recipe(clip_norm=1.0), "clipping"), (Recipe(dropout=0.1), "dropout")]
)
def test_stages_share_no_norm_and_no_dropout(recipe: Recipe, told: str) -> None:
    job = job_of(2, 4, 1, recipe=recipe)
    assert told in refused(TrainingProgress(job, laid_out(stages_of(flush, 2, 4, 1))))
    one = laid_out(stages_of(chain, 1, 4, 2))
    check_stages(TrainingProgress(job, one))


def test_a_table_of_two_stages_is_refused() -> None:
    layout = laid_out(stages_of(flush, 2, 4, 1))
    tied = replace(layout.units[1], chunks=(0, 1), trained=(0, 1))
    layout = replace(layout, units=(layout.units[0], tied))
    assert "chunk 0 is trained by stages [0, 1]" in refused(
        TrainingProgress(job_of(2, 4, 1), layout)
    )


def progressed(name: str, versions: int, until: TrainingTask) -> Job:
    """A job of two stages whose tasks are issued in turns, up to one that is not."""
    layout = laid_out(stages_of(SCHEDULES[name], 2, 2, 1), versions)
    job = Job.trains(TrainingProgress(job_of(2, 2, 3), layout), 0)
    training = training_of(job)
    for _ in range(99):
        for stage in (0, 1):
            for task in training.ahead(1, stage):
                if task == until:
                    return job
                try:
                    check_order(piece_of(job, task), training)
                except ContractError:
                    continue
                advance_training(piece_of(job, task))
    raise AssertionError(f"{until} never comes")


def test_microbatches_of_the_next_step_need_two_versions() -> None:
    ahead = TrainingTask(F, 0, 2)
    check_order(piece_of(job := progressed("2bw", 2, ahead), ahead), training_of(job))
    layout = laid_out(stages_of(two_versions, 2, 2, 1), versions=1)
    one = Job.trains(TrainingProgress(job_of(2, 2, 3), layout), 0)
    with pytest.raises(ContractError, match="microbatch 2: the step has 0 to 1"):
        check_order(piece_of(one, ahead), training_of(one))


def test_a_step_computes_with_the_version_before_the_last_update() -> None:
    """PipeDream-2BW's delay of 1: step n reads version n - 1, and version n + 1 writes over it."""
    layout = laid_out(stages_of(two_versions, 2, 2, 1), versions=2)
    training = TrainingProgress(job_of(2, 2, 4), layout)
    assert [training.version_for(k) for k in range(8)] == [0, 0, 0, 0, 1, 1, 2, 2]
    update = TrainingTask(U, 0, 1)
    job = progressed("2bw", 2, update)
    (launch,) = launches_of(piece_of(job, update), 0)
    assert weight(0, 0, version=0) in launch.reads
    assert weight(0, 0, version=1) in launch.writes
    assert weight(0, 0, version=0) not in launch.writes


class OldWeights(Pipeline):
    """Computes with the newest weights, as a pipeline without versions would."""

    def _ops(self, job: Job, task: TrainingTask, view: View) -> Iterator[Any]:
        for op in super()._ops(job, task, view):
            if isinstance(op, Compute) and task.work is F and task.microbatch >= 4:
                newest = training_of(job).version(task.part) % 2
                reads = [p._replace(region=p.region._replace(slot=newest)) if is_weight(p) else p
                         for p in op.reads]  # fmt: skip
                op = Compute(op.slices, tuple(reads), op.writes, op.device)
            yield op


def is_weight(place: Place) -> bool:
    return place == weight(0, place.region.part, place.tier, place.device, place.region.slot)


def test_a_forward_with_weights_of_another_version_is_refused() -> None:
    layout = laid_out(stages_of(two_versions, 2, 2, 1), 2)
    places = {weight(0, u, device=u): 40 for u in (0, 1)}
    places |= {optimizer(0, u, device=u): 80 for u in (0, 1)}
    with pytest.raises(ContractError, match="does not read weight"):
        replay(
            OldWeights(),
            [job_of(2, 2, 4)],
            pages=100,
            devices=2,
            page=PAGE,
            layout=Layout(places, {0: layout}),
        )


@dataclass(frozen=True)
class WrongDevice:
    """Device 1 runs the first stage."""

    def plan(self, view: View) -> Plan:
        job = next(iter((*view.training, *view.waiting)))
        piece = piece_of(job, TrainingTask(F, 0, 0))
        if view.device == 0:
            return Plan()
        (launch,) = launches_of(piece, 1)
        grows = [Grow(*pair) for pair in launch.brought] + [*launch.grows]
        return Plan((*grows, Compute((piece,), launch.reads, launch.writes, 1)))


def test_a_stage_stays_on_its_device() -> None:
    layout = laid_out(stages_of(flush, 2, 2, 1))
    with pytest.raises(ContractError, match="forward of 0 on device 1: stage 0 runs on another"):
        replay(
            WrongDevice(),
            [job_of(2, 2, 1)],
            pages=100,
            devices=2,
            page=PAGE,
            layout=Layout({}, {0: layout}),
        )


# ---- eager updates
def test_an_eager_update_follows_the_last_backward_that_it_waits_for() -> None:
    job = job_of(3, 2, 2)
    layout = eager(laid_out(stages_of(chain, 1, 2, 3)), job)
    training = TrainingProgress(job, layout)
    check_stages(training)
    step = [(work, part, k) for work, part, k in training.tasks]
    back = [(B, 2, 1), (U, 2, 1), (B, 1, 1), (U, 1, 1), (B, 0, 1), (U, 0, 1)]
    assert step[-6:] == back
    assert [work for work, _, k in step[:-6]] == [F] * 3 + [B] * 3 + [F] * 3
    one = Job.trains(training, 0)
    for task in training.ahead(99):
        check_order(piece_of(one, task), training)
        advance_training(piece_of(one, task))
    assert training.is_complete


def test_clipped_updates_wait_for_the_norm_of_all_gradients() -> None:
    job = job_of(3, 1, 1, recipe=Recipe(clip_norm=1.0))
    layout = eager(laid_out(stages_of(chain, 1, 1, 3)), job)
    works = [task.work for task in TrainingProgress(job, layout).tasks]
    assert works == [F] * 3 + [B] * 3 + [U] * 3


def test_a_policy_that_leaves_the_order_still_finds_what_is_left() -> None:
    """Frontiers tell what is done; a cursor is only where a stage looks first."""
    job = job_of(2, 1, 2)
    layout = laid_out(stages_of(chain, 1, 1, 2))
    one = Job.trains(TrainingProgress(job, layout), 0)
    training = training_of(one)
    for task in (*training.ahead(4), TrainingTask(U, 1, 0)):
        check_order(piece_of(one, task), training)
        advance_training(piece_of(one, task))
    assert training.num_left() == 2
    assert training.ahead(2) == [TrainingTask(U, 0, 0), TrainingTask(F, 0, 1)]
