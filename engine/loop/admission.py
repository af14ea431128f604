"""Arrivals: when requests and training jobs reach the engine, and where jobs leave it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from functools import partial
from heapq import heappop, heappush
from typing import Any

import simpy

from engine.contract.job import Job
from engine.contract.training_check import TrainingContract
from engine.contract.training_progress import TrainingProgress
from engine.loop.completions import Completions, DeferredFrees
from engine.loop.issuing import Issuing
from engine.loop.state import EngineState
from engine.memory.pool import Chain
from traces.serving.request import Request, Sample, TrainingJob

Item = Request | TrainingJob
Answered = Callable[[Job], None]  # hears of each request that leaves: its client goes on


class ComingFeedback:
    """Feedback on a request, as a sample of a job that learns, which may come before that job."""

    def __init__(self, items: Iterable[Item]) -> None:
        self._on: dict[int, list[tuple[int, Sample]]] = {}  # by request: jobs and their samples
        self._early: dict[int, list[Sample]] = {}  # by job that has not arrived yet
        for item in items:
            if isinstance(item, TrainingJob) and item.learns:
                self._early[item.job_id] = []
                for sample in item.samples:
                    assert sample.request is not None, "feedback is on a request"
                    self._on.setdefault(sample.request, []).append((item.job_id, sample))

    def awaits(self, request: int) -> bool:
        """Whether feedback on a request comes once it is answered."""
        return request in self._on

    def on(self, job: Job) -> list[tuple[int, Sample]]:
        """Takes the feedback on a request that is answered: jobs and their samples."""
        return self._on.pop(job.job_id, [])

    def keep(self, job_id: int, sample: Sample) -> bool:
        """Keeps feedback for a job that has not arrived yet; False where it has."""
        early = self._early.get(job_id)
        if early is None:
            return False
        early.append(sample)
        return True

    def before(self, job_id: int) -> list[Sample]:
        """Takes the feedback that has come before its job, which arrives now."""
        return self._early.pop(job_id, [])


class ArrivalQueue:
    """Hands over each item of a trace once; `pending` counts the items still to come.

    Raises:
        ValueError: a session has two turns of one number, or lacks a turn before another.
    """

    def __init__(
        self, env: simpy.Environment, work: Iterable[Item], admit: Callable[[Item, int], None]
    ) -> None:
        self._env, self._admit = env, admit
        self._turns: dict[tuple[int, int], Request] = {}
        items, first = [*work], list[Item]()
        self._feedback = ComingFeedback(items)
        self._learning: dict[int, Callable[[Sample], None]] = {}  # by job, gives it a sample
        for item in items:
            if isinstance(item, Request) and item.session is not None and item.turn > 0:
                if (item.session, item.turn) in self._turns:
                    raise ValueError(f"session {item.session} has two turns {item.turn}")
                self._turns[item.session, item.turn] = item
            else:
                first.append(item)
        self._check_turns({i.session for i in first if isinstance(i, Request)})
        self._first = sorted(first, key=lambda item: item.arrival_ns)
        self._handed = 0  # of `_first`
        self.serves_only = all([isinstance(item, Request) for item in first])
        self._timed: list[int] = []  # a heap: when released turns and samples will arrive
        self.pending = len(self._first) + len(self._turns)
        self.next_ns: int | None = (
            None  # when an item will arrive; None: only answers release turns
        )
        self._look_ahead()

    def run(self) -> Generator[simpy.Event, Any, None]:
        """The process of the items that arrive by the clock."""
        for item in self._first:
            wait_ns = item.arrival_ns - int(self._env.now)  # a wall clock moves on between reads
            if wait_ns > 0:
                yield simpy.Timeout(self._env, wait_ns)
            self._handed += 1
            self._look_ahead()
            self._hand_over(item, item.arrival_ns)
        yield simpy.Timeout(self._env, 0)  # a process needs one event to be one

    def _look_ahead(self) -> None:
        first, handed = self._first, self._handed
        at_ns = first[handed].arrival_ns if handed < len(first) else None
        if self._timed:
            at_ns = self._timed[0] if at_ns is None else min(at_ns, self._timed[0])
        self.next_ns = at_ns

    def awaits_answer(self, job: Job) -> bool:
        """Whether a turn of its session, or feedback, waits for a job's answer."""
        if self._feedback.awaits(job.job_id):
            return True
        return job.session is not None and (job.session, job.turn + 1) in self._turns

    def answered(self, job: Job) -> None:
        """A client has its answer, or was refused.

        Its next turn arrives after its think time, and its feedback after that of the feedback.
        """
        now_ns = int(self._env.now)
        for job_id, sample in self._feedback.on(job):
            self._at(now_ns + sample.release_ns, partial(self._learn, job_id, sample))
        if job.session is None:
            return
        request = self._turns.pop((job.session, job.turn + 1), None)
        if request is not None:
            at_ns = max(request.arrival_ns, now_ns + request.think_ns)
            self._at(at_ns, partial(self._hand_over, request, at_ns))

    def release_samples(self, job: Job, released: Callable[[Sample | None], None]) -> None:
        """Samples of a finetuning job come at times of their own; `released` is told of each."""
        training = job.training
        assert training is not None, "only training jobs have samples"

        def release(sample: Sample | None = None) -> None:
            training._release(sample)
            released(sample)

        if training.spec.learns:
            self._learning[job.job_id] = release
            for sample in self._feedback.before(job.job_id):
                release(sample)
        else:
            for sample in training.spec.samples[training.released :]:
                self._at(job.arrival_ns + sample.release_ns, release)

    def gets_feedback(self, request: Request) -> bool:
        """Whether feedback on a request comes once it is answered."""
        return self._feedback.awaits(request.request_id)

    def _learn(self, job_id: int, sample: Sample) -> None:
        """Feedback has come: from now on its sample tells when that was."""
        sample = sample._replace(release_ns=int(self._env.now))
        if not self._feedback.keep(job_id, sample):
            self._learning[job_id](sample)

    def _at(self, at_ns: int, happens: Callable[[], None]) -> None:
        """Has a turn or a sample come at a moment, which `next_ns` knows until then."""

        def come(_: simpy.Event) -> None:
            heappop(self._timed)
            self._look_ahead()
            happens()

        heappush(self._timed, at_ns)
        timer = simpy.Timeout(self._env, max(0, at_ns - int(self._env.now)))
        timer.callbacks.append(come)
        self._look_ahead()

    def _hand_over(self, item: Item, at_ns: int) -> None:
        self.pending -= 1
        self._admit(item, at_ns)

    def _check_turns(self, sessions: set[int | None]) -> None:
        for session, turn in self._turns:
            before = turn == 1 and session in sessions
            if not (before or (session, turn - 1) in self._turns):
                raise ValueError(f"session {session} has a turn {turn} but no turn {turn - 1}")


