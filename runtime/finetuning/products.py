"""The matrix products of a layer, and what each leaves for the layer's backward."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage, nn
from torch.nn.functional import pad

from models.training.tape_known import (
    BEHIND_RECTIFIED,
    BITS,
    RECTIFIED,
    kept_width,
    packed_width,
)
from runtime.training.store import present, typed

INPUT, ATTENTION, LOG_SUMS = "input", "attention", "log_sums"


class LayerProduct(NamedTuple):
    """A matrix product of a layer, with the adapter behind it if it has one.

    Attributes:
        name: Of its module in the layer.
        weight: The matrix.
        width: Numbers that it makes of a token.
        kept: How many of them, from the first on, the backward reads.
        down: First matrix of the adapter, [rank, inputs].
        up: Second matrix of the adapter, [outputs, rank].
        scale: Factor of what the adapter adds.
        signs: Whether a bit is kept of each, its sign behind the adapter: a ReLU reads no more.
    """

    name: str
    weight: Tensor
    width: int
    kept: int
    down: Tensor | None = None
    up: Tensor | None = None
    scale: float = 1.0
    signs: bool = False


class Role(NamedTuple):
    """The part of a matrix in a backward: it is not computed again.

    Attributes:
        name: Under which its values are kept.
        width: Numbers that the product makes of a token.
        kept: How many of them are kept; the others are read by nothing.
        signs: Whether a bit is kept of each.
    """

    name: str
    width: int
    kept: int
    signs: bool = False


class Field(NamedTuple):
    """Numbers that a layer keeps of each token."""

    name: str
    width: int
    dtype: torch.dtype


def products_of(layer: nn.Module) -> tuple[LayerProduct, ...]:
    """The products of a layer of Hugging Face, wrapped by peft or not.

    Args:
        layer: Of the llama, mistral, qwen2, qwen3, gpt2 or opt family.

    Returns:
        One for each nn.Linear or Conv1D, in their order.
    """
    modules, found = dict(layer.named_modules()), list[LayerProduct]()
    norms_heads = any(name.endswith("k_norm") for name in modules)
    for name, module in modules.items():
        base: Any = getattr(module, "base_layer", module)
        inner = name.endswith(".base_layer") or ".lora_" in name
        if inner or not (isinstance(base, nn.Linear) or hasattr(base, "nf")):
            continue
        width = int(base.nf if hasattr(base, "nf") else base.out_features)
        kept = kept_width(name, width, norms_heads)
        signs = name == RECTIFIED and not _trains(modules[BEHIND_RECTIFIED])
        found.append(LayerProduct(name, base.weight, width, kept, *_adapter(module), signs))
    return tuple(found)


def _trains(module: nn.Module) -> bool:
    """Whether a product or its adapter trains, so that a backward reads its inputs."""
    return any([parameter.requires_grad for parameter in module.parameters()])


def _adapter(module: Any) -> tuple[Tensor | None, Tensor | None, float]:
    """The matrices of peft's adapter and its factor."""
    if not hasattr(module, "lora_A"):
        return None, None, 1.0
    (name,) = module.lora_A
    return module.lora_A[name].weight, module.lora_B[name].weight, float(module.scaling[name])


def roles_of(products: Sequence[LayerProduct]) -> dict[int, Role]:
    """Which matrices a backward does not compute with again, by identity of the matrix.

    An adapter's second matrix is not among them, unless nothing reads what it makes, or signs of
    its sum are kept.
    """
    found = dict[int, Role]()
    for product in products:
        found[id(product.weight)] = Role(product.name, product.width, product.kept, product.signs)
        if product.down is None or product.up is None:
            continue
        rank = len(product.down)
        found[id(product.down)] = Role(f"{product.name}.lora_A", rank, rank)
        if not product.kept or product.signs:
            found[id(product.up)] = Role(f"{product.name}.lora_B", product.width, 0)
    return found


def fields_of(
    roles: Mapping[int, Role], hidden: int, queries: int, heads: int, dtype: torch.dtype
) -> tuple[Field, ...]:
    """What a layer keeps of each token.

    Args:
        roles: Of its matrices.
        hidden: Width of its input.
        queries: Width of attention's output.
        heads: Of its queries.
        dtype: What it computes in.

    Returns:
        Fields in the order in which they lie.
    """
    products = [_field(role, dtype) for role in roles.values() if role.kept]
    own = Field(INPUT, hidden, dtype), Field(ATTENTION, queries, dtype)
    return (*own, Field(LOG_SUMS, heads, wide(dtype)), *products)


