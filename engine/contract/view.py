"""All that a policy may know."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from engine.contract.job import Job
from engine.contract.layout import Layout
from engine.contract.plan import GrowCycle, Op, Slice
from engine.contract.regions import PageSize, Place, Pool, Work
from engine.contract.rules import stored_by_slot
from engine.memory.dry_run import PageDryRun


class Decodes(NamedTuple):
    """Spares a policy to look at each decode at each question; says nothing that a View does not.

    The rest of those in service have begun their prompts.
    """

    slices: tuple[Slice, ...]  # one token each, in the order of admission
    places: tuple[Place, ...]  # what each writes
    growth: GrowCycle  # whose pages are full: at step 0 now, and so on, a token at each step


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
    trial: Callable[[], PageDryRun] | None = (
        None  # dry runs on the device's pages; prefix caching only
    )
    decodes: Decodes | None = None  # of all in service, where the plan before had them

    def __repr__(self) -> str:
        return f"View(device {self.device} at {self.now_ns} ns, {self.issued} plans issued)"

    def lead(self, slices: tuple[Slice, ...]) -> int:
        """How many slices at the beginning of a batch are those of `decodes`: all of them or 0."""
        known = () if self.decodes is None else self.decodes.slices
        return len(known) if slices[: len(known)] == known else 0

    def found_tokens(self, job: Job) -> int:
        """Tokens of a waiting job that it would find computed if it came in now, before others."""
        if self.trial is None or job.computed_tokens:
            return 0
        return len(self.trial().found(job)) * self.page.tokens

    def room(self, pool: Pool) -> int:
        """Bytes that can be taken, some of them only after a wait."""
        return self.free_bytes[pool] + self.coming_bytes[pool]


stored_by_slot(View)
