"""Tables fitted to synthetic steps of training give back the costs behind them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from engine.contract.layout import Mode, TrainingLayout
from engine.contract.plan import HOST_LANE
from engine.results.schema import STEPS
from sim.cost.tables import TableCost
from sim.cost.training_launch import (
    AGAIN,
    BACKWARD,
    FORWARD,
    LIGHT,
    UPDATE,
    Trained,
    unit_of,
    update_of,
)
from sim.fit.errors import ALL, errors_of
from sim.fit.fit_tables import RecordedTraining, all_observed, fit_training
from tandem.config.compose import composed
from tandem.wiring.run_spec import run_spec_of
from tests.support.additive import PAGE, US, copy_ns, host_ns
from tests.training.training_jobs import TINY, job_of, layout_of
from traces.serving.request import TrainingJob
from traces.training.recipe import Recipe

GRID = [(1, 64), (2, 64), (8, 64), (1, 128), (4, 128), (1, 256), (4, 256), (2, 512), (1, 1024)]
HELD_OUT = [(3, 64), (2, 96), (1, 192), (6, 96), (1, 700), (3, 300)]
OF_FORWARD = {FORWARD: 1.0, LIGHT: 0.9, AGAIN: 1.05, BACKWARD: 2.2}
OF_LOWEST = 0.8  # of a backward that also computes the gradient of its input


def truth_ns(launch: Trained) -> float:
    """Straight in rows and in pairs; the embedding's gradient adds a constant."""
    if launch.work == UPDATE:
        return 20 * US + launch.update_bytes / (14 if launch.lane == HOST_LANE else 21)
    constant, row_us, pair_us = {
        "embedding": (5, 0.05, 0.0),
        "layer": (50, 3.0, 0.004),
        "head": (30, 2.0, 0.0),
    }[launch.kind]
    pairs = launch.sequences * launch.tokens**2
    us = constant + row_us * launch.rows + pair_us * pairs
    us *= OF_LOWEST if launch.is_lowest else 1
    return US * (
        us * OF_FORWARD[launch.work] + (300 if launch.group == "embedding backward" else 0)
    )


class Steps:
    """Synthetic rows of STEPS of training steps, with noisy durations."""

    def __init__(self, noise: float, seed: int) -> None:
        self.rows: list[dict[str, Any]] = []
        self._rng, self._noise, self._now = np.random.default_rng(seed), noise, 0

    def add(self, ns: float, lane: str, host_ns: float = 0.0, **row: Any) -> None:
        """One launch or copy, a plan of its own."""
        took, host = (self._varied(n) for n in (ns, host_ns))
        base = {"step": len(self.rows), "device": 0, "lane": lane, "issue_ns": self._now}
        base |= {"start_ns": self._now, "end_ns": self._now + took, "host_ns": host, "nbytes": 0}
        base |= {"prefill_tokens": 0, "decode_tokens": 0, "samples": 0, "jobs": [0]}
        self._now += took
        self.rows.append(base | {"tokens": [], "contexts": []} | row)

    def _varied(self, ns: float) -> int:
        return round(ns * float(np.exp(self._rng.normal(0.0, self._noise))))

    def step(self, job: TrainingJob, layout: TrainingLayout) -> None:
        for work, part, lane in tasks(job, layout):
            launch = shape_of(job, layout, work, part, lane)
            recorded = FORWARD if work == LIGHT else work
            tokens = [1 if work == UPDATE else job.microbatch_tokens]
            row = {"work": recorded, "part": part, "tokens": tokens, "contexts": [0]}
            self.add(truth_ns(launch), lane, host_ns(1), **row)
        for nbytes in (1 << 20, 3 << 20):
            for lane in ("gpu->host", "host->gpu"):
                self.add(copy_ns(nbytes, False), lane, host_ns(1), nbytes=nbytes)


def tasks(job: TrainingJob, layout: TrainingLayout) -> Iterator[tuple[str, int, str]]:
    """The tasks of a microbatch, and updates on the host and the device in turn."""
    units = range(job.num_units)
    recomputed = [unit.mode is Mode.RECOMPUTE for unit in layout.units]
    for u in units:
        yield (LIGHT if recomputed[u] or u < layout.first else FORWARD), u, "compute"
    for u in reversed(units[layout.first :]):
        if recomputed[u]:
            yield AGAIN, u, "compute"
        yield BACKWARD, u, "compute"
    for c, chunk in enumerate(layout.chunks):
        if chunk.trains:
            yield UPDATE, c, (HOST_LANE, "compute")[c % 2]


