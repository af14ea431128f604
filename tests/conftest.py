"""Fixtures that every test may use."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("full", max_examples=100)
settings.register_profile("fast", max_examples=25)  # percent: see tests.strategies.cases


def pytest_configure(config: pytest.Config) -> None:
    """Whoever leaves out the slow tests gets fewer random cases of the properties, too."""
    is_fast = "not slow" in config.getoption("markexpr")
    settings.load_profile("fast" if is_fast else "full")


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of shared research data; skips where absent, fails if it is required."""
    folder = Path(os.environ.get("TANDEM_SHARED", "../shared")).resolve()  # tests change folders
    if not (folder / "data" / "README.md").is_file():
        reason = f"no shared data at {folder} (set TANDEM_SHARED)"
        if os.environ.get("TANDEM_REQUIRE_SHARED") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    return folder


@pytest.fixture
def short_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured runs look for drift a few rounds only, not for half a second at either end."""
    from runtime import probe

    monkeypatch.setattr(probe, "LOOK_S", 0.0)
    monkeypatch.setattr(probe, "probe", partial(probe.probe, least=3))


@pytest.fixture(autouse=True)
def _denormals() -> Iterator[None]:
    """The CPU executor flushes denormals for its thread; hypothesis needs them back."""
    yield
    if torch := sys.modules.get("torch"):
        torch.set_flush_denormal(False)
