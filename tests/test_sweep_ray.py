"""What is said where Ray is there but does not start."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from tandem.engines import on_ray
from tandem.errors import RunFailed


def test_a_ray_that_does_not_start_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**options: Any) -> None:
        raise Exception("The current node timed out during startup.\nMore lines follow.")

    fake = SimpleNamespace(is_initialized=lambda: False, init=init, shutdown=lambda: None)
    monkeypatch.setitem(sys.modules, "ray", fake)
    with pytest.raises(RunFailed, match=r"did not start \(Exception: The current node timed out"):
        next(on_ray([], 2, {}))
