"""Plays back a plan log: the decisions of a run on another backend."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from engine.contract.job import Job
from engine.contract.plan import SECOND_LANE, Compute, Free, Plan, Slice
from engine.contract.policy import Fleet, Traits
from engine.contract.regions import Work
from engine.contract.view import View
from engine.results.plan_log import LoggedPlan, decode


@dataclass(frozen=True)
class RecordedPlans:
    """Issues the plans of a log in their order, each as soon as its jobs and samples are there.

    A plan also frees what finished jobs held, where the recorded run did. With an engine that
    leaves these frees to the policy (`returns_memory=False`), bytes and pages go through the states
    of the recorded run.

    Args:
        log: the plans of all devices, in the order in which they were issued.
    """

    log: tuple[LoggedPlan, ...]

    @cached_property
    def traits(self) -> Traits:
        """Prefix caching where jobs of the log started on shared pages: the log names the pages.

        Two lanes where a launch names the second one. States and adapters lie where the plans say,
        so no tier needs room for states beforehand.
        """
        shares = any('["share"' in logged.body for logged in self.log)
        lanes = any(f'"{SECOND_LANE}"' in logged.body for logged in self.log)
        return Traits(prefix_caching=shares, states_in=(), adapters=True, two_lanes=lanes)

    @cached_property
    def _by_device(self) -> dict[int, list[LoggedPlan]]:
        devices: dict[int, list[LoggedPlan]] = {}
        for logged in self.log:
            devices.setdefault(logged.device, []).append(logged)
        return devices

    def plan(self, view: View) -> Plan:
        log = self._by_device.get(view.device, [])
        if view.issued >= len(log):
            return Plan()
        logged = log[view.issued]
        jobs = {j.job_id: j for j in (*view.serving, *view.training, *view.waiting)}
        if not logged.job_ids <= jobs.keys():
            return Plan()
        plan = decode(logged.body, jobs)
        if not all([_is_there(piece) for op in plan.ops for piece in _windows(op)]):
            return Plan()
        if any([view.is_in_flight(one.job) for one in plan.relaid]):
            return Plan()
        order = {job_id: i for i, job_id in enumerate(logged.returned)}
        back = [place for place in view.held_bytes if place.region.owner in order]
        back.sort(key=lambda place: order[place.region.owner])
        return replace(plan, ops=(*map(Free, back), *plan.ops))


def _windows(op: object) -> tuple[Slice, ...]:
    """The slices of an operation that finetune on a sample."""
    if not isinstance(op, Compute):
        return ()
    return tuple([piece for piece in op.slices if piece.work is not Work.UPDATE])


def _is_there(piece: Slice) -> bool:
    """Whether the sample of a slice has been released; True of slices without one."""
    training = piece.job.training
    if training is None or not training.spec.finetunes:
        return True
    return training.is_released(piece.microbatch)


@dataclass(frozen=True)
class RecordedRouter:
    """Sends each request to the replica that served it in a plan log.

    A request that no plan names, because the log ends before it, goes to the first replica: no plan
    will ever ask for it.

    Args:
        log: the plans of all devices, in the order in which they were issued.
    """

    log: tuple[LoggedPlan, ...]

    @cached_property
    def _devices(self) -> dict[int, int]:
        return {job_id: logged.device for logged in self.log for job_id in logged.job_ids}

    def route(self, job: Job, fleet: Fleet) -> int:
        return self._devices.get(job.job_id, 0)
