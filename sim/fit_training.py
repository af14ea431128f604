"""Recorded steps of training as shapes with durations: what its cost tables are fitted to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from engine.model import ModelSpec
from engine.plan import PageSize
from engine.training_layout import Mode, TrainingLayout
from sim.fit import fit_observed
from sim.shapes import Observed, observed, rows_of, trains
from sim.tables import TableCost
from sim.trained import FORWARD, LIGHT, UPDATE, Trained, unit_of, update_of
from traces.request import TrainingJob

MIXED = "mixed"


class Recorded(NamedTuple):
    """The STEPS of a run (Arrow or pandas), and the jobs that it trained, as they were laid out."""

    steps: Any
    jobs: Mapping[int, tuple[TrainingJob, TrainingLayout]]


def fit_training(
    runs: Iterable[Recorded], model: ModelSpec, page: PageSize, source: str = "a profile"
) -> TableCost:
    """Tables of all that these runs show: training, copies, the host, and serving where there is
    some. ValueError without launches."""
    found = [one for run in runs for one in all_observed(run, model)]
    return fit_observed(found, model, page, source)


def all_observed(run: Recorded, model: ModelSpec) -> list[Observed]:
    """Every duration of a run, launches that train among them."""
    return [*observed(run.steps), *trained_observed(run, model)]


def trained_observed(run: Recorded, model: ModelSpec) -> list[Observed]:
    """Launches that train and do nothing else, one unit or chunk each, with their durations."""
    rows = [row for row in rows_of(run.steps) if trains(row) and row["work"] != MIXED]
    return [(_shape(row, run, model), int(row["end_ns"] - row["start_ns"])) for row in rows]


def _shape(row: Mapping[str, Any], run: Recorded, model: ModelSpec) -> Trained:
    (job_id,), part, lane = row["jobs"], int(row["part"]), str(row["lane"])
    job, layout = run.jobs[int(job_id)]
    work = str(row["work"])
    if work == UPDATE:
        return update_of(model, job, layout, part, lane)
    return unit_of(model, job, part, _kept(work, part, layout), lane)


def _kept(work: str, unit: int, layout: TrainingLayout) -> str:
    """A forward that keeps nothing is light: its unit comes again, or nothing below it trains."""
    recomputes = layout.units[unit].mode is Mode.RECOMPUTE
    return LIGHT if work == FORWARD and (recomputes or unit < layout.first) else work
