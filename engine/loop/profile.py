"""The profile: durations and moments of training launches so far, for policies to read."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from engine.contract.executor import Launch, Span
from engine.contract.plan import Compute
from engine.contract.regions import Place, Work
from engine.contract.rules import refuse_write
from engine.contract.view import LaunchKey, Moment
from engine.memory.ledger import Beside


def launch_key(op: Compute) -> LaunchKey:
    """The key of a launch in the profile. A whole launch is one unit: fused work has no parts.

    Nearly each launch has other requests beside a window, so its key is that of the window.
    """
    for piece in op.slices[-1:]:
        training = piece.job.training
        if training is not None and training.spec.finetunes:
            return ((piece.work, piece.layers, piece.tokens),)
    if len(op.slices) == 1:  # of a launch that trains, but where it serves as well
        (piece,) = op.slices
        return ((piece.work, piece.layers, piece.tokens),)
    return tuple([(s.work, s.layers, s.tokens) for s in op.slices])


NO_USES: Mapping[Place, Sequence[int]] = MappingProxyType({})


@dataclass(slots=True)
class ProfiledStep:
    """The launches of a step, and which of them touched each place: found when first read."""

    moments: tuple[Moment, ...]
    _uses: Mapping[Place, Sequence[int]] | None = field(default=None, compare=False)

    def uses(self) -> Mapping[Place, Sequence[int]]:
        """Numbers of launches by place, read-only."""
        if self._uses is None:
            found = dict[Place, list[int]]()
            for number, moment in enumerate(self.moments):
                for place in moment.places:
                    found.setdefault(place, []).append(number)
            numbers = {place: tuple(launches) for place, launches in found.items()}
            self._uses = MappingProxyType(numbers)
        return self._uses


QUOTED = 64  # newest launches of a work whose quotes are compared with their durations
FEWEST = 8  # of these, before their ratio is told


class QuotedLaunch:
    """A launch that has ended, and what a policy is quoted for it, once that is asked."""

    __slots__ = ("launch", "ns", "quoted_ns")

    def __init__(self, launch: Launch, ns: int) -> None:
        self.launch, self.ns = launch, ns
        self.quoted_ns: int | None = None


class EngineProfile:
    """Durations at settle, moments at issue; only launches with training work are kept.

    Where a job finetunes, launches that only serve are compared with their quotes, too.
    """

    def __init__(self, quote: Callable[[Launch], int] | None = None) -> None:
        """`quote` prices a launch as policies are quoted; None where they are not."""
        self._quote = quote
        self._newest: dict[Work | None, deque[QuotedLaunch]] = {}
        self._sums: dict[tuple[int, LaunchKey], list[int]] = {}  # total duration, and launches
        self._steps: dict[int, ProfiledStep] = {}  # the last complete step by job
        self._recent: dict[int, list[Moment]] = defaultdict(list)
        self.trains = False  # whether a training job has arrived

    def moments(self, job_id: int) -> Sequence[Moment]:
        """The launches of a training job's last complete step, in issue order."""
        return self._steps[job_id].moments if job_id in self._steps else ()

    def uses(self, job_id: int) -> Mapping[Place, Sequence[int]]:
        """Which of these launches, by number, touched each place."""
        return self._steps[job_id].uses() if job_id in self._steps else NO_USES

    def mean_ns(self, job_id: int, unit: LaunchKey) -> int | None:
        """Mean duration of a launch of one job, None before its first settle."""
        found = self._sums.get((job_id, unit))
        return found[0] // found[1] if found else None

    def quote_ratio(self, work: Work | None) -> float | None:
        """Measured over quoted time of the newest launches of a work, see Profile."""
        newest = self._newest.get(work, ())
        if self._quote is None or len(newest) < FEWEST:
            return None
        for one in newest:
            if one.quoted_ns is None:
                one.quoted_ns = self._quote(one.launch)
        quoted_ns = sum([one.quoted_ns or 0 for one in newest])
        return sum([one.ns for one in newest]) / quoted_ns if quoted_ns else None

    def moment(self, job_id: int) -> int:
        """Launches of a training job's step that have been issued: the next one's number."""
        return len(self._recent.get(job_id, ()))

    def issued(self, op: Compute, job_id: int, beside: Beside) -> None:
        """A launch of a training job was issued."""
        moment = Moment(launch_key(op), (*op.reads, *op.writes), *beside)
        self._recent[job_id].append(moment)

    def completed_step(self, job_id: int) -> None:
        """The launches since the last call were one whole step."""
        self._steps[job_id] = ProfiledStep(tuple(self._recent.pop(job_id, ())))

    def settled(self, span: Span, launch: Launch) -> None:
        """A duration was measured."""
        op, sums = span.op, self._sums
        if not isinstance(op, Compute):
            return
        if self._quote is not None:
            self._compare(op, launch, span.end_ns - span.start_ns)
        trained = [piece.job.job_id for piece in op.slices if piece.job.training is not None]
        for job_id in trained:
            key = (job_id, launch_key(op))
            if (found := sums.get(key)) is None:
                found = sums[key] = [0, 0]
            found[0] += span.end_ns - span.start_ns
            found[1] += 1

    def _compare(self, op: Compute, launch: Launch, ns: int) -> None:
        """Keeps a launch that serves or finetunes, to be compared with its quote."""
        training = op.slices[-1].job.training
        if training is not None and not training.spec.finetunes:
            return
        work = None if training is None else op.slices[-1].work
        newest = self._newest.setdefault(work, deque(maxlen=QUOTED))
        newest.append(QuotedLaunch(launch, ns))


class ShownProfile:
    """A profile as policies see it: its answers, and nothing that could be written to."""

    __slots__ = ("mean_ns", "moment", "moments", "quote_ratio", "uses")
    mean_ns: Callable[[int, LaunchKey], int | None]
    moment: Callable[[int], int]
    moments: Callable[[int], Sequence[Moment]]
    quote_ratio: Callable[[Work | None], float | None]
    uses: Callable[[int], Mapping[Place, Sequence[int]]]

    def __init__(self, profile: EngineProfile) -> None:
        for name in self.__slots__:
            object.__setattr__(self, name, getattr(profile, name))

    def __setattr__(self, name: str, value: object) -> None:
        refuse_write(f"{name} of the profile")
