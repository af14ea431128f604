"""The units of a model that trains, written down as Hugging Face's modules run them.

A variable lives here as long as in the module, because a tensor's storage lives as long as its
variables. So the peaks are equal, and a variable that looks superfluous is not.
"""

from __future__ import annotations

from collections.abc import Sequence

from models.parameters import Parameter
from models.spec import DTYPE_BYTES, ModelSpec
from models.training import tape_operators as op
from models.training.tape import Storage, Tape, Value
from traces.serving.request import TrainingJob


class UnitForward:
    """One forward of one unit for one microbatch.

    Dropout is where the family has it. Token ids, cosines and sines exist before the forward.

    Args:
        tape: Records the forward.
        spec: The model.
        job: Sequences and tokens of the microbatch, and the recipe.
        parameters: The parameters of the unit.
        prefix: The name of the unit's module, which is cut from the names of its parameters.

    Attributes:
        own: The parameters by their names within the module, without peft's additions.
        rows: Tokens of the microbatch.
        item_bytes: Bytes of one number of weights and activations.
    """

    def __init__(
        self,
        tape: Tape,
        spec: ModelSpec,
        job: TrainingJob,
        parameters: Sequence[Parameter],
        prefix: str = "",
    ) -> None:
        self.tape, self.spec, self.recipe = tape, spec, job.recipe
        self.sequences, self.tokens = job.sequences, job.sequence_tokens
        self.rows, self.item_bytes = job.microbatch_tokens, DTYPE_BYTES[job.recipe.dtype]
        self.own = {
            _own_name(p.name, prefix): tape.outside(p.elements, self.item_bytes, p.trains)
            for p in parameters
        }

    def embedding(self) -> Value:
        """Unit 0: token ids to hidden states.

        Returns:
            Hidden states [rows, hidden_size].
        """
        table, *positions = self.own.values()
        hidden = op.embedding(self.tape, table, self.rows * self.spec.hidden_size)
        if not positions:
            return hidden
        counted = self.tape.storage(self.tokens * op.INDEX_BYTES)
        hidden = op.plus(self.tape, hidden, self._positions(positions[0], counted))
        is_dropped = self.spec.family == "gpt2"  # OPT drops out nothing here
        return op.dropout(self.tape, hidden, self.recipe.dropout) if is_dropped else hidden

    def _positions(self, table: Value, counted: Storage) -> Value:
        """Position embeddings: GPT-2 has one set for all sequences, OPT a set per sequence."""
        if self.spec.family == "gpt2":
            return op.embedding(self.tape, table, self.tokens * self.spec.hidden_size, counted)
        shifted = self.tape.storage(self.rows * op.INDEX_BYTES)
        return op.embedding(self.tape, table, self.rows * self.spec.hidden_size, shifted)

    def layer(self, hidden: Value) -> Value:
        """Units 1 to num_layers: hidden states to hidden states.

        Args:
            hidden: Hidden states [rows, hidden_size].

        Returns:
            Hidden states [rows, hidden_size].
        """
        of_family = {"gpt2": self._gpt2_layer, "opt": self._opt_layer}
        return of_family.get(self.spec.family, self._gated_layer)(hidden)

    def head(self, hidden: Value) -> Value:
        """The last unit: hidden states to the loss, divided by the number of microbatches.

        Args:
            hidden: Hidden states [rows, hidden_size].

        Returns:
            The loss: one number of float32.
        """
        return op.copy(self.tape, self._loss(hidden))

    def _loss(self, hidden: Value) -> Value:
        *_, table = self.own.values()
        logits = op.linear(self.tape, self._last_norm(hidden), table, None, self.rows)
        return op.cross_entropy(self.tape, logits, self.rows, self.sequences)

    def _last_norm(self, hidden: Value) -> Value:
        norm, *bias, _ = self.own.values()
        if not bias:
            return op.rms_norm(self.tape, hidden, norm)
        return op.layer_norm(self.tape, hidden, norm, bias[0], self.rows)

    # ---- Llama, Mistral, Qwen
    def _gated_layer(self, hidden: Value) -> Value:
        residual = hidden
        hidden = self._rms_norm("input_layernorm", hidden)
        hidden = self._gated_attention(hidden)
        residual = hidden = op.plus(self.tape, residual, hidden)
        hidden = self._rms_norm("post_attention_layernorm", hidden)
        hidden = self._gated_mlp(hidden)
        return op.plus(self.tape, residual, hidden)

    def _gated_attention(self, hidden: Value) -> Value:
        q = self._heads("q", hidden)
        k = self._heads("k", hidden)
        v = self._linear("self_attn.v_proj", hidden)
        q, k = self._turned(q, k)
        attended = self._attention(q, k, v)
        return self._linear("self_attn.o_proj", attended)

    def _gated_mlp(self, hidden: Value) -> Value:
        inner = op.times(
            self.tape,
            op.silu(self.tape, self._linear("mlp.gate_proj", hidden)),
            self._linear("mlp.up_proj", hidden),
        )
        return self._linear("mlp.down_proj", inner)

    def _turned(self, q: Value, k: Value) -> tuple[Value, Value]:
        """Queries and keys, rotated by the cosines and sines that all layers share."""
        angles = self.tape.outside(self.tokens * self.spec.head_dim, self.item_bytes)
        return self._rotated(q, angles), self._rotated(k, angles)

    def _rotated(self, x: Value, angles: Value) -> Value:
        straight = op.times(self.tape, x, angles)
        return op.plus(self.tape, straight, op.times(self.tape, self._half_turned(x), angles))

    def _half_turned(self, x: Value) -> Value:
        first, second = op.half(self.tape, x), op.half(self.tape, x)
        return op.concatenated(self.tape, op.copy(self.tape, second), first)

    def _heads(self, name: str, hidden: Value) -> Value:
        """Queries or keys; Qwen3 has a norm over each head."""
        x = self._linear(f"self_attn.{name}_proj", hidden)
        if x.elements > self.rows * self.spec.head_dim:
            x = op.relaid(self.tape, x)  # gradients of several heads come in their order
        if self.spec.family == "qwen3":
            return self._rms_norm(f"self_attn.{name}_norm", x)
        return x

    # ---- GPT-2
    def _gpt2_layer(self, hidden: Value) -> Value:
        residual = hidden
        hidden = self._layer_norm("ln_1", hidden)
        attended = self._gpt2_attention(hidden)
        hidden = op.plus(self.tape, attended, residual)
        residual = hidden
        hidden = self._layer_norm("ln_2", hidden)
        fed = self._gpt2_mlp(hidden)
        return op.plus(self.tape, residual, fed)

    def _gpt2_attention(self, hidden: Value) -> Value:
        q, k, v = self.tape.split(self._linear("attn.c_attn", hidden), 3)
        attended = self._attention(q, k, v)
        attended = self._linear("attn.c_proj", attended)
        return op.dropout(self.tape, attended, self.recipe.dropout)

    def _gpt2_mlp(self, hidden: Value) -> Value:
        hidden = self._linear("mlp.c_fc", hidden)
        hidden = op.gelu_new(self.tape, hidden)
        hidden = self._linear("mlp.c_proj", hidden)
        return op.dropout(self.tape, hidden, self.recipe.dropout)

    # ---- OPT
    def _opt_layer(self, hidden: Value) -> Value:
        residual = hidden
        hidden = self._layer_norm("self_attn_layer_norm", hidden)
        hidden = self._opt_attention(hidden)
        hidden = op.dropout(self.tape, hidden, self.recipe.dropout)
        residual = hidden = op.plus(self.tape, residual, hidden)
        hidden = self._layer_norm("final_layer_norm", hidden)
        hidden = self._linear("fc1", hidden)
        hidden = op.relu(self.tape, hidden)
        hidden = self._linear("fc2", hidden)
        hidden = op.dropout(self.tape, hidden, self.recipe.dropout)
        return op.plus(self.tape, residual, hidden)

    def _opt_attention(self, hidden: Value) -> Value:
        q = op.copy(self.tape, self._linear("self_attn.q_proj", hidden))  # scaled
        k = self._linear("self_attn.k_proj", hidden)
        v = self._linear("self_attn.v_proj", hidden)
        attended = self._attention(q, k, v)
        return self._linear("self_attn.out_proj", attended)

    # ---- all families
    def _linear(self, name: str, x: Value) -> Value:
        """A matrix product, plus its LoRA adapter where the module has one, as peft adds it."""
        tape, rows = self.tape, self.rows
        bias = self.own.get(f"{name}.bias")
        result = op.linear(tape, x, self.own[f"{name}.weight"], bias, rows)
        if f"{name}.lora_A.weight" not in self.own:
            return result
        down, up = self.own[f"{name}.lora_A.weight"], self.own[f"{name}.lora_B.weight"]
        change = op.copy(
            tape,
            op.linear(
                tape,
                op.linear(tape, op.dropout(tape, x, self.recipe.lora_dropout), down, None, rows),
                up,
                None,
                rows,
            ),
        )
        return op.plus(tape, result, change)

    def _rms_norm(self, name: str, x: Value) -> Value:
        return op.rms_norm(self.tape, x, self.own[f"{name}.weight"])

    def _layer_norm(self, name: str, x: Value) -> Value:
        weight, bias = self.own[f"{name}.weight"], self.own[f"{name}.bias"]
        return op.layer_norm(self.tape, x, weight, bias, self.rows)

    def _attention(self, q: Value, k: Value, v: Value) -> Value:
        heads = self.spec.num_heads
        if self.recipe.dropout:
            shape = (self.sequences, heads, self.tokens)
            attended = op.math_attention(self.tape, q, k, v, shape, self.recipe.dropout)
            return op.contiguous(self.tape, attended)
        return op.flash_attention(self.tape, q, k, v, self.rows, heads)


def _own_name(name: str, prefix: str) -> str:
    name = name.removeprefix(f"{prefix}.")
    return name.replace(".base_layer.", ".").replace(".default.", ".")
