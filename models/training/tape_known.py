"""The backward of a layer from kept products, written down as the runtime runs it.

Products and attention return what their forward has kept, so only elementwise work allocates
(runtime/finetuning/backward.py). Queries see the keys of all tokens up to the window's end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from operator import le

import numpy as np
import numpy.typing as npt

from models.parameters import layer_name, lora_targets, model_parameters
from models.spec import DTYPE_BYTES, ModelSpec
from models.training import tape_operators as op
from models.training.tape import Storage, Tape, Value
from models.training.tape_layers import UnitForward
from traces.serving.request import TrainingJob
from traces.training.recipe import Recipe

# Products that a backward does not read: keys and values lie in pages, the last one is behind all.
UNREAD = ("k_proj", "v_proj", "down_proj", "mlp.c_proj", "fc2")
QUERY_SHARE = 3  # GPT-2's product makes queries, keys and values; the first of them are read
SCALARS = 4  # of the loss: before and behind each of its divisors


RECTIFIED, BEHIND_RECTIFIED = "fc1", "fc2"  # a ReLU lies between these products (OPT)
BITS = 8  # signs in a byte


def keeps_signs(spec: ModelSpec, recipe: Recipe) -> bool:
    """Whether a layer keeps the signs of its ReLU alone.

    Args:
        spec: The model.
        recipe: Of the job; where the product behind the ReLU trains, its inputs are kept.

    Returns:
        Whether the model has a ReLU, and adapters lie elsewhere.
    """
    return spec.family == "opt" and not (
        recipe.lora_rank is None or BEHIND_RECTIFIED in lora_targets(spec, recipe)
    )


def packed_width(width: int) -> int:
    """The bytes of so many signs."""
    return -(-width // BITS)


def kept_width(name: str, width: int, norms_heads: bool) -> int:
    """How many numbers of a product a layer keeps of each token.

    Args:
        name: Of the product within the layer.
        width: Numbers that it makes.
        norms_heads: Whether each head of queries and keys is normed.

    Returns:
        The first so many of them.
    """
    if name.endswith("c_attn"):
        return width // QUERY_SHARE
    if name.endswith(UNREAD) and not (norms_heads and name.endswith("k_proj")):
        return 0
    return width


class KnownForward(UnitForward):
    """A layer over a window, from what it has kept.

    Args:
        tape: Records the forward.
        spec: The model.
        recipe: Of the job.
        tokens: Of the window.
        keys: Of the sample, up to the window's end.
        copied: Whether what is kept lies in several parts, of which a copy is made.
    """

    def __init__(
        self, tape: Tape, spec: ModelSpec, recipe: Recipe, tokens: int, keys: int, copied: bool
    ) -> None:
        parameters, units = model_parameters(spec, recipe)
        job = TrainingJob(0, 0, spec.num_layers + 2, max(2, tokens), recipe=recipe)
        own = [parameters[p] for p in units[spec.num_layers]]
        super().__init__(tape, spec, job, own, layer_name(spec, spec.num_layers - 1))
        self.tokens = self.rows = tokens
        self._keys, self._copied = keys, copied
        self._rectified = RECTIFIED if keeps_signs(spec, recipe) else ""
        self.kept: dict[str, Storage] = {}
        self._keep("input", spec.hidden_size)
        self._keep("attention", spec.query_size)
        self._keep("log_sums", spec.num_heads, max(self.item_bytes, op.WIDE_BYTES))
        for name, weight in self.own.items():
            is_matrix = name.endswith(".weight") and "norm" not in name and "ln_" not in name
            if is_matrix and ".lora_" not in name:
                self._keep_product(name.removesuffix(".weight"), weight)

    def _keep_product(self, name: str, weight: Value) -> None:
        """A product, and what the first matrix of its adapter makes."""
        fan_in = self._fan_in(name)
        width = kept_width(name, weight.elements // fan_in, self.spec.norms_heads)
        if name == self._rectified:
            self._keep(name, packed_width(width), 1)
        elif width:
            self._keep(name, width)
        if f"{name}.lora_A.weight" in self.own:
            self._keep(f"{name}.lora_A", self.recipe.lora_rank or 0)

    def _keep(self, name: str, width: int, item_bytes: int = 0) -> None:
        nbytes = self.rows * width * (item_bytes or self.item_bytes)
        self.kept[name] = self.tape.storage(nbytes if self._copied else 0)

    def _fan_in(self, name: str) -> int:
        if name.endswith(("o_proj", "out_proj")):
            return self.spec.query_size
        is_last = name.endswith(("down_proj", "mlp.c_proj", "fc2"))
        return self.spec.intermediate_size if is_last else self.spec.hidden_size

    def _linear(self, name: str, x: Value) -> Value:
        bias = self.own.get(f"{name}.bias")
        result = self._known(name, x, self.own[f"{name}.weight"], bias)
        if f"{name}.lora_A.weight" not in self.own:
            return result
        tape, rows = self.tape, self.rows
        down, up = self.own[f"{name}.lora_A.weight"], self.own[f"{name}.lora_B.weight"]
        narrow = self._known(f"{name}.lora_A", x, down, None)
        if name in self.kept and name != self._rectified:
            change = op.linear(tape, narrow, up, None, rows)
        else:
            change = self._known(f"{name}.lora_B", narrow, up, None)
        change = op.copy(tape, change)
        return op.plus(tape, result, change)

    def _known(self, name: str, x: Value, weight: Value, bias: Value | None) -> Value:
        """A product that is not computed: what is kept of it, or one zero for all numbers."""
        width = weight.elements // (x.elements // self.rows)
        elements = self.rows * width
        if name not in self.kept:
            storage = self.tape.storage(self.item_bytes)
        elif name.endswith("c_attn"):
            storage = self.tape.storage(elements * self.item_bytes)
        elif name == self._rectified:
            bits = self.tape.storage(elements)  # a byte for each, until they are numbers
            storage = self.tape.storage(elements * self.item_bytes)
            del bits
        else:
            storage = self.kept[name]
        value = Value(storage, elements, self.item_bytes)
        inputs = (x, weight) if bias is None else (x, weight, bias)
        makes = (x.nbytes, weight.nbytes, 0 if bias is None else bias.nbytes)[: len(inputs)]
        saved = (x.storage if weight.edge else None,)
        return self.tape.make(elements, self.item_bytes, inputs, makes, saved, view_of=value)

    def _attention(self, q: Value, k: Value, v: Value) -> Value:
        """Keys and values of all tokens from their pages; a mask behind the first window."""
        tape, item, kv = self.tape, self.item_bytes, self.spec.kv_size
        pages = tape.storage(2 * self._keys * kv * item)
        is_cut = self._keys > self.rows
        mask = tape.storage(self.rows * self._keys * item if is_cut else 0)
        known = (self.kept["attention"], self.kept["log_sums"])
        value = Value(known[0], q.elements, item)
        makes = (q.nbytes, k.nbytes, v.nbytes)
        scratch = (self._keys * kv * item,) * 2 if is_cut else ()
        saved = (q.storage, pages, mask, *known)
        return tape.make(
            q.elements, item, (q, k, v), makes, saved, scratch, computes_all=True, view_of=value
        )


@dataclass(frozen=True)
class BackwardBytes:
    """Workspace of the backward of a window, and of its loss, by their sizes.

    Attributes:
        spec: The model; its own dtype is not read.
        recipe: Of the job.
    """

    spec: ModelSpec
    recipe: Recipe

    def of(self, units: range, tokens: int, keys: int) -> int:
        """The workspace of a launch.

        Args:
            units: It goes down through these, the embedding or layers.
            tokens: Of the window.
            keys: Tokens of the sample, in whole pages.

        Returns:
            Bytes at its peak, where the sample went forward in several windows.
        """
        gradient_bytes = self._gradient_bytes
        found = [keys * gradient_bytes]  # parts of the gradient that comes in become one
        if units.stop > 1:
            passed = tokens * gradient_bytes if len(units) > 1 else 0  # from layer to layer
            found.append(self._of_layer(tokens, keys) + passed)
        if not units.start:
            found.append(self._table_bytes + 2 * tokens * gradient_bytes)
        return max(found)

    def of_loss(self, rows: int) -> int:
        """The workspace of the loss of a window forward, with the gradient of the head's input.

        Args:
            rows: That the head computes.

        Returns:
            Bytes at its peak; 0 without a row.
        """
        if not rows:
            return 0
        return max([fixed + by_row * rows for fixed, by_row in self._loss_terms])

    def _of_layer(self, tokens: int, keys: int) -> int:
        if keys < tokens:
            return known_backward_bytes(self.spec, self.recipe, tokens, keys)
        terms = self._cut_terms if keys > tokens else self._whole_terms
        pairs = tokens * keys
        return max([one + t * tokens + k * keys + p * pairs for one, t, k, p in terms])

    # Policies ask for workspace at each step: what windows have in common is kept, and hashes of
    # models and recipes would take longer than the sums.
    @cached_property
    def _gradient_bytes(self) -> int:
        return self.spec.hidden_size * DTYPE_BYTES[self.recipe.dtype]

    @cached_property
    def _table_bytes(self) -> int:
        return _table_bytes(self.spec, self.recipe)

    @cached_property
    def _cut_terms(self) -> list[tuple[int, ...]]:
        return undominated_terms(_live_terms(self.spec, self.recipe, True, True))

    @cached_property
    def _whole_terms(self) -> list[tuple[int, ...]]:
        return undominated_terms(_live_terms(self.spec, self.recipe, False, True))

    @cached_property
    def _loss_terms(self) -> list[tuple[int, ...]]:
        return undominated_terms(_loss_terms(self.spec, self.recipe))


def undominated_terms(terms: npt.NDArray[np.int64]) -> list[tuple[int, ...]]:
    """The rows that may make the largest sum, whatever counts they are multiplied with.

    Args:
        terms: [rows, counts], bytes by count; counts are 0 or more.

    Returns:
        Rows without those that are nowhere larger than another one.
    """
    rows = [tuple(map(int, row)) for row in np.unique(terms, axis=0)]
    return [
        row for row in rows if not any(other != row and all(map(le, row, other)) for other in rows)
    ]


def known_loss_bytes(spec: ModelSpec, recipe: Recipe, rows: int) -> int:
    """Workspace of the loss of so many rows, and of its backward as far as the head's input.

    Args:
        spec: The model; its own dtype is not read.
        recipe: Of the job.
        rows: That the head computes.

    Returns:
        Bytes at the peak, beside hidden states.
    """
    return max(_played_loss(spec, recipe, rows))


def _loss_terms(spec: ModelSpec, recipe: Recipe) -> npt.NDArray[np.int64]:
    """Bytes live behind each allocation of a loss, as terms of 1 and rows; see `_live_terms`."""
    sizes = (16, 32)
    lives = np.array([_played_loss(spec, recipe, rows) for rows in sizes])
    known = np.array([(1, rows) for rows in sizes])
    found = np.rint(np.linalg.solve(known, lives)).astype(np.int64).T
    assert (found @ known.T == lives.T).all(), "bytes grow by whole ones"
    return found


def _played_loss(spec: ModelSpec, recipe: Recipe, rows: int) -> Sequence[int]:
    """Bytes live behind each allocation of a loss and its backward, by a tape."""
    tape = Tape()
    parameters, units = model_parameters(spec, recipe)
    job = TrainingJob(0, 0, spec.num_layers + 2, max(2, rows), recipe=recipe)
    run = UnitForward(tape, spec, job, [parameters[p] for p in units[-1]])
    run.rows = run.tokens = rows
    hidden = tape.outside(rows * spec.hidden_size, run.item_bytes, requires_grad=True)
    labels = tape.storage(rows * op.INDEX_BYTES + SCALARS * op.WIDE_BYTES)
    loss = op.copy(tape, run.head(hidden))  # over the labels, then over the samples of a step
    del loss
    tape.backward(tape.storage(op.WIDE_BYTES))
    lives = tape.history
    del labels
    return lives


@lru_cache(maxsize=16)
def _table_bytes(spec: ModelSpec, recipe: Recipe) -> int:
    """Fresh gradients of the tables of the embedding."""
    parameters, units = model_parameters(spec, recipe)
    trained = [parameters[p].elements for p in units[0] if parameters[p].trains]
    return sum(trained) * DTYPE_BYTES[recipe.dtype]


def known_backward_bytes(
    spec: ModelSpec, recipe: Recipe, tokens: int, keys: int, copied: bool = True
) -> int:
    """Workspace of the backward of a layer over a window, of which a gradient goes on.

    Args:
        spec: The model; its own dtype is not read.
        recipe: Of the job.
        tokens: Of the window.
        keys: Tokens of the sample up to the window's end, in whole pages.
        copied: Whether the layer went forward in several windows.

    Returns:
        Bytes at the peak, beside what is kept, sums of gradients, and the gradient that comes in.
    """
    if keys < tokens:  # the window is not in its sample
        return max(_played(spec, recipe, tokens, keys, copied))
    terms = _live_terms(spec, recipe, keys > tokens, copied)
    return int((terms @ np.array((1, tokens, keys, tokens * keys))).max())


@lru_cache(maxsize=64)
def _live_terms(
    spec: ModelSpec, recipe: Recipe, is_cut: bool, copied: bool
) -> npt.NDArray[np.int64]:
    """Bytes live behind each allocation, as terms of 1, tokens, keys and tokens x keys.

    Each storage has so many bytes per token, per key, and per pair of both, and all windows make
    and free them in one order. So a few windows tell the terms of all; [terms, 4], each once.
    """
    low, high = 16, 32  # any two: keys are more than tokens where a window is cut, else as many
    sizes = [(t, k) for t in (low, high) for k in (2 * high, 4 * high)]
    if not is_cut:
        sizes = [(low, low), (high, high)]
    known = np.array([(1, t, k, t * k) if is_cut else (1, t) for t, k in sizes])
    lives = np.array([_played(spec, recipe, *size, copied) for size in sizes])
    found = np.rint(np.linalg.solve(known, lives)).astype(np.int64).T
    assert (found @ known.T == lives.T).all(), "bytes grow by whole ones"
    return np.unique(np.pad(found, ((0, 0), (0, 4 - found.shape[1]))), axis=0)


def _played(spec: ModelSpec, recipe: Recipe, tokens: int, keys: int, copied: bool) -> Sequence[int]:
    """Bytes live behind each allocation of a backward, by a tape."""
    tape = Tape()
    run = KnownForward(tape, spec, recipe, tokens, keys, copied)
    turns = _turns(tape, run)
    hidden = tape.outside(tokens * spec.hidden_size, run.item_bytes, requires_grad=True)
    hidden.storage = run.kept.pop("input")
    out = run.layer(hidden)
    run.kept.clear()
    del out
    tape.backward(tape.storage(0))
    lives = tape.history
    del hidden, turns
    return lives


def _turns(tape: Tape, run: KnownForward) -> tuple[Storage, ...]:
    """Positions, and cosines and sines where they are rotary."""
    rotary = 0 if run.spec.family in ("gpt2", "opt") else run.spec.head_dim * run.item_bytes
    return tuple([tape.storage(run.rows * nbytes) for nbytes in (op.INDEX_BYTES, rotary, rotary)])
