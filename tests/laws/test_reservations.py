"""`kv_growth="reserved"` is checked where a plan is repeated: reserved KV holds the steps ahead."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from engine.contract.plan import Slice
from engine.contract.policy import PlanBuilder, Traits
from engine.contract.regions import Tier, kv_place
from engine.contract.rules import ContractError, Rule, defined_at
from engine.contract.view import View
from engine.loop.engine import Engine
from engine.loop.state import VirtualClock
from engine.results.recorder import Recorder
from policies.composed import Composed
from policies.kv.max_reservation import MaxReservation
from policies.kv.paged_restart import PagedRestart
from policies.scheduling.chunked_prefill import ChunkedPrefill
from tests.support.jumps import Shaped, both_simulated
from tests.support.lies import PAGE, SPEC, executor_for
from tests.support.serving import short_requests
from traces.serving.request import Request

REQUESTS = short_requests(6, SPEC.vocab_size)
LONGEST = max(r.prompt_tokens + r.output_tokens for r in REQUESTS)
PAGES = len(REQUESTS) * PAGE.count(LONGEST)


@dataclass(frozen=True)
class PageByPage(PagedRestart):
    """It takes a page whenever the last one is full, and declares reservations."""

    declared: int = LONGEST

    @property
    def traits(self) -> Traits:
        return Traits(kv_growth="reserved", reserved_tokens=self.declared)


@dataclass(frozen=True)
class PromptAlone:
    """It takes the pages of a prompt and no more."""

    declared: int = LONGEST

    @property
    def traits(self) -> Traits:
        return Traits(kv_growth="reserved", reserved_tokens=self.declared)

    def fit(self, batch: tuple[Slice, ...], view: View, plan: PlanBuilder) -> None:
        places = [kv_place(piece.job.job_id, Tier.GPU, view.device) for piece in batch]
        for piece, place in zip(batch, places, strict=True):
            if not plan.holds(place):
                plan.grow(place, view.page.bytes_for(piece.job.prompt_tokens))
        plan.compute(batch, places)


def ended(memory: Any, backend: str, fast_forward: bool, depth: int = 2) -> ContractError | None:
    """What a replay under a memory policy ended with; None where it has finished."""
    env = VirtualClock()
    engine = Engine(
        env,
        Composed(ChunkedPrefill(), memory),
        executor_for(backend, env, REQUESTS, PAGES),
        {(Tier.GPU, 0): PAGES * PAGE.nbytes, (Tier.HOST, 0): PAGES * PAGE.nbytes},
        PAGE,
        depth=depth,
        recorder=Recorder(),
        fast_forward=fast_forward,
    )
    try:
        engine.replay(REQUESTS)
    except ContractError as error:
        return error
    return None


@pytest.mark.parametrize("backend", ["sim", "lockstep"])
@pytest.mark.parametrize("memory", [PageByPage(), PromptAlone()])
def test_a_false_reservation_is_refused_where_its_plan_is_repeated(
    memory: Any, backend: str
) -> None:
    error = ended(memory, backend, fast_forward=True)
    assert error is not None and error.rule is Rule.KV_PAGES
    assert (error.step, error.device, error.job_id is None) == (0, 0, False)
    line = str(error)
    told = f"policy ChunkedPrefill with {type(memory).__name__} ({defined_at(type(memory).fit)})"
    assert line.startswith(f"{told}, step 0, device 0")
    assert f'Traits(kv_growth="reserved", reserved_tokens={LONGEST}) do not hold' in line
    assert line == str(ended(memory, "sim", fast_forward=True, depth=1))


@pytest.mark.parametrize("backend", ["sim", "lockstep"])
def test_a_decode_past_its_pages_is_refused_step_by_step(backend: str) -> None:
    error = ended(PromptAlone(), backend, fast_forward=False)
    assert error is not None and error.rule is Rule.KV_PAGES and error.step


@pytest.mark.parametrize("backend", ["sim", "lockstep"])
@pytest.mark.parametrize("fast_forward", [False, True])
def test_no_job_outgrows_what_is_declared_without_a_word(fast_forward: bool, backend: str) -> None:
    """Jobs that are longer than the declared reservation are asked for at each step."""
    memory = PromptAlone(declared=1)
    error = ended(memory, backend, fast_forward)
    assert error is not None and str(error) == str(ended(memory, "sim", fast_forward=False))


def test_reservations_that_hold_are_repeated() -> None:
    assert ended(MaxReservation(LONGEST), "lockstep", fast_forward=True) is None
    requests = [Request(i, 0, 20, 40) for i in range(6)]
    policy = Composed(ChunkedPrefill(), MaxReservation(60))
    setting = {"pages": 100, "host_pages": 0, "depth": 2}
    fast, slow = both_simulated(policy, requests, Shaped(0), **setting)
    assert fast.asked < 0.1 * slow.asked
