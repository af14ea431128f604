"""Keeps what a backward needs while a window runs: by itself, or in a launch that serves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

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
SCORES_BYTES = 1 << 26  # of attention by products: scores of so many bytes are made at once


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
    outs, sums = list[Tensor](), list[Tensor]()
    for heads, kv in head_runs(query, key):
        scores = scores_of(query[:, heads], key[:, kv], mask, scale)
        sums.append(torch.logsumexp(scores, -1))
        weights = scores.sub_(sums[-1].unsqueeze(-1)).exp_().to(query.dtype)
        outs.append(weights @ value[:, kv])
    tokens = query.shape[2]
    out, sum_rows = torch.cat(outs, 1), torch.cat(sums, 1)
    return (
        out.unflatten(2, (-1, tokens)).flatten(1, 2),
        sum_rows.unflatten(2, (-1, tokens)).flatten(1, 2),
    )


def head_runs(query: Tensor, key: Tensor) -> Iterator[tuple[slice, slice]]:
    """Heads, and their KV heads, whose scores take SCORES_BYTES at most; one KV head at least."""
    kv_heads, shared = key.shape[1], query.shape[1] // key.shape[1]
    pairs = len(query) * query.shape[2] * key.shape[2]
    step = max(1, SCORES_BYTES // (shared * pairs * wide(query.dtype).itemsize))
    for low in range(0, kv_heads, step):
        high = min(low + step, kv_heads)
        yield slice(low * shared, high * shared), slice(low, high)


def by_kv_head(rows: Tensor, kv_heads: int) -> Tensor:
    """[N, heads, T, ..] -> [N, kv_heads, heads that share one * T, ..]."""
    found: Tensor = rows.unflatten(1, (kv_heads, -1)).flatten(2, 3)
    return found


def scores_of(query: Tensor, key: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """The scores of rows by KV head, [N, kv_heads, heads that share it * T, S], in a wide dtype."""
    (tokens, size), keys = query.shape[2:], key.shape[2]
    found = (by_kv_head(query, key.shape[1]) @ key.transpose(-1, -2)).to(wide(query.dtype))
    found *= size**-0.5 if scale is None else scale
    if mask is None:
        shape = (tokens, keys)
        mask = torch.full(shape, float("-inf"), dtype=query.dtype, device=query.device).triu_(1)
    found.view(*found.shape[:2], -1, tokens, keys).add_(mask)
    return found


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
