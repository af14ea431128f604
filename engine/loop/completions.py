"""When each job ends, and when the memory of an ended job comes back."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from engine.contract.executor import Launch, Span
from engine.contract.job import Job
from engine.contract.plan import Compute, Lane, Op
from engine.loop.state import JobLists
from engine.results.recorder import Recorder


class DeferredFrees:
    """Per device, jobs that have finished and the plan they finished with, oldest first.

    When their memory is shown again depends on plans alone, never on how soon the engine notices an
    end (law 11): the caller names the plan up to which it comes back.
    """

    def __init__(self, give_all: Callable[[int], None], recorder: Recorder, devices: int) -> None:
        self._give_all, self._recorder = give_all, recorder
        self._queues: list[deque[tuple[int, Job]]] = [deque() for _ in range(devices)]

    def oldest(self, device: int) -> int | None:
        """The plan whose jobs' memory comes back next; None where no memory is deferred."""
        return self._queues[device][0][0] if self._queues[device] else None

    def leave(self, device: int, number: int, job: Job) -> None:
        """A job has finished with the device's plan of that number."""
        self._queues[device].append((number, job))

    def give_back(self, device: int, number: int) -> bool:
        """Gives back the memory of jobs up to the device's plan of that number; whether any did."""
        queue, is_any = self._queues[device], False
        while queue and queue[0][0] <= number:
            _, job = queue.popleft()
            self._give_all(job.job_id)
            self._recorder.returned(job.job_id, device)
            is_any = True
        return is_any


@dataclass(slots=True, eq=False)
class StepEnd:
    """A training job's step that is issued whole, while its launches are in flight."""

    job: Job
    step: int
    open: int  # lanes whose last launch of the step has not settled
    end_ns: int = 0  # of what has settled
    number: int = 0  # its device's plan up to which it took

    @property
    def is_last(self) -> bool:
        """Whether the job ends with it."""
        assert self.job.training is not None
        return self.step + 1 >= self.job.training.spec.num_steps

    def settle(self, end_ns: int, number: int) -> bool:
        """A last launch of a lane has ended; returns whether the step has."""
        self.open -= 1
        self.end_ns, self.number = max(self.end_ns, end_ns), max(self.number, number)
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

    def settle(self, op: Op, end_ns: int, number: int) -> Sequence[StepEnd]:
        """Steps that have ended with an operation of the device's plan of that number."""
        ends = self._steps.pop(op, ()) if self._steps else ()
        return [end for end in ends if end.settle(end_ns, number)]

    def pop(self, op: Op) -> Sequence[Job]:
        """The jobs that finish with an operation that has ended."""
        return self._with.pop(op, ())
