"""What layers keep of a window is on the host between its forward and its backward."""

from __future__ import annotations

import random
from typing import Any

import pytest

from engine.contract.layout import Mode
from engine.contract.plan import Compute, Copy, Free, Plan
from engine.contract.regions import Kind, Tier, Work
from models.training.kept import kept_token_bytes
from policies.composed import Composed
from policies.kv.paged_restart import PagedRestart
from policies.kv.paged_swap import PagedSwap
from policies.scheduling.chunked_prefill import ChunkedPrefill
from policies.sharing.coserve import CoMemory
from policies.sharing.spatial import Spatial
from policies.training.out_of_memory import OutOfMemory
from tests.policies.finetuning_jobs import (
    BUDGET,
    SPEC,
    coserving,
    finetuning_job,
    random_job,
)
from tests.policies.test_coserve import PAGES, finetuned, of_requests, run, slices_of
from tests.support.replays import Replay, random_requests
from traces.serving.request import Request, Sample

HOST_PAGES = 4000
LAYERS = range(1, 1 + SPEC.num_layers)
MIXED = (Mode.OFFLOAD, Mode.KEEP, Mode.RECOMPUTE, Mode.OFFLOAD)


def copies(plan: Plan) -> list[Copy]:
    return [op for op in plan.ops if isinstance(op, Copy) and op.src.region.kind is Kind.ACTIVATION]


def device_peak(found: Replay) -> int:
    """The most bytes of activations that plans have left on the device."""
    rows = [row for row in found.rows("memory") if row["tier"] == "gpu"]
    return max([row["activation_bytes"] for row in rows])


@pytest.mark.broad(2)
@pytest.mark.parametrize("modes", [Mode.OFFLOAD, MIXED], ids=["all", "mixed"])
@pytest.mark.parametrize("buffers", ["grown", "static"])
@pytest.mark.parametrize("serving", [PagedRestart(), PagedSwap()], ids=["restart", "swap"])
@pytest.mark.parametrize("depth", [1, 2])
def test_laws_hold_under_pressure(
    modes: Any, buffers: Any, serving: Any, depth: int, request: pytest.FixtureRequest
) -> None:
    """Samples give way here and on the host, where requests are swapped to."""
    restarts = 0
    for seed in range(4):
        rng = random.Random(f"{request.node.name}{seed}")
        requests = random_requests(rng.randint(0, 1 << 30), 30, rate=rng.choice([200, 2000]))
        jobs = [random_job(rng, 1000 + i) for i in range(2)]
        fused = rng.choice([True, False])
        policy = coserving(CoMemory(serving, buffers, fused), backward_layers=rng.choice([1, 2]))
        given = {"policy": policy, "depth": depth, "noise": 0.5, "seed": seed, "modes": modes}
        found = run(jobs, requests, rng.choice(PAGES), host_pages=200, **given).check()
        restarts += sum([job.training is not None for p in found.plans for job in p.restart])
        assert [row["status"] for row in found.rows("requests")] == ["finished"] * 30
        assert len(found.rows("training")) == 6
        assert any(map(copies, found.plans))
    assert not restarts or buffers == "grown"


def test_laws_hold_on_two_lanes() -> None:
    for seed in range(4):
        rng = random.Random(seed)
        memory = CoMemory(PagedRestart(), fused=False, lanes=2)
        policy = Composed(Spatial(ChunkedPrefill(BUDGET, 12)), memory)
        given = {"policy": policy, "noise": 0.9, "seed": seed, "modes": Mode.OFFLOAD}
        jobs, requests = [random_job(rng, 1000)], random_requests(seed, 30, rate=2000)
        found = run(jobs, requests, rng.choice(PAGES), host_pages=HOST_PAGES, **given).check()
        assert len(found.rows("training")) == 3


