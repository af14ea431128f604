"""Fair service over tenants: the order by counters, its bound, and that first come lacks one."""

from __future__ import annotations

import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.contract.executor import Piece
from engine.contract.job import Job
from engine.contract.plan import Compute, Plan, Slice
from engine.contract.policy import Scheduling, Traits, traits_of
from engine.contract.regions import Work
from engine.contract.view import ServiceWeights, View
from engine.fast_forward.reads import SeenView, can_be_seen
from engine.laws.check_policy import WatchedPolicy, check_policy, requests
from engine.loop.engine import Engine
from policies.composed import Composed
from policies.kv.max_reservation import MaxReservation
from policies.kv.paged_restart import PagedRestart
from policies.kv.paged_swap import PagedSwap
from policies.scheduling.chunked_prefill import ChunkedPrefill
from policies.scheduling.continuous_batching import ContinuousBatching
from policies.scheduling.vllm_v1 import VllmV1
from policies.scheduling.vtc import Vtc
from policies.sharing.coserve import CoMemory, CoServe, first_with_work
from policies.sharing.coserve_slo import CoServeSlo
from policies.sharing.spatial import Spatial
from policies.sharing.temporal import Temporal
from tests.policies.finetuning_jobs import BUDGET, finetuning_job, layout_of_jobs
from tests.policies.finetuning_jobs import PAGE as SMALL_PAGE
from tests.support.jumps import Shaped, both_replayed, both_simulated, jumped_steps, simulated
from tests.support.replays import PAGE, Replay, random_requests, replay
from tests.support.states import sliced, view
from tests.support.strategies import TIMING, cases, room, sessions, traces
from traces.serving.request import Request, Sample

pytestmark = pytest.mark.ci

CHUNKED, CONTINUOUS = ChunkedPrefill(token_budget=48, max_jobs=12), ContinuousBatching(128, 12)
SERVING: dict[str, Scheduling] = {
    "chunked": CHUNKED,
    "continuous": CONTINUOUS,
    "v1": VllmV1(token_budget=24, max_jobs=12),
}
MEMORY: dict[str, Any] = {
    "restart": PagedRestart(),
    "kept": PagedRestart(prefix_caching=True),
    "swap": PagedSwap(),
    "reservation": MaxReservation(max_tokens=120),
}
TENANTS = ("a", "b", "c")


def asks(number: int, tenant: str, prompt: int = 10, computed: int = 0) -> Job:
    return Job(number, 0, prompt, prompt, computed, tenant=tenant)


def order(scheduling: Scheduling, waiting: list[Job], **service: float) -> list[int]:
    state = replace(view([], waiting, pages=1000), service=service)
    return [number for number, _ in sliced(scheduling, state)]


def named(work: Sequence[Request], tenants: Sequence[str] = TENANTS) -> list[Request]:
    """Requests of tenants in turn; those of a session have one."""
    turns = [i if r.session is None else r.session for i, r in enumerate(work)]
    return [
        replace(r, tenant=tenants[turn % len(tenants)]) for r, turn in zip(work, turns, strict=True)
    ]


# ---- the order
def test_the_smallest_counter_is_served_first_and_each_prompt_counts_at_once() -> None:
    waiting = [asks(0, "a"), asks(1, "a"), asks(2, "a"), asks(3, "b"), asks(4, "b")]
    scheduling = Vtc(ChunkedPrefill(1000, 64))
    assert order(scheduling, waiting, a=0, b=5) == [0, 3, 1, 4, 2]
    assert order(scheduling, waiting, a=0, b=25) == [0, 1, 2, 3, 4]
    assert order(scheduling, waiting, a=25, b=0) == [3, 4, 0, 1, 2]
    assert order(scheduling, waiting) == [0, 3, 1, 4, 2], "of equal ones the first to arrive"


def test_a_weight_says_what_a_prompt_counts() -> None:
    waiting = [asks(0, "a", 30), asks(1, "a"), asks(2, "b"), asks(3, "b")]
    assert order(Vtc(ChunkedPrefill(1000, 64)), waiting) == [0, 2, 3, 1]
    assert order(Vtc(ChunkedPrefill(1000, 64), prefill=0.0), waiting) == [0, 1, 2, 3]


