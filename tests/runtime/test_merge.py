"""Merged weights: no byte twice, the modules see every change, logits as without."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from runtime.measure.tracker import storage_bytes
from runtime.serving.gated import GatedLayer, Merged
from runtime.serving.model import Decoder, build_model
from tests.support.hand_made import FAMILIES, SPREAD, HandMade, make_prompts, own_model
from tests.support.reference import NEAR_TIE, plain_model

families = pytest.mark.parametrize("family", FAMILIES)


@families
def test_a_merged_model_takes_the_bytes_of_its_parameters(family: str) -> None:
    spec = FAMILIES[family]
    model = build_model(spec, seed=1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    decoders = [Decoder(model), Decoder(model)]  # the second finds them merged
    tensors = [*model.parameters(), *(t for d in decoders for t in merged(d))]
    assert storage_bytes(model.parameters()) == storage_bytes(tensors) == spec.weight_bytes
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(after[name].equal(value) for name, value in before.items())


def merged(decoder: Decoder) -> list[torch.Tensor]:
    """The joint tensors of all layers; none where a family has no such layers."""
    layers = [layer for layer in decoder.layers if isinstance(layer, GatedLayer)]
    joint = [m for layer in layers for m in (layer._qkv, layer._gate_up)]
    return [t for m in joint for t in (m.weight, m.bias) if t is not None]


def test_only_the_families_with_learned_positions_run_as_they_are() -> None:
    for family, spec in FAMILIES.items():
        found = len(merged(Decoder(build_model(spec))))
        biases = family in ("qwen2", "biased")
        assert found == spec.is_gated * spec.num_layers * (3 if biases else 2)


def test_modules_and_product_share_their_numbers() -> None:
    modules = [nn.Linear(8, n) for n in (3, 5, 2)]
    rows = torch.randn(4, 8)
    expected = torch.cat([m(rows) for m in modules], -1)
    product = Merged(*modules)
    assert torch.allclose(product(rows), expected, atol=1e-6)
    with torch.no_grad():
        modules[1].weight.zero_()
        modules[1].bias.fill_(7.0)
    assert product(rows)[:, 3:8].eq(7.0).all()
    assert Merged(*modules).weight.data_ptr() == product.weight.data_ptr()


def test_weights_that_only_share_a_storage_are_not_merged() -> None:
    whole = torch.randn(6, 4)
    modules = [nn.Linear(4, 2, bias=False) for _ in range(2)]
    modules[0].weight, modules[1].weight = nn.Parameter(whole[4:]), nn.Parameter(whole[:2])
    assert Merged(*modules).weight.equal(torch.cat([whole[4:], whole[:2]]))


def draw_biases(model: Any) -> None:
    """Biases start at zero, which would hide a lost one."""
    rng = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=SPREAD, generator=rng)


@families
def test_logits_are_those_of_the_plain_model(family: str) -> None:
    """Within half a near tie: a smaller difference turns no sampled token."""
    spec = FAMILIES[family]
    prompt = make_prompts([67], spec.vocab_size)[7]
    plain = build_model(spec, seed=1, attention="sdpa", spread=SPREAD)
    made, found = HandMade(spec, {7: prompt}, model=own_model(spec)), list[torch.Tensor]()
    for model in (plain, made.machine.decoder.model):
        draw_biases(model)
    with torch.no_grad():
        expected = plain(torch.tensor([prompt])).logits[0, -1]
    logits = made.machine.decoder.logits
    made.machine.decoder.logits = lambda *rows: found.append(logits(*rows)) or found[-1]
    made.run((7, 30))
    made.run((7, 37))
    worst = (found[0][0] - expected).abs().max().item()
    print(f"{family}: logits differ by at most {worst:.1e}")
    assert worst < NEAR_TIE / 2


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_bfloat16_rounds_where_the_modules_do(family: str) -> None:
    """A layer alone; 0.02 is a few last places, by which products may differ."""
    spec = replace(FAMILIES[family], dtype="bfloat16")
    made = HandMade(spec, make_prompts([40], spec.vocab_size))
    prepared = made.machine.prepare(made.launch((7, 40)))
    packed, decoder = prepared.parts[0].packed, made.machine.decoder
    plain = plain_model(spec)
    with torch.no_grad():
        hidden = decoder.embed(packed.ids, packed.positions)
        angles = decoder.angles(hidden, packed.positions)
        got = decoder.layer(0, hidden, angles, packed.rows)
        turns = plain.model.rotary_emb(hidden, packed.positions)
        expected = plain.model.layers[0](hidden, position_embeddings=turns, attention_mask=None)
    assert torch.allclose(got, expected, rtol=0.02, atol=0.02)
