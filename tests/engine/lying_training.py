"""Small worlds of training whose policies lie: one change to a plan each, and what must follow."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from engine.contract.layout import Mode
from engine.contract.plan import (
    Collective,
    Compute,
    Grow,
    Pattern,
    Plan,
)
from engine.contract.regions import (
    Kind,
    Place,
    Tier,
    Work,
)
from engine.contract.rules import ContractError
from engine.contract.training_progress import TrainingProgress
from engine.contract.view import View
from engine.loop.engine import Engine
from engine.loop.state import VirtualClock
from engine.results.recorder import Recorder
from policies.composed import Composed
from policies.planners.unit_chunks import UnitChunks
from policies.training.all_on_device import AllOnDevice
from policies.training.patrickstar import PatrickStar
from policies.training.training_order import TrainingOrder
from policies.training.zero3_offload import Zero3Offload
from policies.training.zero_offload import ZeroOffload
from tests.support.offload import NO_PAGES, ROOMY, job_of, shape_of
from tests.support.replays import ToyExecutor
from traces.serving.request import TrainingJob
from traces.training.recipe import Recipe

F, B, U = Work.FORWARD, Work.BACKWARD, Work.UPDATE
GPU, HOST = Tier.GPU, Tier.HOST
UNITS = 5
CLIPS = Recipe(clip_norm=1.0)
Ops = list[Any]
Fault = Callable[[Plan, View], Ops | Plan | None]  # None: the plan is left as it is


@dataclass
class Lying:
    """A policy whose plans are those of another, but for a fault."""

    policy: Any
    fault: Fault
    books: tuple[Any, ...] = ()  # before the last plan
    told: int = 0  # plans that were changed

    def plan(self, view: View) -> Plan:
        plan = self.policy.plan(view)
        self.books = books(view)
        wrong = self.fault(plan, view)
        if wrong is None:
            return plan
        self.told += 1
        return wrong if isinstance(wrong, Plan) else Plan(tuple(wrong))


def books(view: View) -> tuple[Any, ...]:
    """All that a refused plan must leave as it is."""
    jobs = [job for job in (*view.training, *view.waiting) if job.training is not None]
    return (
        dict(view.held_bytes),
        dict(view.written),
        dict(view.free_bytes),
        [progress(job.training) for job in jobs if job.training is not None],
        view.issued,
    )


def progress(training: TrainingProgress) -> tuple[Any, ...]:
    done = [[*map(list, training.frontier(k))] for k in training.microbatches]
    return training.step, dict(training.updated), done


def books_of(engine: Engine, issued: int) -> tuple[Any, ...]:
    jobs = [job for job in (*engine.state.jobs.training, *engine.state.jobs.waiting)]
    return (
        dict(engine.ledger.held_bytes),
        dict(engine.ledger.written),
        engine.ledger.free_bytes(),
        [progress(job.training) for job in jobs if job.training is not None],
        issued,
    )


@dataclass(frozen=True)
class World:
    """A small job under a policy, in memory that has room for all."""

    memory: Any = field(default_factory=Zero3Offload)
    mode: Mode = Mode.KEEP
    tied: bool = False
    ranks: int = 1
    shards: bool = True
    tasks: int = 1
    adapters: bool = False
    job: dict[str, Any] = field(default_factory=dict)

    def engine(self, fault: Fault) -> tuple[Engine, Lying, TrainingJob]:
        shape = shape_of(random.Random(7), tied=self.tied, adapters=self.adapters)
        job = job_of(shape, ranks=self.ranks, **self.job)
        capacity = {(GPU, 0): ROOMY, (HOST, 0): ROOMY}
        planner = UnitChunks(self.mode, shards=self.shards)
        layout = planner.prepare({0: shape}, [job], capacity)
        env = VirtualClock()
        policy = Lying(Composed(TrainingOrder(self.tasks), self.memory), fault)
        engine = Engine(
            env, policy, ToyExecutor(env), capacity, NO_PAGES, layout=layout, recorder=Recorder()
        )
        return engine, policy, job


def refused(world: World, fault: Fault) -> ContractError:
    """The error that a fault ends with; nothing has changed by then."""
    engine, policy, job = world.engine(fault)
    with pytest.raises(ContractError) as caught:
        engine.replay([job])
    assert policy.told, "the plan was changed"
    assert policy.books == books_of(engine, policy.books[-1])
    engine.ledger.conserved()
    assert "\n" not in str(caught.value)
    return caught.value


# ---- faults
def is_task(op: Any, work: Work, part: int, again: bool = False) -> bool:
    if not isinstance(op, Compute) or op.again is not again:
        return False
    piece = op.slices[0]
    return piece.work is work and piece.layers == range(part, part + 1)


def at(
    work: Work,
    part: int,
    change: Callable[[Compute], Sequence[Any]],
    again: bool = False,
    k: int = 0,
) -> Fault:
    """A fault that puts other operations where a launch of microbatch k or later was."""

    def fault(plan: Plan, view: View) -> Ops | None:
        for i, op in enumerate(plan.ops):
            if is_task(op, work, part, again) and op.slices[0].microbatch >= k:
                return [*plan.ops[:i], *change(op), *plan.ops[i + 1 :]]
        return None

    return fault


def other(op: Compute, **fields: Any) -> Compute:
    given = {
        "slices": op.slices,
        "reads": op.reads,
        "writes": op.writes,
        "device": op.device,
        "on": op.on,
        "again": op.again,
        "after": op.after,
    }
    return Compute(**{**given, **fields})


def piece(op: Compute, **fields: Any) -> Sequence[Any]:
    """A launch like this one, of another slice."""
    return (other(op, slices=(op.slices[0]._replace(**fields),)),)


def without(kind: Kind, slot: int | None = None, low: int = 0, high: int = 99) -> Any:
    """A launch like this one that does not name places of a kind."""

    def change(op: Compute) -> Sequence[Any]:
        def is_named(place: Place) -> bool:
            _, own, part, number = place.region
            is_meant = own is kind and (slot is None or number == slot) and low <= part < high
            return not is_meant

        found = other(
            op, reads=tuple(filter(is_named, op.reads)), writes=tuple(filter(is_named, op.writes))
        )
        assert (found.reads, found.writes) != (op.reads, op.writes), "it names some"
        return (found,)

    return change


def before(*ops: Any) -> Callable[[Compute], Sequence[Any]]:
    return lambda op: (*ops, op)


def behind(*ops: Any) -> Callable[[Compute], Sequence[Any]]:
    return lambda op: (op, *ops)


def less(place: Place) -> Fault:
    """A place begins with a byte less than it needs."""

    def fault(plan: Plan, view: View) -> Ops | None:
        ops = [
            Grow(op.place, op.nbytes - 1) if isinstance(op, Grow) and op.place == place else op
            for op in plan.ops
        ]
        return ops if ops != [*plan.ops] else None

    return fault


def never(is_meant: Callable[[Any], bool]) -> Fault:
    """Operations that are left out of all plans."""

    def fault(plan: Plan, view: View) -> Ops | None:
        ops = [op for op in plan.ops if not is_meant(op)]
        return ops if len(ops) < len(plan.ops) else None

    return fault


DEVICE = World(AllOnDevice())
CLIPPED = World(AllOnDevice(), job={"recipe": CLIPS})
OFFLOADING = World(Zero3Offload(), Mode.OFFLOAD)
RECOMPUTING = World(Zero3Offload(), Mode.RECOMPUTE)
TWICE = World(AllOnDevice(), tied=True, job={"microbatches": 2})
GROUP = World(Zero3Offload(), ranks=4)
STAYING = World(Zero3Offload(persistent_bytes=1 << 20), ranks=4)
COPIES = World(ZeroOffload(), ranks=4, shards=False)
REUSING = World(PatrickStar(reuses_gradients=True), job={"recipe": Recipe(dtype="bfloat16")})
REUSING_GROUP = replace(REUSING, ranks=4)


def gathers(op: Any) -> bool:
    return isinstance(op, Collective) and op.pattern is Pattern.ALL_GATHER


def reduces(op: Any) -> bool:
    return isinstance(op, Collective) and not gathers(op)
