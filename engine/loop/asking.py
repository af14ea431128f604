"""What the policy is asked, when, and what it is shown."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from engine.contract.job import Job
from engine.contract.plan import Plan
from engine.contract.plan_check import PlanCheck
from engine.contract.policy import Policy, name_of
from engine.contract.rules import ContractError, ReadOnlyList, Rule, as_write
from engine.contract.view import View
from engine.fast_forward.recurrence import Recurrence
from engine.loop.profile import ShownProfile

if TYPE_CHECKING:
    from engine.loop.engine import Engine


class Asking:
    """Asks the policy unless a plan stands; shows it the memory of finished jobs in good time."""

    def __init__(self, engine: Engine, policy: Policy, may_recur: bool, check: PlanCheck) -> None:
        self._engine, self._policy, self._check = engine, policy, check
        ledger = engine.ledger  # whose own books nobody may write into
        self._held_bytes = MappingProxyType(ledger.held_bytes)
        self._written, self._used = MappingProxyType(ledger.written), MappingProxyType(ledger.used)
        self._capacity_bytes = MappingProxyType(ledger.capacity_bytes)
        self._profile = ShownProfile(engine.profile)
        self._recurrence: Recurrence | None = None
        if may_recur and getattr(policy, "recurs", False):
            self._recurrence = Recurrence(ledger, engine.roster, engine.profile)
        self.asked = 0

    def decide(self, device: int) -> Plan:
        """Asks, and again where memory that has come back meanwhile may change the answer.

        What jobs of plan k held is shown from plan k + depth on, which run-ahead cannot ask for
        before k has settled, or when the policy wants nothing without it: so decisions do not
        depend on how soon the engine noticed an end (law 11).
        """
        engine = self._engine
        self.give_back(device)
        if (again := engine.standing.next(engine.ledger.room_bytes)) is not None:
            return again
        while True:
            plan = self._plan(device)
            oldest = engine.leftovers.oldest(device)
            if plan or oldest is None:
                engine.standing.keep(plan)
                return plan
            self._give_back(device, oldest)

    def _plan(self, device: int) -> Plan:
        if self._recurrence is None:
            return self._ask(device)
        return self._recurrence.plan(lambda: self._ask(device))

    def _ask(self, device: int) -> Plan:
        self.asked += 1
        policy: Any = self._policy  # that its answer is a plan is checked, not known
        view = self._view(device)
        try:
            plan = policy.plan(view)
            if not self._engine.roster.is_whole:
                raise ContractError(Rule.READ_ONLY, "the policy has changed a list of the view")
            self._check.check(plan, device, view)
        except ContractError as error:
            raise self._located(error, device) from error.__cause__
        except Exception as error:
            if (write := as_write(error)) is None:
                raise
            raise self._located(write, device) from error
        assert isinstance(plan, Plan), "the check has seen that it is one"
        return plan

    def _located(self, error: ContractError, device: int) -> ContractError:
        return error.located(name_of(self._policy), self._engine.steps, device)

    def give_back(self, device: int) -> None:
        """Memory of finished jobs that may be shown by now comes back."""
        self._give_back(device, self._engine.flights.issued[device] - self._engine.depth)

    def give_all_back(self) -> None:
        """Nobody is left to be asked for."""
        for device, number in enumerate(self._engine.flights.issued):
            self._give_back(device, number)

    def _give_back(self, device: int, number: int) -> None:
        engine = self._engine
        if engine.leftovers.give_back(device, number):
            if self._recurrence is not None:
                self._recurrence.forget()
            if engine.roster.waiting:
                engine.standing.drop()  # somebody may come in now
            engine.release_idle()

    def _view(self, device: int) -> View:
        engine = self._engine
        ledger, roster = engine.ledger, engine.roster
        return View(
            int(engine.env.now),
            device,
            engine.flights.issued[device],
            self._shown(roster.serving, device),
            roster.training,
            self._shown(roster.waiting, device),
            MappingProxyType(ledger.free_bytes()),
            MappingProxyType(ledger.coming_bytes()),
            self._held_bytes,
            self._written,
            self._used,
            tuple(ledger.open),
            self._capacity_bytes,
            engine.page,
            self._profile,
            engine.layout,
            engine.cost,
            None if engine.reuse is None else engine.reuse.trial(device),
            engine.standing.decodes(roster.serving),
        )

    def _shown(self, jobs: list[Job], device: int) -> list[Job]:
        """A replica sees its own requests; where nobody routes, every device sees all."""
        if self._engine.fleet is None or self._engine.devices == 1:
            return jobs
        return ReadOnlyList([job for job in jobs if job.device in (None, device)])
