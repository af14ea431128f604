"""The order of grow and free in real memory, while launches on threads still use it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.contract.regions import Place, weight
from runtime.training.store import LaneStore

HERE, THERE = weight(0, 0), weight(0, 1)


class Notes:
    """A store that only notes its calls."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int]] = []
        self.held: dict[Place, int] = {}

    def grow(self, place: Place, nbytes: int) -> None:
        self.told.append(("grow", nbytes))
        self.held[place] = self.held.get(place, 0) + nbytes

    def free(self, place: Place) -> None:
        self.told.append(("free", self.held.pop(place)))


def test_a_place_is_freed_behind_its_last_launch() -> None:
    notes = Notes()
    store = LaneStore(notes)
    store.grow(HERE, 10)
    one, two = store.begin([HERE]), store.begin([HERE])
    store.free(HERE)
    store.end(two)
    assert notes.held == {HERE: 10}
    store.end(one)
    assert not notes.held


def test_a_second_stay_begins_when_the_first_is_over() -> None:
    notes = Notes()
    store = LaneStore(notes)
    store.grow(HERE, 10)
    old = store.begin([HERE])
    store.free(HERE)
    store.grow(HERE, 20)
    new = store.begin([HERE])
    assert notes.told == [("grow", 10)]
    store.end(old)
    assert notes.told == [("grow", 10), ("free", 10), ("grow", 20)]
    store.free(HERE)
    store.end(new)
    assert not notes.held


@given(st.lists(st.tuples(st.sampled_from("gfbe"), st.sampled_from([HERE, THERE])), max_size=40))
def test_each_stay_is_grown_and_freed_in_order(steps: list[tuple[str, Place]]) -> None:
    """In any order of ends: a store never grows a place twice, and frees all places in the end."""
    notes = Notes()
    store = LaneStore(notes)
    taken: set[Place] = set()
    open_ones = []
    for what, place in steps:
        if what == "g" and place not in taken:
            store.grow(place, 1)
            taken.add(place)
        elif what == "f" and place in taken:
            store.free(place)
            taken.remove(place)
        elif what == "b" and place in taken:
            open_ones.append(store.begin([place]))
        elif what == "e" and open_ones:
            store.end(open_ones.pop(0))
        assert all(nbytes == 1 for nbytes in notes.held.values())
    for place in taken:
        store.free(place)
    while open_ones:
        store.end(open_ones.pop())
    assert not notes.held
