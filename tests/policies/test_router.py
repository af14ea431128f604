"""Routers: where each sends a request in a given state, and what they may not do."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest

from engine.contract.job import Job
from engine.contract.policy import Fleet, Router
from engine.loop.state import Chains, RoutedFleet
from engine.results.plan_log import LoggedPlan
from policies.composed import Composed
from policies.kv.paged_restart import PagedRestart
from policies.routing.least_outstanding import LeastOutstanding
from policies.routing.prefix_affinity import PrefixAffinity
from policies.routing.round_robin import RoundRobin
from policies.scheduling.recorded import RecordedRouter
from tests.support.replays import SCHEDULING, composed, random_requests, replay
from traces.serving.request import Request

ROUTERS: dict[str, Router] = {
    "round_robin": RoundRobin(),
    "least_requests": LeastOutstanding(),
    "least_tokens": LeastOutstanding("tokens"),
    "affinity": PrefixAffinity(),
}


class Given:
    """Routes as it is told: for states of a fleet made by hand."""

    def __init__(self, replicas: Sequence[int]) -> None:
        self._replicas = iter(replicas)

    def route(self, job: Job, fleet: Fleet) -> int:
        return next(self._replicas)


def job(job_id: int, tokens: int = 10, **given: Any) -> Job:
    return Job(job_id, 0, tokens, tokens, **given)


def fleet(size: int, *held: tuple[int, Job]) -> Fleet:
    """A fleet whose replicas were given these jobs."""
    made = RoutedFleet(size, Given([replica for replica, _ in held]))
    for _, one in held:
        made.assign(one)
    return made


def test_round_robin_goes_on_where_it_was_after_a_job_has_left() -> None:
    jobs = [job(i) for i in range(4)]
    state = RoutedFleet(3, RoundRobin())
    for one in jobs:
        state.assign(one)
    assert [one.device for one in jobs] == [0, 1, 2, 0]
    state.left(jobs[1])
    assert RoundRobin().route(job(9), state) == 1


def test_least_outstanding_counts_requests_or_tokens_until_they_have_left() -> None:
    long, short = job(0, 100), [job(1, 10), job(2, 10)]
    state = fleet(2, (0, long), (1, short[0]), (1, short[1]))
    assert LeastOutstanding().route(job(9), state) == 0
    assert LeastOutstanding("tokens").route(job(9), state) == 1
    long._advance(100, 5)
    assert state.outstanding_tokens(0) == 105, "generated tokens count"
    state.left(short[0])
    state.left(short[1])
    assert LeastOutstanding().route(job(9), state) == 1


def test_at_a_tie_the_replica_given_fewer_comes_first_then_the_lower_number() -> None:
    gone = job(0)
    state = fleet(3, (0, gone))
    state.left(gone)
    assert LeastOutstanding().route(job(9), state) == 1, "an idle fleet is not always its first"
    assert LeastOutstanding().route(job(9), fleet(3)) == 0


def test_affinity_follows_the_longest_chain_and_its_last_receiver() -> None:
    state = fleet(
        3,
        (0, job(0, prefix_ids=(1, 2, 3))),
        (1, job(1, prefix_ids=(1, 2, 7))),
        (2, job(2, prefix_ids=(5,))),
    )
    router = PrefixAffinity(load_bound=3)
    routed = {
        ids: router.route(job(9, prefix_ids=ids), state)
        for ids in [(1, 2, 3, 4), (1, 2, 7), (1, 2), (1, 9), (5, 1), (2, 3)]
    }
    assert routed == {
        (1, 2, 3, 4): 0,
        (1, 2, 7): 1,
        (1, 2): 1,  # both have it, 1 got it last
        (1, 9): 1,
        (5, 1): 2,
        (2, 3): 0,  # no job begins like this: the least loaded
    }


def test_affinity_takes_a_session_for_a_chain_where_blocks_have_no_names() -> None:
    state = fleet(2, (0, job(0, session=3)), (1, job(1, session=4)))
    router = PrefixAffinity(load_bound=2)
    assert router.route(job(8, session=4, turn=1), state) == 1
    assert router.route(job(9, session=3, turn=1), state) == 0
    assert router.route(job(9), state) == 0, "no session, no chain"


def test_a_hot_prefix_cannot_overload_a_replica() -> None:
    """All requests begin alike: none ever has more than the bound, and all four are in use."""
    state = RoutedFleet(4, PrefixAffinity(load_bound=1.5))
    for i in range(40):
        state.assign(job(i, prefix_ids=(1, i)))
        mean = (i + 1) / 4
        assert max(state.outstanding(r) for r in range(4)) <= -(-1.5 * mean // 1)
    assert min(state.assigned) > 0
    alone = RoutedFleet(4, PrefixAffinity(load_bound=4))
    for i in range(40):
        alone.assign(job(i, prefix_ids=(1, i)))
    assert alone.assigned == [40, 0, 0, 0], "a bound of all replicas is none"


@pytest.mark.parametrize("router", ROUTERS.values(), ids=ROUTERS)
def test_a_router_is_pure(router: Router) -> None:
    state = fleet(3, (0, job(0, session=1)), (2, job(1, 50)), (1, job(2, prefix_ids=(4,))))
    for asked in (job(7, prefix_ids=(4, 5)), job(8, session=1, turn=1), job(9)):
        before = copy.deepcopy((state, asked))
        assert router.route(asked, state) == router.route(asked, state)
        assert facts(*before) == facts(state, asked), "it changed what it was shown"


def facts(state: Fleet, asked: Job) -> object:
    loads = [(state.outstanding(i), state.outstanding_tokens(i)) for i in range(len(state))]
    return state.assigned, loads, state.last_with(asked), asked.device


def test_wrong_routers_and_wrong_rules_are_told_in_a_line() -> None:
    with pytest.raises(
        ValueError, match=r"Given \(\S+\) sends request 5 to replica 2, but there are 2"
    ):
        RoutedFleet(2, Given([2])).assign(job(5))
    with pytest.raises(ValueError, match="load is 'bytes', not one of requests, tokens"):
        LeastOutstanding("bytes")
    with pytest.raises(ValueError, match=r"load_bound is 0\.5, must be at least 1"):
        PrefixAffinity(load_bound=0.5)


def test_chains_know_no_empty_chain() -> None:
    chains = Chains()
    chains.note((), 1)
    assert chains.last(()) is None and chains.last((3,)) is None


def test_a_recorded_router_sends_requests_where_they_were_served() -> None:
    run = replay(
        composed("chunked", "restart"),
        random_requests(3, 9),
        devices=3,
        router=Given([2, 0, 0, 1, 2, 2, 1, 0, 1]),
    )
    rows = run.recorder.tables()["plans"].to_pylist()
    log = tuple(LoggedPlan(r["device"], tuple(r["returned"]), r["body"]) for r in rows)
    routed = [RecordedRouter(log).route(job(i), fleet(3)) for i in range(10)]
    assert routed == [2, 0, 0, 1, 2, 2, 1, 0, 1, 0]


# ---- in the engine
def test_all_turns_of_a_session_stay_on_one_replica_and_round_robin_scatters_them() -> None:
    turns = [
        Request(10 * s + t, s * 40_000, 12, 6, session=s, turn=t, think_ns=100_000)
        for s in range(8)
        for t in range(4)
    ]
    together = sessions_by_replica(turns, PrefixAffinity(load_bound=3))
    assert all(len(replicas) == 1 for replicas in together.values())
    assert len(set.union(*together.values())) == 3, "sessions are spread"
    apart = sessions_by_replica(turns, RoundRobin())
    assert any(len(replicas) > 1 for replicas in apart.values())


def test_affinity_finds_more_in_the_caches_than_taking_turns() -> None:
    """Every turn begins with all of the turn before it, which one replica has kept."""
    turns = [
        Request(
            10 * s + t,
            s * 40_000,
            12 * (t + 1),
            6,
            session=s,
            turn=t,
            think_ns=100_000,
            prefix_ids=tuple(10 * s + i for i in range(t + 1)),
            prefix_block_tokens=12,
        )
        for s in range(8)
        for t in range(4)
    ]
    policy = Composed(SCHEDULING["chunked"], PagedRestart(prefix_caching=True))

    def cached(router: Router) -> int:
        run = replay(policy, turns, pages=200, devices=3, router=router).check()
        return sum(outcome.cached_tokens for outcome in run.recorder.outcomes.values())

    whole = sum(12 * t for t in range(4)) * 8  # all but each turn's own block: whole pages of 4
    assert cached(PrefixAffinity(load_bound=3)) == whole
    assert 0 < cached(RoundRobin()) < whole


def test_affinity_knows_prompts_by_their_token_ids() -> None:
    """Eight beginnings that come again and again, without sessions or named blocks."""
    begins = [tuple(range(100 * s, 100 * s + 12)) for s in range(8)]
    ids = [(*begins[i % 8], i, i, i) for i in range(32)]
    requests = [Request(i, i * 10_000_000, 15, 6, prompt_ids=ids[i]) for i in range(32)]
    policy = Composed(SCHEDULING["chunked"], PagedRestart(prefix_caching=True))

    def cached(router: Router) -> int:
        run = replay(policy, requests, pages=200, devices=3, router=router).check()
        return sum(outcome.cached_tokens for outcome in run.recorder.outcomes.values())

    assert cached(PrefixAffinity(load_bound=3)) == 24 * 12, "all but the first of each beginning"
    assert 0 < cached(RoundRobin()) < 24 * 12


def test_affinity_tells_prompts_apart_behind_any_common_beginning() -> None:
    """A system prompt of 320 pages that all have, then what is each user's own."""
    system = tuple(range(1280))
    ids = [(*system, *range(9000 + 40 * (i % 6), 9040 + 40 * (i % 6)), i) for i in range(24)]
    requests = [Request(i, i * 10**10, 1321, 4, prompt_ids=ids[i]) for i in range(24)]
    policy = Composed(SCHEDULING["chunked"], PagedRestart(prefix_caching=True))
    run = replay(policy, requests, pages=2500, devices=3, router=PrefixAffinity(load_bound=3))
    cached = [outcome.cached_tokens for outcome in run.check().recorder.outcomes.values()]
    assert all(tokens == 1320 for tokens in cached[6:]), "turns go where their pages are"


def sessions_by_replica(turns: list[Request], router: Router) -> dict[int, set[int]]:
    run = replay(composed("chunked", "restart"), turns, devices=3, router=router).check()
    replicas: dict[int, set[int]] = {}
    for row in run.recorder.tables()["requests"].to_pylist():
        replicas.setdefault(row["session"], set()).add(row["device"])
    return replicas


@pytest.mark.parametrize("router", [LeastOutstanding(), LeastOutstanding("tokens")])
def test_least_outstanding_sees_answers_as_clients_do(router: Router) -> None:
    """A request that comes a nanosecond before an answer still finds it outstanding."""
    one = [Request(0, 0, 10, 5)]
    end = replay(composed("chunked", "restart"), one).recorder.outcomes[0].finish_ns
    assert end is not None
    for arrival_ns, replica in ((end - 1, 1), (end + 1, 0)):
        requests = [*one, Request(1, 1, 10, 1), Request(2, arrival_ns, 10, 1)]
        run = replay(composed("chunked", "restart"), requests, devices=2, router=router)
        assert [run.recorder.outcomes[i].device for i in range(3)] == [0, 1, replica]
