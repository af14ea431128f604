"""Inputs of layers that wait for their backward on the host: what the device keeps without them."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.usage import pools
from engine.contract.layout import Mode
from engine.contract.plan import Copy
from engine.contract.regions import Kind, Tier
from tandem.cli.plan_command import PlannedRun, plan_run
from tandem.config.compose import composed
from tests.support.offload import MEMORIES, job_of, laid_out, min_device_bytes, run, shape_of
from tests.support.strategies import cases
from tests.training.trainings import train

LAYERS, INPUT_BYTES = 6, 4 * 64 * 256 * 4  # of a microbatch
JOB = ("trace=none", "training=random", "model=tiny_llama", f"model.num_layers={LAYERS}")
JOB += ("training.sequences=4", "training.sequence_tokens=64", "planner.modes=recompute")
OUT = "planner.offloads_inputs=true"
SHORT = ("model.vocab_size=100", "training.num_steps=2")


def foreseen(policy: str, *words: str) -> PlannedRun:
    return plan_run(composed([*JOB, f"policy={policy}", *words, "backend=sim"]))


@pytest.mark.broad(2)
@pytest.mark.parametrize("policy", ["zero_offload", "zero3_offload", "fsdp2_offload"])
def test_the_device_keeps_none_of_them(policy: str) -> None:
    most = [activations(foreseen(policy, *words)) for words in ((), (OUT,))]
    assert most[0] - most[1] >= (LAYERS - 1) * INPUT_BYTES, "all but one that comes or goes"


def activations(found: PlannedRun) -> int:
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


@cases(100)
@given(
    seed=st.integers(0, 1 << 16),
    layers=st.integers(1, 5),
    trained=st.sampled_from([{}, {"tied": True}, {"adapters": True}, {"frozen_units": 2}]),
    mode=st.sampled_from([*Mode]),
    microbatches=st.sampled_from([1, 2, 4]),
    name=st.sampled_from([name for name in MEMORIES if name != "all_on_device"]),
    depth=st.integers(1, 3),
    tasks=st.integers(0, 3),
)
def test_they_need_no_more_of_the_device(
    seed: int,
    layers: int,
    trained: dict[str, Any],
    mode: Mode,
    microbatches: int,
    name: str,
    depth: int,
    tasks: int,
) -> None:
    """Where it trains with all inputs there it trains without; laws and contents: `run`."""
    shape = shape_of(random.Random(seed), layers=layers, **trained)
    job = job_of(shape, microbatches=microbatches)
    layouts = [laid_out(shape, mode, offloads_inputs=sends) for sends in (False, True)]
    least = min_device_bytes(layouts[0].training[0], job, name == "zero_offload", True)
    found = run(MEMORIES[name], layouts[1], job, gpu=least, depth=depth, tasks=tasks)
    assert found.recorder.trained_steps == job.num_steps


def test_those_of_layers_that_keep_stay() -> None:
    found = [foreseen("zero3_offload", "planner.modes=keep", *words) for words in ((), (OUT,))]
    assert activations(found[0]) == activations(found[1])
