"""The grid covers what the arena allows, the holdout is apart, and a profile is complete."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from engine.contract.regions import PageSize, Tier
from engine.loop.state import VirtualClock
from engine.results.schema import STEPS
from models.spec import ModelSpec
from runtime.executors.lockstep import CpuExecutor
from runtime.executors.wall import Link
from runtime.measure.calibrate import profile, repeats
from runtime.measure.shapes import Shape, ShapeLimits, ShapeRows, grid, holdout
from runtime.serving.machine import ServingMachine
from runtime.serving.model import build_model

GPU, HOST = (Tier.GPU, 0), (Tier.HOST, 0)
PAGE = PageSize(16, 65536)
MICRO = ModelSpec("micro", "llama", 1, 32, 2, 1, 16, 64, 101, 160, dtype="float32", norm_eps=1e-5)


@pytest.mark.parametrize("pages", [4, 64, 4096])
@pytest.mark.parametrize("positions", [64, 512, 4096])
def test_the_grid_fits_the_model_and_the_arena(positions: int, pages: int) -> None:
    limits = ShapeLimits(positions, pages, host_pages=pages // 2)
    shapes = grid(limits, PAGE)
    assert len(set(shapes)) == len(shapes) > 5
    for shape in shapes:
        assert shape.pages(PAGE) + sum(m.pages for m in shape.moves) <= pages
        assert sum(m.pages for m in shape.moves) <= limits.host_pages
        assert all(r.tokens + r.context <= positions for r in shape.rows)


def test_a_roomy_machine_gets_every_kind_and_small_batches_at_every_context() -> None:
    shapes = grid(ShapeLimits(4096, 8192, 512), PAGE)
    kinds = {shape.kind for shape in shapes}
    assert kinds == {
        *("decode", "prefill", "later slice", "prompts", "mixed"),
        *("copy", "copies", "copy+decode"),
    }
    small = {(len(s.rows), s.rows[0].context) for s in shapes if s.kind == "decode"}
    assert {(n, c) for n in (1, 2, 3) for c in (16, 512, 4000)} <= small
    directions = {m.to_host for s in shapes if s.kind == "copy" for m in s.moves}
    assert directions == {True, False}


@pytest.mark.parametrize(("pages", "largest"), [(8192, 256), (3098, 256), (300, 128), (40, 16)])
def test_the_grid_has_the_largest_batches_that_the_pages_hold(pages: int, largest: int) -> None:
    shapes = grid(ShapeLimits(4096, pages, 64), PAGE)
    batches = {len(shape.rows) for shape in shapes if shape.kind == "decode"}
    assert max(batches) == largest
    assert {b for b in (96, 128, 192, 256) if b <= largest} <= batches


def test_whole_prompts_are_measured_with_the_head_and_without() -> None:
    prompts = [s.rows[0] for s in grid(ShapeLimits(4096, 8192, 64), PAGE) if s.kind == "prefill"]
    sampled = {rows.tokens for rows in prompts if rows.samples}
    assert sampled == {rows.tokens for rows in prompts if not rows.samples} and len(sampled) > 15
    assert all(rows == ShapeRows(rows.tokens, 0, rows.samples) for rows in prompts)


def test_no_copies_are_planned_without_a_host_tier() -> None:
    assert not any(shape.moves for shape in grid(ShapeLimits(512, 256, 0), PAGE))


def test_held_out_shapes_are_apart_from_the_grid_and_fixed_by_the_seed() -> None:
    limits = ShapeLimits(2048, 2048, 64)
    judged = holdout(limits, PAGE, seed=3)
    assert sum(bool(shape.rows) for shape in judged) == 48
    assert judged == holdout(limits, PAGE, seed=3)
    assert judged != holdout(limits, PAGE, seed=4)
    assert not set(judged) & set(grid(limits, PAGE))
    assert all(limits.admit(shape, PAGE) for shape in judged)
    kinds = {"decode", "mixed", "prefill", "copy", "copies"}
    kinds |= {f"{size} decodes" for size in ("long", "short")} | {"long prompt", "long later slice"}
    assert {shape.kind for shape in judged} == kinds


def test_copies_are_held_out_in_both_directions_and_at_once_between_the_grids_sizes() -> None:
    limits = ShapeLimits(2048, 2048, 64)
    copies = [shape for shape in holdout(limits, PAGE, seed=3) if shape.moves]
    fitted = {move.pages for shape in grid(limits, PAGE) for move in shape.moves}
    assert not fitted & {move.pages for shape in copies for move in shape.moves}
    ways = [tuple(move.to_host for move in shape.moves) for shape in copies]
    assert all(ways.count(way) > 2 for way in ((True,), (False,), (True, False)))


@pytest.mark.slow
def test_a_profile_holds_two_tables_and_says_what_it_measured(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    box, env = (
        ServingMachine(build_model(MICRO), MICRO, PageSize.of(MICRO, 16), {GPU: 60, HOST: 8}, {}),
        VirtualClock(),
    )
    links = {name: Link(500e6, 20_000) for name in ("gpu->host", "host->gpu")}
    executor = CpuExecutor(env, box, links)
    looks: list[int] = []
    folder = profile(
        env, executor, box, tmp_path / "p", held_out=6, facts={"commit": "abc"},
        look=lambda: looks.append(1),
    )  # fmt: skip
    about = json.loads((folder / "profile.json").read_text())
    assert about["commit"] == "abc" and about["model"]["name"] == "micro"
    assert about["threads"] == 1 and set(about["probe_ratios"]) == set(about["probe_s"])
    steps, judged = (pq.read_table(folder / f"{n}.parquet") for n in ("steps", "holdout"))
    assert steps.schema.remove_metadata() == judged.schema.remove_metadata() == STEPS
    limits = ShapeLimits(MICRO.max_positions, 60, 8)
    page = PageSize.of(MICRO, 16)
    for table, shapes in ((steps, grid(limits, page)), (judged, holdout(limits, page, 0, 6))):
        kept = sum(repeats(shape) - 1 for shape in shapes)
        assert len(set(table["step"].to_pylist())) == kept > 0
    everything = (*grid(limits, page), *holdout(limits, page, 0, 6))
    assert len(looks) == sum(map(repeats, everything)), "before every run, as in a replay"
    rows = steps.to_pylist()
    assert all(row["end_ns"] > row["start_ns"] for row in rows)
    copies = [row for row in rows if row["lane"] == "gpu->host"]
    assert copies and all(
        row["end_ns"] - row["start_ns"] == 20_000 + round(row["nbytes"] * 2) for row in copies
    )
    first = {row["step"]: row["host_ns"] for row in reversed(rows)}
    assert all(host_ns > 0 for host_ns in first.values())  # packing is the host's time
    assert not box.packer.transcripts


def test_two_copies_of_one_plan_run_side_by_side(tmp_path: Path) -> None:
    """What a fit takes for contention: both directions are busy at once."""
    from runtime.measure.driver import driving
    from runtime.measure.shapes import Move

    torch.set_num_threads(1)
    box, env = (
        ServingMachine(build_model(MICRO), MICRO, PageSize.of(MICRO, 16), {GPU: 60, HOST: 8}, {}),
        VirtualClock(),
    )
    links = {name: Link(1e6) for name in ("gpu->host", "host->gpu")}
    with driving(env, CpuExecutor(env, box, links), box) as driver:
        run = driver.run(Shape("copies", moves=(Move(2, True), Move(2, False))))
    (_, out), (_, back) = run.done
    assert out.start_ns < back.end_ns and back.start_ns < out.end_ns
