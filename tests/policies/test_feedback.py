"""Feedback: samples that come behind the answers of requests, for a job that learns."""

from __future__ import annotations

import random
from typing import Any

import pytest

from engine.contract.plan import Compute, Slice
from engine.contract.policy import Scheduling
from engine.contract.regions import Work
from engine.contract.view import View
from engine.results.recorder import Recorder
from policies.composed import Composed
from policies.kv.paged_restart import PagedRestart
from policies.kv.paged_swap import PagedSwap
from policies.scheduling.chunked_prefill import ChunkedPrefill
from policies.scheduling.recorded import RecordedPlans
from policies.sharing.coserve import CoMemory, CoServe
from policies.sharing.temporal import Temporal
from sim.cost.roofline import Roofline
from tests.policies.finetuning_jobs import (
    BUDGET,
    PAGE,
    SPEC,
    coserving,
    finetuning_job,
    layout_of_jobs,
)
from tests.support.jumps import both_replayed, both_simulated, simulated
from tests.support.replays import Replay, random_requests, replay
from tests.training.training_jobs import device
from traces.serving.request import Request, Sample, TrainingJob
from traces.training.recipe import Recipe

MS = 10**6
COST = Roofline(device("cpu"), SPEC, PAGE.tokens)
CHUNKED = ChunkedPrefill(BUDGET, 12)
SCHEDULINGS: dict[str, Scheduling] = {
    "coserve": CoServe(CHUNKED, BUDGET),
    "temporal": Temporal(CHUNKED, every=4),
}


def feedback(requests: list[Request], seed: int = 0, most_ms: int = 40) -> list[Sample]:
    """Feedback on some two of three requests."""
    rng, found = random.Random(seed), list[Sample]()
    for request in requests:
        if rng.random() < 0.67:
            delay_ns, prompt = rng.randint(0, most_ms) * MS, request.prompt_tokens
            tokens = prompt + request.output_tokens
            found.append(Sample(tokens, prompt, delay_ns, request.request_id))
    return found


def learning_job(requests: list[Request], seed: int = 0, **given: Any) -> TrainingJob:
    return finetuning_job(1000, feedback(requests, seed), learns=True, **given)


def run(requests: list[Request], job: TrainingJob, **given: Any) -> Replay:
    given.setdefault("pages", 400)
    layout, policy = layout_of_jobs([job], given["pages"]), given.pop("policy", coserving())
    return replay(policy, [*requests, job], page=PAGE, layout=layout, **given)


def recorded(requests: list[Request], job: TrainingJob, **given: Any) -> dict[str, Any]:
    """The tables of a simulation."""
    given = {"pages": 400, "host_pages": 0, "depth": 1} | given
    layout, recorder = layout_of_jobs([job], 400), Recorder(finetunes=True, learns=True)
    policy = given.pop("policy", coserving())
    simulated(
        policy, [*requests, job], True, COST, page=PAGE, layout=layout, recorder=recorder, **given
    )
    return {name: table.to_pylist() for name, table in recorder.tables().items()}