def test_prompts_in_service_count_whole() -> None:
    begun = asks(0, "a", 50, computed=2)
    state = view([begun], [asks(1, "a"), asks(2, "b", 20), asks(3, "b")], pages=1000)
    state = replace(state, service={"a": 2.0, "b": 30.0})
    assert sliced(Vtc(ChunkedPrefill(1000, 64)), state) == [(0, 48), (2, 20), (1, 10), (3, 10)]


def test_it_orders_what_another_scheduling_batches() -> None:
    waiting = [asks(0, "a", 60), asks(1, "a", 60), asks(2, "b", 60)]
    assert order(Vtc(ContinuousBatching(120)), waiting) == [0, 2]
    assert order(Vtc(VllmV1(80)), waiting) == [0, 2]
    assert order(ContinuousBatching(120), waiting) == [0, 1]


def test_where_no_order_matters_no_counter_is_read() -> None:
    full = view([asks(0, "a", 50, computed=2)], [asks(1, "a"), asks(2, "b")], pages=1000)
    assert sliced(Vtc(ChunkedPrefill(100, 1)), full) == [(0, 48)]
    alone = view([], [asks(1, "a")], pages=1000)
    assert sliced(Vtc(CHUNKED), alone) == [(1, 10)]
    with pytest.raises(ValueError, match=r"no service is counted.*Traits\(service=\.\.\.\)"):
        sliced(Vtc(CHUNKED), view([], [asks(1, "a"), asks(2, "b")], pages=1000))