def test_each_window_leaves_and_comes_back_before_its_layer() -> None:
    job = finetuning_job(1000, [Sample(100)])
    found = run([job], [Request(0, 0, 1, 90)], 900, modes=Mode.OFFLOAD, host_pages=HOST_PAGES)
    found.check()
    firsts, each = (0, 47, 94), kept_token_bytes(SPEC, job.recipe)
    moved = [op for plan in found.plans for op in copies(plan)]
    gone = [(c.src.region.part, c.src.region.slot) for c in moved if c.dst.tier is Tier.HOST]
    assert gone == [(layer, first) for first in firsts for layer in LAYERS]
    for plan in found.plans:
        own = [piece for piece in finetuned(plan) if piece.work is Work.BACKWARD]
        back = [op for op in copies(plan) if op.dst.tier is Tier.GPU]
        layers = [unit for piece in own for unit in piece.layers or ()]
        wanted = [(unit, first) for unit in layers for first in firsts]
        assert [(op.src.region.part, op.src.region.slot) for op in back] == wanted
        freed = {op.place for op in plan.ops if isinstance(op, Free)}
        assert {op.src for op in copies(plan)} <= freed
    host = [row["activation_bytes"] for row in found.rows("memory") if row["tier"] == "host"]
    assert max(host) == len(LAYERS) * 100 * each and host[-1] == 0


def test_a_window_back_finds_all_windows_of_its_layer() -> None:
    job = finetuning_job(1000, [Sample(60)])
    policy = coserving(backward_tokens=25)
    given = {"policy": policy, "modes": Mode.OFFLOAD, "host_pages": HOST_PAGES}
    found = run([job], [Request(0, 0, 1, 90)], 900, **given).check()
    backs = [p for p in found.plans if any(x.work is Work.BACKWARD for x in finetuned(p))]
    assert [len(copies(plan)) for plan in backs] == [2, 0, 0] * len(LAYERS)


def test_the_device_holds_a_window_instead_of_a_sample() -> None:
    """Behind the forward, what one layer keeps of a whole sample is the most."""
    job, requests = finetuning_job(1000, [Sample(400)]), [Request(0, 0, 1, 90)]
    peaks = {
        mode: device_peak(run([job], requests, 900, modes=mode, host_pages=HOST_PAGES).check())
        for mode in (Mode.KEEP, Mode.OFFLOAD)
    }
    each = kept_token_bytes(SPEC, job.recipe)
    assert peaks[Mode.KEEP] == len(LAYERS) * 400 * each
    assert peaks[Mode.OFFLOAD] <= 400 * each + len(LAYERS) * BUDGET * each


def test_plans_finetune_as_if_all_were_kept_where_there_is_room() -> None:
    rng = random.Random(2)
    jobs, requests = [random_job(rng, 1000)], random_requests(2, 20)
    kept, away = (
        run(jobs, requests, 900, modes=mode, host_pages=HOST_PAGES)
        for mode in (Mode.KEEP, Mode.OFFLOAD)
    )
    assert of_requests(kept) == of_requests(away)
    told = [[[piece[1:] for piece in slices_of(p)] for p in found.plans] for found in (kept, away)]
    assert told[0] == told[1]


def test_a_host_without_room_is_told() -> None:
    job = finetuning_job(1000, [Sample(60)])
    with pytest.raises(OutOfMemory, match=r"host:0 is at least [\d,]+ bytes short for a window of"):
        run([job], [Request(0, 0, 5, 5)], 900, modes=Mode.OFFLOAD, host_pages=0)


def test_a_copy_is_of_what_a_launch_has_written() -> None:
    """A window leaves behind its launch, and never before."""
    job = finetuning_job(1000, [Sample(100)])
    found = run([job], [Request(0, 0, 1, 90)], 900, modes=Mode.OFFLOAD, host_pages=HOST_PAGES)
    for plan in found.plans:
        launches = [i for i, op in enumerate(plan.ops) if isinstance(op, Compute)]
        for i, op in enumerate(plan.ops):
            if isinstance(op, Copy):
                is_behind = i > launches[-1]
                assert is_behind is (op.dst.tier is Tier.HOST)
