"""The place that leaves first, against a plain search for the lowest rank at each question."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from engine.contract.regions import Place, weight
from policies.training.eviction import Candidates, Rank

PLACES = [weight(0, c) for c in range(6)]
PLACE = st.sampled_from(PLACES)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), PLACE, st.tuples(st.integers(0, 3), st.integers(0, 1))),
        st.tuples(st.just("drop"), PLACE),
        st.tuples(st.just("evict"), st.sets(PLACE), st.sets(PLACE)),
    ),
    max_size=40,
)


class Plain:
    """A dict in the order of coming."""

    def __init__(self) -> None:
        self.ranks: dict[Place, Rank] = {}

    def put(self, place: Place, rank: Rank) -> None:
        self.ranks[place] = rank

    def drop(self, place: Place) -> bool:
        return self.ranks.pop(place, None) is not None

    def evict_first(self, pinned: set[Place], evict: Callable[[Place], bool]) -> bool:
        free = [place for place in self.ranks if place not in pinned]
        return any(evict(place) for place in sorted(free, key=self.ranks.__getitem__))


@given(STEPS)
def test_the_lowest_rank_leaves_first_and_of_equals_the_first_to_come(steps: list[tuple]) -> None:  # type: ignore[type-arg]
    ours, plain = Candidates(), Plain()
    for name, *args in steps:
        answers = []
        for them in (ours, plain):
            asked: list[Place] = []

            def evict(place: Place, them=them, asked=asked, args=args) -> bool:  # type: ignore[no-untyped-def]
                asked.append(place)
                return place not in args[1] and them.drop(place)

            given = (args[0], evict) if name == "evict" else args
            method = them.evict_first if name == "evict" else getattr(them, name)
            answers.append((method(*given), asked))
        assert answers[0] == answers[1]
        assert [*ours] == [*plain.ranks]
        assert [ours.rank(place) for place in PLACES] == [plain.ranks.get(p) for p in PLACES]
