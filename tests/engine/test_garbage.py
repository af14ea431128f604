"""The collector during a run: it looks at nothing, and loses nothing."""

from __future__ import annotations

import gc
import weakref

import pytest

from engine.loop.engine import few_collections


class Node:
    """May point at itself."""

    me: Node


@pytest.mark.slow
def test_a_cycle_is_found_after_the_run_and_thresholds_are_as_before() -> None:
    before, frozen = gc.get_threshold(), gc.get_freeze_count()
    with few_collections():
        collections = [generation["collections"] for generation in gc.get_stats()]
        node = Node()
        node.me = node
        seen = weakref.ref(node)
        del node
        kept = [[i] for i in range(5 * before[0])]
        assert [generation["collections"] for generation in gc.get_stats()] == collections
    assert seen() is not None and kept
    assert (gc.get_threshold(), gc.get_freeze_count()) == (before, frozen)
    gc.collect()
    assert seen() is None
