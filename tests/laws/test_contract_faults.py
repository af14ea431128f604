"""A sample of the claim benchmarks/correctness/contract_faults.py, and that its judge is strict."""

from __future__ import annotations

import pytest

from benchmarks.correctness.contract_faults import BY_RULE, judged, legal, lies
from engine.contract.rules import ContractError, Rule
from tests.support.broken_books import FAULTS as BROKEN
from tests.support.fault_cases import Told, lie, random_case, tables
from tests.support.faults import FAULTS, Fault

SWAP = random_case(3, "swap")


def test_every_rule_has_lies() -> None:
    assert {*BY_RULE} == {*Rule}


def test_lies_are_refused_or_mean_nothing() -> None:
    sheet = lies(54, seed=7)
    assert sheet.wrong == []
    assert {rule for rule in Rule if sheet.done(rule)} == {*Rule}
    assert sum(sheet.counts[rule]["meant nothing"] for rule in Rule) < 6


def test_legal_replays_finish_with_equal_tables() -> None:
    compared, wrong = legal(24, seed=5)
    assert (compared, wrong) == (12, [])


@pytest.mark.parametrize("name", BROKEN)
def test_a_fault_in_the_books_is_caught(name: str) -> None:
    assert BROKEN[name]()


# ---- the judge
def told(error: BaseException | None, differs: str = "") -> Told:
    engine = SWAP.engine(SWAP.policy())
    engine.replay(SWAP.work)
    return Told(FAULTS["no tokens"], error, 1, engine, differs)


def test_only_an_error_that_names_all_is_a_refusal() -> None:
    error = ContractError(Rule.TOKENS, "0 tokens", 3)
    located = error.located("Liar", 5, 0)
    assert judged(told(located), {}) == ("refused", "")
    assert judged(told(ContractError(Rule.JOB, "whose").located("Liar", 5, 0)), {})[0] == (
        "by another rule"
    )
    assert judged(told(error), {})[0] == "WRONG"
    assert judged(told(located, "free"), {})[0] == "WRONG"
    assert judged(told(ValueError("5")), {})[0] == "WRONG"


def test_an_accepted_lie_may_change_no_table() -> None:
    accepted = told(None)
    assert judged(accepted, tables(accepted.engine))[0] == "meant nothing"
    assert judged(accepted, {})[0] == "WRONG"


def test_a_lie_that_is_believed_is_seen() -> None:
    """An honest plan told later breaks no rule: tables differ, and the judge says so."""
    late = Fault("an empty plan", (Rule.ANSWER,), lambda scene: type(scene.plan)())
    engine = SWAP.engine(SWAP.policy())
    engine.replay(SWAP.work)
    verdicts = {judged(lie(SWAP, late, at, 0), tables(engine))[0] for at in range(8)}
    assert "WRONG" in verdicts
