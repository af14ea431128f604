"""A stretched plan never runs out of pages: its growth against counting it step by step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.contract.plan import Compute, Slice
from engine.contract.view import View
from engine.fast_forward.horizon import horizon, stretched
from engine.fast_forward.repeated_plan import StretchedPlan
from policies.composed import Composed
from policies.kv.max_reservation import MaxReservation
from policies.kv.paged_restart import PagedRestart
from policies.scheduling.chunked_prefill import ChunkedPrefill
from policies.scheduling.continuous_batching import ContinuousBatching
from tests.support.states import PAGE, V0, V1, decoding, job, view
from tests.support.strategies import cases
from tests.support.stretches import grows_at, slices_at, stretch

SCHEDULING = {
    "chunked": ChunkedPrefill(token_budget=16, max_jobs=9),
    "continuous": ContinuousBatching(token_budget=64, max_jobs=9),
}
MEMORY = {"v0": V0, "v1": V1, "restart": PagedRestart(), "reservation": MaxReservation(60)}
WALKED = 200  # steps that are counted
FAR = 10_000  # pages that no plan needs in so many steps

states = st.fixed_dictionaries(
    {
        "contexts": st.lists(st.tuples(st.integers(1, 40), st.integers(0, 2)), max_size=4),
        "begun": st.lists(st.tuples(st.integers(1, 20), st.integers(1, 50)), max_size=1),
        "prompts": st.lists(st.integers(1, 60), max_size=3),
        "free": st.one_of(st.integers(0, 60), st.just(FAR)),
    }
)


def state_of(
    contexts: Sequence[tuple[int, int]],
    begun: Sequence[tuple[int, int]],
    prompts: Sequence[int],
    free: int,
    reserved: int = 0,
) -> View:
    """Decodes that hold pages to spare, a prompt that has begun, prompts that wait; free pages."""
    jobs = [decoding(i, context) for i, (context, _) in enumerate(contexts)]
    held = {i: PAGE.count(c) + spare for i, (c, spare) in enumerate(contexts)}
    for done, left in begun:
        jobs.append(job(len(jobs), done + left, done))
        held[len(jobs) - 1] = PAGE.count(done)
    if reserved:
        held = dict.fromkeys(held, reserved)
    waiting = [job(10 + i, tokens) for i, tokens in enumerate(prompts)]
    return view(jobs, waiting, sum(held.values()) + free, held)


class Walk:
    """The jobs of a stretched plan, moved step by step with the pages that it gives them."""

    def __init__(self, made: StretchedPlan, state: View) -> None:
        self.made = made
        self.pages = {p.region.owner: n // PAGE.nbytes for p, n in state.held_bytes.items()}
        self.computed = {s.job.job_id: s.job.computed_tokens for s in made.launch.slices}
        self.known = {s.job.job_id: s.job.known_tokens for s in made.launch.slices}
        self.taken: list[int] = []  # pages, step by step

    def lack(self, step: int) -> str:
        """Goes on by a step; says what is wrong in it."""
        grows = grows_at(self.made, step)
        self.taken.append(sum(op.nbytes for op in grows) // PAGE.nbytes)
        for op in grows:
            owner = op.place.region.owner
            self.pages[owner] = self.pages.get(owner, 0) + op.nbytes // PAGE.nbytes
        for piece in slices_at(self.made, step):
            if found := self._move(piece):
                return f"step {step}: {found}"
        return ""

    def _move(self, piece: Slice) -> str:
        i, tokens = piece.job.job_id, piece.tokens
        if not 0 < tokens <= self.known[i] - self.computed[i]:
            return f"job {i} has {tokens} tokens of {self.known[i] - self.computed[i]}"
        self.computed[i] += tokens
        if self.computed[i] > self.pages[i] * PAGE.tokens:
            return f"job {i} has {self.pages[i]} pages for {self.computed[i]} tokens"
        self.known[i] += self.computed[i] == self.known[i]
        return ""

    def spare(self) -> dict[int, int]:
        """Whole pages that jobs do not need yet."""
        return {i: self.pages[i] - PAGE.count(n) for i, n in self.computed.items()}


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("scheduling", SCHEDULING)
@given(given=states)
@cases(150)
def test_no_step_lacks_a_page_or_takes_one_too_many(
    scheduling: str, memory: str, given: dict[str, Any]
) -> None:
    policy = Composed(SCHEDULING[scheduling], MEMORY[memory])
    reserved = PAGE.count(60) if memory == "reservation" else 0
    state = state_of(**given, reserved=reserved)
    plan = policy.plan(state)
    if not plan.ops or not isinstance(plan.ops[-1], Compute):
        return
    made = stretch(policy, state)
    walk, spare_pages = Walk(made, state), policy.traits.spare_pages
    decodes = {job.job_id for job in state.serving if not job.is_prefilling}
    before = {**walk.pages}
    for step in range(min(made.steps, WALKED)):
        assert walk.lack(step) == ""
        grown = {i for i, pages in walk.pages.items() if pages > before.get(i, 0)}
        before = {**walk.pages}
        if not reserved and made.steps > 1:  # a page that is taken is needed at once
            assert not any(walk.spare()[i] for i in grown & decodes)
    if made.steps > 1:
        assert sum(walk.taken) <= given["free"] - spare_pages


@pytest.mark.parametrize("memory", MEMORY)
@given(given=states)
@cases(150)
def test_decodes_go_on_while_there_are_pages(memory: str, given: dict[str, Any]) -> None:
    """To the very step at which the first of them finds none, or outgrows its reservation; perhaps
    to an earlier one where a job holds pages to spare."""
    reserved = PAGE.count(60) if memory == "reservation" else 0
    given |= {"begun": (), "prompts": ()}
    state, roomy = (
        state_of(**given | {"free": free}, reserved=reserved) for free in (given["free"], FAR)
    )
    policy = Composed(SCHEDULING["chunked"], MEMORY[memory])
    plan, traits = policy.plan(state), policy.traits
    if not plan.ops or plan.restart or horizon(plan, state, traits.appends).steps == 1:
        return
    walk = Walk(stretch(policy, roomy), roomy)
    expected = 0
    while expected < WALKED:
        longest = max(walk.known.values())  # a job's known tokens must find room in what it has
        if reserved and longest > 60:
            break
        assert walk.lack(expected) == ""
        if not reserved and sum(walk.taken) > given["free"] - traits.spare_pages:
            break
        expected += 1
    made = stretched(plan, state, horizon(plan, state, traits.appends), traits, None)
    found, expected = min(1 if made is None else made.steps, WALKED), max(1, expected)
    has_spare = not reserved and any(spare for _, spare in given["contexts"])
    assert found == expected or (has_spare and found < expected)


def test_the_walk_sees_a_page_that_is_lacking() -> None:
    """A page that comes a step late, or never, and a slice beyond its prompt."""
    state = state_of([(7, 0), (9, 1)], (), (), 60)
    made = stretch(Composed(SCHEDULING["chunked"], V1), state)
    late = [replaced(made, first=op.first + 1, i=i) for i, op in enumerate(made.grows)]
    assert made.cycle is None and late, "one holds a page to spare"
    for wrong in (*late, made._replace(grows=made.grows[1:])):
        walk = Walk(wrong, state)
        assert any(walk.lack(step) for step in range(20))
    walk = Walk(made._replace(later=((2, (Slice(state.serving[1], 2),)),)), state)
    assert [bool(walk.lack(step)) for step in range(3)] == [False, False, True]


def replaced(made: StretchedPlan, first: int, i: int) -> StretchedPlan:
    """A plan with one growth at another step."""
    grows = [*made.grows]
    grows[i] = grows[i]._replace(first=first)
    return made._replace(grows=tuple(grows))


@pytest.mark.parametrize(("free", "spare_pages", "steps"), [(1, 0, 5), (3, 0, 13), (3, 1, 9)])
def test_free_pages_are_steps(free: int, spare_pages: int, steps: int) -> None:
    """Of 4 tokens each, behind the one that has room in the last page."""
    state, memory = state_of([(3, 0)], (), (), free), replace(V1, spare_pages=spare_pages)
    assert stretch(Composed(SCHEDULING["chunked"], memory), state).steps == steps
