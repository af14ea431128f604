"""Triton's kernels on its interpreter (`make kernels`), or compiled where there is a GPU."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from runtime.kernels import available
from tests.kernels.interpreter import mend

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips with the reason. Test modules import kernels in the tests only."""
    if not available():
        marker = pytest.mark.skip(reason="needs triton: make kernels")
    elif DEVICE == "cpu" and not INTERPRETED:
        marker = pytest.mark.skip(reason="needs a GPU or TRITON_INTERPRET=1: make kernels")
    else:  # the interpreter's own loops over ranges, with a numpy it allows
        marker = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(marker)


@pytest.fixture
def device() -> str:
    """Where the kernels run."""
    return DEVICE


@pytest.fixture(autouse=True)
def _bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """bfloat16 as a GPU computes it."""
    if INTERPRETED and available():
        mend(monkeypatch)
