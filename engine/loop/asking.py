"""When the policy is asked, and what it is shown."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from inspect import signature
from itertools import pairwise
from traceback import walk_tb
from types import MappingProxyType
from typing import Any, NamedTuple

from engine.contract.executor import Launch
from engine.contract.job import Job
from engine.contract.kv_check import Leading
from engine.contract.plan import Compute, Op, Plan
from engine.contract.plan_check import PlanCheck
from engine.contract.policy import PlanBuilder, Policy
from engine.contract.regions import Shortage
from engine.contract.rules import (
    OURS,
    ContractError,
    ReadOnlyList,
    Rule,
    as_write,
    line_of_policy,
    made_at,
    name_of,
)
from engine.contract.view import Reads, RunningDecodes, View
from engine.loop.completions import Completions, DeferredFrees
from engine.loop.issuing import Issuing, PrefixReuse
from engine.loop.profile import ShownProfile
from engine.loop.state import EngineState, Issue, Lifecycle, Turn

REPEATED = "the engine repeats plans by itself, where Traits promise that it may"
TAKE = {  # by class and name of earlier versions: what does its work now
    "View": {
        "decodes": "take view.running",
        "lead": "take view.leading_decodes(slices)",
        "trial": "take view.kept_pages, or the `plan` of fit(batch, view, plan)",
    },
    "PlanBuilder": {"grow_decodes": "take plan.grow_running(view.running)"},
    "Plan": dict.fromkeys(
        ("at", "later", "launch", "one_step", "repeats", "slices", "slices_at", "until"), REPEATED
    ),
}
READ = (Job, View, PlanBuilder, Plan)  # what a policy knows by these names
BUILDER = "engine.memory.dry_run"  # the module of the plan builder
MAKERS = ("serving", "trains")  # of jobs; all other public names of Job are facts of a job
UNKNOWN = re.compile(  # an argument of Plan, as Python tells it, and as its compiled form does
    r"Plan\.__init__\(\) got an unexpected keyword argument '(\w+)'"
    r"|'(\w+)' is an invalid keyword argument for __init__\(\)"
)


def _as_lacking(error: Exception) -> ContractError | None:
    """An error of a name that the contract lacks, with the names that it has; None of another.

    A view and a job that note their reads are told as the View and the Job that a policy knows.
    """
    if isinstance(error, TypeError) and (given := UNKNOWN.match(str(error))):
        name = given[1] or given[2]
        take = TAKE["Plan"].get(name)
        return ContractError(Rule.ANSWER, f"Plan has no {name!r}; {take}") if take else None
    if not isinstance(error, AttributeError) or error.name is None:
        return None
    kind = next((kind for kind in READ if isinstance(error.obj, kind)), None)
    if kind is None or hasattr(kind, error.name):
        return None
    if (take := TAKE.get(kind.__name__, {}).get(error.name)) is None:
        facts = [fact for fact in dir(kind) if not fact.startswith("_") and fact not in MAKERS]
        take = f"there is {', '.join(get_close_matches(error.name, facts, n=3) or facts)}"
    what = f"'{kind.__name__}' object has no attribute {error.name!r}; {take}"
    return ContractError(Rule.ANSWER, what)


def _as_shortage(error: Exception) -> ContractError | None:
    """A Shortage that a policy has left to the engine, as a breach of ROOM; None of another."""
    if not isinstance(error, Shortage):
        return None
    what = f"{error}: ask plan.room() before"
    return ContractError(Rule.ROOM, what, error.place.region.owner)


def _as_wrong_call(error: Exception) -> ContractError | None:
    """A TypeError of a call of the plan builder by a user's line, as a breach of ANSWER."""
    if not isinstance(error, TypeError):
        return None
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    named = [(str(f.f_globals.get("__name__")), f.f_code.co_name) for f in frames]
    for (caller, _), (module, name) in reversed([*pairwise(named)]):
        method = getattr(PlanBuilder, name, None)
        if module == BUILDER and method and caller.partition(".")[0] not in OURS:
            call = (
                str(signature(method)).removeprefix("(self, ").partition(") ->")[0].replace("'", "")
            )
            told = f"the call is plan.{name}({call}): {error}"
            return ContractError(Rule.ANSWER, told)
    return None


class LoopParts(NamedTuple):
    """The parts of the loop that carry out what fast-forward decides."""

    completions: Completions
    frees: DeferredFrees
    issuing: Issuing
    lifecycle: Lifecycle
    next_arrival_ns: Callable[[], int | None]
    serves_only: Callable[[], bool]
    awaits_answer: Callable[[Job], bool]
    returns_memory: bool  # of jobs that have finished; else plans do


class PlanReuse:
    """Decides when the policy is not asked; this one has it asked for each plan, of one step.

    Subclasses spare questions. Results are those of asking at each step (law 15).

    Args:
        issue: issues one plan.
    """

    def __init__(self, issue: Issue) -> None:
        self._issue = issue

    def carried_out_by(self, parts: LoopParts) -> None:
        """Takes the parts of the loop, which are made after this object."""

    def next(self) -> Plan | None:
        """The next step of the plan before, while it still holds; else None."""
        return None

    def recurring(self) -> Plan | None:
        """The next plan of a training step that is planned like the step before it; else None."""
        return None

    def answered(self, plan: Plan) -> None:
        """The policy has answered; the engine may ask again at once."""

    def decided(self, plan: Plan, view: View) -> None:
        """The policy's plan for a view is carried out."""

    def changed(self) -> None:
        """A training job has arrived, a job has left, or a moment has come: the policy is asked."""

    def arrived(self) -> None:
        """A request has arrived."""

    def returned(self) -> None:
        """Memory of finished jobs has come back."""

    def ended(self, jobs: Sequence[Job]) -> None:
        """Jobs leave service at issue."""

    def advance(self, plan: Plan, device: int) -> Turn:
        """Issues a plan, and with it as many steps as can be issued at once."""
        return self._issue(plan, device)

    def running(self) -> RunningDecodes | None:
        """Decodes of the plan before, for a View."""
        return None

    def reads(self) -> Reads | None:
        """Notes the reads of a scheduling that promises nothing; None where that is not needed."""
        return None

    def leading(self, launch: Compute) -> Leading | None:
        """Decodes of the plan before that head a launch in their order, for the check of plans."""
        return None

    def unissued_bytes(self, now_ns: int) -> int:
        """KV that is booked for steps which are issued only at `now_ns` or later."""
        return 0

    def launch_of(self, op: Op) -> Launch | None:
        """The launch of a step that was issued with others; None of any other operation."""
        return None


