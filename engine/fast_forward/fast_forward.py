"""Fast-forward: the questions that the policy is spared, and the steps that are issued at once.

The loop knows a `FastForward` as a `PlanReuse` (engine/loop/asking.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.contract.executor import Launch, Pieces, Repeater
from engine.contract.job import Job
from engine.contract.kv_check import Leading
from engine.contract.plan import Compute, Op, Plan
from engine.contract.policy import Policy, notes_reads, traits_of
from engine.contract.rules import ContractError, made_at, name_of
from engine.contract.view import Reads, RunningDecodes, View
from engine.fast_forward.jump import Jump
from engine.fast_forward.reads import SeenReads, can_be_seen
from engine.fast_forward.recurrence import Recurrence
from engine.fast_forward.repeated_plan import RepeatedPlan
from engine.fast_forward.standing_plan import StandingPlan
from engine.loop.asking import LoopParts, PlanReuse
from engine.loop.completions import Completions
from engine.loop.issuing import Moved, Moves, PrefixReuse
from engine.loop.state import EngineState, Issue, Turn


class FastForward(PlanReuse):
    """The PlanReuse of an engine with one device."""

    def __init__(
        self,
        issue: Issue,
        policy: Policy,
        state: EngineState,
        tokens_left: Callable[[Job], int],
    ) -> None:
        super().__init__(issue)
        self._policy, self._state, traits = policy, state, traits_of(policy)
        is_plain = not traits.repeats and traits.kv_growth != "asked"
        self._reads = SeenReads() if is_plain and notes_reads(policy) and can_be_seen() else None
        self._standing = StandingPlan(
            traits, self._reads, state.page, state.ledger.pages, tokens_left
        )
        self._recurrence = (
            Recurrence(state.ledger, state.jobs, state.profile) if traits.recurs else None
        )
        self._parts: LoopParts | None = None
        self.jump: Jump | None = None

    def carried_out_by(self, parts: LoopParts) -> None:
        """See PlanReuse."""
        state, self._parts = self._state, parts
        is_watched = state.is_watched or state.recorder.is_metered
        executor = state.executor
        # Of two lanes one may be ahead of the other: plans do not end one by one.
        is_single = state.forced and not is_watched and not traits_of(self._policy).two_lanes
        if is_single and isinstance(executor, Repeater):
            self.jump = Jump(state, parts, self.returned, executor)

    # ---- which questions are spared
    def next(self) -> Plan | None:
        """See PlanReuse."""
        return self._standing.next(self._state.ledger.room_bytes, bool(self._state.jobs.waiting))

    def recurring(self) -> Plan | None:
        """See PlanReuse."""
        if self._recurrence is None or (plan := self._recurrence.next()) is None:
            return None
        self._standing.clear()
        return plan

    def answered(self, plan: Plan) -> None:
        """See PlanReuse."""
        if self._recurrence is not None:
            self._recurrence.answered(plan)
        if not plan and self.jump is not None:
            self.jump.settle_alone()

    def decided(self, plan: Plan, view: View) -> None:
        """See PlanReuse."""
        try:
            self._standing.decided(plan, view)
        except ContractError as error:
            step = self._state.in_flight.steps
            name, at = name_of(self._policy), made_at(self._policy, error.rule)
            raise error.located(name, step, view.device, at) from None

    def changed(self) -> None:
        """See PlanReuse."""
        self._standing.drop()

    def arrived(self) -> None:
        """See PlanReuse."""
        self._standing.wait_behind()

    def returned(self) -> None:
        """See PlanReuse."""
        if self._recurrence is not None:
            self._recurrence.forget()
        if self._state.jobs.waiting:
            self._standing.wait_behind()  # else a waiting job may be admitted now

    def ended(self, jobs: Sequence[Job]) -> None:
        """See PlanReuse."""
        self._standing.lose(jobs, others_wait=bool(self._state.jobs.waiting))

    # ---- what is known of the plan before
    def running(self) -> RunningDecodes | None:
        """See PlanReuse."""
        return self._standing.running(self._state.jobs.serving)

    def reads(self) -> Reads | None:
        """See PlanReuse. Where a job trains each step is asked for: no read is noted."""
        jobs = self._state.jobs
        if self._reads is not None:
            self._reads.begin(jobs.jobs, self._state.ledger.open)
        return None if jobs.training else self._reads

    def leading(self, launch: Compute) -> Leading | None:
        """See PlanReuse."""
        decodes = self._standing.decodes
        if decodes is None or not self._standing.leads(launch):
            return None
        full = None
        if decodes.turns is not None:
            full = decodes.turns[decodes.clock % self._state.page.tokens]
        return Leading(decodes.ids, full, decodes)

    def unissued_bytes(self, now_ns: int) -> int:
        """See PlanReuse."""
        return self.jump.unissued_bytes(now_ns) if self.jump else 0

    def launch_of(self, op: Op) -> Launch | None:
        """See PlanReuse."""
        return self.jump.launch_of(op) if self.jump else None

    # ---- how plans are issued
    def advance(self, plan: Plan, device: int) -> Turn:
        """See PlanReuse."""
        assert self._parts is not None, "the engine gives the parts of the loop before it runs"
        repeat, jump = self._standing.repeat, self.jump
        if jump is not None:
            if repeat is not None and (yield from jump.carry_out(repeat, device, self._stands)):
                return
            jump.settle_alone()
        if repeat is None:
            yield from self._issue(plan, device)
        else:
            moves = StepMoves(
                repeat, self._state, self._parts.completions, self._parts.issuing.prefix
            )
            yield from self._issue(repeat.next(), device, moves)

    def _stands(self, repeat: RepeatedPlan) -> bool:
        """Whether a plan still holds."""
        standing, state = self._standing, self._state
        return standing.repeat is repeat and standing.goes_on(
            state.ledger.room_bytes, bool(state.jobs.waiting)
        )


class StepMoves(Moves):
    """One step of a repeated plan: decodes by their clock, the tail slice by slice."""

    def __init__(
        self,
        repeat: RepeatedPlan,
        state: EngineState,
        completions: Completions,
        prefix: PrefixReuse | None,
    ) -> None:
        self._repeat, self._state = repeat, state
        self._completions, self._prefix = completions, prefix
        self.num_held = len(repeat.decodes.jobs)

    def pieces(self, op: Compute, moved: Moved) -> Pieces:
        """See Moves."""
        decodes, lead = self._repeat.decodes, self.num_held
        ids, tables, slices = decodes.ids, decodes.tables, op.slices[lead:]
        contexts = decodes.ahead(0, [piece.job.computed_tokens for piece in slices])
        self._repeat.advance(1)
        if self._prefix is not None:
            self._prefix.keep(op.device, decodes.filled(1))
        if self._state.forced and (done := decodes.complete()):
            self._completions.end_with(op, done)
        rest = moved(op, slices)
        tokens, samples = (*((1,) * lead), *rest.tokens), (*((True,) * lead), *rest.samples)
        return Pieces((*ids, *rest.job_ids), tokens, contexts, samples, (*tables, *rest.tables))
