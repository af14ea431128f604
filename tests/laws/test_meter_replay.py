"""Law 14: at every settle of a real replay the meter's figure is the ledger's, to the byte."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.contract.policy import Policy
from engine.contract.regions import PageSize
from engine.loop.engine import Engine
from engine.loop.state import VirtualClock
from engine.results.recorder import Recorder
from policies.composed import Composed
from runtime.executors.clock import WallClock
from runtime.executors.lockstep import CpuExecutor
from runtime.executors.wall import WallExecutor
from runtime.measure.meter import CpuMeter, page_slack_bytes
from runtime.measure.tracker import Workspace, storage_bytes
from runtime.serving.machine import GPU, ServingMachine
from tests.support.hand_made import HOST, TINY, own_model, shared_model
from tests.support.serving import MEMORY, SCHEDULING, short_requests
from tests.support.strategies import SEEDS, cases
from traces.serving.request import Request


def toy_requests(seed: int) -> list[Request]:
    return short_requests(14, TINY.vocab_size, seed, max_output=24)


def machine(page_tokens: int, gpu_pages: int, seed: int = 0, model: Any = None) -> ServingMachine:
    torch.set_num_threads(1)
    requests = toy_requests(seed)
    prompts = {r.request_id: r.prompt_ids or () for r in requests}
    pages = {GPU: gpu_pages, HOST: 4 * gpu_pages}
    return ServingMachine(
        model or shared_model(TINY), TINY, PageSize.of(TINY, page_tokens), pages, prompts
    )


@contextmanager
def world(clock: str, box: ServingMachine, every: int) -> Iterator[tuple[Any, Any]]:
    workspace = Workspace(box, every)
    if clock == "wall":
        env = WallClock()
        with WallExecutor(env, box, workspace=workspace) as executor:
            yield env, executor
    else:
        env = VirtualClock()
        yield env, CpuExecutor(env, box, workspace=workspace)


def replay(
    box: ServingMachine, memory: str, depth: int = 1, clock: str = "service", every: int = 0
) -> Recorder:
    policy = Composed(SCHEDULING["chunked_prefill"], MEMORY[memory])
    return replay_with(policy, box, depth, clock, every)


def replay_with(
    policy: Policy,
    box: ServingMachine,
    depth: int = 1,
    clock: str = "service",
    every: int = 0,
    seed: int = 0,
) -> Recorder:
    page = box.arenas[GPU].page
    weights = {GPU: box.decoder.model.parameters()}
    meter = CpuMeter(weights, {pool: arena.pages for pool, arena in box.arenas.items()})
    capacity = {pool: arena.num_pages * page.nbytes for pool, arena in box.arenas.items()}
    recorder = Recorder(meter)
    with world(clock, box, every) as (env, executor):
        engine = Engine(env, policy, executor, capacity, page, depth=depth, recorder=recorder)
        engine.replay(toy_requests(seed))
    return recorder


def excess(recorder: Recorder) -> pd.DataFrame:
    """Per settle and pool: what the meter saw above weights and the ledger's KV bytes."""
    rows = recorder.tables()["memory"].to_pandas()
    rows = rows[rows["cause"] == "settle"]
    weights = rows["tier"].map({"gpu": TINY.weight_bytes, "host": 0})
    rows["excess"] = rows["measured_bytes"] - weights - rows["kv_bytes"]
    assert not rows["excess"].isna().any()
    return rows


@given(seed=SEEDS)
@cases(10)
def test_restart_at_depth_1_is_exact_to_the_page(seed: int) -> None:
    policy = Composed(SCHEDULING["chunked_prefill"], MEMORY["paged_restart"])
    recorder = replay_with(policy, machine(16, 16, seed), seed=seed)
    if not seed:  # the first that is tried
        assert sum(o.restarts for o in recorder.outcomes.values()) > 0, "no pressure"
    rows = excess(recorder)
    assert rows["kv_bytes"].nunique() > 5  # it moved, and the kernel saw every move
    assert (rows["excess"] == 0).all()


