"""What an out-of-memory line advises: knobs of the pool that is short, and none that is set."""

from __future__ import annotations

import pytest

from engine.plan import Tier
from policies.out_of_memory import OutOfMemory, knobs_of_launch, knobs_of_states
from tests.trainings import setting, train

INPUTS_OUT = "send layers' inputs to the host (planner.offloads_inputs=true)"


def advised(tier: Tier, *words: str) -> str:
    """The knobs for launches of such a job, in a line."""
    found = setting(*words)
    job = found.trainees[0].job
    return "; ".join(knobs_of_launch(tier, job, found.room.layout.training[job.job_id]))


def test_of_a_device_it_names_what_its_activations_are_made_of() -> None:
    kept = advised(Tier.GPU, "policy=zero3_offload", "planner.modes=keep")
    assert "training.sequences" in kept and "planner.modes=recompute" in kept
    assert "chunks" not in kept and "lora" not in kept, "its chunks are units"
    words = ("policy=zero3_offload", "planner.modes=recompute", "training.sequences=1")
    shorter = "take shorter sequences (training.sequence_tokens)"
    assert advised(Tier.GPU, *words) == f"{shorter}; {INPUTS_OUT}"
    assert advised(Tier.GPU, *words, "planner.offloads_inputs=true") == shorter
    out = advised(Tier.HOST, *words, "planner.offloads_inputs=true")
    assert "planner.offloads_inputs=false" in out
    assert "planner.chunk_elements" in advised(
        Tier.GPU, "policy=patrickstar", "planner.chunk_elements=40000"
    )


def test_of_a_host_it_names_states_and_what_is_offloaded() -> None:
    words = ("policy=zero3_offload", "planner.modes=recompute", "training.sequences=1")
    assert advised(Tier.HOST, *words) == "train adapters (training/recipe=lora)"
    assert "planner.modes=recompute" in advised(
        Tier.HOST, "policy=zero3_offload", "planner.modes=offload"
    )
    assert not advised(Tier.HOST, *words, "training/recipe=lora")


def test_of_states_it_names_where_else_they_may_lie() -> None:
    assert knobs_of_states("device")[0] == "take planner.start=host"
    assert knobs_of_states("host_first") == ("take a smaller model",)


def test_the_line_says_so_where_a_job_fails() -> None:
    words = ("planner.modes=recompute", "training.sequences=1", "policy=zero3_offload")
    with pytest.raises(OutOfMemory, match=r"states .*give it more memory, or take planner.start="):
        setting(*words, "budget.host_bytes=300000")
    with pytest.raises(OutOfMemory) as caught:
        train("sim", *words, "budget.device_bytes=60000")
    line = str(caught.value)
    assert line.startswith("gpu:0 is at least") and "\n" not in line
    assert "recompute" not in line and "training.sequences)" not in line
    assert line.endswith(f", or take shorter sequences (training.sequence_tokens), or {INPUTS_OUT}")
