"""Memory of training outside of regions stays small, and does not grow from step to step."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from runtime.training.trainer import Trainer
from tandem.config.compose import composed
from tandem.wiring.backends import backend_of
from tandem.wiring.experiment import engine_of
from tandem.wiring.run_spec import run_spec_of
from tests.support.pressure import CLIP, DROPOUT, FROZEN, POLICIES
from tests.training.trainings import SMALL

STEPS, MICROBATCHES, LOSS_BYTES = 6, 2, 4
SMALL_CHANGE_BYTES = 64 * 1024  # tables of angles, token ids, the state of the job's generator


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["keep", "recompute", "offload"])
@pytest.mark.parametrize("policy", POLICIES)
def test_memory_outside_of_regions_is_small(
    policy: str, mode: str, monkeypatch: pytest.MonkeyPatch, small_heap: None
) -> None:
    """Found by the collector's census at the end of each step. Losses, 4 bytes each, are kept
    as results."""
    beside = unclaimed(monkeypatch, *POLICIES[policy], f"planner.modes={mode}", CLIP, DROPOUT)
    assert len(beside) == STEPS
    assert beside[0] >= 0 and max(beside) <= SMALL_CHANGE_BYTES
    assert beside[-1] - beside[0] <= (STEPS - 1) * MICROBATCHES * LOSS_BYTES


@pytest.mark.slow
def test_frozen_units_that_draw_leave_nothing(
    monkeypatch: pytest.MonkeyPatch, small_heap: None
) -> None:
    """Dropout in units without a backward."""
    beside = unclaimed(monkeypatch, *POLICIES["zero3_offload"], DROPOUT, FROZEN)
    assert beside[-1] - beside[0] <= (STEPS - 1) * MICROBATCHES * LOSS_BYTES


@pytest.mark.slow
def test_the_census_sees_what_a_trainer_hides(
    monkeypatch: pytest.MonkeyPatch, small_heap: None
) -> None:
    """A copy of a storage behind the store's back."""
    hidden: list[torch.Tensor] = []
    beside = unclaimed(monkeypatch, *POLICIES["zero3_offload"], hidden=hidden)
    assert beside[-1] - beside[0] >= (STEPS - 1) * hidden[0].nbytes


def unclaimed(
    monkeypatch: pytest.MonkeyPatch, *words: str, hidden: list[torch.Tensor] | None = None
) -> list[int]:
    """Bytes that neither the store nor its graphs hold at the end of each step of a lockstep run;
    each step adds 10 kB to `hidden`."""
    job = (f"training.num_steps={STEPS}", f"training.microbatches={MICROBATCHES}")
    found = run_spec_of(composed([*SMALL, *job, *words, "backend=lockstep"]))
    seen: list[int] = []
    ends = Trainer._end_step

    with backend_of(found, {"name": "lockstep", "clock": "virtual"}) as world:
        meter = world.meter
        assert meter is not None

        def end(trainer: Trainer, step: int) -> None:
            ends(trainer, step)
            if hidden is not None:
                hidden.append(torch.zeros(10_000, dtype=torch.uint8))
            seen.append(meter.unclaimed_bytes())

        monkeypatch.setattr(Trainer, "_end_step", end)
        engine_of(found, world).replay(found.work)
    return seen
