"""The backward of a layer from what its windows kept: nothing but elementwise work is repeated.

The module of Hugging Face runs again under autograd. Its products and its attention return what
their forward has computed, so autograd differentiates what it would have recorded then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

from runtime.finetuning.products import ATTENTION, LOG_SUMS, Role, unpacked_signs, unread, wide
from runtime.finetuning.recording import WindowKV, parts_of, weight_of

flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def attention_gradients(
    given: Tensor, query: Tensor, key: Tensor, value: Tensor, known: tuple[Tensor, ...],
    mask: Tensor | None, scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of query, key and value of `attend_with_sums`.

    Args:
        given: That of its output, [N, heads, T, D].
        query: As the forward had it, as are key, value, mask and scale.
        known: What the forward has returned.
    """
    if query.device.type == "cpu":  # the kernel that SDPA's own backward calls
        found: tuple[Tensor, Tensor, Tensor] = flash_backward(
            given, query, key, value, *known, 0.0, mask is None, attn_mask=mask, scale=scale
        )
        return found
    return gradients_by_products(given, query, key, value, known, mask, scale)


def gradients_by_products(
    given: Tensor, query: Tensor, key: Tensor, value: Tensor, known: tuple[Tensor, ...],
    mask: Tensor | None, scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """As `attention_gradients`, on any device: the softmax again, from the sums of its rows."""
    (out, sums), kind = known, wide(query.dtype)
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    to_query = torch.empty_like(query)
    to_key, to_value = (torch.zeros_like(part, dtype=kind) for part in (key, value))
    for part in parts_of(query, key):
        back = part.of(given)
        weights = part.scores(query, key, mask, scale).sub_(part.of(sums).unsqueeze(-1)).exp_()
        to_value[:, part.kv] += weights.transpose(-1, -2) @ back
        inner = (back * part.of(out)).sum(-1, keepdim=True)
        to_scores = (back @ part.of_kv(value).transpose(-1, -2)).sub_(inner)
        to_scores.mul_(weights).mul_(factor)
        part.write(to_query, to_scores @ part.of_kv(key))
        to_key[:, part.kv] += to_scores.transpose(-1, -2) @ part.of(query)
    return to_query, to_key.to(key.dtype), to_value.to(value.dtype)


class KnownProduct(torch.autograd.Function):
    """A product whose value is known: of nn.Linear, or `is_transposed` of GPT-2's Conv1D."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        value: Tensor,
        is_transposed: bool,
    ) -> Tensor:
        """[.., inputs] -> value, [.., outputs]."""
        ctx.save_for_backward(rows if weight.requires_grad else None, weight)
        ctx.is_transposed = is_transposed
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor | None, ...]:
        """As autograd has it for torch's own products."""
        rows, weight = ctx.saved_tensors
        flat, (for_rows, for_weight, for_bias, *_) = given[0].flatten(0, -2), ctx.needs_input_grad
        back = down = None
        if for_rows:
            back = flat.mm(weight.t() if ctx.is_transposed else weight)
            back = back.view(*given[0].shape[:-1], -1)
        if for_weight:
            inputs = rows.flatten(0, -2)
            down = inputs.t().mm(flat) if ctx.is_transposed else flat.t().mm(inputs)
        return back, down, flat.sum(0) if for_bias else None, None, None


class KnownAttention(torch.autograd.Function):
    """Attention of a window whose output is known, over keys and values of all tokens so far.

    With `sums`, [tokens, 2, kv_heads, D], gradients of keys and values before the window are added
    to them, and those of the window are taken from them.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, known: tuple[Tensor, ...],
        kv: tuple[Tensor, Tensor], mask: Tensor | None, scale: float | None, sums: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """[1, heads, tokens, D] and the window's own kv_heads -> [1, heads, tokens, D]."""
        ctx.save_for_backward(query)
        ctx.how = known, kv, mask, scale, sums
        out = known[0]
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor | None, ...]:
        """From what the forward has returned."""
        (query,) = ctx.saved_tensors
        (known, (keys, values), mask, scale, sums), ctx.how = ctx.how, None
        to_query, to_keys, to_values = attention_gradients(
            given[0], query, keys, values, known, mask, scale
        )
        if sums is not None:
            start, stop = keys.shape[2] - query.shape[2], keys.shape[2]
            for part, fresh in enumerate((to_keys, to_values)):
                sums[:stop, part] += fresh[0].transpose(0, 1)
            own = (part.to(query.dtype, copy=True) for part in sums[start:stop].unbind(1))
            to_keys, to_values = (part.transpose(0, 1)[None] for part in own)
        return to_query, to_keys, to_values, None, None, None, None, None


known_product: Any = KnownProduct.apply
known_attention: Any = KnownAttention.apply


class Known(TorchFunctionMode):
    """Around a layer's module: its products and its attention are not computed again."""

    def __init__(
        self,
        roles: Mapping[int, Role],
        kept: Mapping[str, Tensor],
        kv: WindowKV,
        sums: Tensor | None,
    ) -> None:
        """
        Args:
            roles: Of the layer's matrices.
            kept: What it keeps of the window, [tokens, width] by name.
            kv: The pages of the window.
            sums: Gradients of keys and values so far; None: the window is the whole sample.
        """
        super().__init__()
        self._roles, self._kept, self._kv, self._sums = roles, kept, kv, sums

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        weight = weight_of(func, args)
        role = self._roles.get(id(weight))
        if weight is None or role is None:
            return func(*args, **(kwargs or {}))
        if func is linear:
            rows, bias = args[0], args[2] if len(args) > 2 else None
        else:
            bias, rows = args[0], args[1]
        value = self._value(role, rows)
        return known_product(rows, weight, bias, value, func is not linear)

    def _value(self, role: Role, rows: Tensor) -> Tensor:
        """What the product has made of these rows, with zeros where nothing reads it."""
        shape = (*rows.shape[:-1], role.width)
        if not role.kept:
            return unread(rows, role.width)
        if role.signs:
            return unpacked_signs(self._kept[role.name], role.width, rows.dtype).view(shape)
        if role.kept == role.width:
            return self._kept[role.name].view(shape)
        value = rows.new_zeros(shape)
        value[..., : role.kept] = self._kept[role.name]
        return value

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None
    ) -> Tensor:
        """[1, heads, tokens, D] and kv_heads of the window -> [1, tokens, heads, D]."""
        heads = self._kept[ATTENTION].unflatten(1, (query.shape[1], -1)).transpose(0, 1)[None]
        known = heads, self._kept[LOG_SUMS].t()[None]
        kv, mask = self._kv.read(layer), self._kv.mask(query.dtype)
        out: Tensor = known_attention(query, key, value, known, kv, mask, scale, self._sums)
        return out.transpose(1, 2)
