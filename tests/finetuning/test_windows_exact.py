"""One window over a whole sample gives the bits of plain torch and peft."""

from __future__ import annotations

import pytest
import torch

from tests.finetuning.windows_by_hand import ByHand, recipe_of
from tests.support.hand_made import FAMILIES
from traces.serving.request import Sample

KINDS = ("lora_all", "lora_attention", "lora_down", "full")


@pytest.mark.broad(3)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_one_window_is_plain_torch_bit_for_bit(family: str, kind: str, dtype: str) -> None:
    made = ByHand(family, recipe_of(family, kind, dtype=dtype), [Sample(61)])
    made.whole()
    loss, expected = made.plainly()
    own = made.gradients()
    assert made.finetuner.loss(0) == loss
    assert own.keys() == expected.keys()
    # Both gradients of a tied table are added in float32 here, and rounded by torch.
    wrong = [n for n in own if not torch.equal(own[n].to(expected[n].dtype), expected[n])]
    assert not wrong
