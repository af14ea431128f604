"""The check of a plan's adapters: slices run through the version that their job was admitted with.

A copy of an adapter on a device comes from its home on the host, or is a new version that a job
which finetunes has made. Homes stay: the engine gives them back when no request needs the version.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NoReturn

from engine.contract.adapters import AdapterVersion
from engine.contract.job import Job
from engine.contract.plan import Compute, Copy, Free, Grow, Op, Plan, Share, Slice
from engine.contract.regions import SHARED_OWNER, Kind, Place, Tier, told, weight
from engine.contract.rules import ContractError, Rule


def adapters_of(slices: Sequence[Slice], device: int) -> tuple[Place, ...]:
    """The places of the adapters that a launch runs through.

    Args:
        slices: the slices of the launch.
        device: where it runs.

    Returns:
        One place per version, in the order of the slices.
    """
    found = [piece.job.adapter for piece in slices]
    return tuple([version.place(device) for version in dict.fromkeys(found) if version is not None])


def publications(plan: Plan) -> Iterator[Copy]:
    """The copies of a plan that make a new version of an adapter.

    Args:
        plan: a plan that has been checked.

    Yields:
        Copies of what a job trains to the home of a version.
    """
    for op in plan.ops:
        if isinstance(op, Copy) and is_publication(op):
            yield op


def is_publication(op: Op | Grow | Share | Free) -> bool:
    """Whether an operation makes a new version of an adapter.

    Args:
        op: any operation of a plan.

    Returns:
        True for a copy of trained weights to an adapter's place.
    """
    if not isinstance(op, Copy):
        return False
    return op.src.region.kind is Kind.WEIGHT and op.dst.region.kind is Kind.ADAPTER


class AdapterCheck:
    """Checks what a plan does with adapters; it changes nothing.

    Args:
        newest: the newest version of each adapter.
        jobs: the jobs that wait or are in service.
        held_bytes: bytes of each place that is held.
    """

    def __init__(
        self,
        newest: Mapping[str, AdapterVersion],
        jobs: Mapping[int, Job],
        held_bytes: Mapping[Place, int],
    ) -> None:
        self._newest, self._jobs, self._held_bytes = newest, jobs, held_bytes

    def check(self, plan: Plan) -> None:
        """Checks a plan whose operations have the form of the contract.

        Args:
            plan: the plan of a policy.

        Raises:
            ContractError: the plan breaks a rule; nothing is changed.
        """
        made = set[Place]()  # homes of versions that the plan makes
        for op in plan.ops:
            if isinstance(op, Compute):
                self._compute(op)
            elif isinstance(op, Copy):
                if is_publication(op):
                    self._publish(op, made)
                elif op.dst.region.kind is Kind.ADAPTER and op.dst.tier is Tier.HOST:
                    _refuse(f"copy onto {told(op.dst)}: a version stays as it was published")
            elif isinstance(op, Grow) and op.place.region.kind is Kind.ADAPTER:
                _refuse(f"{told(op.place)} takes bytes: it comes as a copy of its home")

    def _compute(self, op: Compute) -> None:
        """A launch reads the adapters of its slices, and writes none."""
        reads = {*op.reads}
        for piece in op.slices:
            version = piece.job.adapter
            if version is not None and version.place(op.device) not in reads:
                what = f"a slice in a launch that does not read {told(version.place(op.device))}"
                _refuse(what, piece.job.job_id)
        for place in op.writes:
            if place.region.kind is Kind.ADAPTER:
                _refuse(f"a launch writes {told(place)}: a version stays as it was published")

    def _publish(self, op: Copy, made: set[Place]) -> None:
        """A new version is a whole copy of what a job trains, newer than all of its adapter."""
        (owner, _, chunk, _), number = op.src.region, op.dst.region.part
        job = self._jobs.get(owner)
        known = [version for version in self._newest.values() if version.number == number]
        if job is None or job.training is None or not known:
            _refuse(f"copy of {told(op.src)} onto {told(op.dst)}: no adapter that a job trains")
        if op.src != weight(owner, chunk, device=op.src.device) or op.dst.tier is not Tier.HOST:
            _refuse(f"copy of {told(op.src)} onto {told(op.dst)}: from the device to its host")
        (newest,), training = known, job.training
        if training.spec.publish != newest.name or op.dst in made:
            _refuse(f"{told(op.dst)} is published by another job, or twice", owner)
        if op.dst.device != op.src.device:
            _refuse(f"{told(op.dst)} is published from {told(op.src)}: on another host", owner)
        if op.dst.region.slot <= newest.version:
            what = f"{told(op.dst)} is published, and the newest is {newest.version}"
            _refuse(what, owner)
        if (nbytes := self._held_bytes.get(op.src)) != newest.nbytes:
            _refuse(f"{nbytes} bytes are published as {told(op.dst)} of {newest.nbytes}", owner)
        made.add(op.dst)


def check_free(place: Place) -> None:
    """Checks that a plan may free a place that no job owns.

    Args:
        place: what the plan frees.

    Raises:
        ContractError: the place is no copy of an adapter on a device.
    """
    (owner, kind, _, _), tier, _ = place
    if owner == SHARED_OWNER and not (kind is Kind.ADAPTER and tier is Tier.GPU):
        raise ContractError(Rule.JOB, f"free of {told(place)}, which belongs to no job")


def _refuse(what: str, job_id: int | None = None) -> NoReturn:
    raise ContractError(Rule.ADAPTER, what, job_id)
