"""Training in the order of its chain: forward, backward, updates; several jobs in turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from engine.contract.job import Job, TrainingTask
from engine.contract.plan import Slice
from engine.contract.policy import Traits
from engine.contract.regions import Work
from engine.contract.view import View
from policies.training.cycle import training_jobs


@dataclass(frozen=True)
class TrainingOrder:
    """The next tasks of one training job, never beyond its step.

    tasks  how many in a plan; 0: all that are left of the step
    updates  in plans like other tasks (`in_turn`), or all that are left in one (`together`), as a
           plain loop calls its optimizer once: then an update need not wait for a question, but
           all that they bring and take is booked at once
    turns  when another job comes in: behind the whole `job`, behind a `step` (who has done the
           fewest goes first), or behind a `task`, which holds activations of all jobs at once;
           a configuration makes one job, so all three are alike there
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
        """Lowest first; of equals, who came first."""
        assert job.training is not None
        step, position = job.training.step, job.training.position
        return (step, position) if self.turns == "task" else (-1 if position else step, 0)

    def _tasks(self, job: Job) -> tuple[Slice, ...]:
        training = job.training
        assert training is not None
        left = training.tasks[training.position :]
        count, tokens = self._count(left), training.spec.microbatch_tokens
        return tuple(
            [
                Slice(
                    job,
                    1 if work is Work.UPDATE else tokens,
                    work,
                    range(part, part + 1),
                    microbatch,
                )
                for work, part, microbatch in training.ahead(count)
            ]
        )

    def _count(self, left: Sequence[TrainingTask]) -> int:
        """Tasks of a plan, of those that are left of a step."""
        if self.updates == "together" and left[0].work is Work.UPDATE:
            return len(left)
        return min(self.tasks or len(left), len(left))
