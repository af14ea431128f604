"""Random schedulings: small expression trees over what a view shows, that promise nothing."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from hypothesis import strategies as st

from engine.contract.job import Job
from engine.contract.plan import Compute, Slice
from engine.contract.policy import PROMISES_NOTHING, Scheduling, Traits
from engine.contract.regions import Place, Tier, kv_place
from engine.contract.view import View

Expression = int | str | tuple[str, "Expression", "Expression"]
Fact = Callable[[View, Job], int]


def _other(view: View, job: Job) -> Job:
    """The job behind this one among those in service, or the first of them, or itself."""
    if not view.serving:
        return job
    ids = [other.job_id for other in view.serving]
    at = ids.index(job.job_id) + 1 if job.job_id in ids else 0
    return view.serving[at % len(ids)]


def _place(view: View, job: Job) -> Place:
    return kv_place(job.job_id, Tier.GPU, view.device)


def _kept_pages(view: View, job: Job) -> int:
    return 0 if view.kept_pages is None else len(view.kept_pages().found(job))


def _jobs_in_flight(view: View) -> list[Job]:
    launches = [op for op in view.in_flight if isinstance(op, Compute)]
    return [piece.job for op in launches for piece in op.slices]


STEADY: dict[str, Fact] = {  # while nothing arrives, ends or is admitted
    "job_id": lambda view, job: job.job_id,
    "arrival_ms": lambda view, job: job.arrival_ns // 1_000_000,
    "prompt_tokens": lambda view, job: job.prompt_tokens,
    "num_serving": lambda view, job: len(view.serving),
    "num_waiting": lambda view, job: len(view.waiting),
    "last_arrival_ms": lambda view, job: (
        max([other.arrival_ns for other in (*view.serving, *view.waiting)]) // 1_000_000
    ),
    "capacity_pages": lambda view, job: (
        view.capacity_bytes[Tier.GPU, view.device] // view.page.nbytes
    ),
}
MOVING: dict[str, Fact] = {  # some of them not in decodes
    "is_prefilling": lambda view, job: job.is_prefilling,
    "remaining_tokens": lambda view, job: job.remaining_tokens,
    "known_tokens": lambda view, job: job.known_tokens,
    "generated_tokens": lambda view, job: job.generated_tokens,
    "computed_tokens": lambda view, job: job.computed_tokens,
    "other_known_tokens": lambda view, job: _other(view, job).known_tokens,
    "other_remaining_tokens": lambda view, job: _other(view, job).remaining_tokens,
    "other_is_prefilling": lambda view, job: _other(view, job).is_prefilling,
    "num_prefilling": lambda view, job: len([j for j in view.serving if j.is_prefilling]),
    "most_known_tokens": lambda view, job: max([j.known_tokens for j in view.serving], default=0),
    "waited_ms": lambda view, job: (view.now_ns - job.arrival_ns) // 1_000_000,
    "time": lambda view, job: view.now_ns // 200_000,
    "issued": lambda view, job: view.issued,
    "free_pages": lambda view, job: view.free_bytes[Tier.GPU, view.device] // view.page.nbytes,
    "room_pages": lambda view, job: view.room((Tier.GPU, view.device)) // view.page.nbytes,
    "coming_pages": lambda view, job: view.coming_bytes[Tier.GPU, view.device] // view.page.nbytes,
    "kept_pages": _kept_pages,
    "held_pages": lambda view, job: view.held_bytes.get(_place(view, job), 0) // view.page.nbytes,
    "written": lambda view, job: view.written.get(_place(view, job), 0),
    "used": lambda view, job: view.used.get(_place(view, job), 0),
    "num_in_flight": lambda view, job: len(view.in_flight),
    "slices_in_flight": lambda view, job: _jobs_in_flight(view).count(job),
    "most_in_flight": lambda view, job: max([j.job_id for j in _jobs_in_flight(view)], default=0),
}
FACTS = STEADY | MOVING
OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "%": lambda a, b: a % b if b else a,
    "<": lambda a, b: int(a < b),
    "min": min,
}


def value(expression: Expression, view: View, job: Job) -> int:
    """What a tree says of a job. `if` reads its second branch where its first one is 0."""
    if isinstance(expression, int):
        return expression
    if isinstance(expression, str):
        return int(FACTS[expression](view, job))
    name, one, other = expression
    found = value(one, view, job)
    if name == "or":
        return found or value(other, view, job)
    if name == "and":
        return found and value(other, view, job)
    return OPERATIONS[name](found, value(other, view, job))


@dataclass(frozen=True)
class Drawn:
    """A scheduling made of trees: which jobs are in a batch, in which order, with which tokens.

    Either prompts that wait, alone, or all of them behind the job that is longest in service, which
    is always there, so that work comes to an end.
    """

    are_prompts_alone: Expression  # odd
    is_wanted: Expression  # a multiple of 4 is not
    rank: Expression
    tokens: Expression  # 0: all that remain
    token_budget: int
    max_jobs: int
    traits: ClassVar[Traits] = PROMISES_NOTHING

    def batch(self, view: View) -> tuple[Slice, ...]:
        waiting = view.waiting[: max(0, self.max_jobs - len(view.serving))]
        if waiting and view.serving and value(self.are_prompts_alone, view, waiting[0]) % 2:
            return self._slices(view, [*waiting])
        head, *rest = [*view.serving, *waiting] or [None]
        if head is None:
            return ()
        wanted = [job for job in rest if value(self.is_wanted, view, job) % 4]
        wanted.sort(key=lambda job: (value(self.rank, view, job) % 7, job.job_id))
        return self._slices(view, [head, *wanted])

    def _slices(self, view: View, jobs: Sequence[Job]) -> tuple[Slice, ...]:
        slices, left = list[Slice](), self.token_budget
        for job in jobs:
            if left <= 0:
                break
            most = value(self.tokens, view, job) % 9
            tokens = 1 if most == 1 else min(left, job.remaining_tokens, most or left)
            slices.append(Slice(job, tokens))
            left -= tokens
        return tuple(slices)


class Counts:
    """Turns to another scheduling at each n-th question: state that moves with every question."""

    def __init__(self, usual: Drawn, other: Drawn, n: int) -> None:
        self.usual, self.other, self.n, self.asked = usual, other, n, 0

    def batch(self, view: View) -> tuple[Slice, ...]:
        self.asked += 1
        return (self.usual if self.asked % self.n else self.other).batch(view)


class Compares:
    """Turns to another scheduling while a fact is not what it was at the question before."""

    def __init__(self, usual: Drawn, other: Drawn, fact: str) -> None:
        self.usual, self.other, self.fact = usual, other, fact
        self.before: dict[str, int] = {}

    def batch(self, view: View) -> tuple[Slice, ...]:
        jobs = [*view.serving, *view.waiting]
        now = FACTS[self.fact](view, jobs[0]) if jobs else 0
        before, self.before[self.fact] = self.before.get(self.fact), now
        return (self.usual if now == before else self.other).batch(view)


class Draws:
    """Draws one of two schedulings at each question, from a generator of its own."""

    def __init__(self, usual: Drawn, other: Drawn, seed: int) -> None:
        self.usual, self.other, self.rng = usual, other, random.Random(seed)

    def batch(self, view: View) -> tuple[Slice, ...]:
        return self.rng.choice((self.usual, self.usual, self.other)).batch(view)


def expressions(facts: dict[str, Fact]) -> st.SearchStrategy[Expression]:
    """Trees over facts."""
    leaves = st.one_of(st.integers(0, 5), st.sampled_from([*facts]), st.sampled_from([*facts]))
    names = st.sampled_from([*OPERATIONS, "or", "and"])
    return st.recursive(leaves, lambda inner: st.tuples(names, inner, inner), max_leaves=5)


def schedulings() -> st.SearchStrategy[Scheduling]:
    """Pure ones and, one in four, such as remember."""
    return st.integers(0, 3).flatmap(lambda n: remembering(drawn()) if n == 3 else drawn())


def remembering(pure: st.SearchStrategy[Drawn]) -> st.SearchStrategy[Scheduling]:
    """Schedulings that keep state of their own, and turn from one pure one to another by it."""
    numbers = st.integers(2, 9)
    return st.one_of(
        st.builds(Counts, pure, pure, numbers),
        st.builds(Compares, pure, pure, st.sampled_from([*FACTS])),
        st.builds(Draws, pure, pure, numbers),
    )


def drawn() -> st.SearchStrategy[Drawn]:
    """Many trees read steady facts alone; most lists of tokens are all that remain."""
    few = {name: FACTS[name] for name in ("job_id", "known_tokens", "computed_tokens", "time")}
    trees = st.one_of(expressions(STEADY), expressions(few), expressions(FACTS))
    tokens = st.one_of(st.sampled_from([0, 0, 1]), trees)
    budgets, seats = st.sampled_from([8, 24, 64]), st.integers(1, 12)
    alone = st.one_of(st.just(0), trees)
    return st.builds(Drawn, alone, trees, trees, tokens, budgets, seats)


def going_by(names: Sequence[str]) -> st.SearchStrategy[Drawn]:
    """Schedulings that read these facts and no other: which jobs, their order, or their tokens."""
    trees = expressions({name: FACTS[name] for name in names})
    budgets, seats = st.sampled_from([24, 64]), st.integers(4, 12)
    return st.one_of(
        st.builds(Drawn, st.just(0), trees, st.just(0), st.sampled_from([0, 1]), budgets, seats),
        st.builds(Drawn, st.just(0), st.just(1), trees, st.sampled_from([0, 1]), budgets, seats),
        st.builds(Drawn, st.just(0), st.just(1), st.just(0), trees, budgets, seats),
    )
