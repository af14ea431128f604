"""Recorded steps as shapes with durations, to which cost tables are fitted."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import takewhile
from statistics import median
from types import MappingProxyType
from typing import Any, NamedTuple

from engine.contract.plan import COMPUTE_LANE
from sim.cost.adapters import AdapterRows
from sim.cost.training_launch import Trained
from sim.cost.windows import WindowShape

TRAINING_WORKS = ("forward", "again", "backward", "update", "mixed")  # in STEPS
DECODE_ONLY, PREFILL_ONLY, WITH_PAST, MIXED, HOST = (
    "decode only",
    "prefill only",
    "prefill with past",
    "mixed",
    "host",
)


class Launched(NamedTuple):
    """The shape of a compute launch: slices as sorted (tokens, context), rows of the head.

    `adapters` has the rows of each version of an adapter, sorted, but those of slices that are
    recorded: these are in `recorded`, sorted.
    """

    slices: tuple[tuple[int, int], ...]
    samples: int
    adapters: tuple[AdapterRows, ...] = ()
    recorded: tuple[WindowShape, ...] = ()

    @property
    def group(self) -> str:
        """The class under which errors are reported."""
        decodes = sum(1 for n, context in self.slices if n == 1 and context)
        if decodes == len(self.slices):
            return DECODE_ONLY
        if decodes:
            return MIXED
        return WITH_PAST if any(context for _, context in self.slices) else PREFILL_ONLY


class Windowed(NamedTuple):
    """The shape of a launch with a window of a sample; served slices of a window back are none."""

    launched: Launched
    window: WindowShape

    @property
    def group(self) -> str:
        """The class under which errors are reported; a window beside requests is one of its own."""
        beside = len(self.launched.slices) > 1
        return f"{self.window.group} beside requests" if beside else self.window.group


class Copied(NamedTuple):
    """The shape of a copy."""

    direction: str
    nbytes: int
    contended: bool

    @property
    def group(self) -> str:
        return f"copy {self.direction}" + (" contended" if self.contended else "")


class Planned(NamedTuple):
    """The host's part of a plan: its slices and copies, and the slices of several tokens."""

    items: int
    prompts: int = 0

    @property
    def group(self) -> str:
        return HOST


Shape = Launched | Windowed | Copied | Planned | Trained
Observed = tuple[Shape, int]  # with its duration in ns


@dataclass(frozen=True, slots=True)
class Point:
    """All repeats of a shape: their median and how many there were."""

    shape: Shape
    ns: float
    repeats: int


class Adapted(NamedTuple):
    """The adapter of a request: which version of which, and the shapes of a row through it.

    `recorded` is that of a token which is recorded.
    """

    version: Hashable
    row: AdapterRows
    recorded: WindowShape


NO_ADAPTERS: Mapping[int, Adapted] = MappingProxyType({})
NONE_RECORDED: Set[tuple[int, int]] = frozenset()  # steps, and requests of which they keep a slice


def launched(
    row: Mapping[str, Any],
    adapted: Mapping[int, Adapted] = NO_ADAPTERS,
    recorded: Set[tuple[int, int]] = NONE_RECORDED,
) -> Launched:
    """The shape of a row of STEPS that serves; `adapted` has requests with adapters by number."""
    pairs = zip(map(int, row["tokens"]), map(int, row["contexts"]), strict=True)
    shape = Launched(tuple(sorted(pairs)), int(row["samples"]))
    if not adapted:
        return shape
    rows, kinds = defaultdict[Hashable, int](int), dict[Hashable, AdapterRows]()
    windows, step = list[WindowShape](), int(row["step"]) if recorded else 0
    for job_id, tokens, context in zip(row["jobs"], row["tokens"], row["contexts"], strict=True):
        own = adapted.get(int(job_id))
        if own is not None and (step, int(job_id)) in recorded:
            windows.append(own.recorded._replace(tokens=int(tokens), context=int(context)))
        elif own is not None:
            rows[own.version] += int(tokens)
            kinds[own.version] = own.row
    found = [kinds[version]._replace(rows=count) for version, count in rows.items()]
    return shape._replace(adapters=tuple(sorted(found)), recorded=tuple(sorted(windows)))


