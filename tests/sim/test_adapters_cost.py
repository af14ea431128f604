"""What adapters of requests cost: by roofline, by fitted tables, and where neither knows them."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from engine.contract.adapters import AdapterSpec, AdapterVersion
from engine.contract.executor import Launch, Pieces
from engine.contract.job import Job
from engine.contract.plan import Compute, Slice
from engine.contract.regions import PageSize, kv_place
from models.parameters import adapter_bytes
from models.spec import ModelSpec
from sim.cost.adapters import adapter_operators, adapters_in, recorded_in, shape_of_rows
from sim.cost.piecewise import Table
from sim.cost.policy_cost import PolicyCost
from sim.cost.roofline import Roofline
from sim.cost.tables import TableCost
from sim.cost.windows import recorded_window
from sim.devices.device import Device
from sim.fit.fit_tables import fit_observed
from sim.fit.recorded_shapes import Adapted, Launched, launched
from tandem.config.compose import composed
from tandem.wiring.run_spec import run_spec_of
from traces.serving.request import Request
from traces.training.recipe import Recipe

SPEC = ModelSpec("tiny", "llama", 4, 64, 4, 2, 16, 128, 211, 512, dtype="float32")
PAGE = PageSize.of(SPEC, 16)
RECIPE = Recipe(lora_rank=8, lora_targets=("q_proj", "down_proj"))


def device() -> Device:
    return run_spec_of(composed(["limit=1"])).device


def version(number: int, rank: int = 8) -> AdapterVersion:
    recipe = replace(RECIPE, lora_rank=rank)
    return AdapterVersion(AdapterSpec(f"a{number}", recipe, adapter_bytes(SPEC, recipe)), number, 0)


def launch(*rows: tuple[AdapterVersion | None, int]) -> Launch:
    """A launch of prompts, each through a version or none, of so many tokens."""
    jobs = [Job.serving(Request(i, 0, n, 4), 0, v) for i, (v, n) in enumerate(rows)]
    slices = tuple([Slice(job, job.prompt_tokens) for job in jobs])
    reads = tuple(dict.fromkeys([v.place() for v, _ in rows if v is not None]))
    op = Compute(slices, reads, tuple([kv_place(job.job_id) for job in jobs]))
    count, ids = len(jobs), tuple(range(len(jobs)))
    tokens = tuple([n for _, n in rows])
    return Launch(op, (), Pieces(ids, tokens, (0,) * count, (True,) * count, ((),) * count))


def test_rows_count_by_version() -> None:
    one, other = version(0), version(1, rank=4)
    found = adapters_in(launch((one, 5), (None, 9), (other, 2), (one, 1)), SPEC)
    assert [(shape.rows, shape.rank) for shape in found] == [(6, 8), (2, 4)]
    assert found[0].adapted == ((64, 64), (128, 64)) and found[0].layers == 4
    assert adapters_in(launch((None, 9)), SPEC) == ()


def test_operators_move_the_bytes_of_the_adapter_once() -> None:
    shape = shape_of_rows(SPEC, RECIPE, 3)
    products = [op for op in adapter_operators(SPEC, shape) if op.kind == "linear"]
    pairs = [(64, 8), (8, 64), (128, 8), (8, 64)]
    rows_bytes = 4 * 3 * 4 * sum([a + b for a, b in pairs])
    matrices = sum([op.repeats * op.nbytes for op in products]) - rows_bytes
    assert matrices == adapter_bytes(SPEC, RECIPE)
    assert sum([op.repeats * op.flops for op in products]) == 4 * 3 * 2 * sum(
        [a * b for a, b in pairs]
    )


def test_the_roofline_adds_each_version_to_the_price_of_serving() -> None:
    cost, one, other = Roofline(device(), SPEC), version(0), version(1)
    plain = cost.compute_ns(launch((None, 5), (None, 9)))
    same, two = (cost.compute_ns(launch((one, 5), (v, 9))) for v in (one, other))
    added = [cost.through_ns(shape_of_rows(SPEC, RECIPE, n)) for n in (14, 5, 9)]
    assert same == plain + added[0] and two == plain + added[1] + added[2]
    assert plain < same < two


def recording(given: Launch, *recorded: int) -> Launch:
    """The launch with slices of these numbers recorded."""
    assert isinstance(given.op, Compute)
    pairs = enumerate(given.op.slices)
    slices = tuple([piece._replace(record=number in recorded) for number, piece in pairs])
    return Launch(given.op.again_as(slices), (), given.pieces)


def test_a_recorded_slice_is_priced_as_a_window() -> None:
    """Its adapter is a part of the window's price, and it has no labels."""
    cost, own = Roofline(device(), SPEC), version(0)
    given = launch((own, 5), (own, 9))
    found = recording(given, 1)
    assert adapters_in(found, SPEC) == (shape_of_rows(SPEC, RECIPE, 5),)
    (window,) = recorded_in(found, SPEC)
    assert (window.tokens, window.labels, window.layers, window.rank) == (9, 0, 4, 8)
    plain = cost.compute_ns(launch((None, 5), (None, 9)))
    through = cost.through_ns(shape_of_rows(SPEC, RECIPE, 5))
    assert cost.compute_ns(found) == plain + through + cost.extra_ns(window)
    assert cost.compute_ns(found) > cost.compute_ns(given)


