"""Mistakes of finetuning in windows that the bounds must catch (FlexLLM page, section 8.1)."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from runtime.finetuning.finetuner import Finetuner, SampleWindow
from runtime.finetuning.model import NO_LABEL
from runtime.finetuning.recording import WindowKV
from tests.finetuning.windows_by_hand import ByHand, cuts, furthest, recipe_of
from traces.serving.request import Sample

FAR = 0.01  # 2,000 times what the bounds of float32 allow
WITHOUT_SUMS = 0.1  # by the page
families = pytest.mark.parametrize("family", ["llama", "gpt2"])
kinds = pytest.mark.parametrize("kind", ["lora_all", "full"])


def made(family: str, kind: str) -> ByHand:
    return ByHand(family, recipe_of(family, kind), [Sample(64)])


def error(of: ByHand) -> float:
    return furthest(of.gradients(), of.plainly()[1])


@families
@kinds
def test_without_sums_of_key_and_value_gradients(
    monkeypatch: pytest.MonkeyPatch, family: str, kind: str
) -> None:
    kept = Finetuner._kv_sums

    def forgetful(self: Finetuner, unit: int, window: SampleWindow, total: int) -> Tensor:
        return kept(self, unit, window, total).zero_()

    own = made(family, kind)
    own.randomly(random.Random(0))
    assert error(own) < 5e-6
    monkeypatch.setattr(Finetuner, "_kv_sums", forgetful)
    own.randomly(random.Random(0))
    assert error(own) > WITHOUT_SUMS


@families
@kinds
def test_windows_back_in_the_order_of_the_forward(family: str, kind: str) -> None:
    own, rng = made(family, kind), random.Random(0)
    own.begin()
    for start, count in cuts(rng, 64, 20):
        own.forward(0, start, count)
    for unit in reversed(range(own.trainee.first, own.job.num_units - 1)):
        for start, count in cuts(rng, 64, 20):
            own.backward(0, start, count, range(unit, unit + 1))
    assert error(own) > FAR


@families
@kinds
def test_a_window_without_a_mask(monkeypatch: pytest.MonkeyPatch, family: str, kind: str) -> None:
    def none(self: WindowKV, dtype: torch.dtype) -> None:
        return None

    monkeypatch.setattr(WindowKV, "mask", none)
    own = made(family, kind)
    own.randomly(random.Random(0), fused=False)
    assert error(own) > FAR


@families
@kinds
def test_labels_that_end_with_their_window(
    monkeypatch: pytest.MonkeyPatch, family: str, kind: str
) -> None:
    own = made(family, kind)
    kept = own.trainee.loss

    def border(hidden: Tensor, labels: Tensor) -> Any:
        return kept(hidden, torch.cat([labels[:-1], torch.tensor([NO_LABEL])]))

    monkeypatch.setattr(own.trainee, "loss", border)
    own.randomly(random.Random(0), fused=False)
    assert error(own) > FAR