def observed(
    steps: Any,
    adapted: Mapping[int, Adapted] = NO_ADAPTERS,
    recorded: Set[tuple[int, int]] = NONE_RECORDED,
) -> list[Observed]:
    """Every duration in a STEPS table (Arrow or pandas): launches, copies, host parts of plans.

    Training launches are left out: sim.fit.fit_tables reads them with their jobs. Host parts count
    if any is above zero: a step table of another engine may have none. `adapted` has the requests
    that run through adapters, by number, and `recorded` the steps that keep a slice of a request.
    """
    rows = rows_of(steps)
    found: list[Observed] = []
    plans: dict[tuple[int, int], list[int]] = defaultdict(lambda: [0, 0, 0])
    for row in rows:
        is_training = trains(row)
        if row["lane"] == COMPUTE_LANE and not is_training:
            shape = launched(row, adapted, recorded)
            found.append((shape, int(row["end_ns"] - row["start_ns"])))
        plan = plans[int(row["device"]), int(row["step"])]
        tokens = () if row["tokens"] is None else row["tokens"]
        plan[0] += len(tokens) or 1
        plan[1] += _prompts(row) if row.get("work") == MIXED or not is_training else 0
        plan[2] += int(row["host_ns"])
    found += _copied([row for row in rows if "->" in row["lane"]])
    if any(host_ns for *_, host_ns in plans.values()):
        found += [(Planned(items, prompts), host_ns) for items, prompts, host_ns in plans.values()]
    return found


def _prompts(row: Mapping[str, Any]) -> int:
    """Served slices of several tokens; a window, which is none, comes last in its launch."""
    tokens = () if row["tokens"] is None else list(row["tokens"])
    served = tokens[:-1] if row.get("work") == MIXED else tokens
    return sum(n > 1 for n in served)


def rows_of(steps: Any) -> list[dict[str, Any]]:
    """The rows of a table, Arrow or pandas."""
    found: list[dict[str, Any]]
    found = steps.to_pylist() if hasattr(steps, "to_pylist") else steps.to_dict("records")
    return found


def trains(row: Mapping[str, Any]) -> bool:
    """Whether a row of STEPS is a training launch; a table without the column has none."""
    return row.get("work") in TRAINING_WORKS


def points(found: Iterable[Observed]) -> list[Point]:
    """One point per distinct shape, in order of appearance: the median ignores single spikes."""
    times: dict[Shape, list[int]] = defaultdict(list)
    for shape, ns in found:
        times[shape].append(ns)
    return [Point(shape, float(median(ns)), len(ns)) for shape, ns in times.items()]


def _copied(rows: Sequence[dict[str, Any]]) -> list[Observed]:
    """Copies, contended where the other direction ran for at least half of their time."""
    runs: dict[tuple[int, str], list[tuple[int, int]]] = defaultdict(list)
    for row in rows:
        runs[row["device"], row["lane"]].append((int(row["start_ns"]), int(row["end_ns"])))
    for spans in runs.values():
        spans.sort()  # a lane runs one copy at a time, so ends rise too
    found: list[Observed] = []
    for row in rows:
        start, end = int(row["start_ns"]), int(row["end_ns"])
        opposite = "->".join(reversed(row["lane"].split("->")))
        is_link = opposite != row["lane"]
        shared = _shared_ns(runs[row["device"], opposite], start, end) if is_link else 0
        shape = Copied(row["lane"], int(row["nbytes"]), 2 * shared >= end - start > 0)
        found.append((shape, end - start))
    return found


def _shared_ns(spans: Sequence[tuple[int, int]], start: int, end: int) -> int:
    first = bisect_right(spans, start, key=lambda span: span[1])
    within = takewhile(lambda span: span[0] < end, spans[first:])
    return sum(min(end, high) - max(start, low) for low, high in within)
