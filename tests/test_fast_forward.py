"""Law 15: a plan that holds for many steps gives what asking at every step gives, byte for byte."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.policy import Composed
from policies.chunked_prefill import ChunkedPrefill
from policies.continuous_batching import ContinuousBatching
from policies.earliest_deadline import EarliestDeadline
from policies.max_reservation import MaxReservation
from policies.orca import Orca
from policies.paged_restart import PagedRestart
from policies.paged_swap import PagedSwap
from policies.static_batching import StaticBatching
from policies.vllm_v1 import VllmV1
from tests.replays import replay
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
