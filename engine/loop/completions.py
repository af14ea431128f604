"""When each job ends, when its memory comes back, and that none is lost (laws 1 and 2)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

from engine.contract.executor import Launch, Span
from engine.contract.job import Job
from engine.contract.plan import Compute, Lane, Op
from engine.contract.regions import SHARED_OWNER, Kind, Place, Tier
from engine.contract.rules import BrokenLaw
from engine.loop.state import JobLists
from engine.results.outcomes import Outcome
from engine.results.recorder import Recorder
from traces.serving.request import TrainingJob


class DeferredFrees:
    """Per device, jobs that have finished and the plan they finished with, oldest first.

    When their memory is shown again depends on plans alone, never on how soon the engine notices an
    end (law 11): the caller names the plan up to which it comes back. Steps that are issued as one
    run also `expect` jobs, which finish while the run passes.
    """

    def __init__(
        self, give_all: Callable[[int, bool], bool], recorder: Recorder, devices: int
    ) -> None:
        """`give_all` gives back a job's memory; with True, no operation in flight will use it.

        It returns False where the memory stays, as that of a request that is recorded.
        """
        self._give_all, self._recorder = give_all, recorder
        self._queues: list[deque[tuple[int, Job]]] = [deque() for _ in range(devices)]
        self._expected: list[deque[tuple[int, Job]]] = [deque() for _ in range(devices)]
        self._given: set[int] = set()  # expected jobs whose memory is back

    def oldest(self, device: int) -> int | None:
        """The plan whose jobs' memory comes back next; None where no memory is deferred."""
        return self._queues[device][0][0] if self._queues[device] else None

    def oldest_or_expected(self, device: int) -> int | None:
        """As `oldest`, of expected jobs too."""
        found = self._queues[device] or self._expected[device]
        return found[0][0] if found else None

    def expect(self, device: int, number: int, job: Job) -> None:
        """A job will finish with the device's plan of that number."""
        self._expected[device].append((number, job))

    def leave(self, device: int, number: int, job: Job) -> None:
        """A job has finished with the device's plan of that number."""
        if job.job_id in self._given:
            self._given.remove(job.job_id)
            return
        expected = self._expected[device]
        if expected and expected[0][1] is job:
            expected.popleft()
        self._queues[device].append((number, job))

    def give_back(self, device: int, number: int) -> bool:
        """Gives back the memory of jobs up to the device's plan of that number; whether any did."""
        queue, is_any = self._queues[device], False
        while queue and queue[0][0] <= number:
            self._give(queue.popleft()[1], device)
            is_any = True
        return is_any

    def due(self, device: int, number: int) -> list[Job]:
        """The jobs up to the device's plan of that number, expected ones too."""
        found: list[Job] = []
        for queue in (self._queues[device], self._expected[device]):
            for last, job in queue:
                if last > number:
                    break
                found.append(job)
        return found

    def give_ahead(self, device: int, number: int) -> None:
        """As `give_back`, of expected jobs too: they finish before the next plan is issued."""
        self.give_back(device, number)
        expected = self._expected[device]
        while expected and expected[0][0] <= number:
            job = expected.popleft()[1]
            self._given.add(job.job_id)
            self._give(job, device, is_ahead=True)

    def _give(self, job: Job, device: int, is_ahead: bool = False) -> None:
        if self._give_all(job.job_id, is_ahead):
            self._recorder.returned(job.job_id, device, is_ahead)


@dataclass(slots=True, eq=False)
class StepEnd:
    """A training job's step that is issued whole, while its launches are in flight."""

    job: Job
    step: int
    open: int  # lanes whose last launch of the step has not settled
    end_ns: int = 0  # of what has settled
    plans: dict[int, int] = field(default_factory=dict)  # by device, the plan up to which it took

    @property
    def is_last(self) -> bool:
        """Whether the job ends with it."""
        assert self.job.training is not None
        return self.step + 1 >= self.job.training.spec.num_steps

    def settle(self, end_ns: int, device: int, number: int) -> bool:
        """A last launch of a lane has ended; returns whether the step has."""
        self.open -= 1
        self.end_ns = max(self.end_ns, end_ns)
        self.plans[device] = max(self.plans.get(device, 0), number)
        return not self.open


