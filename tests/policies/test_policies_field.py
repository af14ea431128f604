"""The field's policies: what each wants in a given state, and that their runs obey the laws."""

from __future__ import annotations

from typing import Any

import pytest

from engine.contract.policy import Scheduling
from policies.composed import Composed
from policies.kv.max_reservation import MaxReservation
from policies.kv.paged_restart import PagedRestart
from policies.kv.paged_swap import PagedSwap
from policies.scheduling.continuous_batching import ContinuousBatching
from policies.scheduling.earliest_deadline import EarliestDeadline
from policies.scheduling.orca import Orca
from policies.scheduling.shortest_job import ClassMean, PromptShare, ShortestJob
from policies.scheduling.vllm_v1 import VllmV1
from tests.support.replays import random_requests, replay
from tests.support.states import V0, V1, decoding, fitted, ids, job, seated, sliced, view
from traces.serving.request import Request


# ---- vLLM v1
def test_v1_serves_running_jobs_in_order_then_waiting_ones() -> None:
    running = [decoding(0, 8), job(1, 50, computed=20), decoding(2, 8)]
    state = view(running, [job(3, 10), job(4, 40)])
    assert sliced(VllmV1(64, 8), state) == [(0, 1), (1, 30), (2, 1), (3, 10), (4, 22)]
    assert sliced(VllmV1(64, 4), state) == [(0, 1), (1, 30), (2, 1), (3, 10)], "four seats"
    assert sliced(VllmV1(20, 8), state) == [(0, 1), (1, 19)], "the budget ends in the middle"


def test_v1_preempts_the_tail_and_admits_no_job_with_it() -> None:
    running = [decoding(0, 8), decoding(1, 8), decoding(2, 8)]
    state = view(running, [job(3, 4)], pages=7)  # 2 each, one free: two need another
    plan = fitted(VllmV1(64, 8), V1, state)
    assert seated(plan) == [(0, 1), (1, 1)]
    assert ids(plan.restart) == [2]


def test_v1_preempts_even_itself_where_no_job_is_behind() -> None:
    running = [decoding(0, 10), decoding(1, 8)]
    state = view(running, [], pages=5)  # 3 + 2: job 0 fits into its last page, job 1 does not
    plan = fitted(VllmV1(64, 8), V1, state)
    assert (seated(plan), ids(plan.restart)) == ([(0, 1)], [1])
    patient = PagedRestart(watermark=0.0)
    plan = fitted(VllmV1(64, 8), patient, state)
    assert (seated(plan), ids(plan.restart)) == ([(0, 1)], [])


# ---- vLLM v0
def test_v0_counts_prompts_as_long_as_the_longest() -> None:
    state = view([], [job(0, 10), job(1, 30), job(2, 10)])
    assert sliced(ContinuousBatching(60), state) == [(0, 10), (1, 30), (2, 10)]
    assert sliced(ContinuousBatching(60, padded=True), state) == [(0, 10), (1, 30)]
    assert sliced(ContinuousBatching(59, padded=True), state) == [(0, 10)]


def test_v0_restarts_the_youngest_though_it_came_in_earlier() -> None:
    running = [decoding(1, 8, arrival_ns=20), decoding(0, 8, arrival_ns=10)]  # 0 was restarted
    state = view(running, [], pages=5)
    for by_arrival, victim in ((False, 0), (True, 1)):
        plan = fitted(ContinuousBatching(by_arrival=by_arrival), V1, state)
        assert ids(plan.restart) == [victim]


# ---- Orca
def test_orca_mixes_whole_prompts_with_decodes_in_the_order_of_arrival() -> None:
    running = [decoding(1, 8, arrival_ns=1), decoding(2, 8, arrival_ns=2)]
    state = view(running, [job(0, 90, arrival_ns=0), job(3, 70, arrival_ns=3)], pages=100)
    assert sliced(Orca(max_jobs=4), state) == [(0, 90), (1, 1), (2, 1), (3, 70)]
    assert sliced(Orca(max_jobs=3), state) == [(0, 90), (1, 1), (2, 1)]
    plan = fitted(Orca(4), MaxReservation(200), view([], [job(0, 90), job(1, 70)], pages=60))
    assert seated(plan) == [(0, 90)], "slots of 50 pages: only one is there"


# ---- priorities and deadlines
def test_the_most_urgent_comes_first_within_its_priority() -> None:
    deadlines = {"chat": 1.0, "batch": 60.0}
    scheduling = EarliestDeadline({"paid": -1}, deadlines, default_deadline_s=10.0, token_budget=99)
    waiting = [
        job(0, 10, slo="batch"),
        job(1, 10, slo="chat", arrival_ns=5_000_000_000),
        job(2, 10, arrival_ns=3_000_000_000),
        job(3, 10, slo="paid", arrival_ns=9_000_000_000),
    ]
    state = view([decoding(8, 8, slo="batch"), decoding(9, 8, slo="chat")], waiting)
    order = [job_id for job_id, _ in sliced(scheduling, state)]
    assert order == [9, 8, 3, 1, 2, 0], "due at 1, 60 | paid | 6, 13, 60"


