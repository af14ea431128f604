"""What a decoder-only model is, in numbers: parameters, KV and activation bytes by arithmetic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
FAMILIES = ("llama", "qwen2", "qwen3", "gpt2")
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


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The shape of one model. Counts are exact; they equal what Hugging Face builds (tested).

    `attention_bias` is the config's flag: all four projections in Llama and Qwen3, q/k/v in Qwen2,
    always in GPT-2. Scaling of rotary positions changes no size and is left to the runtime.
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
        if self.num_heads % self.num_kv_heads:
            shared = f"{self.num_heads} heads cannot share {self.num_kv_heads} KV heads"
            raise ValueError(f"model {self.name}: {shared}")

    @property
    def item_bytes(self) -> int:
        """Bytes of one number."""
        return DTYPE_BYTES[self.dtype]

    @property
    def query_size(self) -> int:
        """Width of the queries (and of the attention's output)."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of the keys, or of the values."""
        return self.num_kv_heads * self.head_dim

    @property
    def layer_matrix_parameters(self) -> int:
        """Entries of one layer's matrices: what a token is multiplied with."""
        attention = self.hidden_size * (2 * self.query_size + 2 * self.kv_size)
        matrices = 2 if self.family == "gpt2" else 3
        return attention + matrices * self.hidden_size * self.intermediate_size

    @property
    def layer_parameters(self) -> int:
        """Parameters of one decoder layer: matrices, biases and norms."""
        norms = 2 * self.hidden_size
        if self.family == "gpt2":
            biases = 5 * self.hidden_size + self.intermediate_size
            return self.layer_matrix_parameters + 2 * norms + biases
        biases = self.query_size + 2 * self.kv_size if self.attention_bias else 0
        if self.attention_bias and self.family != "qwen2":
            biases += self.hidden_size  # Qwen2 has none on the output projection
        norms += 2 * self.head_dim if self.family == "qwen3" else 0
        return self.layer_matrix_parameters + norms + biases

    @property
    def embedding_parameters(self) -> int:
        """Token embedding, learned positions, final norm and the head unless it is tied."""
        tables = self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)
        if self.family == "gpt2":
            return tables + (self.max_positions + 2) * self.hidden_size
        return tables + self.hidden_size

    @property
    def parameters(self) -> int:
        """All parameters, tied ones counted once."""
        return self.num_layers * self.layer_parameters + self.embedding_parameters

    @property
    def weight_bytes(self) -> int:
        """Bytes of all parameters."""
        return self.parameters * self.item_bytes

    @property
    def layer_weight_bytes(self) -> int:
        """Bytes of one layer's parameters."""
        return self.layer_parameters * self.item_bytes

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of keys and values of one token, all layers."""
        return 2 * self.num_layers * self.kv_size * self.item_bytes

    def workspace_bytes(
        self,
        tokens: Sequence[int],
        contexts: Sequence[int] = (),
        samples: int = 0,
        page_tokens: int = 16,
    ) -> int:
        """Peak of what a greedy launch allocates and gives back, without autograd, on a CPU.

        `tokens` and `contexts` (tokens in KV before) are per slice. The largest of four moments of
        the modules of transformers 5 around runtime/attention.py, where T rows run together. Beside
        each but the head lie what all layers share: cosines and sines of the T rows (not in GPT-2)
        and, per slice of several tokens behind a context, a mask of the size of a number. Equal to
        what runtime/tracker.py counts (tests/test_workspace.py), but for a few numbers per row.
        """
        pairs = list(zip(tokens, contexts or [0] * len(tokens), strict=True))
        slices, decodes = [s for s in pairs if s[0] > 1], [c for n, c in pairs if n == 1]
        rows, item = sum(tokens), self.item_bytes
        shared = 0 if self.family == "gpt2" else 2 * rows * self.head_dim * item
        masks = sum(n * (n + c) for n, c in slices if c) * item
        layers = max(
            rows * self._projection_row_bytes,
            rows * (2 * self.hidden_size + self.query_size + 2 * self.kv_size) * item
            + self._attended_bytes(slices, decodes, page_tokens),
            rows * self._mlp_row_bytes,
        )
        # The last layer's rows; of the sampled ones the norm and the logits.
        head = (rows * self.hidden_size + samples * (self.hidden_size + self.vocab_size)) * item
        return shared + max(layers + masks, head)

    @property
    def _projection_row_bytes(self) -> int:
        """Before attention: the layer's input, the normed one and q, and what q is rotated with.

        That is k, v, q times the cosines, q with its halves swapped, and this times the sines. The
        norm of q (Qwen3), unless in float32, instead makes a float32 copy of q, the normed copy and
        two numbers per head. GPT-2 makes nothing here that attention and MLP do not exceed.
        """
        if self.family == "gpt2":
            return 0
        own = (2 * self.hidden_size + self.query_size) * self.item_bytes
        turned = (3 * self.query_size + 2 * self.kv_size) * self.item_bytes
        if self.family != "qwen3" or self.dtype == "float32":
            return own + turned
        return own + max(turned, 4 * 2 * (self.query_size + self.num_heads))

    @property
    def _mlp_row_bytes(self) -> int:
        """The layer's input, its sum with attention's output, the normed sum, and the inner rows.

        Inner rows: gate, up and their product. GPT-2 keeps attention's output too, and its GELU
        holds four inner rows at once.
        """
        held = 4 if self.family == "gpt2" else 3
        return held * (self.hidden_size + self.intermediate_size) * self.item_bytes

    def _attended_bytes(
        self, slices: Sequence[tuple[int, int]], decodes: Sequence[int], page_tokens: int
    ) -> int:
        """Beside the layer's input, the normed one, q, k and v, while jobs are attended in turn.

        Slices (tokens, context) come first, then decodes (context). Each holds the outputs before
        it, its gathered pages (none where a prompt starts), its own output and a float32 sum per
        row and head. Several outputs are joined into a second copy at the end.
        """
        output, sums = self.query_size * self.item_bytes, 4 * self.num_heads
        page_bytes = 2 * self.kv_size * self.item_bytes * page_tokens
        done = most = 0
        for n, c in slices:
            pages = -(-(n + c) // page_tokens) if c else 0
            most = max(most, done + pages * page_bytes + n * (output + sums))
            done += n * output
        for c in decodes:
            done += output
            held = done + (c // page_tokens + 1) * page_bytes + sums
            most = held if held > most else most
        return max(most, 2 * done) if len(slices) + len(decodes) > 1 else most

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], name: str = "") -> ModelSpec:
        """The spec of a Hugging Face config.json, given as a dict. ValueError if it is not ours."""
        family = config.get("model_type")
        label = name or str(config.get("_name_or_path") or family)
        if family not in FAMILIES:
            raise ValueError(f"model {label}: model_type {family!r} is not one of {FAMILIES}")
        for switch in ("mlp_bias", "use_sliding_window", "add_cross_attention"):
            if config.get(switch):
                raise ValueError(f"model {label}: {switch} is not supported; set it to false")
        keys = GPT2_KEYS if family == "gpt2" else LLAMA_KEYS
        if missing := [key for key in keys.values() if config.get(key) is None]:
            raise ValueError(f"model {label}: config lacks {', '.join(missing)}")
        sizes = {field: int(config[key]) for field, key in keys.items()}
        read = _gpt2_fields if family == "gpt2" else _llama_fields
        dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32")
        dtype = dtype.removeprefix("torch.")
        fields: dict[str, Any] = {**sizes, **read(config, sizes)}
        return cls(name=label, family=str(family), dtype=dtype, **fields)


def _llama_fields(config: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, Any]:
    family, heads = config["model_type"], sizes["num_heads"]
    rope = config.get("rope_parameters") or {}
    # Defaults are those of the Hugging Face config classes.
    head_dim = config.get("head_dim") or (
        128 if family == "qwen3" else sizes["hidden_size"] // heads
    )
    bias = family == "qwen2" or bool(config.get("attention_bias"))
    return {
        "num_kv_heads": int(config.get("num_key_value_heads") or heads),
        "head_dim": int(head_dim),
        "tie_embeddings": bool(config.get("tie_word_embeddings", False)),
        "rope_theta": float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
        "norm_eps": float(config.get("rms_norm_eps", 1e-6)),
        "attention_bias": bias,
    }


def _gpt2_fields(config: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, Any]:
    return {
        "num_kv_heads": sizes["num_heads"],
        "head_dim": sizes["hidden_size"] // sizes["num_heads"],
        "intermediate_size": int(config.get("n_inner") or 4 * sizes["hidden_size"]),
        "tie_embeddings": bool(config.get("tie_word_embeddings", True)),
        "norm_eps": float(config.get("layer_norm_epsilon", 1e-5)),
        "attention_bias": True,
    }