class Completions:
    """Lengths of the trace, and jobs that left at issue and finish when operations settle.

    `in_flight`: operations that are issued and not settled, in the order of issue.
    """

    def __init__(
        self,
        jobs: JobLists,
        in_flight: Collection[Op],
        ended: Callable[[Sequence[Job]], None],
        changed: Callable[[], None],
    ) -> None:
        """`ended` is told of jobs that leave service at issue, `changed` that one left later."""
        self._jobs, self._in_flight = jobs, in_flight
        self._ended, self._changed = ended, changed
        self._target: dict[int, int] = {}  # known tokens at which a request is complete
        self._with: dict[Op, list[Job]] = {}
        self._steps: dict[Op, list[StepEnd]] = {}  # of training, by launches that they wait for

    def __bool__(self) -> bool:
        """Whether an end is in flight."""
        return bool(self._with) or (bool(self._steps) and bool(self._last_steps()))

    def __iter__(self) -> Iterator[Job]:
        """Jobs whose end is in flight."""
        return chain(*self._with.values(), [end.job for end in self._last_steps()])

    def _last_steps(self) -> Collection[StepEnd]:
        ends = dict.fromkeys(chain(*self._steps.values()))
        return [end for end in ends if end.is_last]

    def expect(self, job: Job, output_tokens: int) -> None:
        """A request has arrived; its answer will be of so many tokens."""
        self._target[job.job_id] = job.known_tokens + output_tokens

    def tokens_left(self, job: Job) -> int:
        """Tokens that are still to be sampled; 0 or below where the job is complete."""
        return self._target[job.job_id] - job.known_tokens

    def end_with(self, op: Op, jobs: Sequence[Job]) -> None:
        """These jobs leave service now and finish when the operation settles."""
        self._leave(jobs)
        for job in jobs:
            self._with.setdefault(op, []).append(job)

    def _leave(self, jobs: Sequence[Job]) -> None:
        self._ended(jobs)
        for job in jobs:
            self._jobs.leave(job)

    def sampled(self, span: Span, launch: Launch) -> list[Job]:
        """Jobs that sampled an end of sequence, or reached the length of the trace: they leave."""
        ids = {piece.job_id for piece in launch.pieces if piece.samples}
        jobs = [job for job in self._jobs.serving if job.job_id in ids]
        done = [job for job in jobs if job.job_id in span.ended or self.tokens_left(job) <= 0]
        for job in done:
            self._changed()
            self._jobs.leave(job)
        return done

    def step_with(self, op: Compute, job: Job, step: int) -> None:
        """A training job's step is issued whole, with this launch as its last.

        The step ends when all launches of the job up to this one have settled: updates on the host
        and on the device overtake each other. With its last step the job leaves training now.
        """
        last = self._last_launches(op, job)
        end = StepEnd(job, step, len(last))
        for other in last:
            self._steps.setdefault(other, []).append(end)
        if end.is_last:
            self._leave([job])

    def _last_launches(self, op: Compute, job: Job) -> Collection[Op]:
        """The job's last launch on each lane up to `op`: a lane is first-in-first-out."""
        last: dict[Lane, Op] = {}
        for other in self._in_flight:
            if isinstance(other, Compute) and any([p.job is job for p in other.slices]):
                last[other.lane] = other
            if other is op:
                break
        return last.values()

    def settle(self, op: Op, end_ns: int, device: int, number: int) -> Sequence[StepEnd]:
        """Steps that have ended with an operation of the device's plan of that number."""
        ends = self._steps.pop(op, ()) if self._steps else ()
        return [end for end in ends if end.settle(end_ns, device, number)]

    def pop(self, op: Op) -> Sequence[Job]:
        """The jobs that finish with an operation that has ended."""
        return self._with.pop(op, ())


def check_requests(outcomes: Collection[Outcome], inside: Iterable[Job]) -> None:
    """Law 1: a request that has arrived is in the engine or has ended.

    Args:
        outcomes: of all requests that have arrived.
        inside: jobs that wait, are in service, train, or end with an operation in flight.

    Raises:
        BrokenLaw: the numbers differ.
    """
    serving = sum(job.training is None for job in inside)
    ended = sum(outcome.status != "unfinished" for outcome in outcomes)
    if len(outcomes) != serving + ended:
        raise BrokenLaw("law 1: requests do not add up")


def check_end(
    outcomes: Iterable[Outcome],
    training: Iterable[tuple[TrainingJob, int]],
    held: Iterable[Place],
    resident: Container[Place],
    ended: Container[int],
    is_forced: bool,
) -> None:
    """Laws 1 and 2 at the end of a replay: no request is unfinished, each has exactly its output
    tokens, and nothing is held but what belongs to no job and is resident, or a copy of an adapter.

    Args:
        outcomes: of all requests.
        training: training jobs, each with the number of its steps that have ended.
        held: places that are held.
        resident: places that may be held to the end, of no job.
        ended: numbers of jobs whose memory the policy gives back.
        is_forced: whether the trace gives the length of an answer; else sampling may end it early.

    Raises:
        BrokenLaw: one of these does not hold.
    """
    unfinished, lengths = list[int](), list[str]()
    for outcome in outcomes:
        request, tokens = outcome.request, outcome.tokens
        if outcome.status == "unfinished":
            unfinished.append(request.request_id)
        elif outcome.status == "finished" and (
            tokens != request.output_tokens
            if is_forced
            else not 0 < tokens <= request.output_tokens
        ):
            lengths.append(f"{request.request_id} ({tokens} of {request.output_tokens})")
    if unfinished:
        raise BrokenLaw(f"law 1: the replay ends with requests {_some(unfinished)} unfinished")
    if lengths:
        raise BrokenLaw(f"law 1: requests end with other lengths than theirs: {_some(lengths)}")
    for job, steps in training:
        due = job.num_steps - job.begun_steps
        if steps != due and not job.until_served:
            raise BrokenLaw(f"law 1: training job {job.job_id} ends after {steps} of {due} steps")
    rest = [p for p in held if not _may_stay(p, resident) and p.region.owner not in ended]
    if rest:
        raise BrokenLaw(f"law 2: the replay ends and {_some(rest)} is held")


def _may_stay(place: Place, resident: Container[Place]) -> bool:
    """Whether a place belongs to no job, and is resident or a copy of an adapter on a device."""
    is_copy = place.region.kind is Kind.ADAPTER and place.tier is Tier.GPU
    return place.region.owner == SHARED_OWNER and (is_copy or place in resident)


def _some(items: Sequence[object]) -> str:
    """The first items, for messages."""
    more = len(items) - 3
    return ", ".join(map(str, items[:3])) + (f" and {more} more" if more > 0 else "")
