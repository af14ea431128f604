"""Law 15: a plan that holds for many steps gives what asking at every step gives, byte for byte."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.contract.plan import Plan
from engine.contract.policy import Traits
from engine.contract.regions import Tier
from engine.contract.view import View
from engine.loop.engine import Engine
from engine.loop.state import VirtualClock
from engine.results.recorder import Recorder
from policies.composed import Composed
from policies.kv.max_reservation import MaxReservation
from policies.kv.paged_restart import PagedRestart
from policies.kv.paged_swap import PagedSwap
from policies.scheduling.chunked_prefill import ChunkedPrefill
from policies.scheduling.continuous_batching import ContinuousBatching
from policies.scheduling.earliest_deadline import EarliestDeadline
from policies.scheduling.orca import Orca
from policies.scheduling.static_batching import StaticBatching
from policies.scheduling.vllm_v1 import VllmV1
from tests.support.jumps import Shaped, both_replayed, both_simulated, jumped_steps, simulated
from tests.support.replays import PAGE, ToyExecutor
from tests.support.strategies import TIMING, cases, room, sessions, traces
from traces.serving.request import Request

SCHEDULING = {
    "static": StaticBatching(max_jobs=6),
    "continuous": ContinuousBatching(token_budget=128, max_jobs=12),
    "vllm_v0": ContinuousBatching(token_budget=200, max_jobs=12, padded=True, by_arrival=True),
    "chunked": ChunkedPrefill(token_budget=24, max_jobs=12),
    "orca": Orca(max_jobs=8),
    "v1": VllmV1(token_budget=24, max_jobs=12),
    "deadline": EarliestDeadline(token_budget=24, max_jobs=12),
}
MEMORY = {
    "restart": PagedRestart(),
    "reserved": PagedRestart(prompts="reserved", spare_pages=1, gives_way=True),
    "must_fit": PagedRestart(0.0, prompts="must_fit", gives_way=True),
    "swap": PagedSwap(),
    "passing": PagedSwap(swapped_first=False),
    "reservation": MaxReservation(max_tokens=120),
}


@pytest.mark.broad(4)
@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("scheduling", SCHEDULING)
@given(requests=traces(12, 60), **room(160), **TIMING)
@cases(30)
def test_repeated_plans_are_what_would_be_decided(
    scheduling: str, memory: str, requests: list[Request], **setting: Any
) -> None:
    """Any executor: each step is issued without a question, and nothing recorded differs."""
    policy = Composed(SCHEDULING[scheduling], MEMORY[memory])
    fast, slow = both_replayed(policy, requests, **setting)
    assert fast.engine.asked <= slow.engine.asked
    fast.check()


class OtherNames(ToyExecutor):
    """An executor with attributes that only look like abilities."""

    repeat = "three times"
    end_times_ns = hold = None


def test_an_executor_knows_its_durations_by_its_class_alone() -> None:
    policy, requests = Composed(ChunkedPrefill(), PagedRestart()), [Request(0, 0, 20, 60)]
    ended_ns = []
    for kind in (ToyExecutor, OtherNames):
        env, recorder = VirtualClock(), Recorder()
        pools = {(Tier.GPU, 0): 60 * PAGE.nbytes}
        engine = Engine(env, policy, kind(env), pools, PAGE, depth=1, recorder=recorder)
        engine.replay(requests)
        ended_ns.append([span.end_ns for span in recorder.spans])
    assert ended_ns[0] == ended_ns[1]


@pytest.mark.broad(2)
@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("scheduling", SCHEDULING)
@given(
    requests=st.one_of(traces(12, 60), sessions()),
    host_ns=st.sampled_from([0, 900, 9_000]),
    **room(400),
)
@cases(30)
def test_a_jump_is_the_steps_it_stands_for(
    scheduling: str, memory: str, requests: list[Request], host_ns: int, **setting: Any
) -> None:
    """In simulation many steps pass at once; not a byte of the tables differs, nor a stamp."""
    policy = Composed(SCHEDULING[scheduling], MEMORY[memory])
    fast, slow = both_simulated(policy, requests, Shaped(host_ns), **setting)
    assert fast.ledger._board.stamp == slow.ledger._board.stamp
    for i, outcome in fast.recorder.outcomes.items():
        other = slow.recorder.outcomes[i]
        assert outcome.tokens == other.tokens
        assert outcome.first_token_ns == other.first_token_ns
        assert outcome.last_token_ns == other.last_token_ns


class Round(Shaped):
    """Durations and host times of whole microseconds, a few of each."""

    def shape_ns(self, tokens: Sequence[int], contexts: Sequence[int], samples: int) -> int:
        return 1_000 * (1 + len(tokens) % 3 + sum(contexts) // 37 % 3)

    def plan_ns(self, items: int, prompts: int = 0) -> int:
        return self._host_ns * (1 + items % 2)


@pytest.mark.broad(2)
@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("scheduling", SCHEDULING)
@given(
    rows=st.lists(
        st.tuples(
            st.integers(0, 20),
            st.lists(
                st.tuples(st.integers(1, 40), st.integers(1, 20), st.integers(0, 3)),
                min_size=1,
                max_size=4,
            ),
        ),
        min_size=1,
        max_size=6,
    ),
    host_us=st.sampled_from([0, 1, 2, 9]),
    depth=st.integers(1, 5),
    pages=st.sampled_from([31, 60, 400]),
)
@cases(30)
def test_at_a_tie_a_jump_sees_what_single_steps_see(
    scheduling: str,
    memory: str,
    rows: list[tuple[int, list[tuple[int, int, int]]]],
    host_us: int,
    depth: int,
    pages: int,
) -> None:
    """Arrivals, ends, turns of sessions and the host's readiness fall on one moment often."""
    _check_ties(scheduling, memory, rows, host_us, depth, pages)


