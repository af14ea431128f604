"""Law 12: every memory policy trains what plain torch trains, to the bit, in a sixth of the memory."""

from __future__ import annotations

import pytest

from tests.trainings import GPU, differing, plain, setting, state_bytes, train

POLICIES = (
    "zero3_offload",
    "fsdp2_offload",
    "train_lru",
    "train_fifo",
    "train_opt",
    "patrickstar",
)
WHOLE = ("train_on_device", "zero_offload")  # all weights lie on the device
RECIPE = ("recipe.clip_norm=0.5", "recipe.dropout=0.1", "training.microbatches=2")


def in_recipe(*overrides: str) -> tuple[str, ...]:
    return tuple(f"training.{word}" if word.startswith("recipe") else word for word in overrides)


@pytest.mark.parametrize("policy", [*POLICIES, *WHOLE])
@pytest.mark.parametrize("backend", ["lockstep", "cpu"])
def test_a_policy_trains_as_plain_torch(policy: str, backend: str) -> None:
    recipe = in_recipe(*RECIPE)
    found = train(backend, f"policy={policy}", *recipe)
    assert not differing(found.result, plain(f"policy={policy}", *recipe))


@pytest.mark.parametrize("policy", POLICIES)
def test_it_does_so_in_a_sixth_of_the_memory_of_its_states(policy: str) -> None:
    tight = ("model=tiny_llama", "training.sequence_tokens=8", "training.sequences=1")
    whole = state_bytes(setting(f"policy={policy}", *tight))
    found = train("lockstep", f"policy={policy}", *tight, f"budget.device_bytes={whole // 6}")
    assert not differing(found.result, plain(f"policy={policy}", *tight))
    rows = found.recorder.tables()["memory"].to_pylist()
    held = [r["capacity_bytes"] - r["free_bytes"] - r["coming_bytes"] for r in rows if r["tier"] == "gpu"]
    assert max(held) <= whole // 6 == found.setting.room.capacity_bytes[GPU]
