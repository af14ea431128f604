"""What progress bars count: requests, steps of training, or both; and when they say nothing."""

from __future__ import annotations

import random

import pytest

from policies.training.all_on_device import AllOnDevice
from sim.cost.piecewise import warn_beyond
from tandem.cli.terminal import amount, done, search_bar
from tests.support.offload import job_of, laid_out, run, shape_of
from traces.serving.request import Request, TrainingJob

SERVED = [Request(i, 0, 4, 4) for i in range(3)]
TRAINED = TrainingJob(9, 0, 5, 8, num_steps=7)


def test_it_counts_what_there_is_to_do() -> None:
    assert amount(SERVED) == (3, "req")
    assert amount([TRAINED]) == (7, "step")
    assert amount([*SERVED, TRAINED]) == (10, "item")


def test_it_is_full_when_all_steps_are_done() -> None:
    shape = shape_of(random.Random(0))
    job = job_of(shape)
    found = run(AllOnDevice(), laid_out(shape), job)
    assert done(found.engine.recorder) == amount([job])[0] == 3


def test_a_search_is_silent_without_a_terminal(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Also about tables that do not reach as far as what it tries."""
    with search_bar("looking") as tried:
        tried()
        warn_beyond("chunk", 1)
    assert not caplog.records and capsys.readouterr() == ("", "")
    warn_beyond("chunk", 1)
    assert len(caplog.records) == 1
