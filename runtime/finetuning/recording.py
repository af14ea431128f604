"""Keeps what a backward needs while a window runs: by itself, or in a launch that serves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear, relu, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from runtime.finetuning.products import (
    ATTENTION,
    LOG_SUMS,
    LayerProduct,
    Role,
    own,
    packed_signs,
    rectified,
    unread,
    wide,
)
from runtime.serving.kv import Arena

flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # what SDPA calls on a CPU
SCORES_BYTES = 1 << 24  # of attention by products: of scores that are made at once


def weight_of(func: Any, args: Sequence[Any]) -> Tensor | None:
    """The matrix of a product: of nn.Linear, or of GPT-2's Conv1D; None of other functions."""
    if func is linear:
        return args[1]  # type: ignore[no-any-return]
    return args[2] if func is torch.addmm else None


def attend_with_sums(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Attention, with what its backward reads.

    On a CPU by the kernel of SDPA; elsewhere by plain products, since kernels of other devices give
    sums in forms of their own.

    Args:
        query: [N, heads, T, D].
        key: [N, kv_heads, S, D].
        value: [N, kv_heads, S, D].
        mask: [1, 1, T, S], added to the scores; None: causal, where T is S.
        scale: Of the scores; None: one over the root of D.

    Returns:
        [N, heads, T, D], and the logarithm of the sum of each row, [N, heads, T].
    """
    if query.device.type == "cpu":
        out, sums = flash(query, key, value, 0.0, mask is None, attn_mask=mask, scale=scale)
        return out, sums
    return attend_by_products(query, key, value, mask, scale)


def attend_by_products(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None
) -> tuple[Tensor, Tensor]:
    """As `attend_with_sums`, on any device."""
    out = torch.empty_like(query)
    sums = query.new_empty(query.shape[:3], dtype=wide(query.dtype))
    for part in parts_of(query, key):
        scores = part.scores(query, key, mask, scale)
        found = torch.logsumexp(scores, -1)
        part.write(sums, found)
        part.write(out, scores.sub_(found.unsqueeze(-1)).exp_() @ part.of_kv(value))
    return out, sums


class AttentionPart(NamedTuple):
    """Some rows of some heads, whose scores are made at once.

    Attributes:
        kv: KV heads.
        shared_by: Heads that share a KV head.
        rows: Of the queries.
    """

    kv: slice
    shared_by: int
    rows: slice

    def _of(self, tensor: Tensor) -> Tensor:
        """A view of [N, heads, T, ..]: [N, kv_heads, heads that share one, rows, ..]."""
        found: Tensor = tensor.unflatten(1, (-1, self.shared_by))[:, self.kv, :, self.rows]
        return found

    def of(self, tensor: Tensor) -> Tensor:
        """Of [N, heads, T, ..], [N, kv_heads, heads that share one * rows, ..] in a wide dtype."""
        return self._of(tensor).flatten(2, 3).to(wide(tensor.dtype))

    def of_kv(self, tensor: Tensor) -> Tensor:
        """Of [N, kv_heads, S, D], its KV heads in a wide dtype."""
        return tensor[:, self.kv].to(wide(tensor.dtype))

    def write(self, tensor: Tensor, found: Tensor) -> None:
        """Puts what was made of the part, as `of` has it, into [N, heads, T, ..]."""
        self._of(tensor)[...] = found.unflatten(2, (self.shared_by, -1))

    def scores(
        self, query: Tensor, key: Tensor, mask: Tensor | None, scale: float | None
    ) -> Tensor:
        """[N, kv_heads, heads that share one * rows, S], in a wide dtype."""
        found = self.of(query) @ self.of_kv(key).transpose(-1, -2)
        found *= query.shape[-1] ** -0.5 if scale is None else scale
        by_head = found.unflatten(2, (self.shared_by, -1))
        if mask is None:
            hidden = found.new_full(by_head.shape[-2:], float("-inf"))
            by_head.add_(hidden.triu_(self.rows.start + 1))
        else:
            by_head.add_(mask[0, 0, self.rows])
        return found


def parts_of(query: Tensor, key: Tensor) -> Iterator[AttentionPart]:
    """Parts with scores of SCORES_BYTES at most; one row of the heads of a KV head at least."""
    kv_heads, shared_by = key.shape[1], query.shape[1] // key.shape[1]
    a_row = len(query) * shared_by * key.shape[2] * wide(query.dtype).itemsize
    rows = min(query.shape[2], max(1, SCORES_BYTES // a_row))
    heads = max(1, SCORES_BYTES // (a_row * rows))
    for low in range(0, kv_heads, heads):
        for start in range(0, query.shape[2], rows):
            stop = min(start + rows, query.shape[2])
            yield AttentionPart(slice(low, low + heads), shared_by, slice(start, stop))


class WindowKV:
    """The keys and values of a sample up to the end of a window, in the pages of its job."""

    def __init__(self, arena: Arena, table: Tensor, start: int, tokens: int) -> None:
        """
        Args:
            arena: The pages.
            table: Page ids of the job, as many as hold the window's last token.
            start: First token of the window in the sample.
            tokens: Tokens of the window.
        """
        self._arena, self._table, self.start, self.tokens = arena, table, start, tokens

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Puts the window's keys and values, [1, kv_heads, tokens, D], into their slots."""
        rows = self._arena.rows(layer)
        rows.select(1, 0).index_copy_(0, slots, key[0].transpose(0, 1))
        rows.select(1, 1).index_copy_(0, slots, value[0].transpose(0, 1))

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of all tokens up to the window's end, [1, kv_heads, tokens, D]."""
        pages = self._arena.layer(layer).index_select(0, self._table)
        rows = pages.flatten(0, 1)[: self.start + self.tokens]
        keys, values = rows.unbind(1)
        return keys.transpose(0, 1)[None], values.transpose(0, 1)[None]

    def mask(self, dtype: torch.dtype) -> Tensor | None:
        """[1, 1, tokens, keys], added to the scores: a row sees all before it and itself.

        None at the beginning of a sample, where the scores are causal as they are.
        """
        if not self.start:
            return None
        shape = (1, 1, self.tokens, self.start + self.tokens)
        mask = torch.full(shape, float("-inf"), dtype=dtype, device=self._table.device)
        return mask.triu_(self.start + 1)


class Recording(TorchFunctionMode):
    """Around a layer's module: keeps the products of a window, and attends over its pages.

    `kept` has them by name, [tokens, width] each. A window that runs again computes them alone: its
    output is of no use.
    """

    def __init__(self, roles: Mapping[int, Role], kv: WindowKV, slots: Tensor | None) -> None:
        """
        Args:
            roles: Of the layer's matrices.
            kv: The pages of the window.
            slots: Where its keys and values go; None: it runs again, and they are there already.
        """
        super().__init__()
        self._roles, self._kv, self._slots = roles, kv, slots
        self._rectified = rectified(roles.values())
        self.kept: dict[str, Tensor] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        role = self._roles.get(id(weight_of(func, args)))
        if role is not None and not role.kept and self._slots is None:
            return unread(args[0] if func is linear else args[1], role.width)
        if func is relu and self._rectified is not None:
            self.kept[self._rectified] = packed_signs(args[0].flatten(0, -2))
        out = func(*args, **(kwargs or {}))
        if role is not None and role.kept and not role.signs:
            self.kept[role.name] = own(out.flatten(0, -2)[:, : role.kept])
        return out

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None
    ) -> Tensor:
        """[1, heads, tokens, D] and kv_heads of the window -> [1, tokens, heads, D]."""
        if self._slots is not None:
            self._kv.write(layer, self._slots, key, value)
        if self._kv.start or self._slots is None:
            key, value = self._kv.read(layer)
        mask = self._kv.mask(query.dtype)
        out, sums = attend_with_sums(query, key, value, mask, scale)
        rows: Tensor = out[0].transpose(0, 1)
        self.kept[ATTENTION] = own(rows.flatten(1))
        self.kept[LOG_SUMS] = own(sums[0].transpose(0, 1))
        return rows[None]


