"""Training tasks in their order: forward, backward, updates; several jobs by turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import ClassVar, Literal

from engine.contract.job import Job
from engine.contract.layout import TrainingTask
from engine.contract.plan import Slice
from engine.contract.policy import Traits
from engine.contract.regions import Work
from engine.contract.training_progress import TrainingProgress
from engine.contract.view import View
from policies.training.cycle import training_jobs


@dataclass(frozen=True)
class TrainingOrder:
    """The next tasks of one training job, never beyond its step.

    Args:
        tasks: how many in a plan; 0: all that are left of the step.
        updates: `in_turn`: planned like other tasks. `together`: all updates that follow one
            another in one plan, as a plain loop calls its optimizer once. Then no update waits for
            another plan, but the memory of all of them is booked at once.
        turns: when another job takes over: behind the whole `job`; behind a `step`, then the job
            with the fewest steps is next; or behind a `task`, which keeps the activations of all
            jobs at once. A configuration makes one job, for which all three are alike.

    Raises:
        ValueError: `tasks` is below 0.
    """

    traits: ClassVar[Traits] = Traits(recurs=True, trains_only=True)
    tasks: int = 1
    updates: Literal["in_turn", "together"] = "in_turn"
    turns: Literal["job", "step", "task"] = "job"

    def __post_init__(self) -> None:
        if self.tasks < 0:
            raise ValueError(f"training order: tasks is {self.tasks}, must be at least 0")

    def batch(self, view: View) -> tuple[Slice, ...]:
        jobs = [*training_jobs(view)]
        if not jobs:
            return ()
        return self._tasks(jobs[0] if self.turns == "job" else min(jobs, key=self._rank))

    def _rank(self, job: Job) -> tuple[int, int]:
        """The lowest is first; of equals, the job that came first."""
        assert job.training is not None
        step, training = job.training.step, job.training
        position = len(training.tasks) - training.num_left()
        return (step, position) if self.turns == "task" else (-1 if position else step, 0)

    def _tasks(self, job: Job) -> tuple[Slice, ...]:
        training = job.training
        assert training is not None
        tokens = training.spec.microbatch_tokens
        return tuple(
            [
                Slice(
                    job,
                    1 if work is Work.UPDATE else tokens,
                    work,
                    range(part, part + 1),
                    microbatch,
                )
                for work, part, microbatch in self._coming(training)
            ]
        )

    def _coming(self, training: TrainingProgress) -> Sequence[TrainingTask]:
        """The tasks of a plan, of those that are left of a step."""
        left = training.num_left()
        coming = training.ahead(min(self.tasks or left, left))
        if self.updates == "together" and coming[0].work is Work.UPDATE:
            return [*takewhile(_updates, training.ahead(left))]
        return coming


def _updates(task: TrainingTask) -> bool:
    return task.work is Work.UPDATE