@pytest.mark.broad(3)
@pytest.mark.parametrize("clock", ["service", "wall"])
@pytest.mark.parametrize("memory", MEMORY)
@given(seed=SEEDS, gpu_pages=st.integers(8, 16), depth=st.sampled_from([2, 1, 3]))
@cases(10)
def test_what_lies_above_the_ledger_is_given_back_but_still_in_use(
    memory: str, clock: str, seed: int, gpu_pages: int, depth: int
) -> None:
    """A page freed at issue stays with the operations in flight: the ledger calls it coming."""
    policy = Composed(SCHEDULING["chunked_prefill"], MEMORY[memory])
    recorder = replay_with(policy, machine(16, gpu_pages, seed), depth, clock, seed=seed)
    if memory == "paged_swap" and not seed:  # the first that is tried
        assert sum(o.swaps for o in recorder.outcomes.values()) > 0, "no pressure"
    rows = excess(recorder)
    assert (rows["excess"] >= 0).all() and (rows["excess"] <= rows["coming_bytes"]).all()


def test_pages_that_share_system_pages_stay_within_the_stated_slack() -> None:
    box = machine(page_tokens=8, gpu_pages=32)
    slack = page_slack_bytes(32, box.arenas[GPU].page_nbytes)
    rows = excess(replay(box, "paged_restart"))
    rows = rows[rows["tier"] == "gpu"]
    assert (rows["excess"] > 0).any()
    assert (rows["excess"] >= 0).all() and (rows["excess"] <= slack).all()


def test_storages_of_weights_and_arenas_are_what_the_pools_were_given(small_heap: None) -> None:
    """And by the collector's census a machine holds only small change beside them."""
    before = CpuMeter({}, {}).unclaimed_bytes()
    box = machine(page_tokens=16, gpu_pages=16, model=own_model(TINY))
    weights = {GPU: box.decoder.model.parameters()}
    meter = CpuMeter(weights, {pool: arena.pages for pool, arena in box.arenas.items()})
    page_bytes = box.arenas[GPU].page_nbytes
    assert storage_bytes(box.decoder.model.parameters()) == TINY.weight_bytes
    for pool, count in ((GPU, 16), (HOST, 64)):
        assert storage_bytes([box.arenas[pool].pages]) == count * page_bytes
    ring_bytes = box._ring.untyped_storage().nbytes()  # tokens in flight: 512 KiB, fixed
    beside = meter.unclaimed_bytes() - before - ring_bytes
    assert 0 <= beside <= 64 * 1024  # rotary tables and the like
    hidden = torch.zeros(1 << 20, dtype=torch.uint8)
    assert meter.unclaimed_bytes() - before - ring_bytes == beside + hidden.nbytes


def test_sampled_workspace_changes_no_token_and_is_of_the_predicted_size() -> None:
    plain, watched = machine(16, 16), machine(16, 16)
    replay(plain, "paged_restart", depth=2)
    recorder = replay(watched, "paged_restart", depth=2, every=1)
    for request_id in recorder.outcomes:
        assert watched.outputs(request_id) == plain.outputs(request_id)
    rows = recorder.tables()["steps"].to_pandas()
    assert rows["peak_bytes"].nunique() > 3
    for row in rows.itertuples():
        shape = [*map(int, row.tokens)], [*map(int, row.contexts)], int(row.samples)
        # but for a few numbers per row: see tests/models/test_workspace.py
        assert row.peak_bytes == pytest.approx(TINY.workspace_bytes(*shape, 16), rel=0.05)


def test_workspace_is_sampled_every_nth_launch_on_any_clock() -> None:
    for clock in ("service", "wall"):
        recorder = replay(machine(16, 16), "paged_restart", 2, clock, every=5)
        seen = recorder.tables()["steps"].to_pandas()["peak_bytes"].notna()
        assert seen.tolist() == [i % 5 == 0 for i in range(len(seen))]
    with pytest.raises(ValueError, match="every is -1"):
        Workspace(machine(16, 16), -1)
