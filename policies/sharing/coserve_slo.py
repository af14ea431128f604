"""Co-serving within an SLO: each step finetunes as much as its quoted duration allows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.contract.job import Job
from engine.contract.plan import Compute, Slice
from engine.contract.policy import Scheduling, Traits, traits_of
from engine.contract.regions import Work
from engine.contract.view import Cost, Profile, View
from policies.sharing.coserve import due_update, first_with_work
from policies.sharing.time_shared import side_of
from policies.training.cycle import training_jobs

Fits = Callable[[int], bool]


@dataclass(frozen=True)
class CoServeSlo:
    """FlexLLM's hybrid token scheduler: each step finetunes as much as its time allows.

    A step serves first. Then it takes the longest window forward, or the most layers back, with
    which the quoted duration of the step stays within the SLO less a margin. Where not even one
    layer back fits, it takes the longest window of it. A step that serves nothing is bounded, too,
    so that a request that comes meanwhile waits no longer than that (FlexLLM, arXiv 2402.18789;
    details where the paper has none are ours).

    Quotes are corrected by what the newest launches took beside their quotes, so that a predictor
    that is wrong in the mean keeps the SLO as well.

    Args:
        serving: scheduling of the requests.
        slo_s: seconds that a step may take.
        margin: share of these that is left free.
        idle_s: seconds that a step may take which serves nothing; None: `slo_s`.
        token_budget: the most tokens of a launch, of requests and the window together.
        multiple: windows are multiples of so many tokens, but for the last of a sample.
        corrects: whether quotes are corrected by measurements.

    Raises:
        ValueError: a number is not above 0, or `margin` is not in [0, 1).
    """

    serving: Scheduling
    slo_s: float = 0.05
    margin: float = 0.1
    idle_s: float | None = None
    token_budget: int = 2048
    multiple: int = 16
    corrects: bool = True

    def __post_init__(self) -> None:
        for name in ("slo_s", "idle_s", "token_budget", "multiple"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"co-serving: {name} is {value}, must be above 0")
        if not 0 <= self.margin < 1:
            raise ValueError(f"co-serving: margin is {self.margin}, must be in [0, 1)")

    @property
    def traits(self) -> Traits:
        """The bounds of serving, and of a step with its window."""
        serving = traits_of(self.serving)
        return Traits(
            step_tokens=serving.step_tokens and max(self.token_budget, serving.step_tokens),
            prompt_tokens=serving.prompt_tokens,
            max_jobs=serving.max_jobs,
            service=serving.service,
        )

    def batch(self, view: View) -> tuple[Slice, ...]:
        serves = tuple(self.serving.batch(side_of(view, trains=False)))
        job = first_with_work(training_jobs(view), view.service)
        if job is None:
            return serves
        if view.cost is None:
            raise ValueError(
                "co-serving within an SLO needs predicted durations; this run has none"
            )
        return (*serves, *_Step(self, job, serves, view.cost, view.profile).slices())

    def limit_ns(self, serves: bool) -> float:
        """How long a step may take.

        Args:
            serves: whether it serves requests.

        Returns:
            Nanoseconds.
        """
        if not serves and self.idle_s is not None:
            return self.idle_s * 1e9
        return (1 - self.margin) * self.slo_s * 1e9


class _Step:
    """What one step finetunes of a job, beside the slices that it serves."""

    def __init__(
        self,
        settings: CoServeSlo,
        job: Job,
        serves: tuple[Slice, ...],
        cost: Cost,
        profile: Profile,
    ) -> None:
        self._settings, self._job, self._serves = settings, job, serves
        self._cost, self._profile = cost, profile
        self._limit_ns = settings.limit_ns(bool(serves))

    def slices(self) -> tuple[Slice, ...]:
        """The update that is due, and a window forward or back that there is time for."""
        job, training = self._job, self._job.training
        assert training is not None
        update, microbatch = due_update(job, training)
        if microbatch is None or not training.is_released(microbatch):
            return update
        self._limit_ns -= self._ns(*update) if update else 0
        total, units = training.spec.tokens_of(microbatch), training.spec.num_units
        forward, backward = training.frontier(microbatch)
        if ahead := total - forward[-1]:
            window = Slice(job, ahead, Work.FORWARD, range(units), microbatch)
            tokens = self._forward_tokens(window)
            return (*update, window._replace(tokens=tokens)) if tokens else update
        top = max([u for u in range(training.first, units - 1) if backward[u] < total])
        window = Slice(job, total - backward[top], Work.BACKWARD, range(top, top + 1), microbatch)
        found = self._backward(window, 0 if backward[top] else top - training.first)
        return update if found is None else (*update, found)

    def _forward_tokens(self, window: Slice) -> int:
        """Tokens of the longest window with which the launch that serves stays in time."""
        used = sum([piece.tokens for piece in self._serves])

        def fits(tokens: int) -> bool:
            own = window._replace(tokens=tokens)
            return self._ns(*self._serves, own) <= self._limit_ns

        most = min(window.tokens, self._settings.token_budget - used)
        return self._longest(most, window.tokens, fits)

    def _backward(self, window: Slice, below: int) -> Slice | None:
        """The window back: of its unit and as many below as there is time for, or a part of it."""
        served_ns = self._ns(*self._serves) if self._serves else 0
        left_ns, own_ns = self._limit_ns - served_ns, self._ns(window)
        if own_ns <= left_ns:
            count = min(below, int(left_ns / own_ns) - 1)
            while count and self._ns(self._down(window, count)) > left_ns:
                count -= 1
            return self._down(window, count)

        def fits(tokens: int) -> bool:
            return self._ns(window._replace(tokens=tokens)) <= left_ns

        tokens = self._longest(window.tokens, window.tokens, fits)
        return window._replace(tokens=tokens) if tokens else None

    def _down(self, window: Slice, below: int) -> Slice:
        """A window of its unit and so many units below."""
        assert window.layers is not None, "a backward names its units"
        return window._replace(layers=range(window.layers.start - below, window.layers.stop))

    def _longest(self, most: int, whole: int, fits: Fits) -> int:
        """The longest window of at most so many tokens that fits, by bisection.

        A step that serves nothing takes the shortest one, whether it fits or not.
        """
        if most <= 0:
            return 0
        if most == whole and fits(whole):
            return whole
        multiple = self._settings.multiple
        low, high = 0, most // multiple + 1  # in multiples: `low` fits, `high` does not
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle * multiple) else (low, middle)
        if not low and not self._serves:
            return min(most, multiple)
        return low * multiple

    def _ns(self, *slices: Slice) -> float:
        """The quoted duration of a launch, corrected by how long others of its kind took."""
        quoted_ns, last = self._cost.op_ns(Compute(slices)), slices[-1]
        if not self._settings.corrects:
            return quoted_ns
        work = None if last.job.training is None else last.work
        return quoted_ns * (self._profile.quote_ratio(work) or 1.0)
