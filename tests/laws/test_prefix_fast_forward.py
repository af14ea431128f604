"""Law 15 with prefix caching: jumps leave the same tables, the same pages and the same keys."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.contract.policy import Traits
from policies.composed import Composed
from policies.scheduling.earliest_deadline import EarliestDeadline
from tests.support.jumps import Shaped, both_replayed, both_simulated, kept, simulated
from tests.support.prefixes import MEMORY, SCHEDULING, alike_or_not
from tests.support.strategies import TIMING, cases, room
from traces.serving.request import Request

COMBINATIONS = [
    *((scheduling, "v1") for scheduling in ("chunked", "continuous", "orca", "deadline")),
    *(("v1", memory) for memory in MEMORY),
]


@pytest.mark.parametrize(("scheduling", "memory"), COMBINATIONS)
@given(requests=alike_or_not(), **room(160), **TIMING)
@cases(25)
def test_repeated_plans_leave_the_same_pages_and_keys(
    scheduling: str, memory: str, requests: list[Request], **setting: Any
) -> None:
    policy = Composed(SCHEDULING[scheduling], MEMORY[memory])
    fast, slow = both_replayed(policy, requests, **setting)
    assert kept(fast.engine) == kept(slow.engine)


@pytest.mark.parametrize(("scheduling", "memory"), COMBINATIONS)
@given(requests=alike_or_not(), host_ns=st.sampled_from([0, 900, 9_000]), **room(400))
@cases(25)
def test_a_jump_leaves_the_same_pages_and_keys(
    scheduling: str, memory: str, requests: list[Request], host_ns: int, **setting: Any
) -> None:
    policy = Composed(SCHEDULING[scheduling], MEMORY[memory])
    fast, slow = both_simulated(policy, requests, Shaped(host_ns), **setting)
    assert kept(fast) == kept(slow)


class Promising(EarliestDeadline):
    """Promises what holds of one prompt under way: it goes on until another finds room."""

    @property
    def traits(self) -> Traits:
        return Traits(repeats=True, step_tokens=self.token_budget)


@pytest.mark.parametrize("guarded", [True, False])
def test_a_waiting_job_may_share_what_a_prompt_under_way_fills(
    guarded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its prompt does not fit, until another has computed it: that must end a run."""
    if not guarded:
        monkeypatch.setattr("engine.fast_forward.standing_plan.has_prompt", lambda plan: False)
    prompt = tuple(range(160))
    requests = [
        Request(0, 0, 160, 30, prompt_ids=prompt),
        Request(1, 1, 160, 30, slo="urgent", prompt_ids=prompt),
    ]
    scheduling = Promising(priority={"urgent": -1}, token_budget=12)
    policy = Composed(scheduling, MEMORY["v0"])  # all pages of a prompt are taken at once
    fast, slow = (
        simulated(policy, requests, f, Shaped(0), pages=60, host_pages=0, depth=1)
        for f in (True, False)
    )
    found = slow.recorder.outcomes[1].cached_tokens
    assert 80 <= found < 150, "it came in while the other was under way"
    assert (fast.recorder.tables() == slow.recorder.tables()) is guarded
