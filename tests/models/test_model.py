"""Model specs count what Hugging Face builds, exactly."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from models.hf_config import read_model
from models.spec import ModelSpec
from tandem.config.compose import composed
from tandem.wiring.run_spec import spec_of

# Figures of the published config.json files.
LLAMA2_7B = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "intermediate_size": 11008,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
}
LLAMA31_8B = LLAMA2_7B | {
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
}
LLAMA31_70B = LLAMA31_8B | {
    "num_hidden_layers": 80,
    "hidden_size": 8192,
    "num_attention_heads": 64,
    "intermediate_size": 28672,
}
QWEN25_7B = {
    "model_type": "qwen2",
    "num_hidden_layers": 28,
    "hidden_size": 3584,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "vocab_size": 152064,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "torch_dtype": "bfloat16",
}
QWEN25_HALF = QWEN25_7B | {
    "num_hidden_layers": 24,
    "hidden_size": 896,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "intermediate_size": 4864,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}
QWEN3_06B = {
    "model_type": "qwen3",
    "num_hidden_layers": 28,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "torch_dtype": "bfloat16",
}
QWEN3_8B = QWEN3_06B | {
    "num_hidden_layers": 36,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "intermediate_size": 12288,
    "tie_word_embeddings": False,
}
GPT2 = {
    "model_type": "gpt2",
    "n_layer": 12,
    "n_embd": 768,
    "n_head": 12,
    "n_positions": 1024,
    "vocab_size": 50257,
    "layer_norm_epsilon": 1e-5,
}
GPT2_XL = GPT2 | {"n_layer": 48, "n_embd": 1600, "n_head": 25}
MISTRAL_7B = {  # v0.3
    "model_type": "mistral",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "intermediate_size": 14336,
    "vocab_size": 32768,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
OPT_125M = {
    "model_type": "opt",
    "num_hidden_layers": 12,
    "hidden_size": 768,
    "num_attention_heads": 12,
    "ffn_dim": 3072,
    "activation_function": "relu",
    "do_layer_norm_before": True,
    "word_embed_proj_dim": 768,
    "vocab_size": 50272,
    "max_position_embeddings": 2048,
    "torch_dtype": "float16",
}
OPT_13B = OPT_125M | {
    "num_hidden_layers": 40,
    "hidden_size": 5120,
    "num_attention_heads": 40,
    "ffn_dim": 20480,
    "word_embed_proj_dim": 5120,
}
LLAMA_BIASED = LLAMA31_8B | {"attention_bias": True}
PUBLISHED = {
    "llama2_7b": LLAMA2_7B,
    "llama3_8b": LLAMA31_8B,
    "llama3_70b": LLAMA31_70B,
    "qwen2_5_7b": QWEN25_7B,
    "qwen2_5_0_5b": QWEN25_HALF,
    "qwen3_0_6b": QWEN3_06B,
    "qwen3_8b": QWEN3_8B,
    "gpt2": GPT2,
    "mistral_7b": MISTRAL_7B,
    "opt_125m": OPT_125M,
    "opt_13b": OPT_13B,
}
CONF = Path(__file__).parents[2] / "conf" / "model"
ARGUED = ("hf", "gpt2_shape")  # made of arguments: the user's own file, a width and a depth
SHIPPED = sorted(path for path in CONF.glob("*.yaml") if path.stem not in ARGUED)


def yaml_spec(name: str) -> ModelSpec:
    fields = yaml.safe_load((CONF / f"{name}.yaml").read_text())
    assert fields.pop("_target_") == "models.spec.ModelSpec"
    return ModelSpec(**fields)


@pytest.mark.parametrize("layers", [3, pytest.param(None, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", [*PUBLISHED, "gpt2_xl", "llama_biased"])
def test_parameters_equal_hugging_face(name: str, layers: int | None) -> None:
    """Of a few layers, and of all."""
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


@pytest.mark.parametrize(
    ("hidden", "layers", "billions"),
    [(2048, 20, 1), (3072, 53, 6), (4096, 50, 10), (4096, 90, 18), (8192, 25, 20), (9216, 66, 68)],
)
def test_a_gpt2_is_made_by_its_width_and_depth(hidden: int, layers: int, billions: int) -> None:
    """PatrickStar names its models by parameters, in round numbers."""
    sizes = [f"model.hidden_size={hidden}", f"model.num_layers={layers}"]
    spec = spec_of(composed(["model=gpt2_shape", *sizes]))
    assert (spec.family, spec.num_heads * spec.head_dim) == ("gpt2", hidden)
    assert spec.intermediate_size == 4 * hidden
    assert spec.parameters == pytest.approx(billions * 1e9, rel=0.13)
    with pytest.raises(ValueError, match="7 heads do not divide its width"):
        spec_of(composed(["model=gpt2_shape", "model.num_heads=7"]))


@pytest.mark.parametrize("named", ["config.json", ""])
def test_a_run_takes_a_model_by_its_config_file(named: str, tmp_path: Path) -> None:
    """By the file or by its folder, which names it; the dtype is the file's unless told."""
    folder = tmp_path / "Llama-3.1-8B"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA31_8B))
    words = ["model=hf", f"model.path={folder / named}"]
    assert spec_of(composed(words)) == replace(yaml_spec("llama3_8b"), name="Llama-3.1-8B")
    assert spec_of(composed([*words, "model.dtype=float32"])).item_bytes == 4
    assert spec_of(composed([*words, "model.name=mine"])).name == "mine"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "not JSON"),
        ("[]", "no JSON object"),
        (json.dumps(LLAMA31_8B | {"model_type": "mamba"}), "model_type 'mamba'"),
        (json.dumps(LLAMA31_8B | {"hidden_size": [1]}), "hidden_size is '\\[1\\]': give a finite"),
        (json.dumps(LLAMA31_8B | {"vocab_size": "32"}), "vocab_size is '32': give a finite number"),
        (json.dumps(LLAMA31_8B | {"hidden_size": 10**400}), "hidden_size is '10+': give a finite"),
        (json.dumps(LLAMA31_8B | {"hidden_size": 0.5}), "hidden_size is 0.5: give a whole number"),
        (json.dumps(LLAMA31_8B | {"hidden_size": -8}), "hidden_size is -8, not above 0"),
        (json.dumps(LLAMA31_8B | {"num_attention_heads": 0}), "num_heads is 0, not above 0"),
        (json.dumps(LLAMA31_8B | {"rope_theta": float("nan")}), "rope_theta is 'nan': give a fin"),
        (json.dumps(LLAMA31_8B | {"rope_theta": -1.0}), "rope_theta is -1.0, not above 0"),
        (json.dumps(LLAMA31_8B | {"rms_norm_eps": "1e-5"}), "rms_norm_eps is '1e-5': give a fini"),
    ],
)
def test_a_config_file_that_is_none_is_told_with_its_path(
    text: str, complaint: str, tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=complaint) as caught:
        read_model(str(path))
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


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
def test_foreign_configs_are_refused_in_one_line(change: dict[str, Any], complaint: str) -> None:
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
def test_unlike_opts_are_refused_in_one_line(change: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint) as caught:
        ModelSpec.from_hf(OPT_125M | change)
    assert "\n" not in str(caught.value)


