"""Co-serving by tokens: each launch serves first, and finetunes with the tokens that are left."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from engine.contract.job import Job, TrainingProgress
from engine.contract.plan import Slice
from engine.contract.policy import Scheduling, Traits, traits_of
from engine.contract.regions import Work
from engine.contract.view import View
from policies.sharing.time_shared import side_of
from policies.training.cycle import training_jobs


@dataclass(frozen=True)
class CoServe:
    """The rule that FlexLLM released: a fixed token budget, and so many layers back.

    A step serves first. The tokens that its requests leave of the budget go to a window forward of
    the sample under way. Once the sample is through, each step takes its backward some layers down,
    beside what it serves, until the next sample begins. One job finetunes at a time, first come
    first served; a job whose next sample is not there yet lets the next job on (FlexLLM, arXiv
    2402.18789; flexflow-serve, `prepare_next_fwd_batch`).

    Args:
        serving: scheduling of the requests.
        token_budget: tokens of a step, of requests and the window together.
        backward_layers: layers that a step takes a backward down.
        backward_tokens: tokens of a window back, then of one layer in a step; None: the whole
            sample.
        min_window: fewer tokens that are left start no window, unless they end the sample.
        multiple: windows are multiples of so many tokens, but for the last of a sample.

    Raises:
        ValueError: a number is below 1.
    """

    serving: Scheduling
    token_budget: int = 256
    backward_layers: int = 1
    backward_tokens: int | None = None
    min_window: int = 1
    multiple: int = 1

    def __post_init__(self) -> None:
        names = ("token_budget", "backward_layers", "backward_tokens", "min_window", "multiple")
        for name in names:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"co-serving: {name} is {value}, must be at least 1")
        if self.backward_tokens is not None and self.backward_layers > 1:
            raise ValueError(
                f"co-serving: backward_tokens={self.backward_tokens} takes one layer in a step; "
                f"set backward_layers=1, or backward_tokens=null"
            )

    @property
    def traits(self) -> Traits:
        """The bounds of serving, and of a step with its window."""
        serving = traits_of(self.serving)
        return Traits(
            step_tokens=serving.step_tokens and max(self.token_budget, serving.step_tokens),
            prompt_tokens=serving.prompt_tokens,
            max_jobs=serving.max_jobs,
        )

    def batch(self, view: View) -> tuple[Slice, ...]:
        serves = tuple(self.serving.batch(side_of(view, trains=False)))
        job = first_with_work(training_jobs(view))
        if job is None:
            return serves
        left = self.token_budget - sum([piece.tokens for piece in serves])
        return (*serves, *self._trains(job, left))

    def _trains(self, job: Job, left: int) -> tuple[Slice, ...]:
        """The update that is due, and a window forward or back."""
        training = job.training
        assert training is not None
        update, microbatch = due_update(job, training)
        if microbatch is None or not training.is_released(microbatch):
            return update
        total, units = training.spec.tokens_of(microbatch), training.spec.num_units
        forward, backward = training.frontier(microbatch)
        if (ahead := total - forward[-1]) > 0:
            tokens = self._window(left, ahead)
            window = Slice(job, tokens, Work.FORWARD, range(units), microbatch)
            return (*update, window) if tokens else update
        top = max([u for u in range(training.first, units - 1) if backward[u] < total])
        low = max(training.first, top + 1 - self.backward_layers)
        tokens = min(total - backward[top], self.backward_tokens or total)
        return (*update, Slice(job, tokens, Work.BACKWARD, range(low, top + 1), microbatch))

    def _window(self, left: int, ahead: int) -> int:
        """Tokens of a window, with so many left of the budget and so many ahead in the sample."""
        if left >= ahead:
            return ahead
        tokens = left - left % self.multiple
        return tokens if tokens >= self.min_window else 0


def first_with_work(jobs: Iterable[Job]) -> Job | None:
    """The first finetuning job that can go on.

    Args:
        jobs: jobs that train, in the order of their arrival.

    Returns:
        The first whose update is due, or whose next sample is there; None without one.
    """
    for job in jobs:
        training = job.training
        if training is None or not training.spec.finetunes or training.is_complete:
            continue
        microbatch = training.sample
        if microbatch is None or training.is_released(microbatch):
            return job
    return None


def due_update(job: Job, training: TrainingProgress) -> tuple[tuple[Slice, ...], int | None]:
    """The update that ends a step, and the sample behind it.

    Args:
        job: a finetuning job.
        training: its progress.

    Returns:
        () or the slice of the update; and the microbatch of the sample that is next, None behind
        the last step.
    """
    if (microbatch := training.sample) is not None:
        return (), microbatch
    last, chunks = training.microbatches[-1], range(len(training.trained_by))
    is_last = training.step + 1 >= training.spec.num_steps
    return (Slice(job, 1, Work.UPDATE, chunks, last),), None if is_last else last + 1
