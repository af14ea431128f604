"""The policy contract: Policy and its two halves, Planner and Router, with their Traits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from engine.contract.job import Job, named
from engine.contract.layout import Layout
from engine.contract.plan import Collective, Compute, Grow, Plan, Slice
from engine.contract.regions import Place, Pool
from engine.contract.rules import at_class
from engine.contract.traits import Traits as Traits  # users take it from here
from engine.contract.view import Cost, RunningDecodes, View
from models.training.shape import TrainingShape
from traces.serving.request import TrainingJob

PROMISES_NOTHING = Traits()
RETIRED_TRAITS = {  # attributes that are no traits, each with the trait to declare instead
    "repeats": "repeats=True",
    "appends": "appends=True",
    "cuts": "step_tokens=self.token_budget",
    "trains_only": "trains_only=True",
    "recurs": "recurs=True",
    "states_in": "states_in=(...)",
    "stretch": 'kv_growth="page"',
}
SETTINGS_OF_TRAITS = {  # settings that a policy may have, where it declares the trait as well
    "spare_pages": "spare_pages",
    "prefix_caching": "prefix_caching",
    "reuses_gradients": "reuses_gradients",
}
SETTINGS_OF_HALVES = {  # those of a half that has this method
    "batch": {"token_budget": "prompt_tokens", "max_jobs": "max_jobs"},
    "fit": {"max_tokens": "reserved_tokens"},
}
ANSWERS = ("batch", "fit", "plan")  # the methods of which traits promise something


def traits_of(policy: object) -> Traits:
    """The traits of a policy or a half of one.

    Traits are promises of the class that declares them. A class below it that overrides a method
    answers in its own way: it keeps bounds and settings, and the engine asks it as one that
    promises nothing. It promises more by `traits` of its own.

    Args:
        policy: an object that may have an attribute `traits`.

    Returns:
        Its `traits`, or Traits that promise nothing where it has none.

    Raises:
        ValueError: the policy is a class, `traits` is no Traits, or an attribute does what a trait
            does: by its name, or without `traits` by one of the SETTINGS.
    """
    if isinstance(policy, type):
        raise ValueError(f"{policy.__name__} is a class: give an object, {policy.__name__}(...)")
    for attribute, trait in RETIRED_TRAITS.items():
        if hasattr(policy, attribute):
            raise ValueError(_instead(policy, [attribute], trait))
    if not hasattr(policy, "traits"):
        known = dict(SETTINGS_OF_TRAITS)
        for method, settings in SETTINGS_OF_HALVES.items():
            known |= settings if hasattr(policy, method) else {}
        if found := [attribute for attribute in known if getattr(policy, attribute, False)]:
            trait = ", ".join([f"{known[attribute]}=self.{attribute}" for attribute in found])
            raise ValueError(_instead(policy, found, trait))
    traits = getattr(policy, "traits", PROMISES_NOTHING)
    if not isinstance(traits, Traits):
        told = f"{type(policy).__name__}.traits is {named(traits)}; it must be a Traits"
        raise ValueError(at_class(type(policy), told))
    if _answers_as_declared(policy):
        return traits
    return replace(traits, repeats=False, appends=False, kv_growth="asked", recurs=False)


def _answers_as_declared(policy: object) -> bool:
    """Whether no class below the one that declares `traits` overrides one of its methods."""
    own: Mapping[str, object] = getattr(policy, "__dict__", {})
    shadowed = any(callable(getattr(type(policy), name, None)) for name in own)
    if "traits" in own or shadowed or not own.keys().isdisjoint(ANSWERS):
        return "traits" in own
    for i, kind in enumerate(kinds := type(policy).__mro__):
        if "traits" in vars(kind):
            return True
        for name, value in vars(kind).items():
            if name.startswith("__") or name == "notes_reads":
                continue
            is_method = callable(value) or hasattr(value, "__get__")
            is_known = any(name in vars(later) for later in kinds[i + 1 :])
            if name in ANSWERS or (is_method and is_known):
                return False
    return True


def _instead(policy: object, attributes: Sequence[str], trait: str) -> str:
    names = " and ".join([f"{type(policy).__name__}.{attribute}" for attribute in attributes])
    declared = f"`traits = Traits({trait})`"
    if "self." in trait:
        declared = f"a property `traits` that returns `Traits({trait})`"
    told = (
        f"{names} {'is no trait' if len(attributes) == 1 else 'are no traits'}; declare {declared}"
    )
    if "token_budget" in attributes:
        told += ", with step_tokens for prompt_tokens where no batch has more tokens"
    return at_class(type(policy), f"{told} (engine.contract.policy)")


def notes_reads(policy: object) -> bool:
    """Whether a policy goes only by what `Reads.shown` notes and by its memory half.

    The policy's own class has to say so: what a wrapper or a subclass reads beside is not noted.

    Args:
        policy: an object with `plan(view)`.

    Returns:
        The `notes_reads` that its class defines; False where that class defines none.
    """
    return "notes_reads" in vars(type(policy)) and policy.notes_reads is True  # type: ignore[attr-defined]


class Policy(Protocol):
    """Decides what a device does next: a pure function from a View to a Plan.

    Equal views give equal plans. A policy reads no clock and changes no object that it is shown. It
    and its halves may declare `traits: Traits`. A policy that shows its scheduling nothing but
    `view.reads.shown(view)` says so by `notes_reads = True` in its class.
    """

    def plan(self, view: View) -> Plan:
        """The next plan of a device.

        Args:
            view: the state of the engine, read-only.

        Returns:
            A plan that keeps the rules of engine/contract/rules.py; an empty one to wait for the
            next event.
        """


class Scheduling(Protocol):
    """Decides what to compute next: the half of a policy that forms batches.

    Without promises it is asked again when something that it has read of the View may have changed,
    and while the state that it keeps in `self` changes, or is more than 64 KiB. State elsewhere (in
    a class, a module or a closure) is not seen: a scheduling that goes by the number of the step
    reads `view.issued`. A scheduling that shares an object with its memory policy is asked at each
    step.
    """

    def batch(self, view: View) -> Sequence[Slice]:
        """The slices of the next launch.

        Args:
            view: the state of the engine, read-only.

        Returns:
            A tuple or list of slices by falling priority: the memory policy gets a tuple of them
            and drops slices from the end. () for none.
        """


MakeRoom = Callable[[Pool, int], None]


class PlanBuilder(ABC):
    """The plan that a memory policy writes: each operation is tried on a dry run as it is added.

    The dry run counts free and coming bytes, so a launch may wait for bytes that come back. Nothing
    is booked until the engine has the whole plan. Figures are those behind the operations so far.

    Raises:
        Shortage: an operation takes more bytes than a pool has.
        ContractError: an operation cannot be booked, such as the free of a place that is not held.
    """

    @abstractmethod
    def room(self, pool: Pool) -> int:
        """Free and coming bytes of a pool.

        Args:
            pool: a pool of the machine.

        Returns:
            The bytes that this plan may still take.
        """

    @abstractmethod
    def held(self, place: Place) -> int:
        """Bytes of a place.

        Args:
            place: a place in any tier.

        Returns:
            The bytes; 0 where the place is not held.
        """

    @abstractmethod
    def holds(self, place: Place) -> bool:
        """Whether a place is held.

        Args:
            place: a place in any tier.

        Returns:
            True also for a place of 0 bytes.
        """

    @abstractmethod
    def found(self, job: Job) -> tuple[int, ...]:
        """Kept pages on which a job could start (prefix caching).

        Args:
            job: a waiting job.

        Returns:
            Page numbers in order; () without prefix caching.
        """

    @abstractmethod
    def start_of(self, job: Job) -> int:
        """The token that a job's first slice of the plan starts from.

        Args:
            job: a job that is served.

        Returns:
            What it has computed, or the tokens of the kept pages that the plan starts it on.
        """

    @abstractmethod
    def idle(self, pages: Sequence[int]) -> int:
        """How many pages no job holds. Sharing such a page takes room.

        Args:
            pages: page numbers of the device.

        Returns:
            The number of pages without a holder.
        """

    @abstractmethod
    def share(self, place: Place, pages: tuple[int, ...]) -> None:
        """Starts a place on kept or held pages; without pages no operation is added.

        Args:
            place: KV of a job, not held yet.
            pages: page numbers in order.
        """

    @abstractmethod
    def grow(self, place: Place, nbytes: int) -> None:
        """Adds bytes to a place; for 0 bytes no operation is added.

        Args:
            place: a place that is held, or begins with these bytes.
            nbytes: bytes to add; of KV whole pages.
        """

    @abstractmethod
    def grow_all(self, grows: Sequence[Grow]) -> None:
        """Adds bytes to places, in this order. A Shortage leaves those before it in the plan.

        Args:
            grows: the growth of each place.
        """

    @abstractmethod
    def grow_running(self, running: RunningDecodes) -> bool:
        """Adds the pages that running decodes need.

        Args:
            running: the decodes of the view.

        Returns:
            Whether there was room; False leaves the plan unchanged.
        """

    @abstractmethod
    def free(self, place: Place) -> None:
        """Gives a place back.

        Args:
            place: a place that is held.
        """

    @abstractmethod
    def move(self, src: Place, dst: Place) -> None:
        """Copies a region whole and gives its source back.

        Args:
            src: a place that is held.
            dst: a place of its region in another pool.
        """

    @abstractmethod
    def copy(self, src: Place, dst: Place) -> None:
        """Copies a region whole; the source stays.

        Args:
            src: a place that is held.
            dst: a place of its region in another pool; if held, as large as the source.
        """

    @abstractmethod
    def compute(self, slices: Sequence[Slice], writes: Sequence[Place]) -> None:
        """Adds one launch of all slices, which writes these places. Booking checks its places.

        Args:
            slices: the slices of the launch.
            writes: the KV place of each slice, in their order.
        """

    @abstractmethod
    def launch(self, op: Compute) -> None:
        """Adds a launch. Booking checks its places.

        Args:
            op: a new launch, which names its places.
        """

    @abstractmethod
    def join(self, op: Compute) -> None:
        """Makes a launch a part of the one that serves, if the plan ends with that.

        Growth may follow it, and frees of adapters that no slice of it runs through.

        Args:
            op: a launch, which is added by itself where the plan ends otherwise.
        """

    @abstractmethod
    def served(self) -> tuple[Slice, ...]:
        """The slices of the launch that serves, if the plan ends with that; see `join`.

        Returns:
            () where the plan ends otherwise.
        """

    @abstractmethod
    def record(self, places: Mapping[int, Sequence[Place]]) -> None:
        """Has the launch that serves, with which the plan ends, record some of its slices.

        Args:
            places: by job, where its slice writes what it keeps; the plan has grown them.
        """

    @abstractmethod
    def exchange(self, op: Collective) -> None:
        """Adds a device's part in an exchange of its group.

        Args:
            op: a new collective of the plan's device.
        """

    @abstractmethod
    def restart(self, job: Job) -> None:
        """Names a job in service that loses its KV: its tokens are computed again.

        Args:
            job: a job in service.
        """

    @abstractmethod
    def refuse(self, job: Job) -> None:
        """Names a job that will never fit.

        Args:
            job: a job that waits or is in service.
        """

    @abstractmethod
    def relay(self, job: Job, number: int) -> None:
        """Names a training job that goes on by another of its layouts.

        Args:
            job: a job between two steps, with no launch in flight or in this plan.
            number: of the layout, among `View.layout.alternatives` of the job.
        """

    @abstractmethod
    def discard(self) -> None:
        """Takes back all that this builder and the shares made within it have written.

        Raises:
            Shortage: an operation that stays would take more bytes than there are without these.
            ContractError: an operation that stays needs one of these. The plan is unchanged.
        """

    @abstractmethod
    def within(
        self,
        room_bytes: Mapping[Pool, int],
        make_room: MakeRoom | None = None,
        gives_way: Collection[Place] = (),
    ) -> PlanBuilder:
        """A builder that writes into this plan within a share of the room.

        What the share frees it may take again. Only where room is made it has more than this one.

        Args:
            room_bytes: the most bytes that it may take of each pool that is named.
            make_room: called with a pool and bytes that it lacks; it frees places by this builder.
            gives_way: places that `make_room` may free. Kept pages which these alone hold take
                room of the share when a job starts on them.

        Returns:
            A builder whose operations become operations of this plan. It shows what all of the
            plan holds, and discards what the share has written.
        """

    @abstractmethod
    def __bool__(self) -> bool:
        """Whether this builder, or a share made within it, has written anything."""


class Memory(Protocol):
    """Decides where memory goes: the half of a policy that makes a batch fit."""

    def fit(self, batch: tuple[Slice, ...], view: View, plan: PlanBuilder) -> None:
        """Writes a plan for as many slices as fit, in their order.

        It may preempt jobs of lower priority, and admits no waiting job after a preemption.

        Args:
            batch: the slices of the scheduling, by falling priority.
            view: the state of the engine, read-only.
            plan: the empty plan to write; it stays empty where no slice fits.
        """


class Fleet(Protocol):
    """The replicas of a run as a client of them sees them: what a router reads.

    A request is outstanding from its arrival until its last token is delivered, or until it is
    refused: a router learns of an end when the client does.
    """

    @property
    def assigned(self) -> Sequence[int]:
        """Requests so far, by replica."""

    def __len__(self) -> int:
        """The number of replicas."""

    def outstanding(self, replica: int) -> int:
        """The number of requests that a replica has not answered yet.

        Args:
            replica: the number of the replica.

        Returns:
            Requests that are assigned and not answered.
        """

    def outstanding_tokens(self, replica: int) -> int:
        """Tokens of KV of the outstanding requests of a replica, as issued.

        Args:
            replica: the number of the replica.

        Returns:
            Tokens of their prompts, and tokens generated so far.
        """

    def last_with(self, job: Job) -> int | None:
        """The replica that last got the longest known beginning of a job's prompt.

        Blocks of a prompt have names in the trace, or are its full pages, by the keys of the page
        cache. Where a prompt has neither, the turns of its session count as one block.

        Args:
            job: a request that has just arrived.

        Returns:
            The number of the replica; None where no replica got the first block.
        """


class Router(Protocol):
    """Decides which replica serves a request. Pure: equal fleets give equal answers."""

    def route(self, job: Job, fleet: Fleet) -> int:
        """The replica of a request. Asked once, at its arrival; the request stays there.

        Args:
            job: the request, as policies see it.
            fleet: the requests of each replica so far, read-only.

        Returns:
            A number from 0 to len(fleet) - 1.
        """


class Planner(Protocol):
    """Decides once, before the first step, where model states lie."""

    def prepare(
        self,
        shapes: Mapping[int, TrainingShape],
        jobs: Sequence[TrainingJob],
        capacity_bytes: Mapping[Pool, int],
        cost: Cost,
    ) -> Layout:
        """Lays training jobs out.

        Args:
            shapes: by job, the shape of its model: units, parameters and bytes.
            jobs: the training jobs.
            capacity_bytes: bytes of each pool.
            cost: predicted durations.

        Returns:
            Places that are held before the first step, and chunks and units by job.

        Raises:
            ValueError: the jobs cannot fit; one line with the deficit and what would help.
        """
