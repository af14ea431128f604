"""Triton kernels over paged KV: attention, norms, rotation and KV writes.

No module imports the kernels, nor Triton, at its top, but runtime.serving.fused: they are loaded
where `backend.attention=triton` was chosen. Here lie that choice and its checks. May import models
and runtime.serving (how a launch's rows lie).
"""

from __future__ import annotations

import sys
from importlib.util import find_spec

from models.spec import ModelSpec

ATTENTIONS = ("triton", "sdpa")
MAX_HEAD_DIM = 256  # with longer heads no program fits a multiprocessor


def available() -> bool:
    """Whether Triton is installed here."""
    return find_spec("triton") is not None


def are_chosen(attention: object) -> bool:
    """Whether `backend.attention` chooses the kernels; prints a line where Triton is missing.

    ValueError if it is none of ATTENTIONS.
    """
    if attention not in ATTENTIONS:
        raise ValueError(f"backend.attention={attention}: take {' or '.join(ATTENTIONS)}")
    if attention == "triton" and not available():
        line = "backend.attention=triton: no triton here; torch's attention runs, without graphs"
        print(line, file=sys.stderr)
        return False
    return attention == "triton"


def check_shape(spec: ModelSpec) -> None:
    """ValueError for a model whose heads are longer than MAX_HEAD_DIM."""
    if spec.head_dim > MAX_HEAD_DIM:
        raise ValueError(
            f"model {spec.name}: heads of {spec.head_dim} numbers, and the kernels take up to "
            f"{MAX_HEAD_DIM}; take backend.attention=sdpa"
        )
