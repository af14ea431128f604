"""A GPT-2-like model by its width and depth."""

from __future__ import annotations

import pytest

from tandem.config.compose import composed
from tandem.wiring.run_spec import spec_of


@pytest.mark.parametrize(
    ("hidden", "layers", "billions"),
    [(2048, 20, 1), (3072, 53, 6), (4096, 50, 10), (4096, 90, 18), (8192, 25, 20), (9216, 66, 68)],
)
def test_width_and_depth_make_a_gpt2_like_model(hidden: int, layers: int, billions: int) -> None:
    """PatrickStar names its models by parameters, in round numbers."""
    sizes = [f"model.hidden_size={hidden}", f"model.num_layers={layers}"]
    spec = spec_of(composed(["model=gpt2_shape", *sizes]))
    assert (spec.family, spec.num_heads * spec.head_dim) == ("gpt2", hidden)
    assert spec.intermediate_size == 4 * hidden
    assert spec.parameters == pytest.approx(billions * 1e9, rel=0.13)
    with pytest.raises(ValueError, match="7 heads do not divide its width"):
        spec_of(composed(["model=gpt2_shape", "model.num_heads=7"]))
