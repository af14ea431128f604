"""Law 15: a plan that holds for many steps gives what asking at every step gives, byte for byte."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import simpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.engine import Engine
from engine.plan import PageSize, Tier
from engine.policy import Composed
from engine.recorder import Recorder
from policies.chunked_prefill import ChunkedPrefill
from policies.continuous_batching import ContinuousBatching
from policies.earliest_deadline import EarliestDeadline
from policies.max_reservation import MaxReservation
from policies.orca import Orca
from policies.paged_restart import PagedRestart
from policies.paged_swap import PagedSwap
from policies.static_batching import StaticBatching
from policies.vllm_v1 import VllmV1
from sim.cost import ShapePriced
from sim.executor import SimExecutor
from tests.replays import PAGE, replay
from traces.request import Request

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
    "reservation": MaxReservation(max_tokens=120),
}
quick = settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
traces = st.lists(
    st.tuples(st.integers(0, 30_000_000), st.integers(1, 80), st.integers(1, 60)),
    min_size=1,
    max_size=20,
).map(lambda rows: [Request(i, *row) for i, row in enumerate(rows)])


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("scheduling", SCHEDULING)
@given(
    requests=traces,
    pages=st.integers(31, 160),
    host_pages=st.integers(0, 40),
    depth=st.integers(1, 3),
    noise=st.sampled_from([0.0, 0.4]),
    host_ns=st.sampled_from([0, 30_000]),
)
@quick
def test_repeated_plans_are_what_would_be_decided(
    scheduling: str, memory: str, requests: list[Request], **setting: Any
) -> None:
    """Any executor: each step is issued without a question, and nothing recorded differs."""
    policy = Composed(SCHEDULING[scheduling], MEMORY[memory])
    fast, slow = (replay(policy, requests, fast_forward=f, **setting) for f in (True, False))
    assert fast.recorder.tables() == slow.recorder.tables()
    assert fast.engine.asked <= slow.engine.asked
    fast.check()


class Shaped(ShapePriced):
    """A made-up cost by shape, with a workspace and, if asked for, a host."""

    form, provenance = "made up", "a test"

    def __init__(self, host_ns: int) -> None:
        self._host_ns, self.model = host_ns, self

    def shape_ns(self, tokens: Sequence[int], contexts: Sequence[int], samples: int) -> int:
        return 50_000 + 1_000 * sum(tokens) + 37 * sum(contexts) + 11 * samples

    def transfer_ns(self, direction: str, nbytes: int, contended: bool = False) -> int:
        return 20 * nbytes

    def plan_ns(self, items: int, prompts: int = 0) -> int:
        return self._host_ns * (1 + items + 3 * prompts)

    def workspace_bytes(
        self, tokens: Sequence[int], contexts: Sequence[int], samples: int, page_tokens: int
    ) -> int:
        return sum(tokens) + max(contexts) + page_tokens


def simulated(
    policy: Composed,
    requests: Sequence[Request],
    fast_forward: bool,
    cost: Any,
    pages: int,
    host_pages: int,
    depth: int,
    page: PageSize = PAGE,
) -> Engine:
    env, recorder = simpy.Environment(), Recorder()
    capacity = {(Tier.GPU, 0): pages * page.nbytes, (Tier.HOST, 0): host_pages * page.nbytes}
    engine = Engine(
        env,
        policy,
        SimExecutor(env, cost),
        capacity,
        page,
        depth=depth,
        recorder=recorder,
        fast_forward=fast_forward,
    )
    engine.replay(requests)
    return engine


sessions = st.lists(
    st.tuples(
        st.integers(0, 30_000_000),
        st.lists(
            st.tuples(st.integers(1, 60), st.integers(1, 60), st.integers(0, 9_000_000)),
            min_size=1,
            max_size=4,
        ),
    ),
    min_size=1,
    max_size=8,
)


def turns(rows: Any) -> list[Request]:
    """Requests of sessions: each turn comes when the one before is answered and thought over."""
    found: list[Request] = []
    for session, (arrival_ns, items) in enumerate(rows):
        for turn, (prompt, output, think_ns) in enumerate(items):
            found.append(
                Request(
                    len(found),
                    arrival_ns,
                    prompt,
                    output,
                    session=session,
                    turn=turn,
                    think_ns=think_ns,
                )
            )
    return found


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("scheduling", SCHEDULING)
@given(
    requests=st.one_of(traces, sessions.map(turns)),
    pages=st.integers(31, 400),
    host_pages=st.integers(0, 40),
    depth=st.integers(1, 3),
    host_ns=st.sampled_from([0, 900, 9_000]),
)
@quick
def test_a_jump_is_the_steps_it_stands_for(
    scheduling: str, memory: str, requests: list[Request], host_ns: int, **setting: Any
) -> None:
    """In simulation many steps pass at once; not a byte of the tables differs, nor a stamp."""
    policy = Composed(SCHEDULING[scheduling], MEMORY[memory])
    fast, slow = (simulated(policy, requests, f, Shaped(host_ns), **setting) for f in (True, False))
    assert fast.recorder.tables() == slow.recorder.tables()
    assert (fast.steps, fast.env.now) == (slow.steps, slow.env.now)
    assert fast.ledger._stamp == slow.ledger._stamp
    theirs = page_tables(slow)
    assert all(tables == theirs[step] for step, tables in page_tables(fast).items())
    for i, outcome in fast.recorder.outcomes.items():
        other = slow.recorder.outcomes[i]
        assert outcome.tokens == other.tokens
        assert outcome.first_token_ns == other.first_token_ns
        assert outcome.last_token_ns == other.last_token_ns


def page_tables(engine: Engine) -> dict[int, list[list[int]]]:
    """Page ids of all jobs in each launch that was issued alone, as they were in the end.

    Launches of a run have no page tables, also those that settle alone at its end.
    """
    launches = ((row[0], row[-1].pieces) for row in engine.recorder._steps)
    tables = ((step, [list(piece.pages) for piece in pieces]) for step, pieces in launches)
    return {step: ids for step, ids in tables if any(ids)}


def test_most_steps_are_jumped_and_files_are_equal(tmp_path: Path) -> None:
    """The property above is not about nothing: few questions, and identical Parquet files."""
    requests = [Request(i, i * 9_000_000, 30 + i, 200) for i in range(12)]
    policy = Composed(SCHEDULING["chunked"], MEMORY["restart"])
    for depth in (1, 2, 3):
        runs = {f: simulated(policy, requests, f, Shaped(700), 900, 0, depth) for f in (1, 0)}
        assert runs[1].asked < 0.2 * runs[0].asked
        assert runs[1].asked <= 1.5 * len(requests), "a prompt and all its decodes are one answer"
        assert runs[1].jump is not None and runs[1].jump.steps > 0.6 * runs[1].steps
        for name, run in runs.items():
            (tmp_path / f"{depth}{name}").mkdir()
            run.recorder.write(tmp_path / f"{depth}{name}")
        for path in (tmp_path / f"{depth}0").iterdir():
            assert path.read_bytes() == (tmp_path / f"{depth}1" / path.name).read_bytes()
