"""LLMStation's planner: how many of the next steps may carry a tasklet of finetuning."""

from __future__ import annotations

from dataclasses import dataclass
from math import floor

from engine.contract.job import Job
from engine.contract.plan import Compute, Slice
from engine.contract.policy import Scheduling, Traits, traits_of
from engine.contract.records import forward_ahead
from engine.contract.regions import Work
from engine.contract.view import View
from policies.sharing.coserve import beside_windows, due_update, first_with_work, joins
from policies.sharing.coserve_slo import correction
from policies.sharing.time_shared import side_of


@dataclass(frozen=True)
class LlmStation:
    """Finetuning in tasklets of fixed size, as many as the time of decodes allows.

    Of `steps` steps N_p may carry a tasklet beside what they serve (LLMStation, USENIX ATC 2025,
    equation 1):

        N_p <= (SLO_d - N_d l_d0) l_d / ((l_d - l_d0) l_p)

    N_d is `steps`, SLO_d the time that these steps may take together, l_d0 and l_d how long a step
    takes without and with a tasklet, and l_p how long a tasklet takes beside decodes. Here a
    tasklet is in the launch that serves, or follows it on the lane, so it takes as long as its
    step, and l_p is l_d. Windows that may not join are quoted as launches of their own. The steps
    that carry one are spread evenly, by the number of the plan. A step that serves nothing always
    carries one.

    The paper predicts by records of earlier launches, and by regression where it has none. Here
    durations are quoted, and corrected by what launches of each kind took beside their quotes.

    Args:
        serving: scheduling of the requests.
        slo_s: seconds that a step may take in the mean over `steps`.
        tasklet_tokens: tokens of a window forward, or of a window of one layer back.
        steps: over so many the time of decodes is bounded.
        corrects: whether quotes are corrected by measurements.
        fused: whether the memory policy has a window join the launch that serves.

    Raises:
        ValueError: a number is not above 0.
    """

    serving: Scheduling
    slo_s: float = 0.05
    tasklet_tokens: int = 128
    steps: int = 16
    corrects: bool = True
    fused: bool = True

    def __post_init__(self) -> None:
        for name in ("slo_s", "tasklet_tokens", "steps"):
            if not getattr(self, name) > 0:
                raise ValueError(f"LLMStation: {name} is {getattr(self, name)}, must be above 0")

    @property
    def traits(self) -> Traits:
        """What is told of serving, and the bounds of a step with its tasklet."""
        serving = traits_of(self.serving)
        return beside_windows(serving, serving.step_tokens + self.tasklet_tokens)

    def batch(self, view: View) -> tuple[Slice, ...]:
        serves = tuple(self.serving.batch(side_of(view, trains=False)))
        job = first_with_work(view)
        if job is None:
            return serves
        update, tasklet = self._next(job, view)
        if tasklet is None or (serves and not self._carries_one(view, serves, tasklet)):
            return (*serves, *update)
        return (*serves, *update, tasklet)

    def tasklets(self, alone_ns: float, beside_ns: float) -> int:
        """N_p: how many of `steps` steps may carry a tasklet.

        Args:
            alone_ns: how long a step takes that only serves.
            beside_ns: how long it takes with a tasklet.

        Returns:
            A number from 0 to `steps`.
        """
        left_ns = self.steps * (round(self.slo_s * 1e9) - alone_ns)
        more_ns = beside_ns - alone_ns
        if left_ns <= 0:
            return 0
        return self.steps if more_ns <= 0 else min(self.steps, floor(left_ns / more_ns))

    def _carries_one(self, view: View, serves: tuple[Slice, ...], tasklet: Slice) -> bool:
        """Whether this step is one of those that carry a tasklet, by its place in the round."""
        if view.cost is None:
            raise ValueError("LLMStation's planner needs predicted durations; this run has none")
        alone_ns = self._ns(view, *serves)
        if tasklet.work is Work.FORWARD and self.fused and joins(tasklet):
            beside_ns = self._ns(view, *serves, tasklet)
        else:
            beside_ns = alone_ns + self._ns(view, tasklet)
        count, place = self.tasklets(alone_ns, beside_ns), view.issued % self.steps
        return (place + 1) * count // self.steps > place * count // self.steps

    def _ns(self, view: View, *slices: Slice) -> float:
        """The quoted duration of a launch, corrected by how long others of its kind took."""
        assert view.cost is not None
        ratio = correction(view.profile, slices) if self.corrects else 1.0
        return view.cost.op_ns(Compute(slices)) * ratio

    def _next(self, job: Job, view: View) -> tuple[tuple[Slice, ...], Slice | None]:
        """The update that is due, and the next tasklet if its sample is there."""
        training = job.training
        assert training is not None
        update, microbatch = due_update(job, view)
        if microbatch is None or not training.is_released(microbatch):
            return update, None
        total, units = training.spec.tokens_of(microbatch), training.spec.num_units
        _, backward = training.frontier(microbatch)
        ahead, is_behind = forward_ahead(training, microbatch)
        if ahead:
            tokens = min(ahead, self.tasklet_tokens)
            window = Slice(job, tokens, Work.FORWARD, range(units), microbatch, record=is_behind)
            return update, window
        top = max([unit for unit in range(training.first, units - 1) if backward[unit] < total])
        tokens = min(total - backward[top], self.tasklet_tokens)
        return update, Slice(job, tokens, Work.BACKWARD, range(top, top + 1), microbatch)
