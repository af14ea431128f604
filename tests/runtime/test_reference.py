"""The reference clock: fixed work, one factor, and only where it is asked for."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from engine.contract.job import Job
from engine.contract.plan import Slice
from models.spec import ModelSpec
from runtime.measure.reference import (
    DECODES,
    EVERY_NS,
    PROMPT_TOKENS,
    WINDOW,
    ClockPace,
    Gauge,
    Reference,
    references,
    settled_ns,
)
from runtime.serving.model import build_model
from tandem.config.compose import composed
from tandem.wiring.backends import resolved

SPEC = ModelSpec("tiny", "llama", 2, 64, 2, 2, 32, 128, 256, 512, dtype="float32")
PACED = ("backend=cpu", "backend.reference_ns=auto")


Works = tuple[Reference, Reference]


@pytest.fixture(scope="module")
def works() -> Works:
    return references(build_model(SPEC, seed=0), SPEC)


@pytest.fixture
def clock_pace(works: Works) -> ClockPace:
    """The pace of a machine that does either work in its nominal 1,000 ns."""
    return slowed(ClockPace((1000, 1000), works), 1000, 1000)


def slowed(clock_pace: ClockPace, decode_ns: int, prompt_ns: int) -> ClockPace:
    for _ in range(WINDOW):
        clock_pace._decode.note(decode_ns)
        clock_pace._prompt.note(prompt_ns)
    return clock_pace


def slices(decodes: int, prompt_tokens: int) -> list[Slice]:
    prompt = [Slice(Job(decodes, 0), prompt_tokens)] if prompt_tokens else []
    return [*(Slice(Job(i, 0), 1) for i in range(decodes)), *prompt]


def test_the_works_are_the_same_whenever_they_are_done(works: Works) -> None:
    others = references(build_model(SPEC, seed=0), SPEC)
    for work, other, jobs in zip(works, others, (DECODES, 1), strict=True):
        tokens = work.work()
        assert len(tokens) == jobs and tokens == work.work() == other.work()


def test_a_model_of_few_positions_has_shorter_works() -> None:
    short = replace(SPEC, max_positions=32)
    assert min(settled_ns(references(build_model(short, seed=0), short), rounds=2)) > 0


def test_a_machine_twice_as_slow_has_half_the_factor(works: Works) -> None:
    gauge = Gauge(1000, works[0])
    for usual, slowdown in ((500, 0.5), (1000, 1.0), (2000, 2.0)):
        for taken in [usual] * (WINDOW - 1) + [9 * usual]:
            gauge.note(taken)
        assert gauge.slowdown == slowdown, "the median counts, not the hiccup"


def test_a_launch_is_slowed_as_what_it_is_made_of(clock_pace: ClockPace) -> None:
    slowed(clock_pace, 2000, 1250)  # a neighbour on the memory
    assert (
        clock_pace.factor == clock_pace.factor_of(()) == clock_pace.factor_of(slices(3, 0)) == 0.5
    )
    assert clock_pace.factor_of(slices(0, 77)) == 0.8
    half = clock_pace.factor_of(slices(DECODES, PROMPT_TOKENS))  # nominally as long in each
    assert half == pytest.approx(2 / (2 + 1.25))
    assert 0.5 < clock_pace.factor_of(slices(2 * DECODES, PROMPT_TOKENS)) < half < 0.8


def test_a_look_is_due_after_so_much_work_and_not_before(clock_pace: ClockPace) -> None:
    assert not clock_pace.is_due(EVERY_NS // 2 + 1) and clock_pace.is_due(EVERY_NS // 2 + 1)
    clock_pace.measure()
    slowed(clock_pace, 1000, 1000)  # however busy the machine was
    assert not clock_pace.is_due(EVERY_NS // 2 + 1)
    slowed(clock_pace, EVERY_NS, EVERY_NS)  # a look after each launch would take all the time
    assert not clock_pace.is_due(EVERY_NS) and clock_pace.is_due(9 * EVERY_NS)


def test_no_nominal_time_is_refused(works: Works) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        ClockPace((1000, 0), works)


def test_auto_is_what_the_profile_was_measured_with(tmp_path: Path) -> None:
    about = tmp_path / "profile.json"
    about.write_text(json.dumps({"reference_ns": [1_234, 5_678]}))
    config = composed([*PACED, f"profile={tmp_path}"]).config
    assert resolved(config)["backend"]["reference_ns"] == [1_234, 5_678]
    assert config["backend"]["reference_ns"] == "auto", "the given one stays as it is"
    for other, told in ((None, "measured in real time"), (1_234, "calibrate anew")):
        about.write_text(json.dumps({"reference_ns": other}))
        with pytest.raises(ValueError, match=told):
            resolved(config)


def test_auto_without_a_profile_says_what_to_do() -> None:
    with pytest.raises(ValueError, match="name one with profile="):
        resolved(composed([*PACED]).config)


def test_a_number_and_a_simulation_are_left_alone() -> None:
    for words in (
        ("backend=cpu", "backend.reference_ns=[7,8]"),
        ("backend=cpu",),
        ("backend=sim",),
    ):
        config = composed([*words]).config
        assert resolved(config) == config
