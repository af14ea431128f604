"""A model spec against the model that Hugging Face builds and against published figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from models.spec import ModelSpec
from tests.support.published_configs import (
    CONF,
    GPT2_XL,
    LLAMA31_8B,
    LLAMA_BIASED,
    MISTRAL_7B,
    OPT_125M,
    PUBLISHED,
    QWEN3_06B,
    yaml_spec,
)

WITH_ARGUMENTS = ("hf", "gpt2_shape")  # a config.json of the user; a width and a depth
SHIPPED = sorted(path for path in CONF.glob("*.yaml") if path.stem not in WITH_ARGUMENTS)


@pytest.mark.parametrize("layers", [3, pytest.param(None, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", [*PUBLISHED, "gpt2_xl", "llama_biased"])
def test_parameters_equal_hugging_face(name: str, layers: int | None) -> None:
    """With a few layers, and with all."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = (PUBLISHED | {"gpt2_xl": GPT2_XL, "llama_biased": LLAMA_BIASED})[name]
    if layers:
        config = config | {"n_layer" if "n_layer" in config else "num_hidden_layers": layers}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    spec = ModelSpec.from_hf(config)
    assert spec.parameters == sum(p.numel() for p in model.parameters())
    body = getattr(model.base_model, "decoder", model.base_model)
    layers = body.h if spec.family == "gpt2" else body.layers
    assert spec.layer_parameters == sum(p.numel() for p in layers[0].parameters())


@pytest.mark.parametrize("name", PUBLISHED)
def test_shipped_specs_equal_the_published_configs(name: str) -> None:
    assert yaml_spec(name) == ModelSpec.from_hf(PUBLISHED[name], name=name)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_spec_is_buildable_and_named_after_its_file(path: Path) -> None:
    spec = yaml_spec(path.stem)
    assert spec.name == path.stem
    assert spec.parameters > spec.num_layers * spec.layer_matrix_parameters


def test_kv_bytes_equal_published_figures() -> None:
    # by hand from the published configs in bf16: layers x 2 x KV heads x head size x 2 bytes
    assert ModelSpec.from_hf(QWEN3_06B).kv_token_bytes == 114_688
    assert ModelSpec.from_hf(LLAMA31_8B).kv_token_bytes == 131_072


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba'"),
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"torch_dtype": "int8"}, "dtype 'int8'"),
        ({"num_key_value_heads": 5}, "5 KV heads"),
    ],
)
def test_unsupported_configs_are_refused_in_one_line(
    change: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint) as caught:
        ModelSpec.from_hf(LLAMA31_8B | change)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"do_layer_norm_before": False}, "do_layer_norm_before"),  # OPT-350m
        ({"word_embed_proj_dim": 512}, "word_embed_proj_dim"),
        ({"enable_bias": False}, "enable_bias .* set it to true"),
        ({"activation_function": "gelu"}, "'gelu' is not 'relu'"),
    ],
)
def test_unsupported_opt_configs_are_refused_in_one_line(
    change: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint) as caught:
        ModelSpec.from_hf(OPT_125M | change)
    assert "\n" not in str(caught.value)


def test_a_sliding_window_below_the_positions_is_refused() -> None:
    unnamed = {key: value for key, value in MISTRAL_7B.items() if key != "sliding_window"}
    for config in (MISTRAL_7B | {"sliding_window": 4096}, unnamed):  # 4096 is the default
        with pytest.raises(ValueError, match="sliding window of 4096") as caught:
            ModelSpec.from_hf(config)
        assert "\n" not in str(caught.value)
    short = {"sliding_window": 4096, "max_position_embeddings": 4096}
    assert ModelSpec.from_hf(MISTRAL_7B | short).max_positions == 4096


def test_parameters_equal_published_counts() -> None:
    # the parameter counts on the model cards
    assert yaml_spec("mistral_7b").parameters == 7_248_023_552
    assert yaml_spec("opt_125m").parameters == 125_239_296
    assert yaml_spec("llama3_70b").parameters == 70_553_706_496


def test_rope_theta_is_read_from_old_and_new_configs() -> None:
    new = QWEN3_06B | {"rope_theta": None, "rope_parameters": {"rope_theta": 5e5}}
    assert ModelSpec.from_hf(new).rope_theta == 5e5
    assert ModelSpec.from_hf(QWEN3_06B).rope_theta == 1e6
