"""Fast-forward goes on while a job that finetunes waits for its next sample."""

from __future__ import annotations

import random
from typing import Any

import pytest

from engine.contract.policy import Scheduling
from policies.composed import Composed
from policies.kv.paged_restart import PagedRestart
from policies.kv.paged_swap import PagedSwap
from policies.scheduling.chunked_prefill import ChunkedPrefill
from policies.scheduling.continuous_batching import ContinuousBatching
from policies.sharing.coserve import CoMemory, CoServe
from policies.sharing.temporal import Temporal
from sim.cost.roofline import Roofline
from tests.policies.finetuning_jobs import BUDGET, PAGE, SPEC, finetuning_job, layout_of_jobs
from tests.support.jumps import both_replayed, both_simulated, jumped_steps
from tests.support.replays import random_requests
from tests.training.training_jobs import device
from traces.serving.request import Request, Sample, TrainingJob

CHUNKED = ChunkedPrefill(BUDGET, 12)
SCHEDULINGS: dict[str, Scheduling] = {
    "coserve": CoServe(CHUNKED, BUDGET),
    "larger budget": CoServe(CHUNKED, 2 * BUDGET, backward_tokens=16),
    "continuous": CoServe(ContinuousBatching(BUDGET, 12), BUDGET, backward_layers=3),
    "temporal": Temporal(CHUNKED, every=4),
}
COST = Roofline(device("cpu"), SPEC, PAGE.tokens)
MS = 10**6


def work(seed: int, gap_ms: int, **given: Any) -> list[Request | TrainingJob]:
    """Random requests, and a job whose samples come one by one."""
    rng = random.Random(seed)
    samples = [
        Sample(rng.randint(2, 60), release_ns=k * rng.randint(1, gap_ms) * MS) for k in range(6)
    ]
    samples.sort(key=lambda sample: sample.release_ns)
    job = finetuning_job(1000, samples, microbatches=rng.choice([1, 2]), **given)
    return [*random_requests(seed, 20, rate=rng.choice([None, 400.0])), job]


def room_of(found: list[Request | TrainingJob], pages: int, depth: int) -> dict[str, Any]:
    jobs = [item for item in found if isinstance(item, TrainingJob)]
    layout = layout_of_jobs(jobs, pages)
    return {"pages": pages, "layout": layout, "depth": depth, "page": PAGE}


@pytest.mark.broad(4)
@pytest.mark.parametrize("buffers", ["grown", "static"])
@pytest.mark.parametrize("memory", [PagedRestart(), PagedSwap()], ids=["restart", "swap"])
@pytest.mark.parametrize("name", SCHEDULINGS)
def test_spared_questions_change_nothing(name: str, memory: Any, buffers: Any) -> None:
    """Law 15: the tables of a run that asks at each step are equal, to the byte."""
    policy, spared = Composed(SCHEDULINGS[name], CoMemory(memory, buffers=buffers)), 0
    for seed in range(6):
        found = work(seed, 1 + 3 * seed, until_served=seed % 2 == 0)
        how = room_of(found, (180, 400)[seed % 2], 1 + seed % 3)
        fast, slow = both_simulated(policy, found, COST, host_pages=200, **how)
        spared += slow.asked - fast.asked
        assert slow.asked >= fast.asked
    assert spared > 50  # of some 300


@pytest.mark.broad(2)
@pytest.mark.parametrize("name", SCHEDULINGS)
def test_on_any_executor(name: str) -> None:
    policy = Composed(SCHEDULINGS[name], CoMemory(PagedRestart()))
    for seed in range(4):
        found = work(seed, 2)
        how = room_of(found, 200, 1 + seed % 2)
        fast, _ = both_replayed(policy, found, noise=0.4, seed=seed, **how)
        fast.check()


def test_decodes_between_samples_pass_many_steps_at_once() -> None:
    requests = [Request(i, 0, 20 + i, 400) for i in range(6)]
    job = finetuning_job(1000, [Sample(30), Sample(30, release_ns=20 * MS)])
    found: list[Request | TrainingJob] = [*requests, job]
    policy = Composed(SCHEDULINGS["coserve"], CoMemory(PagedRestart()))
    fast, slow = both_simulated(policy, found, COST, host_pages=0, **room_of(found, 2000, 1))
    assert jumped_steps(fast) > 0.8 * fast.steps and fast.asked < 0.2 * slow.asked
