"""Random windows, fused with random rows of requests, stay as near to exact as plain torch does."""

from __future__ import annotations

import random

import pytest

from tests.finetuning.windows_by_hand import ByHand, distance, float64, furthest, recipe_of
from tests.support.reference import compare, greedy
from traces.serving.request import Sample

FAMILIES = ("llama", "gpt2")
KINDS = ("lora_all", "full")
SEEDS = range(4)
AS_ONE = 1.25  # times the distance of plain torch from float64


@pytest.mark.broad(4)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_in_float64(family: str, kind: str, seed: int) -> None:
    with float64():
        rng = random.Random(seed)
        sample = Sample(rng.randint(40, 90), rng.randint(0, 20))
        made = ByHand(family, recipe_of(family, kind, dtype="float64"), [sample])
        made.randomly(rng)
        loss, expected = made.plainly()
        assert furthest(made.gradients(), expected) < 1e-12
        assert made.finetuner.loss(0) == pytest.approx(loss, rel=1e-6)  # kept in float32


@pytest.mark.broad(4)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_in_float32(family: str, kind: str, seed: int) -> None:
    rng = random.Random(seed)
    sample = Sample(rng.randint(40, 90), rng.randint(0, 20))
    made = ByHand(family, recipe_of(family, kind), [sample])
    made.randomly(rng)
    (_, plain), (_, exact) = made.plainly(), made.plainly("float64")
    own = made.gradients()
    assert furthest(own, plain) < 5e-6
    assert distance(own, exact) <= AS_ONE * distance(plain, exact)


@pytest.mark.broad(4)
@pytest.mark.parametrize("most", [1, 20])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_in_bfloat16(family: str, kind: str, most: int) -> None:
    rng = random.Random(most)
    made = ByHand(family, recipe_of(family, kind, dtype="bfloat16"), [Sample(48, 5)])
    made.randomly(rng, most=most)
    (_, plain), (_, exact) = made.plainly(), made.plainly("float64")
    assert distance(made.gradients(), exact) <= AS_ONE * distance(plain, exact)


@pytest.mark.parametrize("family", FAMILIES)
def test_requests_get_the_tokens_of_generate_beside_windows(family: str) -> None:
    made = ByHand(family, recipe_of(family, "lora_all"), [Sample(90), Sample(57)], steps=2)
    for microbatch in range(2):
        made.randomly(random.Random(microbatch), microbatch, most=9)
    made.served.finish(dict.fromkeys(made.prompts, 12))
    outputs = {i: made.machine.outputs(i) for i in made.prompts}
    expected = {i: greedy(made.spec, tuple(ids), 12) for i, ids in made.prompts.items()}
    assert compare(outputs, expected) == (len(outputs), 0, [])