class FusedWindow:
    """The rows [first, first + tokens) of a packed launch that finetune, with their adapters."""

    def __init__(self, products: Mapping[int, LayerProduct], first: int, tokens: int) -> None:
        """
        Args:
            products: All products of the job's layers, by address of the matrix.
            first: The first row of the window.
            tokens: Its rows.
        """
        self._products, self.rows = products, slice(first, first + tokens)
        self._rectified = rectified(products.values())
        self.kept: dict[str, Tensor] = {}

    def began(self, hidden: Tensor) -> Tensor:
        """A copy of the window's rows of a layer's input, [1, T, hidden]."""
        return hidden[0, self.rows].clone()

    def take(self, weight: Tensor, rows: Tensor, out: Tensor) -> None:
        """Keeps the window's part of a product, and adds its adapters there.

        Args:
            weight: A matrix, or some that lie behind each other as one.
            rows: What it was applied to, [T, inputs].
            out: What it has made, [T, outputs]; changed in place.
        """
        for columns, product in self._parts(weight):
            part = out[self.rows, columns]
            if product.kept and not product.signs:
                self.kept[product.name] = part[:, : product.kept].clone()
            if product.down is not None and product.up is not None:
                narrow = linear(rows[self.rows], product.down)
                self.kept[f"{product.name}.lora_A"] = narrow
                part += linear(narrow, product.up) * product.scale

    def rectifies(self, rows: Tensor) -> None:
        """Keeps the signs of what comes into a ReLU, [T, width], if they are all it needs."""
        if self._rectified is not None:
            self.kept[self._rectified] = packed_signs(rows[self.rows])

    def _parts(self, weight: Tensor) -> list[tuple[slice, LayerProduct]]:
        """The products of a matrix, and their columns in what it makes."""
        found, at = list[tuple[slice, LayerProduct]](), 0
        step = weight.shape[-1] * weight.itemsize
        while product := self._products.get(weight.data_ptr() + at * step):
            found.append((slice(at, at + product.width), product))
            at += product.width
            if at >= len(weight):  # of joint matrices each has its rows; Conv1D's is alone
                break
        return found

    def attended(self, out: Tensor, sums: Tensor) -> None:
        """Keeps attention's output [kv_heads, shared, tokens, D] and its logarithms of sums."""
        self.kept[ATTENTION] = own(out.permute(2, 0, 1, 3).flatten(1))
        self.kept[LOG_SUMS] = own(sums.permute(2, 0, 1).flatten(1))


