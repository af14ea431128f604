"""The sizes of a decoder-only model; parameters and KV bytes follow by arithmetic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from typing import Any

import numpy as np
import numpy.typing as npt

from models import workspace

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
GATED = ("llama", "mistral", "qwen2", "qwen3")  # RMSNorm, rotary positions, a gated MLP
FAMILIES = (*GATED, "gpt2", "opt")
ACTIVATIONS = dict.fromkeys(GATED, "silu") | {"gpt2": "gelu_new", "opt": "relu"}
LLAMA_KEYS = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_heads": "num_attention_heads",
    "intermediate_size": "intermediate_size",
    "vocab_size": "vocab_size",
    "max_positions": "max_position_embeddings",
}
GPT2_KEYS = {
    "num_layers": "n_layer",
    "hidden_size": "n_embd",
    "num_heads": "n_head",
    "vocab_size": "vocab_size",
    "max_positions": "n_positions",
}
OPT_KEYS = LLAMA_KEYS | {"intermediate_size": "ffn_dim"}
KEYS = dict.fromkeys(GATED, LLAMA_KEYS) | {"gpt2": GPT2_KEYS, "opt": OPT_KEYS}
# Switches that must have these values, the defaults of Hugging Face; OPT-350m has other ones.
REQUIRED: Mapping[str, Any] = {
    "mlp_bias": False,
    "use_sliding_window": False,
    "add_cross_attention": False,
    "do_layer_norm_before": True,
    "enable_bias": True,
    "layer_norm_elementwise_affine": True,
    "_remove_final_layer_norm": False,
}
SIZES = (
    "num_layers",
    "hidden_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
    "max_positions",
)
CONSTANTS = ("rope_theta", "norm_eps")
MAX_NUMBER = 1e300  # of a config.json
MISTRAL_WINDOW = 4096  # of a Mistral config that names none


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The sizes of one model. All counts equal those of the model that Hugging Face builds.

    Rotary scaling is left out: it changes no size and no time (models/hf_config.py warns of it).

    Attributes:
        name: What results call the model.
        family: The model_type of its config.json: one of FAMILIES.
        num_layers: Decoder layers.
        hidden_size: Width of the hidden states, in numbers.
        num_heads: Attention heads of the queries.
        num_kv_heads: Heads of keys and values; they divide `num_heads`.
        head_dim: Numbers of one head.
        intermediate_size: Inner width of the MLP, in numbers.
        vocab_size: Tokens of the vocabulary.
        max_positions: Longest sequence, in tokens.
        tie_embeddings: Whether the output projection is the token embedding.
        dtype: Type of weights, activations and KV: a key of DTYPE_BYTES.
        rope_theta: Base of the rotary frequencies.
        norm_eps: Epsilon of the norms.
        attention_bias: Whether projections have biases: all four in Llama and Qwen3, q, k and v in
            Qwen2. Mistral has none, GPT-2 and OPT always have all.

    Raises:
        ValueError: A size is below 1, a constant is not a finite number above 0, family or dtype is
            unknown, or KV heads do not divide the heads.
    """

    name: str
    family: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_positions: int
    tie_embeddings: bool = False
    dtype: str = "bfloat16"
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6
    attention_bias: bool = False

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise ValueError(f"model {self.name}: family {self.family!r} is not one of {FAMILIES}")
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"model {self.name}: dtype {self.dtype!r} is not of {[*DTYPE_BYTES]}")
        for name in SIZES:
            if getattr(self, name) < 1:
                raise ValueError(f"model {self.name}: {name} is {getattr(self, name)}, not above 0")
        for name in CONSTANTS:
            if not 0 < (value := getattr(self, name)) < inf:  # NaN is neither
                raise ValueError(f"model {self.name}: {name} is {value}, not above 0")
        if self.num_heads % self.num_kv_heads:
            shared = f"{self.num_heads} heads cannot share {self.num_kv_heads} KV heads"
            raise ValueError(f"model {self.name}: {shared}")

    @property
    def item_bytes(self) -> int:
        """Bytes of one number in `dtype`."""
        return DTYPE_BYTES[self.dtype]

    @property
    def is_gated(self) -> bool:
        """Whether layers are like Llama's. Those of GPT-2 and OPT have learned positions."""
        return self.family in GATED

    @property
    def norms_heads(self) -> bool:
        """Whether every head of q and k is normed."""
        return self.family == "qwen3"

    @property
    def activation(self) -> str:
        """The activation of the MLP, by its name in a Hugging Face config."""
        return ACTIVATIONS[self.family]

    @property
    def query_size(self) -> int:
        """Width of the queries and of attention's output, in numbers."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of the keys, and of the values, in numbers."""
        return self.num_kv_heads * self.head_dim

    @property
    def layer_matrix_parameters(self) -> int:
        """Numbers in the matrices of one layer: a token is multiplied with each once."""
        attention = self.hidden_size * (2 * self.query_size + 2 * self.kv_size)
        matrices = 3 if self.is_gated else 2
        return attention + matrices * self.hidden_size * self.intermediate_size

    @property
    def layer_parameters(self) -> int:
        """Parameters of one decoder layer: matrices, biases and norms."""
        norms = 2 * self.hidden_size
        if not self.is_gated:
            biases = 5 * self.hidden_size + self.intermediate_size
            return self.layer_matrix_parameters + 2 * norms + biases
        biases = self.query_size + 2 * self.kv_size if self.attention_bias else 0
        if self.attention_bias and self.family != "qwen2":
            biases += self.hidden_size  # Qwen2 has none on the output projection
        norms += 2 * self.head_dim if self.norms_heads else 0
        return self.layer_matrix_parameters + norms + biases

    @property
    def embedding_parameters(self) -> int:
        """Parameters outside the layers: embeddings, final norm, the head unless it is tied."""
        tables = self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)
        if self.is_gated:
            return tables + self.hidden_size
        positions = self.max_positions + (2 if self.family == "opt" else 0)  # OPT's start at 2
        return tables + (positions + 2) * self.hidden_size

    @property
    def parameters(self) -> int:
        """All parameters; a tied table counts once."""
        return self.num_layers * self.layer_parameters + self.embedding_parameters

    @property
    def weight_bytes(self) -> int:
        """Bytes of all parameters in `dtype`."""
        return self.parameters * self.item_bytes

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of the keys and values of one token, in all layers."""
        return 2 * self.num_layers * self.kv_size * self.item_bytes

    def workspace_bytes(
        self,
        tokens: Sequence[int],
        contexts: Sequence[int] = (),
        samples: int = 0,
        page_tokens: int = 16,
    ) -> int:
        """Peak of what a launch of this model allocates and frees on a CPU, in bytes.

        Args:
            tokens: New tokens of each slice.
            contexts: Tokens that each slice has in KV before; empty: none has any.
            samples: Rows that the head computes logits of.
            page_tokens: Tokens of a KV page.

        Returns:
            Bytes beside weights and KV, by models/workspace.py.
        """
        return workspace.peak_bytes(self, tokens, contexts, samples, page_tokens)

    def workspaces_bytes(
        self,
        tokens: npt.NDArray[np.int64],
        contexts: npt.NDArray[np.int64],
        starts: npt.NDArray[np.int64],
        samples: npt.NDArray[np.int64],
        page_tokens: int = 16,
    ) -> npt.NDArray[np.int64]:
        """`workspace_bytes` of many launches at once; see models.workspace.peaks_bytes."""
        return workspace.peaks_bytes(self, tokens, contexts, starts, samples, page_tokens)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], name: str = "") -> ModelSpec:
        """The spec of a Hugging Face config.json.

        Args:
            config: The parsed file. Absent entries have the defaults of the Hugging Face config
                class of the family; an absent dtype is float32.
            name: What results call the model; empty: the config's own name or its model_type.

        Returns:
            The spec in the config's dtype.

        Raises:
            ValueError: The family is not in FAMILIES, an entry is missing or no number, or a switch
                changes a layer in a way that is not supported.
        """
        family = config.get("model_type")
        label = name or str(config.get("_name_or_path") or family)
        if family not in FAMILIES:
            raise ValueError(f"model {label}: model_type {family!r} is not one of {FAMILIES}")
        _check_supported(config, label)
        keys = KEYS[family]
        if missing := [key for key in keys.values() if config.get(key) is None]:
            raise ValueError(f"model {label}: config lacks {', '.join(missing)}")
        sizes = {field: _whole(config, key) for field, key in keys.items()}
        dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32")
        dtype = dtype.removeprefix("torch.")
        read = _llama_fields if family in GATED else _plain_fields
        fields: dict[str, Any] = {**sizes, **read(config, sizes)}
        return cls(name=label, family=str(family), dtype=dtype, **fields)


def _check_supported(config: Mapping[str, Any], label: str) -> None:
    """Raises ValueError for a switch that spec and runtime do not know."""
    for switch, value in REQUIRED.items():
        if config.get(switch, value) not in (value, None):
            wanted = str(value).lower()
            raise ValueError(f"model {label}: {switch} is not supported; set it to {wanted}")
    family = str(config["model_type"])
    activation = config.get("hidden_act") or config.get("activation_function")
    if activation not in (None, ACTIVATIONS[family]):
        raise ValueError(f"model {label}: activation {activation!r} is not {ACTIVATIONS[family]!r}")
    if config.get("word_embed_proj_dim") not in (None, config.get("hidden_size")):
        raise ValueError(f"model {label}: word_embed_proj_dim differs from hidden_size")
    if family != "mistral":
        return
    window = config.get("sliding_window", MISTRAL_WINDOW)
    if window is not None and window < config.get("max_position_embeddings", 0):
        raise ValueError(
            f"model {label}: a sliding window of {window} is not supported; set sliding_window to "
            "null, or max_position_embeddings to no more than the window"
        )


def _number(config: Mapping[str, Any], key: str, default: float = 0.0) -> float:
    """A finite number of a config, or the default where the entry is absent."""
    value = config.get(key)
    if value is None:
        return default
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or abs(value) > MAX_NUMBER or not isfinite(value):
        raise ValueError(f"{key} is {str(value)[:30]!r}: give a finite number")
    return float(value)


def _whole(config: Mapping[str, Any], key: str, default: int = 0) -> int:
    """A count of a config, or the default where the entry is absent or 0."""
    value = _number(config, key, default) or default
    if value != int(value):
        raise ValueError(f"{key} is {value}: give a whole number")
    return int(value)


def _llama_fields(config: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, Any]:
    family, heads = config["model_type"], sizes["num_heads"]
    rope = config.get("rope_parameters") or {}
    # Defaults are those of the Hugging Face config classes.
    head_dim = 128 if family == "qwen3" else sizes["hidden_size"] // max(heads, 1)
    bias = family == "qwen2" or (family != "mistral" and bool(config.get("attention_bias")))
    return {
        "num_kv_heads": _whole(config, "num_key_value_heads", heads),
        "head_dim": _whole(config, "head_dim", head_dim),
        "tie_embeddings": bool(config.get("tie_word_embeddings", False)),
        "rope_theta": _number(rope, "rope_theta", _number(config, "rope_theta", 10000.0)),
        "norm_eps": _number(config, "rms_norm_eps", 1e-6),
        "attention_bias": bias,
    }


def _plain_fields(config: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, Any]:
    """Fields of GPT-2 and OPT; OPT's config has no epsilon of the norms."""
    hidden = sizes["hidden_size"]
    return {
        "num_kv_heads": sizes["num_heads"],
        "head_dim": sizes["hidden_size"] // max(sizes["num_heads"], 1),
        "intermediate_size": _whole(config, "ffn_dim", _whole(config, "n_inner", 4 * hidden)),
        "tie_embeddings": bool(config.get("tie_word_embeddings", True)),
        "norm_eps": _number(config, "layer_norm_epsilon", 1e-5),
        "attention_bias": True,
    }