def test_an_urgent_arrival_overtakes_a_prompt_that_has_begun() -> None:
    begun = job(0, 90, computed=10, slo="batch")
    state = view([begun], [job(1, 30, slo="chat")])
    scheduling = EarliestDeadline(deadline_s={"chat": 1.0, "batch": 60.0}, token_budget=50)
    assert sliced(scheduling, state) == [(1, 30), (0, 20)]


def test_seats_go_to_the_most_urgent() -> None:
    waiting = [job(0, 10, slo="batch"), job(1, 10, slo="chat")]
    scheduling = EarliestDeadline(deadline_s={"chat": 1.0, "batch": 60.0}, max_jobs=1)
    assert sliced(scheduling, view([], waiting)) == [(1, 10)]


def test_pages_are_taken_of_prompts_before_decodes_and_of_the_least_urgent_first() -> None:
    scheduling = EarliestDeadline(deadline_s={"chat": 1.0, "batch": 60.0})
    patient, urgent = decoding(0, 8, slo="batch"), decoding(1, 8, slo="chat")
    state = view([patient, urgent], [], pages=4)  # 2 each, and each needs another
    assert ids(fitted(scheduling, V1, state).restart) == [0]
    prompt = job(2, 20, computed=8, slo="chat")
    plan = fitted(scheduling, V1, view([patient, urgent, prompt], [], pages=6))
    assert (seated(plan), ids(plan.restart)) == ([(1, 1), (0, 1)], [2])


def test_deadlines_are_met_that_arrival_order_misses() -> None:
    """Two long prompts of a patient class before a short one of an impatient one."""
    requests = [Request(i, 0, 80, 2, slo="batch") for i in range(6)]
    requests.append(Request(6, 1, 8, 2, slo="chat"))

    def first_token_ns(scheduling: Scheduling) -> int:
        run = replay(Composed(scheduling, PagedRestart()), requests, pages=200, depth=1)
        return run.check().recorder.outcomes[6].token_ns[0]

    urgent = EarliestDeadline(deadline_s={"chat": 0.0}, token_budget=80)
    assert first_token_ns(urgent) < 0.5 * first_token_ns(VllmV1(token_budget=80))


# ---- shortest job
def test_the_shortest_predicted_rest_comes_first() -> None:
    waiting = [job(0, 100), job(1, 20), job(2, 50)]
    by_prompt = ShortestJob(PromptShare(1.0), token_budget=500)
    assert [i for i, _ in sliced(by_prompt, view([], waiting))] == [1, 2, 0]
    waiting = [job(0, 20, slo="essay"), job(1, 60, slo="label")]
    by_class = ShortestJob(ClassMean({"essay": 500.0, "label": 2.0}), token_budget=500)
    assert [i for i, _ in sliced(by_class, view([], waiting))] == [1, 0]
    # In decode: 100 expected and 90 generated leave less than 100 expected and 1 generated.
    late, early = job(2, 8, computed=97, known=98), job(3, 8, computed=8, known=9)
    guess = ShortestJob(ClassMean(default_tokens=100.0))
    assert [i for i, _ in sliced(guess, view([early, late], []))] == [2, 3]


def test_right_guesses_lower_the_mean_latency() -> None:
    requests = [Request(i, 0, 60 if i % 2 else 4, 1) for i in range(12)]

    def mean_ns(scheduling: Scheduling) -> float:
        run = replay(Composed(scheduling, PagedRestart()), requests, pages=300, depth=1).check()
        return sum(o.token_ns[-1] for o in run.recorder.outcomes.values()) / len(requests)

    shortest = ShortestJob(PromptShare(0.1), token_budget=30)
    assert mean_ns(shortest) < 0.8 * mean_ns(VllmV1(token_budget=30))


# ---- all of them
SCHEDULINGS: dict[str, Scheduling] = {
    "v0": ContinuousBatching(128, 12, padded=True, by_arrival=True),
    "v1": VllmV1(48, 12),
    "orca": Orca(12),
    "deadline": EarliestDeadline(priority={"a": 1}, token_budget=48, max_jobs=12),
    "shortest": ShortestJob(PromptShare(), token_budget=48, max_jobs=12),
}
MEMORIES = {
    "v0": V0,
    "v1": V1,
    "swap": PagedSwap(prompts="must_fit", gives_way=True),
    "reservation": MaxReservation(120),
}


@pytest.mark.broad(4)
@pytest.mark.parametrize("depth", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("scheduling", SCHEDULINGS)
def test_every_pair_obeys_the_laws_when_memory_is_short(
    scheduling: str, memory: str, depth: int
) -> None:
    policy = Composed(SCHEDULINGS[scheduling], MEMORIES[memory])
    for seed in range(2):
        requests = random_requests(seed, 14, rate=None if seed else 3000.0)
        run = replay(policy, requests, pages=31, host_pages=12, depth=depth, noise=0.3, seed=seed)
        outcomes = run.check().recorder.outcomes.values()
        assert [o.status for o in outcomes] == ["finished"] * len(requests)


@pytest.mark.parametrize(
    "make",
    [lambda: VllmV1(token_budget=0), lambda: Orca(0), lambda: EarliestDeadline(max_jobs=0)],
)
def test_limits_that_leave_nothing_are_refused(make: Any) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        make()
    with pytest.raises(ValueError, match="below 0"):
        EarliestDeadline(deadline_s={"chat": -1.0})
