"""Fixtures that every test may use."""

from __future__ import annotations

import gc
import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from math import ceil
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

try:
    from hypothesis import settings
except ImportError:  # on a GPU machine, whose tests draw no cases
    settings = None  # type: ignore[assignment, misc]
else:
    settings.register_profile("full", max_examples=100)
    settings.register_profile(
        "fast", max_examples=10
    )  # percent: see tests.support.strategies.cases


def pytest_configure(config: pytest.Config) -> None:
    """A run without the slow tests draws fewer random cases of the properties, too."""
    is_fast = "not slow" in config.getoption("markexpr")
    if settings is not None:
        settings.load_profile("fast" if is_fast else "full")


@pytest.hookimpl(tryfirst=True)  # before -m looks at the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One in n cases of a test marked `broad(n)` is fast; the others are slow.

    Chosen by a hash of their names, so that no column of a matrix is left out as a whole.
    """
    cases = defaultdict(list)
    for item in items:
        if item.get_closest_marker("broad") and not item.get_closest_marker("slow"):
            cases[item.nodeid.partition("[")[0]].append(item)
    for of_one in cases.values():
        (n,) = of_one[0].get_closest_marker("broad").args
        of_one.sort(key=lambda item: crc32(item.nodeid.encode()))
        for item in of_one[ceil(len(of_one) / n) :]:
            item.add_marker(pytest.mark.slow)


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


@pytest.fixture(autouse=True, scope="session")
def _compositions_are_remembered() -> Iterator[None]:
    """Tests compose some four hundred times, mostly what others composed before them."""
    from tests.support.compositions import remember

    with pytest.MonkeyPatch.context() as patch:
        remember(patch)
        yield


@pytest.fixture(autouse=True, scope="session")
def _garbage_is_collected_seldom() -> Iterator[None]:
    """A tenth of all tests' time went into looks at what pytest, torch and transformers hold."""
    before = gc.get_threshold()
    gc.set_threshold(50_000, 20, 20)
    yield
    gc.set_threshold(*before)


@pytest.fixture
def short_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured runs look for drift a few rounds only, not for half a second at either end.

    Nor do they begin with a full garbage collection: what pytest holds takes as long as a run.
    """
    from runtime.measure import reference
    from tandem.wiring.backends import no_full_collections

    whole = reference.probe

    def short(env: Any, executor: Any, machine: Any, look_s: float) -> dict[str, float]:
        return whole(env, executor, machine, 0.0, min_rounds=3)

    def keeps_collections(begins_with_one: bool) -> Any:
        return no_full_collections(False)

    monkeypatch.setattr(reference, "probe", short)
    monkeypatch.setattr("tandem.wiring.experiment.no_full_collections", keeps_collections)


@pytest.fixture
def unrendered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are made, but no pictures of them: those take seconds, and others look at them."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    def save(figure: Figure, path: Path, **_: object) -> None:
        path.write_text("<svg/>")

    monkeypatch.setattr(Figure, "savefig", save)
    monkeypatch.setattr(ConstrainedLayoutEngine, "execute", lambda *_: None)


@pytest.fixture
def small_heap() -> Iterator[None]:
    """A walk over the collector's objects meets those made from here on, not all of pytest's."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _denormals() -> Iterator[None]:
    """The CPU executor flushes denormals for its thread; hypothesis needs them back."""
    yield
    if torch := sys.modules.get("torch"):
        torch.set_flush_denormal(False)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """torch computes on one thread meanwhile, as a device's stand-in does."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