@pytest.mark.parametrize("depth", [1, 2])
def test_each_sample_comes_its_delay_behind_the_answer(depth: int) -> None:
    requests = random_requests(3, 30, rate=300)
    job = learning_job(requests, microbatches=2)
    tables = recorded(requests, job, depth=depth)
    delays = {sample.request: sample.release_ns for sample in job.samples}
    ended = {row["request_id"]: row["finish_ns"] for row in tables["requests"]}
    rows = tables["samples"]
    assert len(rows) == 2 * job.num_steps == 2 * (len(job.samples) // 2)
    assert len({row["request_id"] for row in rows}) == len(rows), "each is trained on once"
    for row in rows:
        on, tokens = row["request_id"], row["tokens"]
        assert row["released_ns"] == ended[on] + delays[on]
        assert row["start_ns"] >= row["released_ns"] and row["status"] == "finished"
        assert tokens == requests[on].prompt_tokens + requests[on].output_tokens
    came = [row["released_ns"] for row in rows]
    assert came == sorted(came) and [row["request_id"] for row in rows] != sorted(delays)
    assert [row["step"] for row in tables["training"]] == [*range(job.num_steps)]


def test_feedback_that_is_left_over_is_not_trained_on() -> None:
    requests = random_requests(3, 20)
    job = learning_job(requests, microbatches=3)
    assert len(job.samples) % 3
    rows = recorded(requests, job)["samples"]
    assert len(rows) == len(job.samples) - len(job.samples) % 3


def test_no_policy_sees_a_sample_before_it_has_come() -> None:
    """The length of a sample tells that of the answer, which no policy may know."""
    seen = list[tuple[int, tuple[int | None, ...], set[int]]]()

    class Watched(CoServe):
        def batch(self, view: View) -> tuple[Slice, ...]:
            for job in (*view.training, *view.waiting):
                if job.training is not None:
                    on = tuple([sample.request for sample in job.training.spec.samples])
                    there = {one.job_id for one in (*view.serving, *view.waiting)}
                    seen.append((job.training.released, on, there))
            return super().batch(view)

    requests = random_requests(5, 30, rate=300)
    policy = Composed(Watched(CHUNKED, BUDGET), CoMemory(PagedRestart()))
    run(requests, learning_job(requests, 1), policy=policy, noise=0.3).check()
    assert seen[0][1] == ()
    for released, on, there in seen:
        assert len(on) == released and not there.intersection(on)
    assert len({released for released, _, _ in seen}) > 5


@pytest.mark.broad(4)
@pytest.mark.parametrize("memory", [PagedRestart(), PagedSwap()], ids=["restart", "swap"])
@pytest.mark.parametrize("name", SCHEDULINGS)
def test_spared_questions_change_nothing(name: str, memory: Any) -> None:
    """Law 15: the tables of a run that asks at each step are equal, to the byte."""
    policy, spared = Composed(SCHEDULINGS[name], CoMemory(memory)), 0
    for seed in range(6):
        requests = random_requests(seed, 20, rate=(None, 400.0)[seed % 2])
        job = learning_job(requests, seed, microbatches=1 + seed % 2, until_served=seed % 3 == 0)
        pages = (300, 500)[seed % 2]  # the longest samples need 280
        how = {"pages": pages, "layout": layout_of_jobs([job], pages), "page": PAGE}
        found: list[Request | TrainingJob] = [*requests, job]
        fast, slow = both_simulated(policy, found, COST, host_pages=200, depth=1 + seed % 3, **how)
        spared += slow.asked - fast.asked
        both_replayed(policy, found, noise=0.4, seed=seed, depth=1 + seed % 2, **how)[0].check()
    assert spared > 50


def test_a_turn_waits_for_the_answer_and_feedback_too() -> None:
    requests = [Request(i, 0, 20, 30, session=i // 3, turn=i % 3, think_ns=MS) for i in range(9)]
    job = learning_job(requests, 2)
    layout = layout_of_jobs([job], 400)
    how = {"pages": 400, "layout": layout, "page": PAGE, "host_pages": 0, "depth": 2}
    both_simulated(coserving(), [*requests, job], COST, **how)
    assert len(recorded(requests, job)["samples"]) == len(job.samples)


def test_feedback_on_a_refused_request_comes_as_well() -> None:
    requests = [Request(0, 0, 10, 4), Request(1, 0, 2000, 4)]  # more tokens than there are pages
    samples = [Sample(12, 10, MS, 0), Sample(20, 10, MS, 1)]
    job = finetuning_job(1000, samples, learns=True)
    found = run(requests, job).check()
    assert [row["status"] for row in found.rows("requests")] == ["finished", "refused"]
    assert len(found.rows("training")) == 2


def test_feedback_may_come_before_its_job() -> None:
    requests = random_requests(4, 12)
    samples = feedback(requests, 1)
    longest = max([sample.tokens for sample in samples])
    job = TrainingJob(
        1000,
        10**9,
        SPEC.num_layers + 2,
        longest,
        num_steps=len(samples),
        recipe=Recipe(lora_rank=4),
        samples=tuple(samples),
        learns=True,
    )
    rows = recorded(requests, job)["samples"]
    assert len(rows) == len(samples) and {row["released_ns"] for row in rows} == {10**9}


def test_a_log_is_played_back_with_the_samples_in_their_order() -> None:
    """Where answers take another time, samples would come in another order."""
    requests = random_requests(8, 25, rate=500)
    job = learning_job(requests, 3)
    found = run(requests, job, noise=0.4, seed=1).check()
    order = [
        piece.job.training.spec.sample(piece.microbatch)
        for plan in found.plans
        for op in plan.ops
        for piece in (op.slices if isinstance(op, Compute) else ())
        if piece.job.training is not None and piece.work is Work.UPDATE
    ]
    assert len(order) == len(job.samples)
    again = finetuning_job(1000, [s._replace(release_ns=0) for s in order])
    played = run(
        requests, again, policy=RecordedPlans(found.plan_log()), returns_memory=False
    ).check()
    assert played.booked() == found.booked()


def test_a_log_waits_for_a_sample_that_comes_later() -> None:
    job = finetuning_job(1000, [Sample(10), Sample(10, release_ns=5 * MS)])
    found = run([], job).check()
    later = finetuning_job(1000, [Sample(10), Sample(10, release_ns=50 * MS)])
    played = run([], later, policy=RecordedPlans(found.plan_log()), returns_memory=False).check()
    assert played.booked() == found.booked()


@pytest.mark.parametrize(
    ("samples", "steps", "told"),
    [
        ([Sample(9, 4, 0, 0)], 2, "2 steps of 1 samples, and feedback on 1 requests"),
        ([Sample(9, 4, 0, 0), Sample(9)], 1, "sample 1 is no feedback on a request"),
    ],
)
def test_wrong_jobs_are_told(samples: list[Sample], steps: int, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        finetuning_job(1000, samples, num_steps=steps, learns=True)
