"""Co-serving within an SLO: each step finetunes as much as its quoted duration allows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Literal

from engine.contract.job import Job
from engine.contract.plan import COMPUTE_LANE, Compute, Slice
from engine.contract.policy import Scheduling, Traits, traits_of
from engine.contract.records import forward_ahead
from engine.contract.regions import Work
from engine.contract.view import Cost, Profile, View
from policies.sharing.coserve import (
    beside_windows,
    due_update,
    first_with_work,
    joins,
    units_back,
)
from policies.sharing.time_shared import side_of

Quote = Callable[[int], float]  # of a window of so many tokens, in ns


@dataclass(frozen=True)
class CoServeSlo:
    """FlexLLM's hybrid token scheduler: each step finetunes as much as its time allows.

    A step serves first. Then it takes the longest window forward, or the most layers back, with
    which the quoted duration of the step stays within the SLO less a margin. Where not even one
    layer back fits, it takes the longest window of it. A step that serves nothing is bounded, too:
    a request that comes meanwhile waits for as many such steps as are in flight (FlexLLM, arXiv
    2402.18789; details where the paper has none are ours).

    Quotes are corrected by what the newest launches took beside their quotes, so that a predictor
    that is wrong in the mean keeps the SLO as well.

    With `kind="token"` no step has a limit of its own: token i of an answer, counted from 0, is due
    `i * slo_s` after the client got the first one, and the first one `ttft_s` after its arrival. A
    step may then last until the first of these moments, over all requests, less the margin; it
    begins when the steps in flight end, by their quotes. A step with a first token lasts `slo_s` at
    most, since the second one follows. A request that is late leaves nothing for finetuning. Where
    no token has a limit, steps have theirs. The host's time is not quoted: the margin covers it.

    Args:
        serving: scheduling of the requests.
        slo_s: seconds that a step may take, or between two tokens of a request.
        margin: share of the time to the limit that is left free.
        idle_s: seconds that a step may take which serves nothing; None: `slo_s` less the margin.
        token_budget: the most tokens of a launch, of requests and the window together.
        multiple: windows are multiples of so many tokens, but for the last of a sample.
        corrects: whether quotes are corrected by measurements.
        fused: whether the memory policy has a window join the launch that serves.
        kind: `iteration`: each step is in time; `token`: each token is, counted from the first one
            of its request.
        ttft_s: with `token`, seconds from arrival to the first token; None: it is never due.

    Raises:
        ValueError: a number is not above 0, `margin` is not in [0, 1), `kind` is unknown, or
            `ttft_s` is given for steps.
    """

    serving: Scheduling
    slo_s: float = 0.05
    margin: float = 0.1
    idle_s: float | None = None
    token_budget: int = 2048
    multiple: int = 16
    corrects: bool = True
    fused: bool = True
    kind: Literal["iteration", "token"] = "iteration"
    ttft_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("slo_s", "idle_s", "token_budget", "multiple", "ttft_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value < inf:
                raise ValueError(f"co-serving: {name} is {value}, must be above 0 and finite")
        if not 0 <= self.margin < 1:
            raise ValueError(f"co-serving: margin is {self.margin}, must be in [0, 1)")
        if self.kind not in ("iteration", "token"):
            raise ValueError(f"co-serving: kind is {self.kind}, must be iteration or token")
        if self.ttft_s is not None and self.kind != "token":
            raise ValueError("co-serving: ttft_s is a limit of tokens: set kind=token, or leave it")

    @property
    def traits(self) -> Traits:
        """What is told of serving, and the bounds of a step with its window."""
        return beside_windows(traits_of(self.serving), self.token_budget)

    def batch(self, view: View) -> tuple[Slice, ...]:
        serves = tuple(self.serving.batch(side_of(view, trains=False)))
        job = first_with_work(view)
        if job is None:
            return serves
        if view.cost is None:
            raise ValueError(
                "co-serving within an SLO needs predicted durations; this run has none"
            )
        limit_ns = self.limit_ns(bool(serves))
        if serves and self.kind == "token":
            left_ns = self._due_ns(view) - view.now_ns - self._in_flight_ns(view, view.cost)
            if any([_begins_answer(piece, view) for piece in serves]):
                # Its second token is due then.
                left_ns = min(left_ns, self.slo_s * 1e9)
            limit_ns = (1 - self.margin) * left_ns if left_ns < inf else limit_ns
        return (*serves, *_Step(self, job, serves, view, view.cost, limit_ns).slices())

    def limit_ns(self, serves: bool) -> float:
        """How long a step may take that no token bounds.

        Args:
            serves: whether it serves requests.

        Returns:
            Nanoseconds.
        """
        if not serves and self.idle_s is not None:
            return self.idle_s * 1e9
        return (1 - self.margin) * self.slo_s * 1e9

    # ---- tokens that are due
    def _due_ns(self, view: View) -> float:
        """When the first token is due that no step has issued yet; inf where none is."""
        jobs = (*view.serving, *view.waiting)
        return min([self._token_due_ns(job, view) for job in jobs], default=inf)

    def _token_due_ns(self, job: Job, view: View) -> float:
        """When the next token of a request is due."""
        if job.training is not None:
            return inf
        if (tokens := job.generated_tokens) <= 0:
            return inf if self.ttft_s is None else job.arrival_ns + self.ttft_s * 1e9
        first_ns = view.first_token_ns(job)
        if first_ns is None:  # in flight: it comes now at the earliest
            first_ns = view.now_ns
        return first_ns + tokens * self.slo_s * 1e9

    def _in_flight_ns(self, view: View, cost: Cost) -> float:
        """How long the launches in flight take, by quotes of what was issued."""
        launches = [op for op in view.in_flight if isinstance(op, Compute)]
        launches = [op for op in launches if op.lane == (view.device, COMPUTE_LANE)]
        quoted_ns = 0.0
        for op in launches:
            ratio = correction(view.profile, op.slices) if self.corrects else 1.0
            quoted_ns += cost.launch_ns(view.launch_of(op)) * ratio
        return quoted_ns


def work_of(slices: tuple[Slice, ...]) -> Work | None:
    """The kind under which a launch is compared with its quote.

    Args:
        slices: of a launch; a window comes last.

    Returns:
        The work of its window; None where it only serves.
    """
    last = slices[-1]
    return None if last.job.training is None else last.work


def correction(profile: Profile, slices: tuple[Slice, ...]) -> float:
    """What a quote is multiplied by: how long the newest launches of its kind took beside theirs.

    Args:
        profile: compares launches with their quotes.
        slices: of the launch.

    Returns:
        A factor; 1 while there is no such launch.
    """
    return profile.quote_ratio(work_of(slices)) or 1.0


def _begins_answer(piece: Slice, view: View) -> bool:
    """Whether a slice of a request yields its first token."""
    job = piece.job
    if job.generated_tokens:
        return False
    return view.found_tokens(job) + piece.tokens == job.remaining_tokens


class _Step:
    """What one step finetunes of a job, beside the slices that it serves."""

    def __init__(
        self,
        settings: CoServeSlo,
        job: Job,
        serves: tuple[Slice, ...],
        view: View,
        cost: Cost,
        limit_ns: float,
    ) -> None:
        self._settings, self._job, self._serves = settings, job, serves
        self._view, self._cost, self._limit_ns = view, cost, limit_ns
        self._ratios: dict[Work | None, float] = {}  # measured over quoted, by work

    def slices(self) -> tuple[Slice, ...]:
        """The update that is due, and a window forward or back that there is time for."""
        job, training = self._job, self._job.training
        assert training is not None
        update, microbatch = due_update(job, self._view)
        if microbatch is None or not training.is_released(microbatch):
            return update
        self._limit_ns -= self._ns(*update) if update else 0
        total, units = training.spec.tokens_of(microbatch), training.spec.num_units
        _, backward = training.frontier(microbatch)
        ahead, is_behind = forward_ahead(training, microbatch)
        if ahead:
            window = Slice(job, ahead, Work.FORWARD, range(units), microbatch, record=is_behind)
            tokens = self._forward_tokens(window)
            return (*update, window._replace(tokens=tokens)) if tokens else update
        back = units_back(training, microbatch, 1)
        top = back.start
        window = Slice(job, total - backward[top], Work.BACKWARD, back, microbatch)
        found = self._backward(window, 0 if backward[top] else top - training.first)
        return update if found is None else (*update, found)

    def _forward_tokens(self, window: Slice) -> int:
        """Tokens of the longest window with which the launch that serves stays in time."""
        used = sum([piece.tokens for piece in self._serves])

        is_fused = self._settings.fused and joins(window)
        beside = self._serves if is_fused else ()
        left_ns = self._limit_ns - (0 if is_fused else self._ns(*self._serves))

        def quote(tokens: int) -> float:
            own = (window._replace(tokens=tokens),) if tokens else ()
            return self._ns(*beside, *own)

        most = min(window.tokens, self._settings.token_budget - used)
        return self._longest(most, window.tokens, quote, left_ns)

    def _backward(self, window: Slice, below: int) -> Slice | None:
        """The window back: of its unit and as many below as there is time for, or a part of it."""
        served_ns = self._ns(*self._serves)
        left_ns, own_ns = self._limit_ns - served_ns, self._ns(window)
        if own_ns <= left_ns:
            count = min(below, int(left_ns / own_ns) - 1) if own_ns else below
            while count and self._ns(self._down(window, count)) > left_ns:
                count -= 1
            while count < below and self._ns(self._down(window, count + 1)) <= left_ns:
                count += 1  # what is below may take less than the top
            return self._down(window, count)

        def quote(tokens: int) -> float:
            if tokens == window.tokens:
                return own_ns
            return self._ns(window._replace(tokens=tokens)) if tokens else 0

        tokens = self._longest(window.tokens, window.tokens, quote, left_ns)
        return window._replace(tokens=tokens) if tokens else None

    def _down(self, window: Slice, below: int) -> Slice:
        """A window of its unit and so many units below."""
        assert window.layers is not None, "a backward names its units"
        return window._replace(layers=range(window.layers.start - below, window.layers.stop))

    def _longest(self, most: int, whole: int, quote: Quote, limit_ns: float) -> int:
        """The longest window of at most so many tokens that is quoted within the limit.

        A quote takes long, and grows by nearly as much with each token: the search looks where the
        line through the nearest quotes meets the limit. A step that serves nothing takes the
        shortest window, whether it fits or not.
        """
        if most <= 0:
            return 0
        multiple = self._settings.multiple
        top = whole if most == whole else most // multiple * multiple
        if top and (top_ns := quote(top)) <= limit_ns:
            return top
        low, high = 0, -(-top // multiple)  # in multiples: `low` fits, `high` does not
        if high > 1:
            below, above = (0.0, quote(0)), (top / multiple, top_ns)
        while high - low > 1:
            share = (limit_ns - below[1]) / (above[1] - below[1]) if above[1] > below[1] else 0.5
            middle = int(below[0] + share * (above[0] - below[0]))
            middle = min(max(middle, low + 1), high - 1)
            ns = quote(middle * multiple)
            if ns <= limit_ns:
                low, below = middle, (middle, ns)
            else:
                high, above = middle, (middle, ns)
        if not low and not self._serves:
            return min(most, multiple)
        return low * multiple

    def _ns(self, *slices: Slice) -> float:
        """The quoted duration of a launch, corrected by how long others of its kind took."""
        if not slices:
            return 0
        quoted_ns, work = self._cost.op_ns(Compute(slices)), work_of(slices)
        if not self._settings.corrects:
            return quoted_ns
        if work not in self._ratios:
            self._ratios[work] = correction(self._view.profile, slices)
        return quoted_ns * self._ratios[work]
