"""The reference clock: fixed work, one factor, and only where it is asked for."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from engine.model import ModelSpec
from runtime.model import build_model
from runtime.reference import EVERY_NS, WINDOW, Pace, Reference, settled_ns
from tandem.compose import composed
from tandem.pace import resolved

SPEC = ModelSpec("tiny", "llama", 2, 64, 2, 2, 32, 128, 256, 512, dtype="float32")
PACED = ("backend=cpu", "backend.reference_ns=auto")


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(build_model(SPEC, seed=0), SPEC)


def test_the_work_is_the_same_whenever_it_is_done(reference: Reference) -> None:
    other = Reference(build_model(SPEC, seed=0), SPEC)
    tokens = reference.work()
    assert len(set(tokens)) <= 8 and tokens == reference.work() == other.work()


def test_a_model_of_few_positions_has_a_shorter_step() -> None:
    short = replace(SPEC, max_positions=32)
    assert settled_ns(Reference(build_model(short, seed=0), short), rounds=2) > 0


def test_a_machine_twice_as_slow_has_half_the_factor(reference: Reference) -> None:
    pace = Pace(1000, reference)
    for usual, factor in ((500, 2.0), (1000, 1.0)):
        pace._times_ns.extend([usual] * (WINDOW - 1) + [9 * usual])
        assert pace.factor == factor, "the median counts, not the hiccup"


def test_a_look_is_due_after_so_much_work_and_not_before(reference: Reference) -> None:
    pace = Pace(1000, reference)
    pace._times_ns.append(1000)  # however busy the machine was
    assert not pace.is_due(EVERY_NS // 2 + 1) and pace.is_due(EVERY_NS // 2 + 1)
    pace.measure()
    assert not pace.is_due(EVERY_NS // 2 + 1)
    pace._times_ns.append(EVERY_NS)  # a large model: a look after each launch would be all we do
    assert not pace.is_due(EVERY_NS) and pace.is_due(9 * EVERY_NS)


def test_no_nominal_time_is_refused(reference: Reference) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Pace(0, reference)


def test_auto_is_what_the_profile_was_measured_with(tmp_path: Path) -> None:
    about = tmp_path / "profile.json"
    about.write_text(json.dumps({"reference_ns": 1_234}))
    config = composed([*PACED, f"profile={tmp_path}"]).config
    assert resolved(config)["backend"]["reference_ns"] == 1_234
    assert config["backend"]["reference_ns"] == "auto", "the given one stays as it is"
    about.write_text(json.dumps({"reference_ns": None}))
    with pytest.raises(ValueError, match="measured in real time"):
        resolved(config)


def test_auto_without_a_profile_says_what_to_do() -> None:
    with pytest.raises(ValueError, match="name one with profile="):
        resolved(composed([*PACED]).config)


def test_a_number_and_a_simulation_are_left_alone() -> None:
    for words in (("backend=cpu", "backend.reference_ns=7"), ("backend=cpu",), ("backend=sim",)):
        config = composed([*words]).config
        assert resolved(config) == config
