"""Linear modules that read the same rows, as one product: their weights laid end to end."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class Merged:
    """The joint weight, [sum of outputs, inputs], and bias of some nn.Linear modules.

    The modules stay what they were: their parameters become views of the joint ones, so that no
    byte is kept twice and whoever changes one sees it in the other. Merging again costs nothing.
    """

    def __init__(self, *modules: nn.Linear) -> None:
        self.weight = _joined(modules, "weight")
        self.bias = None if modules[0].bias is None else _joined(modules, "bias")

    def __call__(self, rows: Tensor) -> Tensor:
        """[T, inputs] -> [T, sum of outputs]."""
        return nn.functional.linear(rows, self.weight, self.bias)


def _joined(modules: Sequence[nn.Linear], name: str) -> Tensor:
    """One tensor over all parameters of that name, of which they are views from now on."""
    parameters = [getattr(module, name) for module in modules]
    parts = [parameter.detach() for parameter in parameters]
    if (whole := _whole(parts)) is not None:
        return whole
    whole = torch.cat(parts)
    views = whole.split([len(part) for part in parts])
    for module, parameter, view in zip(modules, parameters, views, strict=True):
        setattr(module, name, nn.Parameter(view, parameter.requires_grad))
    return whole


def _whole(parts: Sequence[Tensor]) -> Tensor | None:
    """What some contiguous tensors are parts of, if they follow each other in one storage."""
    first = parts[0]
    at = first.storage_offset()
    for part in parts:
        if part.untyped_storage()._cdata != first.untyped_storage()._cdata:
            return None
        if part.storage_offset() != at or not part.is_contiguous():
            return None
        at += part.numel()
    shape = (sum(map(len, parts)), *first.shape[1:])
    return first.as_strided(shape, first.stride())