class AddsToProducts(Protocol):
    """Rows of a packed launch that add to its products."""

    def take(self, weight: Tensor, rows: Tensor, out: Tensor) -> None:
        """Hears of a product: see FusedWindow."""


class Fusing(TorchFunctionMode):
    """Around the layers of a launch that serves: its products and attention also serve windows.

    One mode tells each product to all that add to it: under a second one, whatever the first does
    would be intercepted again. Rows of requests are computed as ever. The packer puts windows
    first, so the first slices that attend are theirs.
    """

    def __init__(
        self, windows: Sequence[FusedWindow], others: Sequence[AddsToProducts] = ()
    ) -> None:
        """
        Args:
            windows: In the order of their rows.
            others: Rows that add to products only.
        """
        super().__init__()
        self._windows, self._slices = windows, 0
        self._all: tuple[AddsToProducts, ...] = (*others, *windows)

    def __enter__(self) -> Fusing:
        """Entered anew for each layer in which windows attend."""
        self._slices = 0
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is scaled_dot_product_attention and self._slices < len(self._windows):
            return self._attend(*args, **(kwargs or {}))
        if func is relu:
            for window in self._windows:
                window.rectifies(args[0].flatten(0, -2))
        out = func(*args, **(kwargs or {}))
        if (weight := weight_of(func, args)) is not None:
            rows, flat = args[0] if func is linear else args[1], out
            if out.dim() > 2:
                rows, flat = rows.flatten(0, -2), out.flatten(0, -2)
            for own in self._all:
                own.take(weight, rows, flat)
        return out

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        scale: float | None = None,
    ) -> Tensor:
        window = self._windows[self._slices]
        self._slices += 1
        assert is_causal is (attn_mask is None), "a slice is masked, or causal as it is"
        mask = None if attn_mask is None else attn_mask[None, None]
        out, sums = attend_with_sums(query, key, value, mask, scale)
        window.attended(out, sums)
        return out
