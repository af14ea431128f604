"""Law 15 with prefix caching: jumps leave the same tables, the same pages and the same keys."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.engine import Engine
from engine.policy import Composed
from policies.earliest_deadline import EarliestDeadline
from tests.prefixes import traces
from tests.replays import replay
from tests.test_fast_forward import Shaped, page_tables, simulated
from tests.test_prefix_laws import MEMORY, SCHEDULING
from traces.request import Request

COMBINATIONS = [
    *((scheduling, "v1") for scheduling in ("chunked", "continuous", "orca", "deadline")),
    *(("v1", memory) for memory in MEMORY),
]
quick = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize(("scheduling", "memory"), COMBINATIONS)
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
    policy = Composed(SCHEDULING[scheduling], MEMORY[memory])
    fast, slow = (replay(policy, requests, fast_forward=f, **setting) for f in (True, False))
    assert fast.recorder.tables() == slow.recorder.tables()
    assert kept(fast.engine) == kept(slow.engine)


@pytest.mark.parametrize(("scheduling", "memory"), COMBINATIONS)
@given(
    requests=traces,
    pages=st.integers(31, 400),
    host_pages=st.integers(0, 40),
    depth=st.integers(1, 3),
    host_ns=st.sampled_from([0, 900, 9_000]),
)
@quick
def test_a_jump_is_the_steps_it_stands_for(
    scheduling: str, memory: str, requests: list[Request], host_ns: int, **setting: Any
) -> None:
    policy = Composed(SCHEDULING[scheduling], MEMORY[memory])
    fast, slow = (simulated(policy, requests, f, Shaped(host_ns), **setting) for f in (True, False))
    assert fast.recorder.tables() == slow.recorder.tables()
    assert (fast.steps, fast.env.now) == (slow.steps, slow.env.now)
    assert kept(fast) == kept(slow)
    theirs = page_tables(slow)
    assert all(tables == theirs[step] for step, tables in page_tables(fast).items())


@pytest.mark.parametrize("guarded", [True, False])
def test_whoever_waits_may_share_what_a_prompt_under_way_fills(
    guarded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its prompt does not fit, until another has computed it: that must end a run."""
    if not guarded:
        monkeypatch.setattr("policies.seating.has_prompt", lambda plan: False)
    prompt = tuple(range(160))
    requests = [
        Request(0, 0, 160, 30, prompt_ids=prompt),
        Request(1, 1, 160, 30, slo="urgent", prompt_ids=prompt),
    ]
    scheduling = EarliestDeadline(priority={"urgent": -1}, token_budget=12)
    policy = Composed(scheduling, MEMORY["v0"])  # all pages of a prompt are taken at once
    fast, slow = (
        simulated(policy, requests, f, Shaped(0), pages=60, host_pages=0, depth=1)
        for f in (True, False)
    )
    found = slow.recorder.outcomes[1].cached_tokens
    assert 80 <= found < 150, "it came in while the other was under way"
    assert (fast.recorder.tables() == slow.recorder.tables()) is guarded


def kept(engine: Engine) -> object:
    """Which pages hold what, and in which order equal ones would be found."""
    caches = [sharing.cache for sharing in engine.ledger.sharing.values()]
    return [(c._keys, {key: [*pages] for key, pages in c._pages.items()}) for c in caches]
