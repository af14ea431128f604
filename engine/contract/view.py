"""The View: all that a policy may know, and the Protocols of what it shows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from engine.contract.adapters import AdapterVersion
from engine.contract.executor import Launch
from engine.contract.job import Job
from engine.contract.layout import Layout
from engine.contract.plan import Compute, Grow, Op, Slice, one_token
from engine.contract.records import FeedbackCount
from engine.contract.regions import PageSize, Place, Pool, Work
from engine.contract.rules import stored_by_slot
from engine.contract.training_progress import Record

LaunchKey = tuple[tuple[Work, range | None, int], ...]  # (work, layers, tokens) of each slice


class Moment(NamedTuple):
    """One launch of the last complete training step.

    Attributes:
        unit: its key in the profile.
        places: places that it read or wrote.
        other_bytes: bytes on its device at issue that are no model states: activations, buffers
            and KV.
        kv_bytes: the bytes of KV among them.
    """

    unit: LaunchKey
    places: tuple[Place, ...]
    other_bytes: int
    kv_bytes: int = 0


class Profile(Protocol):
    """Measurements so far, keyed by whole launches; it is empty during warm-up."""

    def moments(self, job_id: int) -> Sequence[Moment]:
        """The launches of a training job's last complete step.

        Args:
            job_id: the training job.

        Returns:
            One Moment per launch, in issue order; () before the first step is complete.
        """

    def uses(self, job_id: int) -> Mapping[Place, Sequence[int]]:
        """The launches of `moments` that touched each place.

        Args:
            job_id: the training job.

        Returns:
            Per place, the numbers of its launches, ascending.
        """

    def moment(self, job_id: int) -> int:
        """The number of the next launch in the job's present step.

        Args:
            job_id: the training job.

        Returns:
            Launches of the step that are issued.
        """

    def quote_ratio(self, work: Work | None) -> float | None:
        """How much longer launches beside a job that finetunes took than a policy was quoted.

        Args:
            work: of the window in the launch; None: launches that only serve.

        Returns:
            Measured over quoted time of the newest launches; None before some have ended, and where
            policies are quoted nothing.
        """

    def mean_ns(self, job_id: int, unit: LaunchKey) -> int | None:
        """Mean duration of a launch in ns.

        Args:
            job_id: a training job of the launch.
            unit: the launch, as (work, layers, tokens) of each slice; of a window that alone.

        Returns:
            None before such a launch has ended.
        """


class Cost(Protocol):
    """Predicted durations, for policies that plan by time. Equal in every backend."""

    @property
    def copy_share(self) -> float:
        """Of its rate, what a copy to or from the host keeps beside a collective of its device."""

    def op_ns(self, op: Op) -> int:
        """Predicted duration of an operation that is not issued yet.

        Args:
            op: an operation, as a plan would hold it.

        Returns:
            Nanoseconds on its lane, without waits.
        """

    def copy_ns(self, source: Pool, target: Pool, nbytes: int, contended: bool = False) -> int:
        """Predicted duration of a copy, also of what is not booked yet.

        Args:
            source: the tier and device that it comes from.
            target: those that it goes to.
            nbytes: its size.
            contended: the other direction of the link is busy.

        Returns:
            Nanoseconds on its lane, without waits.
        """

    def launch_ns(self, launch: Launch) -> int:
        """Predicted duration of an operation that was issued.

        Args:
            launch: a launch with its jobs as they were at issue.

        Returns:
            Nanoseconds on its lane, without waits.
        """


class KeptPages(Protocol):
    """A dry run on a device's pages, where prefix caching keeps full ones. The books stay.

    Pages are taken oldest first, so what a plan takes may be what a later job of the plan would
    have started on: ask in the order of the plan.
    """

    def found(self, job: Job) -> tuple[int, ...]:
        """The pages with the longest kept beginning of a job, without its last token.

        Args:
            job: a waiting job.

        Returns:
            Page numbers in order.
        """

    def idle(self, pages: Sequence[int], beside: Collection[Place] = ()) -> int:
        """How many pages no job holds. Sharing such a page takes room.

        Args:
            pages: page numbers.
            beside: places that do not count as holders.

        Returns:
            The number of pages without a holder.
        """

    def take(self, place: Place, count: int) -> None:
        """Adds pages to a place.

        Args:
            place: KV of a job on the device.
            count: how many pages.
        """

    def lend(self, room_bytes: int) -> None:
        """Has kept pages give way to bytes that are no pages, or gives them their room back.

        Args:
            room_bytes: what the pool has left behind such bytes were taken or given back.
        """

    def share(self, place: Place, pages: Sequence[int]) -> None:
        """Begins a place with pages that are kept or held.

        Args:
            place: KV of a job, not held yet.
            pages: page numbers in order.

        Raises:
            ContractError: the plan has taken one of the pages.
        """

    def free(self, place: Place) -> int:
        """Gives a place back.

        Args:
            place: KV of a job that is held.

        Returns:
            How many pages no job holds then.
        """


class RunningDecodes(NamedTuple):
    """The decodes of the plan before, which head `View.serving` in the order of their admission.

    Attributes:
        slices: one token of each decode.
        places: the KV place that each writes.
        full: a page for each decode whose pages are full.
    """

    slices: tuple[Slice, ...]
    places: tuple[Place, ...]
    full: tuple[Grow, ...]


class Reads(Protocol):
    """Notes what a scheduling reads of a view, so that the engine need not ask it again."""

    def shown(self, view: View) -> View:
        """A view like this one that notes each read of a fact which a step may change.

        Args:
            view: the view of the question.

        Returns:
            A View with equal facts.
        """

    def slices(self, batch: Sequence[Slice], scheduling: object) -> tuple[Slice, ...]:
        """A batch with the engine's jobs in place of those of `shown`.

        Args:
            batch: the slices of the scheduling.
            scheduling: what made it; where it holds another state now, it is asked again.

        Returns:
            The slices of the engine's jobs, in their order.
        """


def untold(job: Job) -> int | None:
    """The first token's time where a view does not tell it.

    Args:
        job: any job.

    Returns:
        None.
    """
    return None


def unissued(op: Op) -> Launch:
    """An operation of no view is in flight.

    Args:
        op: any operation.

    Raises:
        LookupError: always.
    """
    raise LookupError(f"{op!r} is not in flight")


class ServiceWeights(NamedTuple):
    """What a token adds to the service of its tenant (`View.service`): a virtual token counter.

    The defaults of serving are those of Sheng et al. (OSDI 2024, section 5): an output token costs
    twice an input token. Those of finetuning count products: the forward of a token takes as many
    as its prefill, and the way back of adapters' gradients as many again.

    Attributes:
        prefill: of a prompt token that is computed; one that is found in kept pages costs nothing,
            and one that a restart computes again costs again.
        decode: of a token that a decode computes. The first token of an answer comes with its
            prompt.
        forward: of a token of training that goes forward through all units.
        backward: of a token of training that goes back through all units that a gradient passes.
    """

    prefill: float = 1.0
    decode: float = 2.0
    forward: float = 1.0
    backward: float = 1.0


@dataclass(frozen=True, slots=True)
class View:
    """The state of the engine at one question, for one device.

    Jobs and memory are shown as *issued*: operations in flight count as done. Sequences and
    mappings are read-only. Bytes come back in issue order: the earlier users of `free_bytes` have
    all ended, so a launch that takes them never waits; one that takes `coming_bytes` does.

    Attributes:
        now_ns: the clock of the run.
        device: the device that a plan is asked for.
        issued: plans that are issued to this device so far.
        serving: jobs in service, in the order of their admission.
        training: jobs that train, in the order of their admission.
        waiting: jobs that wait, in the order of arrival; restarted jobs come first.
        free_bytes: per pool, bytes that can be taken without a wait.
        coming_bytes: per pool, bytes that are freed and still used by operations in flight.
        held_bytes: per place, bytes that it holds.
        written: per place, a stamp of its contents; equal stamps mean equal contents.
        used: per place, a stamp of its last use; a later use has a larger one.
        in_flight: operations that are issued and have not ended.
        capacity_bytes: bytes of each pool.
        page: the page size of KV.
        profile: measurements of training so far.
        layout: what the planner has decided.
        cost: predicted durations; None where the backend has none.
        kept_pages: begins a dry run on the device's pages; None without prefix caching.
        running: the decodes of the plan before; None where that plan lacks a job in service.
        reads: notes what the scheduling reads; None where that is not needed.
        service: per tenant, the tokens that its jobs were charged on the device, as issued, and
            what lifted it when it came back; None where no scheduling has `Traits.service`.
        first_token_ns: when the client got a request's first token; None before that. It is a
            measured moment where durations are, so that it differs between runs on other clocks.
        adapters: the newest version of each adapter, by name; none in a run without any.
        records: what serving has kept of requests for a job that learns, by request; that of a
            sample under way is not among them.
        feedback: by tenant, how many answers have got feedback, of those that are old enough; kept
            where requests run through adapters.
        launch_of: an operation of `in_flight` as it was issued, for `Cost.launch_ns`.
    """

    now_ns: int
    device: int
    issued: int
    serving: Sequence[Job]
    training: Sequence[Job]
    waiting: Sequence[Job]
    free_bytes: Mapping[Pool, int]
    coming_bytes: Mapping[Pool, int]
    held_bytes: Mapping[Place, int]
    written: Mapping[Place, int]
    used: Mapping[Place, int]
    in_flight: Sequence[Op]
    capacity_bytes: Mapping[Pool, int]
    page: PageSize
    profile: Profile
    layout: Layout
    cost: Cost | None = None
    kept_pages: Callable[[], KeptPages] | None = None
    running: RunningDecodes | None = None
    reads: Reads | None = None
    service: Mapping[str, float] | None = None
    first_token_ns: Callable[[Job], int | None] = untold
    adapters: Mapping[str, AdapterVersion] | None = None
    records: Mapping[int, Record] | None = None
    feedback: Mapping[str, FeedbackCount] | None = None
    launch_of: Callable[[Op], Launch] = unissued

    def __repr__(self) -> str:
        return f"View(device {self.device} at {self.now_ns} ns, {self.issued} plans issued)"

    def in_service(self) -> tuple[tuple[Slice, ...], Sequence[Job]]:
        """The jobs in service, as decodes and prefills.

        Returns:
            A slice of one token for each decode, and the jobs whose prompts have begun. Both are in
            the order of admission.
        """
        if self.running is not None:
            return self.running.slices, self.serving[len(self.running.slices) :]
        begun = [job for job in self.serving if job.is_prefilling]
        return tuple([one_token(job) for job in self.serving if not job.is_prefilling]), begun

    def running_decodes(self) -> tuple[Slice, ...]:
        """The decodes that run, which head `serving`.

        Returns:
            A slice of one token for each, in the order of admission; () where none are known.
        """
        return () if self.running is None else self.running.slices

    def leading_decodes(self, slices: tuple[Slice, ...]) -> RunningDecodes | None:
        """The running decodes, if a batch begins with all of them in their order.

        Args:
            slices: a batch.

        Returns:
            `running`; None where the batch begins otherwise, or none are known.
        """
        running = self.running
        if running is None or not running.slices:
            return None
        return running if slices[: len(running.slices)] == running.slices else None

    def found_tokens(self, job: Job) -> int:
        """Tokens of a waiting job in kept pages, if it alone were admitted now.

        Args:
            job: a waiting job.

        Returns:
            Tokens of whole pages; 0 without prefix caching, where the job has begun, or trains.
        """
        if self.kept_pages is None or job.computed_tokens or job.training is not None:
            return 0
        return len(self.kept_pages().found(job)) * self.page.tokens

    def room(self, pool: Pool) -> int:
        """Free and coming bytes of a pool. A plan may take them, some only after a wait.

        Args:
            pool: a pool of the machine.

        Returns:
            The bytes.
        """
        return self.free_bytes[pool] + self.coming_bytes[pool]

    def is_in_flight(self, job: Job) -> bool:
        """Whether a launch of a job has been issued and has not ended.

        Args:
            job: a job of the view.

        Returns:
            False where only copies of its memory are in flight.
        """
        launches = [op for op in self.in_flight if isinstance(op, Compute)]
        return any([piece.job is job for op in launches for piece in op.slices])


stored_by_slot(View)
