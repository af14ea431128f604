"""All that a policy may know."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from engine.contract.job import Job
from engine.contract.layout import Layout
from engine.contract.plan import Grow, Op, Slice, one_token
from engine.contract.regions import PageSize, Place, Pool, Work
from engine.contract.rules import stored_by_slot

LaunchKey = tuple[tuple[Work, range | None, int], ...]  # (work, layers, tokens) of each slice


class Moment(NamedTuple):
    """One launch of the last complete training step: what it touched and what else was held."""

    unit: LaunchKey
    places: tuple[Place, ...]
    other_bytes: int  # on the device, no model states: activations, buffers, KV
    kv_bytes: int = 0  # of these, KV


class Profile(Protocol):
    """What was measured so far, keyed by whole launches; empty means warm-up."""

    def moments(self, job_id: int) -> Sequence[Moment]:
        """The launches of a training job's last complete step, in issue order."""

    def uses(self, job_id: int) -> Mapping[Place, Sequence[int]]:
        """Which of these launches, by number, touched each place."""

    def moment(self, job_id: int) -> int:
        """Launches of its present step that have been issued: the number of the next one."""

    def mean_ns(self, job_id: int, unit: LaunchKey) -> int | None:
        """Mean duration of a launch of one job, None before its first settle."""


class Cost(Protocol):
    """Predicted durations, for policies that plan by time."""

    def op_ns(self, op: Op) -> int:
        """Predicted duration of an operation that has not been issued yet."""


class KeptPages(Protocol):
    """A dry run on a device's pages, where prefix caching keeps full ones. Changes nothing.

    Pages are taken oldest first, so what a plan takes may be what a later job of the plan would
    have started on: ask in the order of the plan.
    """

    def found(self, job: Job) -> tuple[int, ...]:
        """Pages that hold the longest beginning of a job that is kept."""

    def idle(self, pages: Sequence[int]) -> int:
        """How many of these pages no job holds: sharing them takes room."""

    def take(self, place: Place, count: int) -> None:
        """A place grows by so many pages."""

    def share(self, place: Place, pages: Sequence[int]) -> None:
        """A place begins with pages that are there."""

    def free(self, place: Place) -> int:
        """A place is given back; returns how many pages no job holds then."""


class RunningDecodes(NamedTuple):
    """The decodes of the plan before, which head `View.serving` in the order of their admission."""

    slices: tuple[Slice, ...]  # one token each
    places: tuple[Place, ...]  # the KV that each writes
    full: tuple[Grow, ...]  # a page for each decode whose pages are full


class Reads(Protocol):
    """Notes what a scheduling reads of a view, where the engine may spare it later questions."""

    def shown(self, view: View) -> View:
        """A view that answers as this one does, and notes each read that may come out otherwise."""

    def slices(self, batch: Sequence[Slice]) -> tuple[Slice, ...]:
        """A batch of the jobs of `shown` as one of the jobs themselves."""


@dataclass(frozen=True, slots=True)
class View:
    """The state at one question, for one device.

    Jobs, held, written, used and issued count work as *issued*. Sequences and mappings are
    read-only by contract (tested). Bytes come back in issue order: `free_bytes` is the part
    whose earlier users have all ended, so taking it never waits; taking `coming_bytes` waits.
    """

    now_ns: int
    device: int
    issued: int  # plans issued to this device so far
    serving: Sequence[Job]  # in service, in the order of their admission
    training: Sequence[Job]
    waiting: Sequence[Job]
    free_bytes: Mapping[Pool, int]
    coming_bytes: Mapping[Pool, int]
    held_bytes: Mapping[Place, int]
    written: Mapping[Place, int]  # stamp of contents: equal = same data
    used: Mapping[Place, int]  # order of last use
    in_flight: Sequence[Op]
    capacity_bytes: Mapping[Pool, int]
    page: PageSize
    profile: Profile
    layout: Layout
    cost: Cost | None = None
    kept_pages: Callable[[], KeptPages] | None = None  # begins a dry run; prefix caching only
    running: RunningDecodes | None = None  # None where the plan before had not all in service

    reads: Reads | None = None  # of the scheduling

    def __repr__(self) -> str:
        return f"View(device {self.device} at {self.now_ns} ns, {self.issued} plans issued)"

    def in_service(self) -> tuple[tuple[Slice, ...], Sequence[Job]]:
        """A slice of one token for each decode, and the jobs whose prompts have begun.

        Both are in the order of admission.
        """
        if self.running is not None:
            return self.running.slices, self.serving[len(self.running.slices) :]
        begun = [job for job in self.serving if job.is_prefilling]
        return tuple([one_token(job) for job in self.serving if not job.is_prefilling]), begun

    def running_decodes(self) -> tuple[Slice, ...]:
        """Decodes of the plan before that head `serving`: a slice each, perhaps none."""
        return () if self.running is None else self.running.slices

    def leading_decodes(self, slices: tuple[Slice, ...]) -> RunningDecodes | None:
        """The running decodes if a batch begins with all of them, in their order."""
        running = self.running
        if running is None or not running.slices:
            return None
        return running if slices[: len(running.slices)] == running.slices else None

    def found_tokens(self, job: Job) -> int:
        """Tokens of a waiting job that it would find computed if it were admitted now, alone."""
        if self.kept_pages is None or job.computed_tokens:
            return 0
        return len(self.kept_pages().found(job)) * self.page.tokens

    def room(self, pool: Pool) -> int:
        """Bytes that can be taken, some of them only after a wait."""
        return self.free_bytes[pool] + self.coming_bytes[pool]


stored_by_slot(View)
