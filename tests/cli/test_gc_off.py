"""No full garbage collection falls into a replay."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from tandem.wiring.backends import no_full_collections


@pytest.fixture(autouse=True)
def _usual() -> Iterator[None]:
    """Python's own settings: those of other tests (conftest.py) let hardly any collection come."""
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*before)


@pytest.mark.parametrize("begins_with_one", [True, False])
def test_full_collections_wait_until_the_block_has_ended(
    begins_with_one: bool, small_heap: None
) -> None:
    usual, before = gc.get_threshold(), gc.get_stats()[2]["collections"]
    with no_full_collections(begins_with_one):
        began = gc.get_stats()[2]["collections"]
        kept = [[number] for number in range(400_000)]  # enough for several with usual settings
        assert gc.get_stats()[2]["collections"] == began
        assert gc.get_stats()[0]["collections"] > 0
    assert len(kept) == 400_000
    assert gc.get_threshold() == usual
    assert began == before + begins_with_one


def test_the_usual_settings_come_back_after_an_error(small_heap: None) -> None:
    usual = gc.get_threshold()
    with pytest.raises(RuntimeError), no_full_collections():
        raise RuntimeError
    assert gc.get_threshold() == usual
