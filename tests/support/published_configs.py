"""Published models: the figures of their config.json files, and their specs in conf/model."""

from __future__ import annotations

from pathlib import Path

import yaml

from models.spec import ModelSpec

CONF = Path(__file__).parents[2] / "conf" / "model"

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


def yaml_spec(name: str) -> ModelSpec:
    """The spec of conf/model/<name>.yaml."""
    fields = yaml.safe_load((CONF / f"{name}.yaml").read_text())
    assert fields.pop("_target_") == "models.spec.ModelSpec"
    return ModelSpec(**fields)
