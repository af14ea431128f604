"""Every policy of conf that trains composes, is built, and trains a made-up job."""

from __future__ import annotations

import random

import pytest

from engine.contract.regions import Tier
from engine.laws.check_policy import WatchedPolicy
from policies.composed import Composed
from tandem.config.build import Builder
from tandem.config.compose import composed
from tests.support.offload import ROOMY, job_of, shape_of, trained

TRAINING = (
    "train_on_device",
    "zero_offload",
    "zero3_offload",
    "fsdp2_offload",
    "train_lru",
    "train_fifo",
    "train_opt",
    "patrickstar",
    "time_shared",
)


@pytest.mark.broad(4)
@pytest.mark.parametrize("mode", ["keep", "recompute", "offload"])
@pytest.mark.parametrize("name", TRAINING)
def test_policy_trains(name: str, mode: str) -> None:
    """And law 8 is watched at every question."""
    words = [f"policy={name}", f"planner.modes={mode}"]
    if name == "patrickstar":
        words.append("planner.chunk_elements=60")
    config, builder = composed(words).config, Builder()
    planner = builder.build(config["planner"], "planner")
    halves = [builder.build(config[half], half) for half in ("scheduling", "memory")]
    shape = shape_of(random.Random(1), layers=4)
    job, capacity = job_of(shape), {(Tier.GPU, 0): ROOMY, (Tier.HOST, 0): ROOMY}
    layout = planner.prepare({0: shape}, [job], capacity, None)
    watched = WatchedPolicy(Composed(*halves))
    trained(watched, [job], layout)
    assert watched.asked > 0
