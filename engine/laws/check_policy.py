"""Checks a policy by replays: it is pure, keeps the rules, and its traits hold.

`check_policy(policy)` is what the author of a policy calls in a test. It needs no simulator:
launches take synthetic times on a virtual clock.
"""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter

import simpy

from engine.contract.executor import Lanes, Launch, Pieces, Repeater, Span
from engine.contract.job import Job, named
from engine.contract.layout import Layout
from engine.contract.plan import Compute, Op, Plan
from engine.contract.policy import Policy, Traits, notes_reads, traits_of
from engine.contract.regions import PageSize, Pool, Tier
from engine.contract.rules import BrokenLaw, ContractError, made_at, name_of
from engine.contract.view import Profile, View
from engine.laws.differences import MOST, of_plans, of_runs, of_views
from engine.loop.engine import Engine, Stalled
from engine.loop.state import VirtualClock
from engine.results.plan_log import encode
from engine.results.recorder import Recorder
from traces.serving.request import Request, TrainingJob

ANSWERS = (
    "profile",
    "cost",
    "kept_pages",
    "reads",
    "first_token_ns",
    "launch_of",
)  # functions: they hold nothing to write to
SHOWN = [field.name for field in dataclasses.fields(View) if field.name not in ANSWERS]
TOKENS = ("known_tokens", "computed_tokens")
SLOTS = getattr(Job, "__slots__", None) or Job.__mypyc_attrs__  # type: ignore[attr-defined]
NAMES = (*TOKENS, *(name for name in SLOTS if not name.startswith("_")))
FIELDS = attrgetter(*NAMES)
MUTABLE = (dict, list)
PAGE = PageSize(tokens=16, nbytes=1 << 16)
ROOMY = 48  # pages of a device
DEVICE = 0


def check_policy(
    policy: Policy,
    work: Sequence[Request | TrainingJob] | None = None,
    *,
    capacity_bytes: Mapping[Pool, int] | None = None,
    layout: Layout | None = None,
    page: PageSize = PAGE,
    depths: Sequence[int] = (1, 2),
) -> int:
    """Replays work under memory pressure, and raises where a policy breaks its contract.

    Each question is asked twice, of views that are compared before and after. Each replay is run
    step by step and again with the questions that the policy's traits spare. Where no pool is given
    there are two: a roomy one, and a tight one of half more than the longest request, in which
    running jobs lose their KV again and again.

    Args:
        policy: an object with `plan(view)`, as an Engine takes it.
        work: requests and training jobs; by default 24 requests of up to 200 tokens.
        capacity_bytes: bytes of each pool; by default a host of 96 pages with a device of 48 pages
            and then with a tight one, in neither of which the default requests fit at once.
        layout: where training jobs lie, if there are any.
        page: the page size of KV.
        depths: the run-ahead of each replay.

    Returns:
        How many questions the policy was asked, without those that only check it.

    Raises:
        ContractError: a plan breaks a rule (engine/contract/rules.py).
        BrokenLaw: the policy changes what it is shown, answers equal views differently, lets time
            pass with nothing in flight, or promises traits that do not hold.
        Stalled: work is left and the policy plans nothing.
        ValueError: `policy` is a class or half of a policy, or declares its traits wrongly.
    """
    _check_is_whole(policy)
    items = [*(requests() if work is None else work)]
    pages = [ROOMY, *_tight(items, page)]
    host, sizes = {(Tier.HOST, DEVICE): 96 * page.nbytes}, list[Mapping[Pool, int]]()
    sizes += [{(Tier.GPU, DEVICE): count * page.nbytes, **host} for count in pages]
    asked = 0
    for pools in [capacity_bytes] if capacity_bytes else sizes:
        for depth in depths:
            asked += _check_replay(policy, items, pools, page, depth, layout)
    return asked


def _check_is_whole(policy: object) -> None:
    """Raises ValueError for what is no policy, with what to give instead."""
    traits_of(policy)
    if hasattr(policy, "plan"):
        return
    name = type(policy).__name__
    if hasattr(policy, "batch"):
        raise ValueError(f"{name} is a scheduling: give Composed({name}(...), MEMORY), a policy")
    if hasattr(policy, "fit"):
        raise ValueError(f"{name} is a memory policy: give Composed(SCHEDULING, {name}(...))")
    raise ValueError(f"{named(policy)} is no policy: give an object with plan(view)")


