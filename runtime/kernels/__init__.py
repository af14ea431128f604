"""Triton kernels over paged KV. Nothing imports them, nor Triton, unless they were chosen."""

from __future__ import annotations

import sys
from importlib.util import find_spec

from models.spec import ModelSpec

ATTENTIONS = ("triton", "sdpa")
LARGEST = 256  # numbers of a head: with longer ones no program fits a multiprocessor


def available() -> bool:
    """Whether Triton is installed here."""
    return find_spec("triton") is not None


def are_chosen(attention: object) -> bool:
    """Whether `backend.attention` means the kernels; says so where Triton is missing for them.

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
    """ValueError for a model whose heads are longer than the kernels can take."""
    if spec.head_dim > LARGEST:
        raise ValueError(
            f"model {spec.name}: heads of {spec.head_dim} numbers, and the kernels take up to "
            f"{LARGEST}; take backend.attention=sdpa"
        )
