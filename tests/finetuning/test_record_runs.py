"""Whole runs with records: equal plans, tokens of generate, and gradients of what was served."""

from __future__ import annotations

import math

import pytest

from engine.contract.records import is_adoption
from tests.finetuning.test_co_serving_runs import SMALL, Run, run_of

OTHERS = ("training.data.", "training=", "training.until_served", "policy=", "scheduling.")
WORDS = (
    *[word for word in SMALL if not word.startswith((*OTHERS, "arrival", "trace.requests"))],
    *("policy=alchemist", "training=feedback", "training.data.chance=0.7", "trace.requests=16"),
    *("training.data.delay_s=0.01", "arrival=poisson", "arrival.rate=100", "scheduling.record=all"),
    *("adapters.count=1", "adapters.rank=4", "training.publish=a0", "training.recipe.lora_rank=4"),
    *("training.microbatches=4", "scheduling.sharing.token_budget=40"),
    "training.recipe.learning_rate=0.05",
)
ROOMY = ("scheduling.sharing.token_budget=4000",)  # each prompt is one slice
BACKENDS = ("lockstep", "cpu", "cpu backend.clock=wall")


def used(found: Run) -> int:
    """How many samples have started behind a record."""
    return sum([is_adoption(op) for row in found.recorder.plans for op in row[-1].ops])


@pytest.mark.parametrize(
    "words", [(), ("memory.records.offload=false",), ("planner.modes=recompute",)], ids=str
)
def test_lockstep_decides_as_a_simulation(words: tuple[str, ...]) -> None:
    found = run_of("lockstep", (*WORDS, *words))
    assert found.log == run_of("sim", (*WORDS, *words)).log
    assert used(found) > 3 and not any(math.isnan(loss) for loss in found.losses)


@pytest.mark.parametrize("words", [(), ("memory.records.offload=false",)], ids=str)
def test_a_record_changes_no_loss(words: tuple[str, ...]) -> None:
    """What serving has kept is what the job would compute: by other windows, so nearly."""
    found = run_of("lockstep", (*WORDS, *words))
    plain = run_of("lockstep", (*WORDS, "scheduling.record=none"))
    assert used(found) and not used(plain)
    assert len(found.losses) == len(plain.losses)
    assert sorted(found.losses) == pytest.approx(sorted(plain.losses), rel=1e-4)
