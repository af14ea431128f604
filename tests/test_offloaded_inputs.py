"""Inputs of layers that wait for their backward on the host: what the device keeps without them."""

from __future__ import annotations

import pytest

from analysis.usage import pools
from engine.plan import Copy, Kind, Tier
from tandem.compose import composed
from tandem.foresight import Foresight, foresee
from tests.trainings import train

LAYERS, INPUT_BYTES = 6, 4 * 64 * 256 * 4  # of a microbatch
JOB = ("trace=none", "training=random", "model=tiny_llama", f"model.num_layers={LAYERS}")
JOB += ("training.sequences=4", "training.sequence_tokens=64", "planner.modes=recompute")
OUT = "planner.offloads_inputs=true"
SHORT = ("model.vocab_size=100", "training.num_steps=2")


def foreseen(policy: str, *words: str) -> Foresight:
    return foresee(composed([*JOB, f"policy={policy}", *words, "backend=sim"]))


@pytest.mark.parametrize("policy", ["zero_offload", "zero3_offload", "fsdp2_offload"])
def test_the_device_keeps_none_of_them(policy: str) -> None:
    most = [activations(foreseen(policy, *words)) for words in ((), (OUT,))]
    assert most[0] - most[1] >= (LAYERS - 1) * INPUT_BYTES, "all but one that comes or goes"


def activations(found: Foresight) -> int:
    return int(pools(found.run)["gpu:0"]["activation_bytes"].max())


@pytest.mark.parametrize("mode", ["recompute", "offload"])
def test_each_goes_out_once_and_comes_back_once(mode: str) -> None:
    """Of all layers and the head, but for the head's: its backward follows at once."""
    words = (*JOB, *SHORT, "policy=zero3_offload", f"planner.modes={mode}", OUT)
    found = train("sim", *words)
    ops = [op for *_, plan in found.recorder.plans for op in plan.ops if isinstance(op, Copy)]
    inputs = [op for op in ops if op.src.region.kind is Kind.ACTIVATION]
    inputs = [op for op in inputs if op.src.region.part >= LAYERS + 2]
    out = [op for op in inputs if op.src.tier is Tier.GPU]
    assert len(out) == len(inputs) - len(out) == 2 * LAYERS


def test_those_of_layers_that_keep_stay() -> None:
    found = [foreseen("zero3_offload", "planner.modes=keep", *words) for words in ((), (OUT,))]
    assert activations(found[0]) == activations(found[1])