def shape_of(job: TrainingJob, layout: TrainingLayout, work: str, part: int, lane: str) -> Trained:
    if work == UPDATE:
        return update_of(TINY, job, layout, part, lane)
    return unit_of(TINY, job, part, work, lane)


def runs(
    shapes: Sequence[tuple[int, int]],
    noise: float = 0.0,
    seed: int = 0,
    recipe: Recipe | None = None,
    repeats: int = 3,
) -> list[RecordedTraining]:
    """A job for each shape: units recompute in turn, and steps are repeated."""
    found = []
    for number, (sequences, tokens) in enumerate(shapes):
        job = job_of(TINY, sequences, tokens, recipe)
        layout = layout_of(TINY, job, [Mode.RECOMPUTE, Mode.KEEP, Mode.KEEP, Mode.RECOMPUTE])
        steps = Steps(noise, seed + number)
        for _ in range(repeats):
            steps.step(job, layout)
        table = pa.Table.from_pylist(steps.rows, schema=STEPS)
        found.append(RecordedTraining(table, {0: (job, layout)}))
    return found


def held_out(recipe: Recipe | None = None) -> list[Trained]:
    shapes = []
    for sequences, tokens in HELD_OUT:
        job = job_of(TINY, sequences, tokens, recipe)
        layout = layout_of(TINY, job, [Mode.RECOMPUTE, Mode.KEEP])
        shapes += [shape_of(job, layout, *task) for task in tasks(job, layout)]
    return shapes


@cache
def noisy() -> TableCost:
    return fit_training(runs(GRID, noise=0.03), TINY, PAGE, "synthetic steps")


@pytest.mark.parametrize(
    "recipe",
    [Recipe(), Recipe(lora_rank=4), Recipe(frozen_units=2)],
    ids=["full", "lora", "frozen"],
)
def test_costs_without_noise_are_given_back(recipe: Recipe) -> None:
    """They are as straight as the tables, so only the rounding to ns is left."""
    cost = fit_training(runs(GRID, recipe=recipe), TINY, PAGE)
    for launch in held_out(recipe):
        assert cost.trained_ns(launch) == pytest.approx(truth_ns(launch), rel=0.005), launch.group
    assert cost.transfer_ns("gpu->host", 2 << 20) == pytest.approx(
        copy_ns(2 << 20, False), rel=0.005
    )
    assert cost.plan_ns(1) == pytest.approx(host_ns(1), rel=0.005)


def test_noise_averages_out_on_shapes_that_were_not_measured() -> None:
    """Each table rests on 27 steps or more (layers: four times as many) of 3 % noise, for at most
    nine values: 3 % * sqrt(9 / 27) = 1.7 % where few are, less in the sum of a step."""
    found = [(noisy().trained_ns(launch), truth_ns(launch)) for launch in held_out()]
    relative = np.array([predicted / true - 1 for predicted, true in found])
    assert np.abs(relative).mean() < 0.017
    assert abs(sum(p for p, _ in found) / sum(t for _, t in found) - 1) < 0.01


def test_held_out_errors_are_listed_by_kind_and_work() -> None:
    measured = [
        one for run in runs(HELD_OUT, noise=0.03, seed=99) for one in all_observed(run, TINY)
    ]
    frame = errors_of(noisy(), measured)
    works = (FORWARD, LIGHT, AGAIN, BACKWARD)
    kinds = {f"layer {work}" for work in works} | {f"embedding {work}" for work in works}
    kinds = kinds - {"embedding forward"} | {"head forward", "head backward"}
    copies = {"copy gpu->host", "copy host->gpu"}
    assert set(frame.index) == kinds | copies | {"update cpu", "update compute", "host", ALL}
    # The mean absolute error of 3 % noise is 2.4 %; the error of the fit adds to it.
    assert frame.loc[ALL, "mape"] < 0.035
    assert abs(frame.loc[ALL, "total"]) < 0.015
    wrong = errors_of(noisy().scaled(1.2, "wrong on purpose"), measured)
    assert wrong.loc["layer backward", "bias"] == pytest.approx(0.2, abs=0.03)


def test_tables_have_few_values() -> None:
    """Updates and pairs are straight; rows have a node per doubling at most."""
    for name, table in noisy().tables.items():
        ((*nodes,),) = table.axes
        if name.endswith("by pairs") or " update " in name:
            assert len(nodes) == 2
        elif name.endswith("by rows"):
            assert len(nodes) <= 6, "64 to 1,024"


