"""Training jobs for tests of their costs: layouts, launches, and an engine on a real cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from engine.contract.executor import Launch, Piece
from engine.contract.footprint import launches_of
from engine.contract.job import Job
from engine.contract.layout import Layout, Mode, TrainingLayout, lay_out
from engine.contract.plan import COMPUTE_LANE, HOST_LANE, Compute, Copy, Free, Grow, Plan, Slice
from engine.contract.regions import PageSize, Tier, Work, gradient, hidden, optimizer, saved, weight
from engine.contract.training_progress import TrainingProgress
from engine.contract.view import View
from engine.loop.engine import Engine
from engine.loop.state import VirtualClock
from engine.memory.scoreboard import Journal
from engine.results.recorder import Recorder
from models.spec import ModelSpec
from models.training.shape import training_shape
from sim.cost.contract import LaunchCost
from sim.devices.device import Device
from sim.executor import SimExecutor
from tests.support.replays import Replay
from traces.serving.request import TrainingJob
from traces.training.recipe import Recipe

CONF = Path(__file__).parents[2] / "conf"
GIB = 1 << 30
TINY = ModelSpec("toy", "llama", 4, 256, 8, 4, 32, 704, 2048, 4096, dtype="float32")


def device(name: str) -> Device:
    fields = yaml.safe_load((CONF / "device" / f"{name}.yaml").read_text())
    return Device(**{key: value for key, value in fields.items() if not key.startswith("_")})


def job_of(
    spec: ModelSpec = TINY,
    sequences: int = 2,
    tokens: int = 64,
    recipe: Recipe | None = None,
    **more: Any,
) -> TrainingJob:
    """A job on a model, with other settings."""
    units = spec.num_layers + 2
    return TrainingJob(0, 0, units, tokens, sequences, recipe=recipe or Recipe(), **more)


def layout_of(
    spec: ModelSpec, job: TrainingJob, modes: Sequence[Mode] = (), chunks: Any = None
) -> TrainingLayout:
    """A chunk per unit, a tied table in the first one, unless told; modes in turn."""
    shape = training_shape(spec, job)
    if chunks is None:
        seen: set[int] = set()
        chunks = []
        for unit in shape.units:
            for trains in (True, False):  # they share no chunk
                own = [
                    p
                    for p in unit.parameters
                    if p not in seen and shape.parameters[p].trains == trains
                ]
                seen.update(own)
                chunks += [own] if own else []
    turn = modes or [Mode.KEEP]
    return lay_out(shape, chunks, [turn[u % len(turn)] for u in range(len(shape.units))])


def trains(spec: TrainingJob, layout: TrainingLayout | None = None) -> Job:
    return Job.trains(TrainingProgress(spec, layout), 0)


def launch(
    job: Job, work: Work, part: int, light: bool = False, on: str = COMPUTE_LANE, **more: Any
) -> Launch:
    """One unit of a job, or one chunk's update; forwards keep unless they are light."""
    assert job.training is not None
    spec = job.training.spec
    tokens = 1 if work is Work.UPDATE else spec.microbatch_tokens
    piece = Slice(job, tokens, work, range(part, part + 1))
    units = spec.num_units
    above = [hidden(job.job_id, part + 1, units, 0)] if part + 1 < units else []
    kept = [] if light else [saved(job.job_id, part, 0)]
    writes = (*above, *kept) if work is Work.FORWARD else ()
    pieces = (Piece(job.job_id, tokens, 0, False, ()),)
    return Launch(Compute((piece,), (), writes, on=on, **more), pieces=pieces)


@dataclass(frozen=True)
class HostStates:
    """The smallest policy that trains by a layout: weights and activations stay on the device,
    optimizer states on the host, where updates run behind a copy of the gradients, or on the device
    with them all (`updates_there`). One task a plan."""

    updates_there: bool = False

    def plan(self, view: View) -> Plan:
        job = next(iter((*view.training, *view.waiting)))
        training = job.training
        assert training is not None and training.layout is not None
        ((work, part, k),) = training.ahead(1)
        tokens = 1 if work is Work.UPDATE else training.spec.microbatch_tokens
        piece = Slice(job, tokens, work, range(part, part + 1), k)
        if work is Work.UPDATE and not self.updates_there:
            here, there = weight(job.job_id, part), weight(job.job_id, part, Tier.HOST)
            added = gradient(job.job_id, part)
            out = (Copy(added, added._replace(tier=Tier.HOST)), Free(added), Copy(here, there))
            back = (Free(here), Copy(there, here), Free(there))
            return Plan((*out, *_launched(piece, view, HOST_LANE), *back))
        return Plan((*_launched(piece, view),))


def _launched(piece: Slice, view: View, on: str = COMPUTE_LANE) -> Iterator[Any]:
    """The launches of a task with what begins before and ends behind each."""
    for launch in launches_of(piece, 0, on):
        if on == COMPUTE_LANE:
            begun = [Grow(*pair) for pair in launch.brought if pair[0] not in view.held_bytes]
            yield from begun
        yield from launch.grows
        yield Compute((launch.piece,), launch.reads, launch.writes, on=on, again=launch.again)
        yield from map(Free, launch.frees)


def train(
    cost: LaunchCost,
    job: TrainingJob,
    layout: TrainingLayout,
    policy: Any = None,
    depth: int = 2,
) -> Replay:
    """Runs a job on the simulator's executor with a real cost; all laws hold."""
    env, recorder = VirtualClock(), Recorder()
    journal = Journal(lambda: int(env.now))
    policy = policy or HostStates()
    states = Tier.GPU if policy.updates_there else Tier.HOST
    places = {weight(0, c): chunk.weight_bytes for c, chunk in enumerate(layout.chunks)}
    places |= {
        optimizer(0, c, states): chunk.optimizer_bytes
        for c, chunk in enumerate(layout.chunks)
        if chunk.optimizer_bytes
    }
    executor = SimExecutor(env, cost)
    recorder.predicted_bytes = executor.peak_bytes
    engine = Engine(
        env,
        policy,
        executor,
        {(Tier.GPU, 0): 64 * GIB, (Tier.HOST, 0): 64 * GIB},
        PageSize(16, GIB),
        depth=depth,
        layout=Layout(places, {0: layout}),
        recorder=recorder,
        journal=journal,
    )
    engine.replay([job])
    return Replay(engine, recorder, journal).check()
