"""Policies that are legal up to a moment and then lie: one change to a plan for each way to lie."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import engine.contract.plan as vocabulary
from engine.contract.job import Job
from engine.contract.plan import (
    Compute,
    Copy,
    Free,
    Plan,
)
from engine.contract.policy import traits_of
from engine.contract.regions import Place, Tier, kv_place
from engine.contract.rules import Rule
from engine.contract.view import View

IS_COMPILED = not str(vocabulary.__file__).endswith(".py")
FOREIGN = 1_000_003  # no job has this number


@dataclass
class Scene:
    """One question, the honest answer to it, and what the liar remembers."""

    view: View
    plan: Plan
    rng: random.Random
    notes: dict[str, Any]

    @property
    def launch(self) -> Compute | None:
        """The launch of the honest answer that serves."""
        for op in reversed(self.plan.ops):
            if isinstance(op, Compute) and all(s.job.training is None for s in op.slices):
                return op
        return None

    @property
    def page(self) -> Any:
        return self.view.page

    def own(self, job: Job) -> Place:
        """The place of a job's KV on the device of the question."""
        return kv_place(job.job_id, Tier.GPU, self.view.device)

    def away(self, job: Job) -> Place:
        """The place of a job's KV on the host that the device can reach."""
        hosts = [d for tier, d in self.view.capacity_bytes if tier is Tier.HOST]
        device = self.view.device if self.view.device in hosts else 0
        return kv_place(job.job_id, Tier.HOST, device)

    def alive(self) -> list[Job]:
        """Jobs in service with KV on the device, that the honest answer neither gives up nor
        moves."""
        gone = {j.job_id for j in (*self.plan.restart, *self.plan.refuse)}
        gone |= {op.place.region.owner for op in self.plan.ops if isinstance(op, Free)}
        gone |= {op.src.region.owner for op in self.plan.ops if isinstance(op, Copy)}
        held = self.view.held_bytes
        return [
            j
            for j in self.view.serving
            if j.computed_tokens and self.own(j) in held and j.job_id not in gone
        ]

    def sliced(self) -> list[Job]:
        return [] if self.launch is None else [s.job for s in self.launch.slices]


Make = Callable[[Scene], Any]


@dataclass(frozen=True)
class Legal:
    """A change that prepares a lie and is none."""

    plan: Plan


@dataclass(frozen=True)
class Fault:
    """A way to lie. `rules`: those that may name it. `make` answers None where it does not apply,
    Legal where it only prepares."""

    name: str
    rules: tuple[Rule, ...]
    make: Make
    is_written: bool = False  # it writes to the view: the error comes out of the policy


FAULTS: dict[str, Fault] = {}


def fault(name: str, *rules: Rule, is_written: bool = False) -> Callable[[Make], Make]:
    """Registers a way to lie under its name, and the rules that may refuse it."""

    def register(make: Make) -> Make:
        assert name not in FAULTS, name
        FAULTS[name] = Fault(name, rules, make, is_written)
        return make

    return register


class Liar:
    """Answers as a policy does, but for one moment: from question `at` on, as soon as it can lie.

    With `is_stubborn` every answer from then on is a lie.
    """

    def __init__(
        self,
        policy: Any,
        lie: Fault,
        at: int = 0,
        seed: int = 0,
        before: Callable[[], None] = lambda: None,
        is_stubborn: bool = False,
    ) -> None:
        self.traits = traits_of(policy)
        self._policy, self._lie, self._at = policy, lie, at
        self._rng, self.notes = random.Random(seed), dict[str, Any]()
        self._before, self._is_stubborn = before, is_stubborn
        self.asked = self.lies = self.unbuilt = 0

    def plan(self, view: View) -> Any:
        number, self.asked = self.asked, self.asked + 1
        honest = self._policy.plan(view)
        self._remember(view)
        if number < self._at or (self.lies and not self._is_stubborn):
            return honest
        if self._lie.is_written:
            self._before()
            self.lies += 1  # taken back where there is nothing to write to
        try:
            found = self._lie.make(Scene(view, honest, self._rng, self.notes))
        except TypeError:
            if self._lie.is_written or not IS_COMPILED:
                raise
            self.unbuilt += 1  # records of the compiled form take no wrong types
            return honest
        if self._lie.is_written:
            if found is None:
                self.lies -= 1
            return honest
        if found is None:
            return honest
        if isinstance(found, Legal):
            return found.plan
        if not self.lies:
            self._before()
        self.lies += 1
        return None if found is NOTHING else found

    def _remember(self, view: View) -> None:
        jobs = self.notes.setdefault("jobs", {})
        for job in (*view.serving, *view.waiting, *view.training):
            jobs[job.job_id] = job


NOTHING = object()  # stands for the answer None


# ---- plans, changed
def with_launch(scene: Scene, plan: Plan | None = None, **fields: Any) -> Plan | None:
    """The honest answer, its serving launch with other fields."""
    launch, plan = scene.launch, plan or scene.plan
    if launch is None:
        return None
    if launch not in plan.ops:
        launch = next((op for op in reversed(plan.ops) if isinstance(op, Compute)), None)
        if launch is None:
            return None
    return swapped(plan, launch, changed(launch, **fields))


def changed(launch: Compute, **fields: Any) -> Compute:
    names = ("slices", "reads", "writes", "device", "on", "again", "after")
    values = {name: getattr(launch, name) for name in names} | fields
    return Compute(**values)


def swapped(plan: Plan, old: Any, *new: Any) -> Plan:
    """A plan with other operations in the place of one."""
    ops = list[Any]()
    for op in plan.ops:
        ops += new if op is old else [op]
    return replace(plan, ops=tuple(ops))


def ahead(plan: Plan, *ops: Any) -> Plan:
    """A plan with more operations before the others."""
    return replace(plan, ops=(*ops, *plan.ops))


def behind(plan: Plan, *ops: Any) -> Plan:
    return replace(plan, ops=(*plan.ops, *ops))


def pick(scene: Scene, items: Any) -> Any:
    items = list(items)
    return scene.rng.choice(items) if items else None


def with_slice(scene: Scene, **fields: Any) -> Plan | None:
    """The honest answer with one slice changed."""
    launch, i = scene.launch, None
    if launch is not None and launch.slices:
        i = scene.rng.randrange(len(launch.slices))
    if i is None:
        return None
    plan = scene.plan
    slices = launch.slices
    piece = slices[i]
    given = {k: v(piece) if callable(v) else v for k, v in fields.items()}
    return with_launch(scene, plan, slices=(*slices[:i], piece._replace(**given), *slices[i + 1 :]))
