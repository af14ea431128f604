"""Fits cost tables to recorded steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from engine.contract.layout import Mode, TrainingLayout
from engine.contract.plan import COMPUTE_LANES
from engine.contract.regions import PageSize, Work
from engine.results.plan_log import LoggedSlice
from models.spec import ModelSpec
from sim.cost.adapters import adapter_terms
from sim.cost.piecewise import Nodes, Table
from sim.cost.tables import (
    CONTENDED,
    DECODE,
    FIRST,
    HEAD,
    HOST,
    LINEAR,
    PREFILL_SLICE,
    PROMPTS,
    TableCost,
)
from sim.cost.training_launch import FORWARD, LIGHT, UPDATE, Trained, unit_of, update_of
from sim.cost.training_operators import Terms, is_of_training, is_straight, training_terms
from sim.cost.windows import WindowPart, back_terms, extra_terms, shape_of
from sim.fit.recorded_shapes import (
    NO_ADAPTERS,
    Adapted,
    Copied,
    Launched,
    Observed,
    Planned,
    Point,
    Shape,
    Windowed,
    launched,
    observed,
    points,
    rows_of,
    trains,
)
from sim.fit.solve import Observation, solve
from traces.serving.request import TrainingJob

MIXED = "mixed"


class RecordedTraining(NamedTuple):
    """The STEPS of a run (Arrow or pandas), and its training jobs with their layouts.

    Where jobs finetune, `launches` has the slices of each launch of a step, as plans name them.
    `adapted` has the requests that run through adapters, by number.
    """

    steps: Any
    jobs: Mapping[int, tuple[TrainingJob, TrainingLayout]]
    launches: Mapping[int, Sequence[Sequence[LoggedSlice]]] = MappingProxyType({})
    adapted: Mapping[int, Adapted] = NO_ADAPTERS

    @property
    def recorded(self) -> set[tuple[int, int]]:
        """The steps that keep a slice of a request, with the request."""
        slices = [(n, s) for n, own in self.launches.items() for launch in own for s in launch]
        return {(n, s.job_id) for n, s in slices if s.record and s.job_id not in self.jobs}


def fit_training(
    runs: Iterable[RecordedTraining], model: ModelSpec, page: PageSize, source: str = "a profile"
) -> TableCost:
    """Fits tables to recorded runs of training: training, copies, the host, and serving if any.

    Args:
        runs: recorded runs.
        model: the model that was trained.
        page: the KV page of the profile.
        source: name of the profile, for results.

    Returns:
        The cost.

    Raises:
        ValueError: the runs hold no launches.
    """
    found = [one for run in runs for one in all_observed(run, model)]
    return fit_observed(found, model, page, source)


def all_observed(run: RecordedTraining, model: ModelSpec) -> list[Observed]:
    """Every duration of a run, launches that train among them."""
    return [*observed(run.steps, run.adapted, run.recorded), *trained_observed(run, model)]


def trained_observed(run: RecordedTraining, model: ModelSpec) -> list[Observed]:
    """Launches that train and do nothing else, one unit or chunk each, with their durations.

    Windows of finetuning jobs are among them, with what is served beside them.
    """
    if any([job.finetunes for job, _ in run.jobs.values()]):
        return _windows_observed(run, model)
    rows = [row for row in rows_of(run.steps) if trains(row) and row["work"] != MIXED]
    return [(_shape(row, run, model), int(row["end_ns"] - row["start_ns"])) for row in rows]


def _shape(row: Mapping[str, Any], run: RecordedTraining, model: ModelSpec) -> Trained:
    (job_id,), part, lane = row["jobs"], int(row["part"]), str(row["lane"])
    job, layout = run.jobs[int(job_id)]
    work = str(row["work"])
    if work == UPDATE:
        return update_of(model, job, layout, part, lane)
    return unit_of(model, job, part, _kept(work, part, layout), lane)


def _windows_observed(run: RecordedTraining, model: ModelSpec) -> list[Observed]:
    """Launches with a window or an update of a finetuning job, with their durations."""
    by_step: dict[int, list[dict[str, Any]]] = {}
    for row in rows_of(run.steps):
        if row["lane"] in COMPUTE_LANES:
            by_step.setdefault(int(row["step"]), []).append(row)
    found, recorded = list[Observed](), run.recorded
    for step, rows in by_step.items():
        rows.sort(key=lambda row: int(row["start_ns"]))  # launches run in their order
        for row, slices in zip(rows, run.launches[step], strict=True):
            own = [piece for piece in slices if piece.job_id in run.jobs]
            if own:
                shape = _windowed(row, own[-1], slices, run, model, recorded)
                found.append((shape, int(row["end_ns"] - row["start_ns"])))
    return found


def _windowed(
    row: Mapping[str, Any],
    piece: LoggedSlice,
    slices: Sequence[LoggedSlice],
    run: RecordedTraining,
    model: ModelSpec,
    recorded: Set[tuple[int, int]],
) -> Shape:
    job, layout = run.jobs[piece.job_id]
    if piece.work is Work.UPDATE:
        chunks = [update_of(model, job, layout, c, str(row["lane"])) for c in piece.layers or ()]
        return chunks[0]._replace(elements=sum([chunk.elements for chunk in chunks]))
    pairs = [*zip(map(int, row["tokens"]), map(int, row["contexts"]), strict=True)]
    context = pairs[slices.index(piece)][1]
    assert piece.layers is not None, "a window names its units"
    part = WindowPart(piece.work, piece.layers, piece.microbatch, piece.tokens, context)
    window = shape_of(part, job, layout, model)
    return Windowed(launched(row, run.adapted, recorded), window)


def _kept(work: str, unit: int, layout: TrainingLayout) -> str:
    """A forward that keeps nothing is light: its unit comes again, or nothing below it trains."""
    recomputes = layout.units[unit].mode is Mode.RECOMPUTE
    return LIGHT if work == FORWARD and (recomputes or unit < layout.first) else work


STEPS_PER_DOUBLING = {
    LINEAR: 4,
    HEAD: 2,
    FIRST: 4,
    DECODE: 2,
    PREFILL_SLICE: 1,
    HOST: 2,
    PROMPTS: 1,
}
MOST_REPEATS = 16  # more repeats of a shape add no weight: its bias stays
# The weight of a launch measured apart from replays. It may be a tenth faster there, a bias that
# repeats do not mend, where launches of a replay scatter by 3 to 4 % around what they take.
APART = 0.3
# Copies of nearly one size tell no slope: their noise of a few percent would be extrapolated many
# times over. Below this ratio of largest to smallest, the line begins at the latency of a copy,
# which is nothing beside the milliseconds of a chunk.
SPAN, LATENCY_NS = 4, 1000.0
STALL = 2.0  # a duration of more than so many times the expected is a stall, not scatter


def fit(rows: Any, model: ModelSpec, page: PageSize, source: str = "a profile") -> TableCost:
    """Fits tables to the steps of a calibration.

    A grid of shapes and a replay of another trace on the same engine can be given together: all
    node values are unknowns of one least squares on whole launches.

    Args:
        rows: STEPS rows (Arrow or pandas).
        model: the model that was calibrated.
        page: the KV page of the profile.
        source: name of the profile, for results.

    Returns:
        The cost.

    Raises:
        ValueError: the rows hold no launches.
    """
    return fit_observed(observed(rows), model, page, source)


def fit_observed(
    found: Sequence[Observed],
    model: ModelSpec,
    page: PageSize,
    source: str,
    apart: Sequence[Observed] = (),
) -> TableCost:
    """Fits tables to shapes with durations; those seen `apart` from a replay weigh less."""
    groups: dict[str, list[Observation]] = {}
    for observations, weight in ((found, 1.0), (apart, APART)):
        for point in points(observations):
            if point.ns > 0:
                groups.setdefault(_system(point.shape), []).append(_sample(point, weight))
    if LINEAR not in groups and not any(map(is_of_training, groups)):
        raise ValueError(f"{source} holds no compute launches to fit; calibrate again")
    tables: dict[str, Table] = {}
    for system, samples in groups.items():
        samples = anchored(samples)
        solved = solve(_grids(samples), samples)
        tables |= _levelled(solved, [o for o in found if _system(o[0]) == system])
    tables.setdefault(HOST, Table(((0,),), (0.0,)))
    return TableCost(_complete(tables) if LINEAR in tables else tables, model, page, source)


def _levelled(tables: dict[str, Table], found: Sequence[Observed]) -> dict[str, Table]:
    """Multiplies tables by one factor, so that their predictions add up to the measured sum.

    Times scatter upwards, so medians of repeats and trusted errors lie below the mean (by 4 % for
    the host's part of eight replays among busy neighbours). The time of a replay is a sum of means.
    """
    expected_ns = {shape: _expected_ns(tables, shape) for shape, _ in found}
    kept = [(expected_ns[shape], ns) for shape, ns in found if ns <= STALL * expected_ns[shape]]
    total_ns = sum(expected for expected, _ in kept)
    factor = sum(ns for _, ns in kept) / total_ns if total_ns else 1.0
    return {
        name: Table(table.axes, tuple(factor * value for value in table.values))
        for name, table in tables.items()
    }


def _expected_ns(tables: Mapping[str, Table], shape: Shape) -> float:
    return sum(tables[name].value(point) for name, point in terms(shape))


def _system(shape: Shape) -> str:
    """Launches share their unknowns, windows back theirs; copies in a direction stand alone."""
    if isinstance(shape, Windowed) and shape.window.work == Work.BACKWARD:
        return f"window back {shape.window.trains}"
    if isinstance(shape, Windowed | Launched):
        return LINEAR
    return terms(shape)[0][0]


def _sample(point: Point, weight: float) -> Observation:
    return Observation(
        terms(point.shape), point.ns, weight * min(point.repeats, MOST_REPEATS) ** 0.5
    )


def terms(shape: Shape) -> Terms:
    """The table entries that TableCost adds up to a shape's duration."""
    if isinstance(shape, Planned):
        admitted: Terms = [(PROMPTS, (shape.prompts,))] if shape.prompts else []
        return [(HOST, (shape.items,)), *admitted]
    if isinstance(shape, Trained):
        return training_terms(shape)
    if isinstance(shape, Windowed):
        if shape.window.work == Work.BACKWARD:
            return back_terms(shape.window)
        forward = shape.launched._replace(samples=shape.launched.samples + shape.window.labels)
        return [*terms(forward), *extra_terms(shape.window)]
    if isinstance(shape, Copied):
        return [(shape.direction + (CONTENDED if shape.contended else ""), (shape.nbytes,))]
    found: Terms = [(LINEAR, (sum(n for n, _ in shape.slices),))]
    if shape.samples:
        found.append((HEAD, (shape.samples,)))
    for n, context in shape.slices:
        if not context:
            found.append((FIRST, (n,)))
        else:
            found.append((DECODE, (context,)) if n == 1 else (PREFILL_SLICE, (n, context)))
    for rows in shape.adapters:
        found += adapter_terms(rows)
    for window in shape.recorded:
        found += extra_terms(window)
    return found


def anchored(samples: Sequence[Observation]) -> list[Observation]:
    """The samples, and an empty copy in each direction whose copies have nearly one size."""
    sizes: dict[str, set[int]] = {}
    for sample in samples:
        for name, (nbytes, *_) in sample.terms:
            if "->" in name:
                sizes.setdefault(name, set()).add(nbytes)
    near = [name for name, found in sizes.items() if max(found) < SPAN * min(found)]
    return [*samples, *[Observation([(name, (0,))], LATENCY_NS) for name in near]]


def _grids(samples: Iterable[Observation]) -> dict[str, tuple[Nodes, ...]]:
    """Per table and axis the nodes that the data can carry."""
    seen: dict[str, set[tuple[int, ...]]] = {}
    for sample in samples:
        for name, point in sample.terms:
            seen.setdefault(name, set()).add(point)
    return {
        name: tuple(_axis(name, set(values)) for values in zip(*at, strict=True))
        for name, at in seen.items()
    }


def _axis(name: str, values: set[int]) -> Nodes:
    if is_straight(name) or ("->" in name and 0 in values):
        return (0, max(values))
    return _nodes(values, STEPS_PER_DOUBLING.get(name, 1))


def _nodes(values: set[int], steps: int) -> Nodes:
    """Nodes on data: the ends, and about so many per doubling where data lies near."""
    ordered = np.array(sorted(values))
    ladder = 2.0 ** np.arange(0, np.log2(max(ordered[-1], 1)) + 1 / steps, 1 / steps)
    nearest = ordered[np.abs(ordered[None, :] - np.round(ladder)[:, None]).argmin(axis=1)]
    near = np.abs(np.log2(np.maximum(nearest, 1) / ladder)) <= 0.5 / steps
    ends = (int(ordered[0]), int(ordered[-1]))
    return tuple(sorted({*map(int, nearest[near]), *ends}))


def _complete(tables: dict[str, Table]) -> dict[str, Table]:
    """Adds tables for kinds that no launch showed: each answers with the nearest kind seen."""
    zero = Table(((1,),), (0.0,))
    first = tables.setdefault(FIRST, zero)
    tables.setdefault(HEAD, zero)
    tables.setdefault(DECODE, Table(((1,),), (first.values[0],)))
    if PREFILL_SLICE not in tables:  # n tokens behind a context cost about as one slice of both
        sizes = (1, *(n for n in first.axes[0] if n > 1))
        grid = [first.value((n + context,)) for n in sizes for context in (0, *sizes)]
        tables[PREFILL_SLICE] = Table((sizes, (0, *sizes)), tuple(grid))
    return tables
