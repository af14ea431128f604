"""Storages as tensors: whole, the first numbers, or several behind each other."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, UntypedStorage


def as_bytes(storage: UntypedStorage) -> Tensor:
    """A whole storage as one flat tensor."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def typed(storage: UntypedStorage, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """The first numbers of a storage as a contiguous tensor."""
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, 0, shape)


def flat_parts(
    storage: UntypedStorage, dtype: torch.dtype, sizes: Sequence[int], start: int = 0
) -> Sequence[Tensor]:
    """Flat tensors of so many numbers each, behind each other from number `start` on."""
    flat = torch.empty(0, dtype=dtype, device=storage.device).set_(storage, start, (sum(sizes),))
    return torch.split_with_sizes(flat, sizes)


def present(storage: UntypedStorage | None) -> UntypedStorage:
    """A storage that must not be used up."""
    assert storage is not None, "this storage was used up"
    return storage
