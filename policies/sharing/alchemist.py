"""Which prompts are recorded, and when a job trains on feedback (Alchemist, arXiv 2503.01066).

That activations are kept in prefill alone, and used once feedback has come, is the paper's. What to
record, when to train and all thresholds are ours: the text names none.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from engine.contract.job import Job
from engine.contract.plan import Slice
from engine.contract.policy import Scheduling, Traits, traits_of
from engine.contract.records import is_stale, learner_of
from engine.contract.regions import Work
from engine.contract.training_progress import TrainingProgress
from engine.contract.view import View
from policies.sharing.records import NS_PER_S, feedback_rate


@dataclass(frozen=True)
class Alchemist:
    """Marks what is to be recorded, and lets a job train once feedback on enough answers is there.

    Args:
        sharing: shares the device between requests and what finetunes.
        record: `none`; `all` prompts; those of tenants from whose answers a share of `least` gets
            feedback, as far as is known (`threshold`); those on which feedback will come
            (`oracle`); or prompts and answers (`everything`).
        least: of `threshold`.
        from_token: the first token that is recorded; those before it are computed again. A slice
            that crosses it is cut there: the rest of the prompt comes with the next step.
        samples: that wait before a step begins.
        max_wait_s: a step begins, too, with the first plan behind the moment at which a sample has
            waited for so long; None: never.

    Raises:
        ValueError: a number is out of its range.
    """

    sharing: Scheduling
    record: Literal["none", "all", "threshold", "oracle", "everything"] = "threshold"
    least: float = 0.1
    from_token: int = 0
    samples: int = 1
    max_wait_s: float | None = None

    def __post_init__(self) -> None:
        kinds = ("none", "all", "threshold", "oracle", "everything")
        if self.record not in kinds:
            raise ValueError(f"alchemist: record={self.record}: there are {', '.join(kinds)}")
        if not 0 <= self.least <= 1:
            raise ValueError(f"alchemist: least is {self.least}, must be in [0, 1]")
        if self.from_token < 0 or self.samples < 1:
            raise ValueError(
                f"alchemist: from_token is {self.from_token}, samples {self.samples}: they must be "
                "at least 0 and 1"
            )
        if self.max_wait_s is not None and not self.max_wait_s > 0:
            raise ValueError(
                f"alchemist: max_wait_s is {self.max_wait_s}, must be above 0, or null"
            )

    @property
    def traits(self) -> Traits:
        """Bounds of what shares the device; what it would promise depends on what is recorded."""
        sharing = traits_of(self.sharing)
        return Traits(
            step_tokens=sharing.step_tokens,
            prompt_tokens=sharing.prompt_tokens,
            max_jobs=sharing.max_jobs,
            whole_samples=sharing.whole_samples,
            service=sharing.service,
        )

    def batch(self, view: View) -> tuple[Slice, ...]:
        training, waiting = (
            [job for job in jobs if self._may_train(job, view.now_ns)]
            for jobs in (view.training, view.waiting)
        )
        batch = self.sharing.batch(replace(view, training=training, waiting=waiting))
        batch = [piece for piece in batch if not self._is_too_soon(piece, view.now_ns)]
        if self.record == "none":
            return tuple(batch)
        learns = [job for job in (*view.training, *view.waiting) if job.training is not None]
        return tuple([self._marked(piece, view, learns) for piece in batch])

    def _may_train(self, job: Job, now_ns: int) -> bool:
        """Whether a step is under way, or may begin."""
        training = job.training
        if training is None or not training.spec.learns or not training.begins_step:
            return True
        return self._may_begin(training, training.first_microbatch, now_ns)

    def _is_too_soon(self, piece: Slice, now_ns: int) -> bool:
        """Whether a window begins the next step behind an update, before that step may begin."""
        training = piece.job.training
        if training is None or not training.spec.learns:
            return False
        following = training.microbatches.stop
        if piece.work is not Work.FORWARD or piece.microbatch < following:
            return False
        return not self._may_begin(training, following, now_ns)

    def _may_begin(self, training: TrainingProgress, first: int, now_ns: int) -> bool:
        """Whether there is feedback enough, or old enough, for a step from this microbatch on."""
        spec = training.spec
        waiting = spec.samples[first:]
        if len(waiting) >= min(self.samples, spec.num_steps * spec.microbatches - first):
            return True
        if self.max_wait_s is None or not waiting:
            return False
        return now_ns - waiting[0].release_ns >= round(self.max_wait_s * NS_PER_S)

    def _marked(self, piece: Slice, view: View, learns: Iterable[Job]) -> Slice:
        job = piece.job
        start = job.computed_tokens or view.found_tokens(job)
        is_prompt = start + piece.tokens <= job.prompt_tokens
        if job.training is not None or not (is_prompt or self.record == "everything"):
            return piece
        before = self.from_token - start
        if before >= piece.tokens or not job.may_record:
            return piece
        is_last = start >= job.prompt_tokens - 1
        if is_last and not (self.record == "everything" and job.recorded_tokens):
            return piece  # no sample could use it: it computes the last token of its prompt
        learner = learner_of(job, learns)
        if learner is None or learner.training is None or job.adapter is None:
            return piece
        if not learner.training.spec.learns or is_stale(job.adapter, learner.training):
            return piece  # nothing comes of it
        if not self._is_to_record(job, view):
            return piece
        return piece._replace(tokens=before) if before > 0 else piece._replace(record=True)

    def _is_to_record(self, job: Job, view: View) -> bool:
        if self.record == "oracle":
            return job.gets_feedback
        if self.record == "threshold":
            return feedback_rate(view, job.tenant) >= self.least
        return True
