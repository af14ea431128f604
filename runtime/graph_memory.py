"""What an autograd graph holds, asked of its own nodes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, UntypedStorage
from torch.autograd.graph import GradientEdge


def saved_storages(edge: GradientEdge) -> Iterator[UntypedStorage]:
    """Storages of all tensors that the graph below an edge has saved, some of them repeatedly.

    Not for graphs with hooks on what they save: looking would call these. Nor for graphs that a
    backward may be running: it frees on its thread what is read here.
    """
    seen, waiting = set[Any](), [edge.node]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for name in _names(node):
            try:
                value = getattr(node, name)
            except RuntimeError:  # used up by an earlier backward
                continue
            for tensor in value if isinstance(value, tuple | list) else (value,):
                if isinstance(tensor, Tensor):
                    yield tensor.untyped_storage()
        waiting += [following for following, _ in node.next_functions]


_KNOWN: dict[type, tuple[str, ...]] = {}


def _names(node: Any) -> tuple[str, ...]:
    """Attributes that give what a node of this type has saved."""
    kind = type(node)
    if kind not in _KNOWN:
        _KNOWN[kind] = tuple(name for name in dir(node) if name.startswith("_saved_"))
    return _KNOWN[kind]
