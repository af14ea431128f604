"""Training jobs of every kind under every policy, and the least memory that they train in."""

from __future__ import annotations

from functools import cache

from engine.contract.regions import Tier
from policies.training.out_of_memory import DoesNotFit
from tandem.cli.plan_command import KEYS, Need, min_budget_of, plan_run
from tandem.config.compose import composed
from tandem.config.composed_config import ComposedConfig
from tests.training.trainings import SMALL, run_spec, state_bytes

Words = tuple[str, ...]

JOB = (
    "model.num_layers=8",
    "training.sequence_tokens=8",
    "training.sequences=1",
    "training.num_steps=2",
)
STREAMING = ("zero3_offload", "fsdp2_offload", "train_lru", "train_fifo", "train_opt")
WHOLE = ("train_on_device", "zero_offload")  # all weights lie on the device
POLICIES: dict[str, Words] = {name: (f"policy={name}",) for name in (*STREAMING, *WHOLE)}
POLICIES["patrickstar"] = (  # chunks of half a layer
    "policy=patrickstar",
    "planner.chunk_elements=15000",
    "planner.oversize=alone",
)

LORA = "training/recipe=lora"
BF16 = "training.recipe.dtype=bfloat16"
CLIP = "training.recipe.clip_norm=0.5"
DROPOUT = "training.recipe.dropout=0.1"
FROZEN = "training.recipe.frozen_units=2"  # the embedding and the first layer
TIED = "model.tie_embeddings=true"
SGD = "training/recipe=sgd"
LORA_SGD = "training.recipe.optimizer=sgd"  # a recipe of adapters, moved by SGD

# Every mode of activations with every accumulation; LoRA, bfloat16 and neither once with each of
# either; all else with and without. Each policy meets every case.
CASES: dict[str, Words] = {
    f"{mode}-{count}": (f"planner.modes={mode}", f"training.microbatches={count}", *traits)
    for mode, count, *traits in (
        ("keep", 1, LORA, CLIP, DROPOUT),
        ("keep", 2, BF16, CLIP, TIED),
        ("keep", 4, CLIP, DROPOUT, TIED),
        ("recompute", 1, FROZEN, DROPOUT),
        ("recompute", 2, LORA, CLIP, FROZEN),
        ("recompute", 4, BF16, DROPOUT, FROZEN),
        ("offload", 1, BF16, CLIP, DROPOUT),
        ("offload", 2, CLIP, TIED),
        ("offload", 4, LORA, DROPOUT, TIED),
    )
}

# Every mode of activations x full or LoRA x every accumulation, in fp32: the others of the
# contract's traits are spread over it, so that each meets each mode, full or LoRA.
GRID: dict[str, Words] = {
    f"{mode}-{'lora' if LORA in traits else 'full'}-{count}": (
        f"planner.modes={mode}",
        f"training.microbatches={count}",
        *traits,
    )
    for mode, count, *traits in (
        ("keep", 1, CLIP, DROPOUT),
        ("keep", 2, CLIP, TIED),
        ("keep", 4, FROZEN),
        ("recompute", 1, DROPOUT, TIED),
        ("recompute", 2, CLIP, FROZEN),
        ("recompute", 4, SGD, DROPOUT),
        ("offload", 1, FROZEN, TIED),
        ("offload", 2, DROPOUT),
        ("offload", 4, SGD, CLIP),
        ("keep", 1, LORA, LORA_SGD),
        ("keep", 2, LORA, DROPOUT, FROZEN),
        ("keep", 4, LORA, CLIP, TIED),
        ("recompute", 1, LORA, CLIP, DROPOUT),
        ("recompute", 2, LORA, TIED),
        ("recompute", 4, LORA, FROZEN),
        ("offload", 1, LORA, CLIP),
        ("offload", 2, LORA, FROZEN),
        ("offload", 4, LORA, DROPOUT, TIED),
    )
}


def job_of(policy: str, *traits: str) -> Words:
    """The job under a policy, with what it can do in a sixth: PatrickStar cuts LoRA's states, which
    are little more than the frozen weights, in smaller chunks."""
    finer = ("planner.chunk_elements=3000",) if policy == "patrickstar" and LORA in traits else ()
    return (*JOB, *POLICIES[policy], *finer, *traits)


def has_sixth(policy: str, *traits: str) -> bool:
    """Whether a policy trains in a sixth of the model's states; for others see `pressing`."""
    return policy not in WHOLE and not (LORA in traits and "planner.modes=keep" in traits)


def budget(need: Need) -> Words:
    """The overrides that give so much memory."""
    return tuple(f"budget.{KEYS[tier]}={nbytes}" for tier, nbytes in need.items())


def refusal(*words: str) -> DoesNotFit | None:
    """Why the simulator does not train this; None where it does."""
    try:
        plan_run(_point(*words))
    except DoesNotFit as error:
        return error
    return None


@cache
def min_budget(*words: str) -> Need:
    """The least memory that the search of `tandem plan` finds, from next to nothing on."""
    nothing = budget({Tier.GPU: 1, Tier.HOST: 1})
    return _min_budget(*words, *nothing)


@cache
def pressing(*words: str) -> Words:
    """The words with a sixth of the model's states on the device, or the least that does.

    A layout with all weights on the device needs more than a sixth. So does LoRA that keeps
    activations: its states are little more than the frozen weights, and activations come on top.
    """
    sixth = budget({Tier.GPU: state_bytes(run_spec(*words)) // 6})
    if refusal(*words, *sixth) is None:
        return (*words, *sixth)
    return (*words, *budget({Tier.GPU: _min_budget(*words, *sixth)[Tier.GPU]}))


def _min_budget(*words: str) -> Need:
    refused = refusal(*words)
    assert refused is not None, "there is no pressure"
    need = min_budget_of(_point(*words), refused)
    assert need is not None
    return need


def _point(*words: str) -> ComposedConfig:
    return composed([*SMALL, *words, "backend=sim"])