class Admission:
    """Makes a job of each item that arrives, and takes out jobs that are served or refused."""

    def __init__(
        self,
        state: EngineState,
        completions: Completions,
        frees: DeferredFrees | None,
        issuing: Issuing,
        training: TrainingContract,
        left: Callable[[Job], None],
    ) -> None:
        """`frees` gets the memory of finished jobs; None leaves it to the policy. `left` is called
        with each request that leaves."""
        self._state, self._completions, self._frees = state, completions, frees
        self._issuing, self._training, self._left = issuing, training, left

    def admit(self, item: Item, arrival_ns: int, gets_feedback: bool = False) -> Job:
        """A request or training job has arrived: it waits."""
        state = self._state
        if isinstance(item, Request):
            job = self._serving(item, arrival_ns, gets_feedback)
        else:
            layout = state.layout.training.get(item.job_id)
            training = TrainingProgress(item, layout, state.records.records)
            job = Job.trains(training, arrival_ns)
            self._training.admit(job)
            state.profile.trains = True
        state.jobs.wait(job)
        if min(state.in_flight.level) < state.depth:  # else the end of a plan wakes the loop
            state.wakeup.tell()
        return job

    def stop(self, job: Job) -> None:
        """A training job ends before its last step: what it holds comes back."""
        self._state.jobs.refuse(job)
        self._training.leave(job.job_id)
        self._state.give_all(job.job_id)

    def _serving(self, item: Request, arrival_ns: int, gets_feedback: bool) -> Job:
        state, prefix = self._state, self._issuing.prefix
        adapter = None if state.adapters is None else state.adapters.of(item)
        job = Job.serving(item, arrival_ns, adapter, gets_feedback)
        if state.fleet is not None:
            if item.prompt_ids is not None:
                job._name_prefix(Chain(item, state.page.tokens, adapter).of_prompt())
            state.fleet.assign(job)
        elif state.devices == 1:
            job._route(0)
        self._completions.expect(job, item.output_tokens)
        state.recorder.arrived(item, arrival_ns, job.device)
        if prefix is not None:
            prefix.arrived(item, adapter)
        return job

    def refuse(self, job: Job, answered: Answered) -> None:
        """A job that will never fit leaves."""
        self._state.jobs.refuse(job)
        self._state.give_all(job.job_id)
        self._leave(job, self._state.now_ns, "refused", answered)

    def finish(self, job: Job, now_ns: int, device: int, number: int, answered: Answered) -> None:
        """A job is complete with the device's plan of that number."""
        if self._frees is not None:
            self._frees.leave(device, number, job)
        else:
            self._state.ledger.ended.add(job.job_id)
        self._leave(job, now_ns, "finished", answered)

    def _leave(self, job: Job, now_ns: int, status: str, answered: Answered) -> None:
        if job.training is not None:
            self._training.leave(job.job_id)
            return
        self._left(job)
        if status == "finished" and self._state.adapters is not None:
            self._state.records.answered(job, now_ns)
        self._state.recorder.ended(job.job_id, now_ns, status)
        if self._state.fleet is not None:
            self._state.fleet.left(job)
        if self._issuing.prefix is not None:
            self._issuing.prefix.left(job)
        answered(job)
