"""Policies that lie are caught where they lie, in every backend, in one line; nothing finishes."""

from __future__ import annotations

import re

import pytest

from engine.contract.rules import ContractError
from engine.loop.engine import Stalled
from tests.support.faults import FAULTS
from tests.support.lies import BACKENDS, SERVED, SHARED, TRAINED, tell


def refused(name: str, backend: str) -> None:
    """One line that names policy, step and rule; the books are as before; nothing finishes."""
    told, lie = tell(name, backend), FAULTS[name]
    assert told.lies == 1, "the moment for it never came"
    error = told.error
    assert isinstance(error, ContractError), repr(error)
    assert error.rule in lie.rules, error
    line = str(error)
    assert "\n" not in line
    assert re.match(rf"policy Liar \(\S+\.py:\d+\), step {error.step}, ", line), line
    assert error.policy == "Liar" and line.endswith(f"(rule: {error.rule})")
    assert not lie.is_written or "answers.py:" in error.at, line
    assert told.differs == "", "the books are as before the plan"
    assert name in TRAINED or told.finished < len(told.engine.recorder.outcomes)


@pytest.mark.parametrize("name", [*SERVED, *SHARED, *TRAINED])
def test_the_simulator_believes_no_lie(name: str) -> None:
    refused(name, "sim")


@pytest.mark.broad(6)
@pytest.mark.parametrize("backend", ["lockstep", "cpu"])
@pytest.mark.parametrize("name", [*SERVED, *SHARED, *TRAINED])
def test_no_backend_that_works_believes_a_lie(name: str, backend: str) -> None:
    refused(name, backend)


@pytest.mark.broad(2)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_moment_that_is_asked_for_for_ever_is_a_stall(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.loop.engine.FRUITLESS", 500)
    told = tell("wakes for ever", backend)
    assert isinstance(told.error, Stalled), repr(told.error)
    assert "\n" not in str(told.error)