def test_every_scheduling_around_it_passes_its_weights_on() -> None:
    fair = Vtc(CHUNKED, decode=3.0)
    assert traits_of(fair) == Traits(step_tokens=48, max_jobs=12, service=fair.weights)
    for around in (CoServe(fair), CoServeSlo(fair), Temporal(fair), Spatial(fair)):
        assert traits_of(around).service == ServiceWeights(1.0, 3.0, 1.0, 1.0)
    assert Composed(fair, PagedRestart()).traits.service == fair.weights


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"decode": -1.0}, "decode is -1.0, must be at least 0"),
        ({"forward": float("inf")}, "forward is inf"),
        ({"prefill": 0.0, "decode": 0.0}, "nothing counts"),
    ],
)
def test_wrong_weights_are_told(given: dict[str, float], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Vtc(CHUNKED, **given)
    with pytest.raises(ValueError, match="it must be a ServiceWeights or None"):
        Traits(service=(1.0, 2.0))  # type: ignore[arg-type]


# ---- the bound
@dataclass(frozen=True)
class Bound:
    """Service of two tenants while both have requests waiting, beside what the theorem allows."""

    widest: float  # of their difference of service, over any stretch of time
    allowed: float
    stretches: int


def bound_of(found: Replay, pair: tuple[str, str], pool_tokens: int, fair: Vtc) -> Bound:
    """Theorem 4.4 of "Fairness in Serving Large Language Models" (Sheng et al., OSDI 2024).

    For clients f and g that are backlogged all through [t1, t2), |W_f - W_g| <= 2 U, with U =
    max(w_p L_input, w_q M): L_input is the longest prompt, and M the most tokens in a batch, here
    the pool, which is reserved for whole answers. As in the paper a prompt is served when its
    request enters the batch, and a token of an answer when it is computed. The first token of an
    answer comes with its prompt here and costs nothing, which only lowers W.
    """
    outcomes, pieces = found.recorder.outcomes, defaultdict[int, list[Piece]](list)
    for step, *_, launch in found.recorder.steps:
        pieces[step] += launch.pieces
    arrivals = deque(sorted((o.arrival_ns, i) for i, o in outcomes.items()))
    asked = {i: o.request for i, o in outcomes.items()}
    waiting, service = Counter[str](), defaultdict[str, float](float)
    widest, low, high, stretches = 0.0, 0.0, 0.0, 0
    backlogged = False
    for step, _, at_ns, *_ in found.recorder.plans:
        while arrivals and arrivals[0][0] <= at_ns:
            waiting[asked[arrivals.popleft()[1]].tenant] += 1
        for piece in pieces[step]:
            request = asked[piece.job_id]
            if not piece.context_tokens:
                waiting[request.tenant] -= 1
                service[request.tenant] += fair.prefill * request.prompt_tokens
            elif piece.context_tokens >= request.prompt_tokens:
                service[request.tenant] += fair.decode
        was, backlogged = backlogged, all(waiting[tenant] > 0 for tenant in pair)
        ahead = service[pair[0]] - service[pair[1]]
        if backlogged:
            low, high = (min(low, ahead), max(high, ahead)) if was else (ahead, ahead)
            widest, stretches = max(widest, high - low), stretches + (not was)
    longest = max([request.prompt_tokens for request in asked.values()])
    allowed = 2 * max(fair.prefill * longest, fair.decode * pool_tokens)
    return Bound(widest, allowed, stretches)


def slices_of(plan: Plan) -> list[Slice]:
    return [piece for op in plan.ops if isinstance(op, Compute) for piece in op.slices]


RESERVED, SEATS = 80, 6  # tokens of a request, and requests at once
POOL_TOKENS = RESERVED * SEATS


def crowd(seed: int) -> list[Request]:
    """Two tenants that mostly have requests waiting, and one that comes and goes."""
    rng = random.Random(seed)
    kinds = {name: (rng.randint(1, 40), rng.randint(1, 40)) for name in TENANTS}
    found = list[Request]()
    for tenant, count in (("a", 90), ("b", 60), ("c", 20)):
        prompt, output = kinds[tenant]
        for i in range(count):
            at_ns = 0 if tenant != "c" and i < 40 else rng.randint(0, 60_000_000)
            lengths = rng.randint(1, prompt), rng.randint(1, output)
            found.append(Request(len(found), at_ns, *lengths, tenant=tenant))
    return found


def reserved(scheduling: Scheduling, work: Sequence[Request], **given: Any) -> Replay:
    policy = Composed(scheduling, MaxReservation(max_tokens=RESERVED))
    return replay(policy, work, pages=POOL_TOKENS // PAGE.tokens, **given).check()


@pytest.mark.broad(4)
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("serving", SERVING)
@pytest.mark.parametrize("weights", [(1.0, 2.0), (1.0, 0.1), (0.25, 1.0)])
def test_service_of_two_tenants_that_wait_differs_by_no_more_than_the_theorem_says(
    serving: str, weights: tuple[float, float], depth: int
) -> None:
    fair, stretches = Vtc(SERVING[serving], *weights), 0
    for seed in range(4):
        found = reserved(fair, crowd(seed), depth=depth, noise=0.3, seed=seed)
        for pair in (("a", "b"), ("a", "c"), ("b", "c")):
            bound = bound_of(found, pair, POOL_TOKENS, fair)
            assert bound.widest <= bound.allowed, (seed, pair, bound)
            stretches += bound.stretches
    assert stretches > 8


def test_first_come_first_served_has_no_such_bound() -> None:
    """The control: all requests of one tenant come before those of the other."""
    work = [Request(i, i // 80, 30, 30, tenant="ab"[i // 80]) for i in range(160)]
    fair = Vtc(CHUNKED)
    plain, kept = (
        bound_of(reserved(scheduling, work), ("a", "b"), POOL_TOKENS, fair)
        for scheduling in (CHUNKED, fair)
    )
    assert kept.widest <= kept.allowed < plain.widest


# ---- laws
@pytest.mark.broad(4)
@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("serving", SERVING)
@given(requests=traces(12, 60), **room(160), **TIMING)
@cases(20)
def test_spared_questions_change_nothing(
    serving: str, memory: str, requests: list[Request], **setting: Any
) -> None:
    """Law 15, on any executor; the tables have the service of tenants, too."""
    policy = Composed(Vtc(SERVING[serving]), MEMORY[memory])
    fast, slow = both_replayed(policy, named(requests), **setting)
    assert fast.engine.asked <= slow.engine.asked
    assert "service" in fast.recorder.tables()
    fast.check()


@pytest.mark.broad(4)
@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("serving", SERVING)
@given(
    requests=st.one_of(traces(12, 60), sessions()),
    host_ns=st.sampled_from([0, 900, 9_000]),
    **room(400),
)
@cases(20)
def test_a_jump_is_the_steps_it_stands_for(
    serving: str, memory: str, requests: list[Request], host_ns: int, **setting: Any
) -> None:
    policy = Composed(Vtc(SERVING[serving]), MEMORY[memory])
    both_simulated(policy, named(requests), Shaped(host_ns), **setting)


@pytest.mark.skipif(not can_be_seen(), reason="reads of compiled classes are not noted")
def test_decodes_without_a_queue_pass_many_steps_at_once() -> None:
    work = named([Request(i, 0, 20 + i, 60) for i in range(6)])
    policy = Composed(Vtc(CHUNKED), PagedRestart())
    how: dict[str, Any] = {"pages": 400, "host_pages": 0, "depth": 1}
    fast, slow = both_simulated(policy, work, Shaped(0), **how)
    assert fast.asked < 0.5 * slow.asked and jumped_steps(fast) > 40


@pytest.mark.broad(2)
@pytest.mark.parametrize("serving", SERVING)
def test_equal_views_get_equal_plans(serving: str) -> None:
    work = named(requests())
    assert check_policy(Composed(Vtc(SERVING[serving]), PagedRestart()), work) > 0
    watched = WatchedPolicy(Composed(Vtc(SERVING[serving]), MaxReservation(120)))
    replay(watched, named(random_requests(3, 30, rate=2000)), pages=60)
    assert watched.asked and not watched.idle_without_a_plan


@pytest.mark.parametrize("depth", [1, 2])
def test_plans_do_not_depend_on_durations(depth: int) -> None:
    """Law 11: counters are as issued."""
    policy, work = Composed(Vtc(CHUNKED), PagedRestart()), named(random_requests(5, 40))
    logs = [
        replay(policy, work, pages=50, depth=depth, noise=noise, seed=seed).log()
        for noise, seed in ((0.0, 0), (0.4, 1), (0.4, 2))
    ]
    assert logs[0] == logs[1] == logs[2]


@dataclass(frozen=True)
class ByFact:
    """Decodes in reverse where a fact of the view is odd, by some unit."""

    fact: str

    @property
    def traits(self) -> Traits:
        return Traits(step_tokens=64, max_jobs=8, service=ServiceWeights())

    def batch(self, view: View) -> tuple[Slice, ...]:
        jobs = [*view.serving, *view.waiting[: 8 - len(view.serving)]]
        if self.fact == "service":
            is_odd = int(sum((view.service or {}).values())) // 40 % 2
        else:
            is_odd = sum(view.first_token_ns(job) is None for job in jobs) % 2
        slices, left = list[Slice](), 64
        for job in reversed(jobs) if is_odd else jobs:
            if tokens := min(job.remaining_tokens, left):
                slices.append(Slice(job, tokens))
                left -= tokens
        return tuple(slices)


@pytest.mark.skipif(not can_be_seen(), reason="reads of compiled classes are not noted")
@pytest.mark.parametrize("fact", ["service", "first_token_ns"])
def test_a_read_that_is_not_noted_would_be_seen(fact: str, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Composed(ByFact(fact), PagedRestart())
    work = named([Request(i, i * 400_000, 20, 60) for i in range(6)])
    how: dict[str, Any] = {"pages": 400, "host_pages": 0, "depth": 2}
    both_simulated(policy, work, Shaped(0), **how)
    monkeypatch.setattr(SeenView, fact, vars(View)[fact])
    fast, slow = (simulated(policy, work, is_fast, Shaped(0), **how) for is_fast in (True, False))
    differs = fast.recorder.tables() != slow.recorder.tables()
    assert differs or fast.asked < slow.asked


# ---- service, and finetuning
def service_of(engine: Engine) -> Mapping[str, dict[str, Any]]:
    """Rows of the table of service by tenant."""
    return {row["tenant"]: row for row in engine.recorder.tables()["service"].to_pylist()}


def test_a_run_tells_what_each_tenant_was_charged() -> None:
    work = named(random_requests(9, 24), ("a", "b"))
    found = replay(Composed(Vtc(CHUNKED), PagedRestart()), work, pages=400, depth=1).check()
    rows = service_of(found.engine)
    for tenant, row in rows.items():
        own = [request for request in work if request.tenant == tenant]
        assert row["prefill_tokens"] == sum([request.prompt_tokens for request in own])
        assert row["decode_tokens"] == sum([request.output_tokens - 1 for request in own])
        assert row["charged"] == row["prefill_tokens"] + 2 * row["decode_tokens"]
        assert row["forward_tokens"] == row["backward_tokens"] == 0
    steps = found.rows("steps")
    for kind in ("prefill_tokens", "decode_tokens"):
        assert sum([row[kind] for row in rows.values()]) == sum([step[kind] for step in steps])


@pytest.mark.parametrize(
    ("around", "memory"),
    [
        (lambda serving: CoServe(serving, BUDGET), CoMemory(PagedRestart())),
        (Temporal, CoMemory(PagedRestart())),
        (Spatial, CoMemory(PagedRestart(), fused=False, lanes=2)),
    ],
    ids=["coserve", "temporal", "spatial"],
)
def test_the_next_sample_is_one_of_the_tenant_with_the_smallest_counter(
    around: Callable[[Scheduling], Scheduling], memory: CoMemory
) -> None:
    """Both jobs have equal samples; the tenant whose requests are served finetunes less."""
    jobs = [
        finetuning_job(1000 + i, [Sample(40)] * 4, num_steps=1 << 20, until_served=True, tenant=t)
        for i, t in enumerate(("a", "b"))
    ]
    serving = ChunkedPrefill(BUDGET, 12)
    work = named([Request(i, 0, 20, 30) for i in range(24)], ("a",))

    def trained(scheduling: Scheduling) -> tuple[Replay, Counter[str]]:
        policy = Composed(around(scheduling), memory)
        layout = layout_of_jobs(jobs, 4000)
        found = replay(policy, [*work, *jobs], pages=4000, page=SMALL_PAGE, layout=layout).check()
        tokens = Counter[str]()
        for plan in found.plans:
            for piece in slices_of(plan):
                if piece.job.training is not None and piece.work is Work.FORWARD:
                    tokens[piece.job.tenant] += piece.tokens
        return found, tokens

    _, plain = trained(serving)
    assert set(plain) == {"a"}, "the first job that has work"
    found, tokens = trained(Vtc(serving))
    assert tokens["b"] > 4 * tokens["a"]
    rows = service_of(found.engine)
    assert (rows["a"]["forward_tokens"], rows["b"]["forward_tokens"]) == (tokens["a"], tokens["b"])
    held = [job.job_id for plan in found.plans for job in plan.restart]
    assert not held
    at = [
        piece.job.job_id for plan in found.plans for piece in slices_of(plan) if piece.job.training
    ]
    turns = 1 + sum(one != other for one, other in pairwise(at))
    samples = sum(tokens.values()) / 40
    assert turns <= samples + 2, "a sample that has begun goes on to its end"


def test_tenants_that_finetune_alone_take_turns() -> None:
    """Behind an update it is the turn of the tenant that has had less; without counters it is the
    first job's alone."""
    jobs = [
        finetuning_job(1000 + i, [Sample(40)] * 12, num_steps=12, tenant=tenant)
        for i, tenant in enumerate(("a", "b"))
    ]
    for scheduling, changes in ((CHUNKED, 1), (Vtc(CHUNKED), 23)):
        policy = Composed(CoServe(scheduling, BUDGET), CoMemory(PagedRestart()))
        layout, work = layout_of_jobs(jobs, 4000), [Request(0, 0, 20, 1), *jobs]
        found = replay(policy, work, pages=4000, page=SMALL_PAGE, layout=layout).check()
        at = [s.job.tenant for plan in found.plans for s in slices_of(plan) if s.job.training]
        assert sum([one != other for one, other in pairwise(at)]) == changes


def test_no_job_has_work_where_none_trains() -> None:
    assert first_with_work(view([], [])) is None


def test_a_pool_of_two_tenants_is_shared_where_first_come_serves_one() -> None:
    """A burst of one tenant: the other one's first tokens come as if it had half of the device."""
    burst = [Request(i, 0, 30, 20, tenant="a") for i in range(60)]
    late = [Request(60 + i, 1_000_000, 30, 20, tenant="b") for i in range(6)]

    def mean_ttft_ns(scheduling: Scheduling) -> float:
        policy = Composed(scheduling, PagedRestart())
        found = replay(policy, [*burst, *late], pages=400, depth=1).check()
        own = [found.recorder.outcomes[request.request_id] for request in late]
        return sum([o.token_ns[0] - o.arrival_ns for o in own]) / len(own)

    assert mean_ttft_ns(Vtc(CHUNKED)) < 0.3 * mean_ttft_ns(CHUNKED)
