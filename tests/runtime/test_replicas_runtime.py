"""Two replicas with real work: equal decisions on every backend, and generate()'s tokens."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import simpy
import torch

from engine.contract.plan import Compute
from engine.contract.regions import PageSize, Pool, Tier
from engine.laws.check_replay import check_capacity, check_inputs, check_lanes
from engine.loop.engine import Engine
from engine.loop.state import VirtualClock
from engine.memory.scoreboard import Journal
from engine.results.plan_log import LoggedPlan, encode
from engine.results.recorder import Recorder
from policies.composed import Composed
from policies.routing.least_outstanding import LeastOutstanding
from policies.routing.round_robin import RoundRobin
from policies.scheduling.recorded import RecordedPlans, RecordedRouter
from runtime.executors.clock import WallClock
from runtime.executors.cuda import CudaExecutor
from runtime.executors.joined_machines import ReplicaMachines
from runtime.executors.lockstep import CpuExecutor, LockstepExecutor
from runtime.executors.wall import WallExecutor
from runtime.serving.machine import ServingMachine
from sim.executor import SimExecutor
from tests.runtime.test_cuda import StandIn
from tests.support.hand_made import shared_model
from tests.support.parity import BACKENDS, LINKS, PAGE, SPEC, SyntheticCost
from tests.support.reference import compare, expected
from tests.support.serving import MEMORY, PAGE_TOKENS, SCHEDULING, short_requests
from traces.serving.request import Request

DEVICES = 2
PAGES: dict[Pool, int] = {
    (tier, device): count
    for device in range(DEVICES)
    for tier, count in ((Tier.GPU, 26), (Tier.HOST, 104))
}
CAPACITY = {pool: count * PAGE.nbytes for pool, count in PAGES.items()}


def replicas(requests: Sequence[Request], gpus: Sequence[str] = ()) -> ReplicaMachines:
    """Machines that share their weights, or on a GPU each."""
    torch.set_num_threads(1)
    prompts = {r.request_id: r.prompt_ids or () for r in requests}
    model = shared_model(SPEC)
    return ReplicaMachines(
        [
            ServingMachine(
                copy.deepcopy(model).to(gpus[number]) if gpus else model,
                SPEC,
                PageSize.of(SPEC, PAGE_TOKENS),
                {pool: n for pool, n in PAGES.items() if pool[1] == number},
                prompts,
                device=gpus[number] if gpus else "cpu",
                number=number,
            )
            for number in range(DEVICES)
        ]
    )


@contextmanager
def opened(backend: str, box: ReplicaMachines) -> Iterator[tuple[simpy.Environment, Any]]:
    if backend in ("wall", "cuda"):
        clock = WallClock()
        wall, cuda = partial(WallExecutor, links=LINKS), partial(CudaExecutor, devices=DEVICES)
        with (wall if backend == "wall" else cuda)(clock, box) as executor:
            yield clock, executor
        return
    env = VirtualClock()
    made = {
        "sim": lambda: SimExecutor(env, SyntheticCost()),
        "lockstep": lambda: LockstepExecutor(box, SimExecutor(env, SyntheticCost())),
        "cpu": lambda: CpuExecutor(env, box, LINKS),
    }
    yield env, made[backend]()


def run(
    backend: str,
    policy: Any,
    requests: Sequence[Request],
    router: Any,
    depth: int = 2,
    gpus: Sequence[str] = (),
    **more: Any,
) -> tuple[Recorder, ReplicaMachines]:
    """A replay with all checks."""
    box = replicas(requests, gpus)
    with opened(backend, box) as (env, executor):
        recorder, journal = Recorder(), Journal(lambda: int(env.now))
        Engine(
            env,
            policy,
            executor,
            CAPACITY,
            PAGE,
            devices=DEVICES,
            depth=depth,
            recorder=recorder,
            journal=journal,
            router=router,
            **more,
        ).replay(requests)
    plans, spans = [row[-1] for row in recorder.plans], {s.op: s for s in recorder.spans}
    check_lanes(plans, spans)
    check_inputs(plans, spans)
    check_capacity(journal.lives, spans, CAPACITY)
    return recorder, box


def logs(recorder: Recorder) -> list[list[str]]:
    """Decisions by device: the order of plans of two devices depends on time."""
    return [[encode(r[-1]) for r in recorder.plans if r[1] == d] for d in range(DEVICES)]


def pages(recorder: Recorder) -> list[list[tuple[int, list[int]]]]:
    """Whose pages each launch used, by device."""
    rows = sorted((row[0], row[-1]) for row in recorder.steps if row[-1].pieces)
    return [
        [
            (piece.job_id, list(piece.pages[: PAGE.count(piece.context_tokens + piece.tokens)]))
            for _, launch in rows
            for piece in launch.pieces
            if launch.op.lane[0] == device
        ]
        for device in range(DEVICES)
    ]


@pytest.mark.broad(2)
@pytest.mark.parametrize(
    ("scheduling", "memory"),
    [
        ("static_batching", "paged_restart"),
        ("continuous_batching", "paged_swap"),
        ("chunked_prefill", "paged_swap"),
        pytest.param("chunked_prefill", "paged_restart", marks=pytest.mark.slow),
        pytest.param("chunked_prefill", "max_reservation", marks=pytest.mark.slow),
    ],
)
def test_all_backends_decide_alike_and_tokens_equal_generate(scheduling: str, memory: str) -> None:
    policy = Composed(SCHEDULING[scheduling], MEMORY[memory])
    requests = short_requests(16, SPEC.vocab_size, max_output=24)
    made = {name: run(name, policy, requests, LeastOutstanding()) for name in BACKENDS}
    reference, _ = made["sim"]
    for name in BACKENDS[1:]:
        recorder, box = made[name]
        assert logs(recorder) == logs(reference), f"{name} decides otherwise"
        assert pages(recorder) == pages(reference), f"{name} has other pages"
        outputs = {r.request_id: box.outputs(r.request_id) for r in requests}
        assert not compare(outputs, expected(SPEC, requests)).wrong, name
    homes = {outcome.device for outcome in reference.outcomes.values()}
    assert homes == {0, 1}


def test_a_measured_log_of_replicas_plays_back_in_the_simulator() -> None:
    requests = [
        Request(
            r.request_id, i * 2_000_000, r.prompt_tokens, r.output_tokens, prompt_ids=r.prompt_ids
        )
        for i, r in enumerate(short_requests(16, SPEC.vocab_size))
    ]
    policy = Composed(SCHEDULING["chunked_prefill"], MEMORY["paged_swap"])
    real, _ = run("wall", policy, requests, LeastOutstanding())
    log = tuple(LoggedPlan(d, back, encode(p)) for _, d, _, back, p in real.plans)
    played, _ = run("sim", RecordedPlans(log), requests, RecordedRouter(log), returns_memory=False)
    assert pages(played) == pages(real)


def test_lanes_of_replicas_run_side_by_side_on_the_wall_clock() -> None:
    """A thread per lane: computes of the two devices overlap, those of one never do."""
    policy = Composed(SCHEDULING["chunked_prefill"], MEMORY["paged_restart"])
    recorder, _ = run("wall", policy, short_requests(16, SPEC.vocab_size), RoundRobin())
    spans = [s for s in recorder.spans if isinstance(s.op, Compute)]
    by_device = [[s for s in spans if s.op.device == d] for d in range(DEVICES)]
    for own in by_device:
        assert all(
            a.end_ns <= b.start_ns for a, b in pairwise(sorted(own, key=lambda s: s.start_ns))
        )
    assert any(
        a.start_ns < b.end_ns and b.start_ns < a.end_ns for a in by_device[0] for b in by_device[1]
    )


def test_each_replica_has_streams_uploads_and_a_timeline_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The wiring of two GPUs over stand-ins: no stream waits for another device's event."""
    stand_in = StandIn()
    stand_in.take_over(monkeypatch)
    policy = Composed(SCHEDULING["chunked_prefill"], MEMORY["paged_swap"])
    requests = short_requests(16, SPEC.vocab_size)
    recorder, box = run("cuda", policy, requests, LeastOutstanding())
    assert logs(recorder) == logs(run("sim", policy, requests, LeastOutstanding())[0])
    outputs = {r.request_id: box.outputs(r.request_id) for r in requests}
    assert not compare(outputs, expected(SPEC, requests)).wrong
    assert stand_in.synchronized[:DEVICES] == [0, 1]
    assert {stream.device for stream, _ in stand_in.waited} == {0, 1}
    assert all(event.stream.device == stream.device for stream, event in stand_in.waited)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < DEVICES, reason="needs two CUDA devices")
def test_two_gpus_generate_the_tokens_of_generate() -> None:
    policy = Composed(SCHEDULING["chunked_prefill"], MEMORY["paged_swap"])
    requests = short_requests(16, SPEC.vocab_size)
    _, box = run("cuda", policy, requests, LeastOutstanding(), gpus=("cuda:0", "cuda:1"))
    outputs = {r.request_id: box.outputs(r.request_id) for r in requests}
    assert not compare(outputs, expected(SPEC, requests)).wrong