def test_unmeasured_work_is_priced_by_similar_work_or_refused() -> None:
    """All forwards compute alike; a backward of other parts, or another dtype, does not."""
    keeping = [replace_modes(run) for run in runs(GRID)]
    cost = fit_training(keeping, TINY, PAGE, "keeping steps")
    job = job_of(TINY, 2, 128)
    forward, light, again = (unit_of(TINY, job, 1, work) for work in (FORWARD, LIGHT, AGAIN))
    assert cost.trained_ns(forward) == cost.trained_ns(light) == cost.trained_ns(again)
    frozen = unit_of(TINY, job_of(TINY, 2, 128, Recipe(frozen_units=3)), 2, LIGHT)
    assert cost.trained_ns(frozen) == cost.trained_ns(light)
    adapters = unit_of(TINY, job_of(TINY, 2, 128, Recipe(lora_rank=4)), 1, BACKWARD)
    with pytest.raises(ValueError, match=r"keeping steps has no layer backward in float32 \(adapt"):
        cost.trained_ns(adapters)
    narrow = unit_of(TINY, job_of(TINY, 2, 128, Recipe(dtype="bfloat16")), 1, FORWARD)
    with pytest.raises(ValueError, match="has no layer forward in bfloat16"):
        cost.trained_ns(narrow)


def test_the_lowest_adapters_have_a_table_of_their_own() -> None:
    """The input of the lowest layer needs no gradient: the mean over layers is too long for it, and
    too short for each layer above."""
    cost = fit_training(runs(GRID, recipe=Recipe(lora_rank=4)), TINY, PAGE, "adapters")
    job = job_of(TINY, 2, 128, Recipe(lora_rank=4))
    lowest, above = (unit_of(TINY, job, u, BACKWARD) for u in (1, 2))
    assert lowest.is_lowest and not above.is_lowest
    assert cost.trained_ns(lowest) == pytest.approx(OF_LOWEST * cost.trained_ns(above), rel=1e-3)
    tables = {name: table for name, table in cost.tables.items() if "lowest" not in name}
    assert TableCost(tables, TINY, PAGE, "older").trained_ns(lowest) == cost.trained_ns(above)


def replace_modes(run: RecordedTraining) -> RecordedTraining:
    """The run's job with all activations kept: it has forwards and no recomputes."""
    job, _ = run.jobs[0]
    kept = layout_of(TINY, job)
    steps = Steps(0.0, 0)
    steps.step(job, kept)
    return RecordedTraining(pa.Table.from_pylist(steps.rows, schema=STEPS), {0: (job, kept)})


def test_a_profile_of_training_alone_is_stored_and_refuses_serving(tmp_path: Path) -> None:
    noisy().save(tmp_path / "cost.json")
    again = TableCost.load(tmp_path / "cost.json")
    assert [again.trained_ns(x) for x in held_out()] == [noisy().trained_ns(x) for x in held_out()]
    with pytest.raises(ValueError, match="synthetic steps was calibrated with training alone"):
        again.shape_ns([1], [10], 1)
    deeper = replace(TINY, name="deep", num_layers=9)
    assert again.as_deep_as(deeper).model == deeper, "its tables are of single units"


def test_a_profile_of_training_alone_is_refused_for_a_trace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cost = noisy()
    monkeypatch.setattr("tandem.wiring.cost.read_cost", lambda *_: cost)
    with pytest.raises(ValueError, match=r"profile=mine was calibrated with training alone"):
        run_spec_of(composed(["profile=mine", "backend=sim", "limit=2"]))
    run_spec_of(composed(["profile=mine", "trace=none", "training=random", "policy=train_lru"]))


@pytest.mark.slow
def test_serving_and_training_are_fitted_side_by_side() -> None:
    from tests.support.additive import noisy_log, unseen

    serving = noisy_log().table()
    cost = fit_training([RecordedTraining(serving, {}), *runs(GRID, noise=0.03)], TINY, PAGE)
    for relative in unseen(cost).values():
        assert abs(relative.mean()) < 0.02
    for launch in held_out():
        assert cost.trained_ns(launch) == noisy().trained_ns(launch)


def test_a_profile_without_training_refuses_training() -> None:
    from tests.support.additive import fitted

    with pytest.raises(ValueError, match="has no layer forward in float32"):
        fitted().trained_ns(unit_of(TINY, job_of(TINY), 1, FORWARD))
