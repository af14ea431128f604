"""Recipes: learning rates are those of transformers; a wrong recipe is refused in one line."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import get_scheduler

from tests.support.strategies import cases
from traces.serving.request import TrainingJob
from traces.training.recipe import Recipe

TRANSFORMERS_NAMES = {"linear": "linear", "cosine": "cosine", "constant": "constant_with_warmup"}


def rates_of_transformers(recipe: Recipe, num_steps: int) -> list[float]:
    """The rates that transformers.get_scheduler sets for each step, and behind the last."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=recipe.learning_rate)
    name, warmup = TRANSFORMERS_NAMES[recipe.schedule], recipe.warmup_steps
    scheduler = get_scheduler(name, optimizer, warmup, num_steps)
    rates = []
    for _ in range(num_steps + 1):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        scheduler.step()
    return rates


@cases(200)
@given(
    schedule=st.sampled_from(sorted(TRANSFORMERS_NAMES)),
    warmup_steps=st.integers(0, 12),
    num_steps=st.integers(1, 40),
    learning_rate=st.floats(0, 10, allow_subnormal=False),
)
def test_rates_are_those_of_transformers_to_the_bit(
    schedule: str, warmup_steps: int, num_steps: int, learning_rate: float
) -> None:
    recipe = Recipe(schedule=schedule, warmup_steps=warmup_steps, learning_rate=learning_rate)
    own = [recipe.learning_rate_at(step, num_steps) for step in range(num_steps + 1)]
    assert own == rates_of_transformers(recipe, num_steps)


def test_constant_without_warmup_is_their_constant() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.3)
    get_scheduler("constant", optimizer)
    assert Recipe(learning_rate=0.3).learning_rate_at(0, 1) == optimizer.param_groups[0]["lr"]


def test_there_is_no_rate_of_a_step_that_is_not_taken() -> None:
    for step in (-1, 4):
        with pytest.raises(AssertionError, match="of 3"):
            Recipe().learning_rate_at(step, 3)


def test_defaults_are_those_of_torchs_adamw() -> None:
    torch_defaults = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))]).defaults
    own = Recipe()
    assert (own.learning_rate, own.betas) == (torch_defaults["lr"], torch_defaults["betas"])
    assert (own.eps, own.weight_decay) == (torch_defaults["eps"], torch_defaults["weight_decay"])


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"optimizer": "adam"}, "optimizer=adam: use one of adamw, sgd"),
        ({"schedule": "step"}, "schedule=step: use one of constant, linear, cosine"),
        ({"dtype": "float16"}, "dtype=float16: use one of float32, bfloat16"),
        ({"learning_rate": -1.0}, "learning_rate=-1.0: it must be a number, at least 0"),
        ({"learning_rate": math.nan}, "learning_rate=nan: it must be a number, at least 0"),
        ({"learning_rate": math.inf}, "learning_rate=inf: it must be a number, at least 0"),
        ({"eps": -1e-8}, "eps="),
        ({"weight_decay": -0.1}, "weight_decay=-0.1"),
        ({"warmup_steps": -1}, "warmup_steps=-1"),
        ({"frozen_units": -2}, "frozen_units=-2"),
        ({"seed": -3}, "seed=-3"),
        ({"betas": (0.9, 1.0)}, "betas=.*two numbers in"),
        ({"betas": (0.9,)}, "betas=.*two numbers in"),
        ({"dropout": 1.0}, "dropout=1.0: it must be in"),
        ({"dropout": math.nan}, "dropout=nan: it must be in"),
        ({"optimizer": "sgd", "momentum": 1.0}, "momentum=1.0"),
        ({"clip_norm": 0.0}, "clip_norm=0.0: it must be above 0, or null"),
        ({"lora_rank": 0}, "lora_rank=0: it must be above 0, or null"),
        ({"lora_rank": 4, "lora_alpha": 0.0}, "lora_alpha=0.0: it must be above 0"),
        ({"lora_rank": 4, "lora_dropout": 1.0}, "lora_dropout=1.0"),
        ({"momentum": 0.9}, "momentum says nothing with optimizer=adamw"),
        ({"optimizer": "sgd", "betas": (0.8, 0.9)}, "betas says nothing with optimizer=sgd"),
        ({"optimizer": "sgd", "eps": 1e-6}, "eps says nothing with optimizer=sgd"),
        ({"lora_targets": ("q_proj",)}, "lora_targets says nothing with lora_rank=null"),
        ({"lora_dropout": 0.1}, "lora_dropout says nothing with lora_rank=null"),
        ({"lora_alpha": 8.0}, "lora_alpha says nothing with lora_rank=null"),
    ],
)
def test_a_wrong_recipe_is_refused_in_one_line(settings: dict[str, Any], what: str) -> None:
    with pytest.raises(ValueError, match=what) as caught:
        Recipe(**settings)
    assert str(caught.value).startswith("recipe.") and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"job_id": -1}, "job_id must be at least 0"),
        ({"arrival_ns": -1}, "arrival_ns must be at least 0"),
        ({"num_units": 0}, "num_units=0: it must be at least 1"),
        ({"sequence_tokens": 0}, "sequence_tokens must be at least 2"),
        ({"sequence_tokens": 1}, "sequence_tokens must be at least 2: the loss is over tokens"),
        ({"sequences": 0}, "sequences=0: it must be at least 1"),
        ({"num_steps": 0}, "num_steps=0: it must be at least 1"),
        ({"microbatches": 0}, "microbatches=0: it must be at least 1"),
        ({"recipe": Recipe(frozen_units=4)}, "leaves nothing to train; freeze fewer than 4"),
        ({"recipe": Recipe(frozen_units=3, lora_rank=2)}, "freeze fewer than 3 of its 4 units"),
    ],
)
def test_an_impossible_job_is_refused_in_one_line(settings: dict[str, Any], what: str) -> None:
    sound: dict[str, Any] = {"job_id": 7, "arrival_ns": 0, "num_units": 4, "sequence_tokens": 8}
    TrainingJob(**sound, recipe=Recipe(frozen_units=3))
    with pytest.raises(ValueError, match=what) as caught:
        TrainingJob(**{**sound, **settings})
    assert str(caught.value).startswith("training job") and "\n" not in str(caught.value)


def test_a_microbatch_has_the_tokens_of_all_its_sequences() -> None:
    assert TrainingJob(0, 0, 3, 8, sequences=5).microbatch_tokens == 40