Rows = list[tuple[int, list[tuple[int, int, int]]]]  # arrival, turns: prompt, output, think time


def _check_ties(
    scheduling: str, memory: str, rows: Rows, host_us: int, depth: int, pages: int
) -> None:
    requests: list[Request] = []
    for session, (arrival_us, turns) in enumerate(rows):
        for turn, (prompt, output, think_us) in enumerate(turns):
            times = (session, turn, 1_000 * think_us)
            requests.append(Request(len(requests), 1_000 * arrival_us, prompt, output, *times))
    policy = Composed(SCHEDULING[scheduling], MEMORY[memory])
    both_simulated(policy, requests, Round(1_000 * host_us), pages=pages, host_pages=0, depth=depth)


@pytest.mark.parametrize(
    ("scheduling", "memory", "rows", "host_us", "depth"),
    [
        (
            "v1",
            "restart",
            [(14, [(1, 1, 0)]), (17, [(1, 1, 0)]), (2, [(1, 1, 0), (1, 5, 0)])],
            0,
            1,
        ),
        (
            *("vllm_v0", "reservation"),
            [
                (0, [(1, 1, 0), (1, 2, 0), (1, 2, 0)]),
                (17, [(1, 1, 0)]),
                (0, [(1, 3, 0), (1, 1, 1)]),
            ],
            *(1, 2),
        ),
        ("chunked", "swap", [(0, [(1, 4, 0)]), (1, [(1, 1, 0)]), (7, [(1, 1, 0)])], 1, 3),
        (
            *("deadline", "restart"),
            [(0, [(26, 3, 0)]), (0, [(22, 3, 0)]), (12, [(1, 1, 0)]), (0, [(1, 1, 0)])],
            *(2, 2),
        ),
        (  # a step settles alone where memory has come back behind a run
            *("vllm_v0", "reserved"),
            [(18, [(1, 3, 0), (5, 5, 0), (5, 4, 0)]), (17, [(1, 5, 3), (22, 5, 1)])],
            *(2, 3),
        ),
    ],
)
def test_an_end_an_arrival_and_the_hosts_readiness_at_one_moment(
    scheduling: str, memory: str, rows: Rows, host_us: int, depth: int
) -> None:
    """Ties that jumps once saw in another order: the end comes first, then what was set first."""
    for pages in (31, 60):
        _check_ties(scheduling, memory, rows, host_us, depth, pages)


def test_an_open_step_that_settles_alone_comes_before_an_arrival_of_its_moment() -> None:
    """No run follows where no job is left, and the next turn of one that ends comes at once."""
    rows = [
        (2_000, 1, 13, 0, 0, 0),
        (2_000, 12, 4, 0, 1, 0),
        (2_000, 63, 10, 0, 2, 0),
        (2_000, 22, 15, 1, 0, 0),
        (0, 9, 15, 2, 0, 0),
        (0, 18, 19, 2, 1, 6_000),
        (2_000, 23, 13, 3, 0, 0),
    ]
    requests = [Request(i, *row) for i, row in enumerate(rows)]
    policy = Composed(SCHEDULING["chunked"], MEMORY["reservation"])
    both_simulated(policy, requests, Round(0), pages=160, host_pages=100, depth=4)


def test_most_steps_are_jumped_and_files_are_equal(tmp_path: Path) -> None:
    """The property above is not about nothing: few questions, and identical Parquet files."""
    requests = [Request(i, i * 9_000_000, 30 + i, 120) for i in range(12)]
    policy = Composed(SCHEDULING["chunked"], MEMORY["restart"])
    for depth in (1, 2, 3):
        runs = {f: simulated(policy, requests, f, Shaped(700), 900, 0, depth) for f in (1, 0)}
        assert runs[1].asked < 0.2 * runs[0].asked
        assert runs[1].asked <= 1.5 * len(requests), "a prompt and all its decodes are one answer"
        assert jumped_steps(runs[1]) == runs[1].steps, f"at run-ahead {depth} too"
        for name, run in runs.items():
            (tmp_path / f"{depth}{name}").mkdir()
            run.recorder.write(tmp_path / f"{depth}{name}")
        for path in (tmp_path / f"{depth}0").iterdir():
            assert path.read_bytes() == (tmp_path / f"{depth}1" / path.name).read_bytes()