def test_a_window_is_refused_unless_no_position_lies_beyond_it() -> None:
    unnamed = {key: value for key, value in MISTRAL_7B.items() if key != "sliding_window"}
    for config in (MISTRAL_7B | {"sliding_window": 4096}, unnamed):  # 4096 is the default
        with pytest.raises(ValueError, match="sliding window of 4096") as caught:
            ModelSpec.from_hf(config)
        assert "\n" not in str(caught.value)
    short = {"sliding_window": 4096, "max_position_embeddings": 4096}
    assert ModelSpec.from_hf(MISTRAL_7B | short).max_positions == 4096


def test_parameters_equal_published_counts() -> None:
    # As the model cards' safetensors say.
    assert yaml_spec("mistral_7b").parameters == 7_248_023_552
    assert yaml_spec("opt_125m").parameters == 125_239_296
    assert yaml_spec("llama3_70b").parameters == 70_553_706_496


def test_workspace_is_the_largest_of_its_moments() -> None:
    """By hand; tests/models/test_workspace.py measures the same on the runtime."""
    head = yaml_spec("gpt2").workspace_bytes([1] * 8, [10] * 8, samples=8)
    assert head == 8 * 4 * (768 + 768 + 50257)  # eight decodes: the logits are the peak
    spec = yaml_spec("tiny_llama")
    mlp = spec.workspace_bytes([512], [0], samples=0)
    assert mlp == 512 * 4 * (3 * 256 + 2 * 704 + 2 * 32)
    gather = spec.workspace_bytes([2], [4000], samples=0, page_tokens=32)
    # Input, q, k, v and the outputs of all; the slice's own output, its sums; cosines and sines.
    rows, mask = 2 * (256 + 256 + 2 * 128 + 256 + 256 + 8 + 2 * 32), 2 * 4002
    assert gather == 4 * (rows + mask + 2 * 128 * 4032)  # 4002 tokens lie in 126 pages of 32


@pytest.mark.parametrize(
    ("rope", "told"),
    [
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rotary scaling llama3"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rotary scaling linear"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 5e5}}, "rotary scaling yarn"),
        ({"rope_scaling": None}, ""),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, ""),
    ],
)
def test_rotary_scaling_that_is_left_out_is_told(
    rope: dict[str, Any], told: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_06B | rope))
    read_model(str(tmp_path))
    assert told in caplog.text and len(caplog.records) == bool(told)


def test_rope_theta_is_read_from_old_and_new_configs() -> None:
    new = QWEN3_06B | {"rope_theta": None, "rope_parameters": {"rope_theta": 5e5}}
    assert ModelSpec.from_hf(new).rope_theta == 5e5
    assert ModelSpec.from_hf(QWEN3_06B).rope_theta == 1e6