def test_a_policy_is_quoted_what_the_launch_will_cost() -> None:
    cost = Roofline(device(), SPEC)
    issued = launch((version(0), 5), (version(1), 9))
    assert isinstance(issued.op, Compute)
    bare = Compute(issued.op.slices, writes=issued.op.writes)
    for op in (issued.op, bare):
        assert PolicyCost(cost, lambda _: 0).op_ns(op) == cost.compute_ns(issued)


def tables(**more: Table) -> TableCost:
    flat = Table(((1, 512),), (0.0, 0.0))
    needed = {
        "linear": Table(((1, 512),), (1_000.0, 52_100.0)),
        "head": flat,
        "first": flat,
        "decode": flat,
        "chunk": Table(((1, 512), (1, 512)), (0.0,) * 4),
        "host": flat,
    }
    return TableCost({**needed, **more}, SPEC, PAGE, "a profile")


def test_an_adapter_that_no_table_knows_is_assumed_or_refused() -> None:
    given, bare = launch((version(0), 5)), tables()
    with pytest.raises(ValueError, match="has no adapters of requests; take profile=null, or cal"):
        bare.compute_ns(given)
    roofline = Roofline(device(), SPEC)
    assumed = replace(bare, assumed=roofline)
    shape = shape_of_rows(SPEC, RECIPE, 5)
    plain = bare.compute_ns(launch((None, 5)))
    assert assumed.compute_ns(given) == plain + roofline.through_ns(shape)
    assert assumed.extrapolated == {f"{shape.table} (not fitted)": 1}
    fitted = tables(**{shape.table: Table(((1, 512),), (1.0, 512.0))})
    assert fitted.compute_ns(given) == plain + 5


def test_a_fit_finds_what_adapters_add() -> None:
    """Durations are 1 us a token, and for each version 20 us and 0.5 us a row."""
    rng, found = random.Random(1), []
    kinds = {0: shape_of_rows(SPEC, RECIPE, 0), 1: shape_of_rows(SPEC, RECIPE, 0)}
    window = recorded_window(SPEC, RECIPE)
    adapted = {job: Adapted(job % 2, kinds[job % 2], window) for job in range(0, 6)}
    for _ in range(400):
        jobs = rng.sample(range(12), rng.randint(1, 6))
        tokens = [rng.choice((1, 1, 4, 16)) for _ in jobs]
        row = {"jobs": jobs, "tokens": tokens, "contexts": [0] * len(jobs), "samples": 0}
        shape = launched(row, adapted)
        added = sum([20_000 + 500 * rows.rows for rows in shape.adapters])
        found.append((shape, 1_000 * sum(tokens) + added))
    cost = fit_observed(found, SPEC, PAGE, "made up")
    for rows in (2, 8, 20):
        ns = cost.through_ns(kinds[0]._replace(rows=rows))
        assert ns == pytest.approx(20_000 + 500 * rows, rel=0.05)
    row = {"step": 3, "jobs": [0, 2], "tokens": [4, 16], "contexts": [0, 8], "samples": 0}
    seen = launched(row, adapted, {(3, 2)})
    assert seen.adapters == (kinds[0]._replace(rows=4),)
    assert seen.recorded == (window._replace(tokens=16, context=8),)
    assert launched(row, adapted, {(4, 2)}).recorded == ()
    assert Launched(((1, 0),), 0) == launched(
        {"jobs": [7], "tokens": [1], "contexts": [0], "samples": 0}, adapted
    )