class Asking:
    """Asks the policy where no plan holds, and decides when it sees memory of finished jobs."""

    def __init__(
        self,
        state: EngineState,
        policy: Policy,
        check: PlanCheck,
        reuse: PlanReuse,
        frees: DeferredFrees,
        prefix: PrefixReuse | None,
    ) -> None:
        self._state, self._policy, self._check, self._reuse = state, policy, check, reuse
        self._frees, self._prefix = frees, prefix
        ledger = state.ledger  # policies see read-only proxies of its books
        self._held_bytes = MappingProxyType(ledger.held_bytes)
        self._written, self._used = MappingProxyType(ledger.written), MappingProxyType(ledger.used)
        self._capacity_bytes = MappingProxyType(ledger.capacity_bytes)
        self._profile = ShownProfile(state.profile)
        self.asked = 0

    def decide(self, device: int) -> Plan:
        """The next plan of a device. An empty answer is asked again with memory that came back.

        The memory of jobs that end with plan k is shown from plan k + depth on: run-ahead cannot
        ask for that plan before k has settled. It is shown earlier only where the policy plans
        nothing without it. So decisions do not depend on how soon an end is noticed (law 11).
        """
        self.give_back(device)
        if (again := self._reuse.next()) is not None:
            return again
        while True:
            if (recurring := self._reuse.recurring()) is not None:
                return recurring
            plan, view = self._ask(device)
            self._reuse.answered(plan)
            oldest = self._frees.oldest(device)
            if plan or oldest is None:
                self._reuse.decided(plan, view)
                return plan
            self._give_back(device, oldest)

    def _ask(self, device: int) -> tuple[Plan, View]:
        """A plan that keeps the rules, and the view that the policy was asked with."""
        self.asked += 1
        policy: Any = self._policy  # its answer may be of any type: the check decides
        view = self._view(device)
        try:
            plan = policy.plan(view)
            if not self._state.jobs.is_whole:
                raise ContractError(Rule.READ_ONLY, "the policy has changed a list of the view")
            if isinstance(plan, Plan):
                self._state.end_freed(plan)
            self._check.check(plan, device)
        except ContractError as error:
            raise self._located(error, device) from error.__cause__
        except Exception as error:
            ways = (as_write, _as_lacking, _as_shortage, _as_wrong_call)
            if (found := next(filter(None, (way(error) for way in ways)), None)) is None:
                raise
            found.at = found.at or line_of_policy(error)
            raise self._located(found, device) from error
        assert isinstance(plan, Plan), "the check lets only a Plan pass"
        return plan, view

    def _located(self, error: ContractError, device: int) -> ContractError:
        at = error.at or line_of_policy(error) or made_at(self._policy, error.rule)
        return error.located(name_of(self._policy), self._state.in_flight.steps, device, at)

    def give_back(self, device: int) -> None:
        """Gives back the memory of finished jobs that may be shown by now."""
        self._give_back(device, self._state.in_flight.issued[device] - self._state.depth)

    def give_all_back(self) -> None:
        """Gives back the memory of all finished jobs, where no job is left."""
        for device, number in enumerate(self._state.in_flight.issued):
            self._give_back(device, number)

    def _give_back(self, device: int, number: int) -> None:
        if self._frees.give_back(device, number):
            self._reuse.returned()
            self._state.retire()
            self._state.release_idle()

    def _view(self, device: int) -> View:
        state = self._state
        ledger, jobs = state.ledger, state.jobs
        return View(
            state.now_ns,
            device,
            state.in_flight.issued[device],
            self._shown(jobs.serving, device),
            jobs.training,
            self._shown(jobs.waiting, device),
            MappingProxyType(ledger.free_bytes()),
            MappingProxyType(ledger.coming_bytes()),
            self._held_bytes,
            self._written,
            self._used,
            tuple(ledger.open),
            self._capacity_bytes,
            state.page,
            self._profile,
            state.layout,
            state.cost,
            None if self._prefix is None else self._prefix.dry_run(device),
            self._reuse.running(),
            self._reuse.reads(),
            None if jobs.service is None else jobs.service.shown(device),
            state.recorder.first_token_ns,
            None if state.adapters is None else state.adapters.newest,
            state.records.records,
            None if state.adapters is None else state.records.feedback(state.now_ns),
            self._launch_of,
        )

    def _launch_of(self, op: Op) -> Launch:
        """An operation in flight as it was issued."""
        return self._reuse.launch_of(op) or self._state.in_flight.launch_of(op)

    def _shown(self, jobs: list[Job], device: int) -> list[Job]:
        """The jobs that a device is shown: a replica sees its own, else each device sees all."""
        if self._state.fleet is None or self._state.devices == 1:
            return jobs
        return ReadOnlyList([job for job in jobs if job.device in (None, device)])