def _tight(items: Sequence[Request | TrainingJob], page: PageSize) -> list[int]:
    """Pages of a pool in which the longest request has little room beside it; none for training."""
    tokens = [i.prompt_tokens + i.output_tokens for i in items if isinstance(i, Request)]
    longest = page.count(max(tokens, default=0))
    return [tight] if 0 < (tight := longest + longest // 2) < ROOMY else []


def _check_replay(
    policy: Policy,
    items: Sequence[Request | TrainingJob],
    pools: Mapping[Pool, int],
    page: PageSize,
    depth: int,
    layout: Layout | None,
) -> int:
    """Replays work with fast-forward and without it; returns the questions asked."""
    asked, name, recorders = 0, name_of(policy), list[Recorder]()
    for fast_forward in (False, True):
        watched = WatchedPolicy(policy)
        engine = _engine(watched, pools, page, depth, layout, fast_forward)
        try:
            engine.replay(items)
        except ContractError as error:
            at = made_at(policy, error.rule)
            raise error.located(name, error.step, error.device, at) from error.__cause__
        except Stalled as error:
            pages = pools[Tier.GPU, DEVICE] // page.nbytes
            raise Stalled(f"{error} (a pool of {pages} pages)") from error
        except BrokenLaw as error:
            if name in str(error):
                raise
            raise BrokenLaw(f"{error} (policy {name}, step {engine.steps})") from error
        if watched.idle_without_a_plan:
            raise BrokenLaw(watched.told_idle())
        asked += watched.asked
        recorders.append(engine.recorder)
    one, other = recorders
    if one.tables() != other.tables():
        raise BrokenLaw(
            f"law 15: policy {name}, run-ahead {depth}, "
            f"{of_runs(one, other).told('asked at each step', 'asked less')}; {_remedy(policy)}"
        )
    return asked


def _remedy(policy: Policy) -> str:
    """What to do where sparing questions changes the results."""
    traits = traits_of(policy)
    if traits.repeats or traits.recurs or not notes_reads(policy):
        return f"leave out what does not hold of Traits({traits})"
    return (
        "let the scheduling go by `self` and the view alone, and leave out what does not hold of "
        f"the memory policy's Traits({traits})"
    )


def requests(count: int = 24, seed: int = 0) -> list[Request]:
    """Requests that arrive in bursts, of 1 to 200 prompt tokens and 1 to 100 output tokens.

    Args:
        count: how many.
        seed: of the random numbers.

    Returns:
        The requests, by arrival.
    """
    rng, at_ns, found = random.Random(seed), 0, list[Request]()
    for number in range(count):
        at_ns += rng.choice((0, 0, 1_000_000, 20_000_000))
        found.append(Request(number, at_ns, rng.randint(1, 200), rng.randint(1, 100)))
    return found


def _engine(
    policy: Policy,
    capacity_bytes: Mapping[Pool, int],
    page: PageSize,
    depth: int,
    layout: Layout | None,
    fast_forward: bool,
) -> Engine:
    env = VirtualClock()
    return Engine(
        env,
        policy,
        SyntheticTimes(env),
        capacity_bytes,
        page,
        depth=depth,
        layout=layout,
        recorder=Recorder(),
        fast_forward=fast_forward,
    )


class SyntheticTimes(Repeater):
    """An executor whose launches take 50 us, 1 us a token and 37 ns a token of context."""

    def __init__(self, env: simpy.Environment) -> None:
        self._lanes = Lanes(env)

    def prepare(self, launches: Sequence[Launch]) -> int:
        """See Executor: deciding takes no time."""
        return 0

    def run(self, launch: Launch, done: Callable[[Span], None]) -> None:
        """See Executor."""
        self._lanes.place(launch, self._duration_ns(launch, 0), done)

    def release(self, pool: Pool, pages: Sequence[int]) -> None:
        """See Executor: there is no memory behind pages."""

    def repeat(self, launch: Launch, count: int) -> tuple[Sequence[int], int]:
        """Durations of launches in a row, each behind the tokens of the one before."""
        return [self._duration_ns(launch, step) for step in range(count)], 0

    def end_times_ns(self, ops: Sequence[Op]) -> list[int]:
        """When operations in flight will end."""
        return self._lanes.end_times_ns(ops)

    def hold(self, launch: Launch, span: Span, done: Callable[[Span], None]) -> None:
        """Occupies a lane until a span's end."""
        self._lanes.hold(launch.op.lane, span, done)

    def _duration_ns(self, launch: Launch, step: int) -> int:
        if not isinstance(launch.op, Compute):
            return 20 * launch.nbytes
        pieces = launch.pieces
        assert isinstance(pieces, Pieces)
        tokens = sum(pieces.tokens)
        return 50_000 + 1_000 * tokens + 37 * (sum(pieces.contexts) + step * tokens)


class WatchedPolicy:
    """A policy that is asked twice at each question, and held to laws 6, 8 and 9.

    Args:
        policy: the policy that it asks.

    Raises:
        ValueError: the policy declares its traits wrongly.
    """

    def __init__(self, policy: Policy) -> None:
        self.traits = traits_of(policy)
        self.watched_policy, self._now_ns = policy, 0
        self._wants_nothing = False  # the last answer, while no launch was in flight
        self._idle = ""  # the first question behind which time passed so
        self.idle_without_a_plan = self.asked = 0

    @property
    def notes_reads(self) -> bool:
        """As the policy that it asks."""
        return notes_reads(self.watched_policy)

    def plan(self, view: View) -> Plan:
        """The policy's plan for a view.

        Raises:
            BrokenLaw: the policy changes the view or answers an equal view otherwise, a batch is
                beyond the bounds of its traits, or the clock runs back.
        """
        where = f"policy {name_of(self.watched_policy)}, step {view.issued}, device {view.device}"
        if view.now_ns < self._now_ns:
            raise BrokenLaw(f"law 6: {where}: the clock ran back")
        self.idle_without_a_plan += self._wants_nothing and view.now_ns > self._now_ns
        self._now_ns = view.now_ns
        self.asked += 1
        before = snapshot(view)
        plan = self.watched_policy.plan(view)
        if (after := snapshot(view)) != before:
            what = of_views(before, after, NAMES)
            raise BrokenLaw(
                f"law 8: {where}: the policy changed what it was shown, {what}: work on a copy"
            )
        again: object = self.watched_policy.plan(view)
        written = _written(plan)
        if written is None:
            return plan  # the engine's check says what is wrong with it
        if written != _written(again) and (found := of_plans(plan, again)):
            raise BrokenLaw(
                f"law 8: {where}: equal views, other plans: {found.told('at first', 'then')}; "
                "plan by the view alone"
            )
        if beyond := _beyond(plan, view, self.traits):
            raise BrokenLaw(f"law 15: {where}: {beyond}; a run sets memory aside by these bounds")
        self._wants_nothing = not (plan or any(isinstance(op, Compute) for op in view.in_flight))
        if self._wants_nothing and not self.idle_without_a_plan:
            jobs = [job.job_id for job in (*view.serving, *view.waiting)]
            self._idle = f"{where}: it planned nothing at {view.now_ns} ns for jobs {jobs[:MOST]}"
        return plan

    def told_idle(self) -> str:
        """Law 9 in a line, where time passed with nothing in flight."""
        return (
            f"law 9: {self._idle}, and time passed with nothing in flight: plan what fits, and "
            "refuse what never will"
        )


def _beyond(plan: Plan, view: View, traits: Traits) -> str | None:
    """The bound of a policy's traits that a plan breaks, in words; None where it keeps all."""
    serving = {job.job_id for job in view.serving} - {job.job_id for job in plan.restart}
    for op in plan.ops:
        if not isinstance(op, Compute):
            continue
        served = [piece for piece in op.slices if piece.job.training is None]
        prompts = [piece.tokens for piece in served if piece.job.is_prefilling]
        serving.update(piece.job.job_id for piece in served)
        if (tokens := sum([piece.tokens for piece in served])) > (traits.step_tokens or tokens):
            return f"a batch of {tokens} tokens, Traits(step_tokens={traits.step_tokens})"
        if len(prompts) > 1 and sum(prompts) > (traits.prompt_tokens or sum(prompts)):
            return f"prompts of {sum(prompts)} tokens, Traits(prompt_tokens={traits.prompt_tokens})"
    if len(serving) > (traits.max_jobs or len(serving)):
        return f"{len(serving)} jobs in service, Traits(max_jobs={traits.max_jobs})"
    return None


def _written(plan: object) -> tuple[str, int | None] | None:
    """A plan as text, and its moment; None where it is no Plan, or holds what is no part of one."""
    if not isinstance(plan, Plan):
        return None
    try:
        return encode(plan), plan.wake_ns
    except (AttributeError, LookupError, TypeError, ValueError):
        return None


def snapshot(view: View) -> dict[str, object]:
    """All that a view shows, by value, for comparison.

    Args:
        view: the view.

    Returns:
        Every field but functions, as copies that later writes do not change; of the profile, what
        it answers for each job that is shown.
    """
    found = {name: _shown(getattr(view, name)) for name in SHOWN}
    jobs = (*view.serving, *view.training, *view.waiting)
    return found | {"profile": [_profiled(view.profile, job.job_id) for job in jobs]}


def _profiled(profile: Profile, job_id: int) -> object:
    """All that a profile answers for a job."""
    moments = (*profile.moments(job_id),)
    uses = {place: (*numbers,) for place, numbers in profile.uses(job_id).items()}
    means_ns = {unit: profile.mean_ns(job_id, unit) for unit in {m.unit for m in moments}}
    return moments, uses, profile.moment(job_id), means_ns


def _shown(value: object) -> object:
    """A copy of a field of a view that later writes do not change."""
    match value:
        case Job():
            return [_kept(field) for field in FIELDS(value)]
        case Layout():
            return [_shown(getattr(value, field.name)) for field in dataclasses.fields(value)]
        case Mapping():
            return dict(value)
        case list():
            return [_shown(item) for item in value]
    return value


def _kept(value: object) -> object:
    """A copy of a field of a job that later writes do not change."""
    if isinstance(value, MUTABLE):
        return copy.deepcopy(value) if value else type(value)()
    return value
