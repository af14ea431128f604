"""Random windows, fused with random rows of requests, stay as near to exact as plain torch does."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

import runtime.finetuning.backward
import runtime.finetuning.recording
from runtime.serving.machine import GPU
from tests.finetuning.windows_by_hand import ByHand, distance, float64, furthest, recipe_of
from tests.support.reference import compare, greedy
from traces.serving.request import Sample

FAMILIES = ("llama", "gpt2")
KINDS = ("lora_all", "full")
SEEDS = range(4)
AS_ONE = 1.25  # times the distance of plain torch from float64


@pytest.fixture(params=["kernel", "products"])
def attention(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows attend by a CPU's kernel, or as on other devices: a few rows of scores at a time."""
    if request.param == "products":
        recording, backward = runtime.finetuning.recording, runtime.finetuning.backward
        monkeypatch.setattr(recording, "SCORES_BYTES", 1 << 12)
        monkeypatch.setattr(recording, "attend_with_sums", recording.attend_by_products)
        monkeypatch.setattr(backward, "attention_gradients", backward.gradients_by_products)


@pytest.mark.broad(8)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.usefixtures("attention")
def test_gradients_in_float64(family: str, kind: str, seed: int) -> None:
    with float64():
        rng = random.Random(seed)
        sample = Sample(rng.randint(40, 90), rng.randint(0, 20))
        made = ByHand(family, recipe_of(family, kind, dtype="float64"), [sample])
        made.randomly(rng)
        loss, expected = made.plainly()
        assert furthest(made.gradients(), expected) < 1e-12
        assert made.finetuner.loss(0) == pytest.approx(loss, rel=1e-6)  # kept in float32


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_of_a_dialogue_whose_turns_are_read(family: str) -> None:
    """Windows begin and end within turns of the user, at their borders, and lie in one whole."""
    read = ((21, 34), (40, 41), (55, 70))
    for seed in SEEDS:
        with float64():
            recipe = recipe_of(family, "lora_all", dtype="float64")
            made = ByHand(family, recipe, [Sample(80, 9, read=read)])
            made.randomly(random.Random(seed), most=15)
            loss, expected = made.plainly()
            assert furthest(made.gradients(), expected) < 1e-12
            assert made.finetuner.loss(0) == pytest.approx(loss, rel=1e-6)


@pytest.mark.parametrize("seed", SEEDS)
def test_gradients_behind_the_signs_of_a_relu(seed: int) -> None:
    with float64():
        rng = random.Random(seed)
        sample = Sample(rng.randint(40, 90), rng.randint(0, 20))
        made = ByHand("opt", recipe_of("opt", "lora_attention", dtype="float64"), [sample])
        made.randomly(rng)
        _, expected = made.plainly()
        assert furthest(made.gradients(), expected) < 1e-12


@pytest.mark.broad(8)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.usefixtures("attention")
def test_gradients_in_float32(family: str, kind: str, seed: int) -> None:
    rng = random.Random(seed)
    sample = Sample(rng.randint(40, 90), rng.randint(0, 20))
    made = ByHand(family, recipe_of(family, kind), [sample])
    made.randomly(rng)
    (_, plain), (_, exact) = made.plainly(), made.plainly("float64")
    own = made.gradients()
    assert furthest(own, plain) < 5e-6
    assert distance(own, exact) <= AS_ONE * distance(plain, exact)


@pytest.mark.broad(8)
@pytest.mark.parametrize("most", [1, 20])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.usefixtures("attention")
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


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_leave_the_rows_of_requests_as_they_are(family: str) -> None:
    """Keys and values of requests have equal bits, whatever a window beside them adds."""
    found = list[Tensor]()
    for scale in (0.0, 1.0):
        made = ByHand(family, recipe_of(family, "lora_all"), [Sample(60)])
        for name, parameter in made.trainee.model.named_parameters():
            if "lora_B" in name:
                parameter.data.mul_(scale)
        made.randomly(random.Random(2))
        pages = [page for i in made.prompts for page in made.served.pages[i]]
        found.append(made.machine.arenas[GPU].pages[pages].nan_to_num(nan=7.0))
    assert len(found[0])
    assert torch.equal(found[0], found[1])
