"""bfloat16 on the interpreter of triton 3.6.0, which cuts it off and multiplies it as integers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch


def mend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes bfloat16 round to nearest, as on GPUs and in torch, and multiply as floats."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    cast, dot = InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot

    def cast_impl(self: Any, source: Any, dtype: Any) -> Any:
        kinds = source.dtype.scalar, dtype.scalar
        if kinds == (tl.float32, tl.bfloat16):
            rounded = torch.from_numpy(np.ascontiguousarray(source.data)).bfloat16()
            return TensorHandle(rounded.view(torch.uint16).numpy(), tl.bfloat16)
        return cast(self, source, dtype)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        if a.dtype.scalar == tl.bfloat16:
            a, b = (cast(self, side, tl.float32) for side in (a, b))
        return dot(self, a, b, *rest)

    monkeypatch.setattr(InterpreterBuilder, "cast_impl", cast_impl)
    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)