def _field(role: Role, dtype: torch.dtype) -> Field:
    if role.signs:
        return Field(role.name, packed_width(role.kept), torch.uint8)
    return Field(role.name, role.kept, dtype)


def rectified(parts: Iterable[LayerProduct | Role]) -> str | None:
    """The name of the product of a layer of which signs are kept; None where there is none."""
    return next((part.name for part in parts if part.signs), None)


def packed_signs(rows: Tensor) -> Tensor:
    """A bit of each number that is above zero, [T, width] -> [T, packed_width(width)] bytes."""
    bits = rows.gt(0).view(torch.uint8)
    if lacks := -bits.shape[-1] % BITS:
        bits = pad(bits, (0, lacks))
    packed: Tensor = (
        bits.unflatten(-1, (-1, BITS)).mul_(_powers(rows.device)).sum(-1, dtype=torch.uint8)
    )
    return packed


def unpacked_signs(packed: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """One for each bit, and zero where none is, [T, width]: alike to a ReLU's backward."""
    ones = packed.unsqueeze(-1).bitwise_and(_powers(packed.device)).ne_(0)
    return ones.flatten(-2)[..., :width].to(dtype)


@cache
def _powers(device: torch.device) -> Tensor:
    return torch.tensor([1 << bit for bit in range(BITS)], dtype=torch.uint8, device=device)


def unread(rows: Tensor, width: int) -> Tensor:
    """Zeros in place of a product of rows, [.., inputs], whose values nothing reads."""
    return rows.new_zeros(()).expand(*rows.shape[:-1], width)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums: float32, or float64 of a model in that."""
    return torch.promote_types(dtype, torch.float32)


def own(rows: Tensor) -> Tensor:
    """The tensor with a storage that it fills alone; a copy where it shares one."""
    fills = rows.is_contiguous() and rows.untyped_storage().nbytes() == rows.nbytes
    return rows if fills else rows.clone(memory_format=torch.contiguous_format)


def storages_of(kept: Mapping[str, Tensor], fields: Sequence[Field]) -> list[UntypedStorage]:
    """A window's kept tensors as storages in the order of the fields, without a byte beside."""
    return [own(kept[field.name]).untyped_storage() for field in fields]


def kept_rows(
    storages: Sequence[UntypedStorage | None],
    fields: Sequence[Field],
    firsts: Sequence[int],
    start: int,
    stop: int,
) -> dict[str, Tensor]:
    """The tokens [start, stop) of all fields.

    Args:
        storages: Of all windows, behind each other as `storages_of` has them.
        fields: Of the layer.
        firsts: First token of each window in the sample.
        start: First token in the sample.
        stop: The token behind the last one.

    Returns:
        By field, [tokens, width]. A view where the tokens are those of one window, else a copy.
    """
    width, found = len(fields), dict[str, Tensor]()
    bounds = window_bounds(storages, fields, firsts)
    for at, field in enumerate(fields):
        parts = list[Tensor]()
        for storage, (first, end) in zip(map(present, storages[at::width]), bounds, strict=True):
            count = storage.nbytes() // (field.width * field.dtype.itemsize)
            low, high = max(start, first), min(stop, end)
            if low < high:
                rows = typed(storage, field.dtype, (count, field.width))
                parts.append(rows[low - first : high - first])
        found[field.name] = parts[0] if len(parts) == 1 else torch.cat(parts)
    return found


def window_bounds(
    storages: Sequence[UntypedStorage | None], fields: Sequence[Field], firsts: Sequence[int]
) -> list[tuple[int, int]]:
    """The windows in which a layer went forward: first token, and the token behind the last.

    A window ends where the next begins, also where it has more rows, as that of a record may.
    """
    field, found = fields[0], list[tuple[int, int]]()
    following = [*firsts[1:], sys.maxsize]
    own = map(present, storages[:: len(fields)])
    for storage, first, after in zip(own, firsts, following, strict=True):
        count = storage.nbytes() // (field.width * field.dtype.itemsize)
        found.append((first, min(first + count, after)))
    return found