def test_run_ahead_takes_as_few_runs_as_one_plan_in_flight() -> None:
    requests = [Request(i, i * 9_000_000, 30 + i, 120) for i in range(12)]
    policy = Composed(SCHEDULING["chunked"], MEMORY["restart"])
    one, *others = [simulated(policy, requests, True, Shaped(700), 900, 0, d) for d in (1, 2, 3)]
    for run in others:
        assert run.asked == one.asked
        assert len(run.recorder._facts.runs) == len(one.recorder._facts.runs)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_an_end_without_a_waiting_job_takes_no_run_and_no_event(depth: int) -> None:
    """A run goes on behind ends: as many runs, events and questions as for one end of all."""
    policy, told = Composed(SCHEDULING["continuous"], MEMORY["restart"]), []
    for more in (0, 5):
        requests = [Request(i, 0, 10, 20 + more * i) for i in range(12)]
        run = simulated(policy, requests, True, Shaped(700), 900, 0, depth)
        runs = run.recorder._facts.runs
        told.append((len(runs), run.asked, next(run.state.env._eid)))
        contexts = [leg.pieces.contexts for later in runs[1:] for leg in later.segments]
        assert not any([c.tail for c in contexts[1:]]), "the jobs in decode move together"
    assert told[0] == told[1]


class Pauses(Composed):
    """Promises nothing, asks for a moment with plan 6, and plans nothing once two plans later."""

    @property
    def traits(self) -> Traits:
        return Traits()

    def plan(self, view: View) -> Plan:
        plan = super().plan(view)
        if view.issued == 6:
            return Plan(plan.ops, plan.restart, plan.refuse, wake_ns=view.now_ns + 1)
        return Plan() if view.issued == 8 and view.in_flight else plan


class Even(Shaped):
    """Every launch takes the same time."""

    def shape_ns(self, tokens: Sequence[int], contexts: Sequence[int], samples: int) -> int:
        return 700


@pytest.mark.parametrize("depth", [2, 3, 4])
def test_memory_that_comes_back_behind_a_run_has_its_row_where_no_plan_follows(depth: int) -> None:
    """Also where a step that was issued alone settles while the run passes."""
    requests = [Request(0, 0, 4, 6), Request(1, 0, 4, 30)]
    policy = Pauses(SCHEDULING["continuous"], MEMORY["restart"])
    both_simulated(policy, requests, Even(1_000), pages=100, host_pages=0, depth=depth)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_run_stops_where_an_end_releases_a_turn(depth: int) -> None:
    """The turn arrives with the end: no later step is issued without a question."""
    policy = Composed(SCHEDULING["chunked"], MEMORY["restart"])
    rows = [(0, 10, 20, 0, 0), (0, 10, 90, 1, 0), (0, 10, 5, 0, 1)]
    requests = [Request(i, *row) for i, row in enumerate(rows)]
    both_simulated(policy, requests, Shaped(0), pages=900, host_pages=0, depth=depth)
    plain = [Request(i, *row[:3]) for i, row in enumerate(rows[:2])]
    run = simulated(policy, plain, True, Shaped(0), 900, 0, depth)
    assert len(run.recorder._facts.runs) == 1, "without sessions the end of one cuts nothing"


@pytest.mark.broad(2)
@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("kind", [ChunkedPrefill, VllmV1])
@given(
    requests=st.one_of(traces(16, 30), sessions()),
    budget=st.sampled_from([6, 10, 24]),
    host_ns=st.sampled_from([0, 900]),
    **room(90),
)
@cases(30)
def test_prompts_that_take_the_budget_go_on_as_they_would_be_decided(
    kind: type, memory: str, requests: list[Request], budget: int, host_ns: int, **setting: Any
) -> None:
    """Jobs arrive behind them and end before them, and pages run out: tables are equal."""
    policy = Composed(kind(budget, 12), MEMORY[memory])
    fast, slow = both_simulated(policy, requests, Shaped(host_ns), **setting)
    assert fast.asked <= slow.asked


def test_an_end_before_a_prompt_that_takes_the_budget_is_no_question() -> None:
    """The prompt takes its token: as many questions as if the job had gone on."""
    policy, asked = Composed(SCHEDULING["chunked"], MEMORY["restart"]), []
    for tokens in (40, 6, 7):
        requests = [Request(0, 0, 4, tokens), Request(1, 0, 300, 2), Request(2, 0, 9, 2)]
        fast, _ = both_simulated(policy, requests, Shaped(0), pages=900, host_pages=0, depth=1)
        asked.append(fast.asked)
    assert asked == [asked[0]] * 3


@pytest.mark.parametrize("depth", [1, 2])
def test_an_arrival_behind_a_prompt_that_takes_the_budget_is_no_question(depth: int) -> None:
    """It has no token before the prompt ends: as many questions as if it had come just then."""
    policy, asked = Composed(SCHEDULING["chunked"], MEMORY["restart"]), []
    for at_ns in (0, 300_000, 600_000):
        requests = [Request(0, 0, 240, 4), Request(1, at_ns, 30, 4)]
        runs = both_simulated(policy, requests, Shaped(0), pages=900, host_pages=0, depth=depth)
        asked.append(runs[0].asked)
    assert asked == [asked[0]] * 3
