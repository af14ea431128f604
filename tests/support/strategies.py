"""What the properties of replays are tried on: traces, room, timing; and on how many of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from traces.serving.request import Request

TIMING: Mapping[str, st.SearchStrategy[float]] = {  # durations vary or not, and so does the host
    "noise": st.sampled_from([0.0, 0.4]),
    "host_ns": st.sampled_from([0, 30_000]),
}
SEEDS = st.integers(0, 99)


def cases(count: int) -> settings:
    """So many random cases; in the fast set a tenth of them (conftest.py says which it is).

    A profile of hypothesis carries the share: its number of examples is a percentage here.
    """
    share = settings.default.max_examples
    return settings(
        max_examples=max(1, count * share // 100),
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


def room(most_pages: int = 90) -> dict[str, st.SearchStrategy[int]]:
    """Memory from just enough for one request, and plans in flight."""
    return {
        "pages": st.integers(31, most_pages),
        "host_pages": st.integers(0, 40),
        "depth": st.integers(1, 3),
    }


def traces(
    most_requests: int = 25,
    most_output_tokens: int = 40,
    least_output_tokens: int = 1,
    last_ns: int = 30_000_000,
) -> st.SearchStrategy[list[Request]]:
    """Requests of any length that arrive within 30 ms, in any order."""
    lengths = st.integers(1, 80), st.integers(least_output_tokens, most_output_tokens)
    rows = st.lists(
        st.tuples(st.integers(0, last_ns), *lengths), min_size=1, max_size=most_requests
    )
    return rows.map(lambda rows: [Request(i, *row) for i, row in enumerate(rows)])


def sessions() -> st.SearchStrategy[list[Request]]:
    """Requests of sessions: each turn comes when the one before is answered and thought over."""
    turn = st.tuples(st.integers(1, 60), st.integers(1, 60), st.integers(0, 9_000_000))
    session = st.tuples(st.integers(0, 30_000_000), st.lists(turn, min_size=1, max_size=4))
    return st.lists(session, min_size=1, max_size=8).map(_turns)


def _turns(rows: Sequence[tuple[int, Sequence[tuple[int, int, int]]]]) -> list[Request]:
    found: list[Request] = []
    for session, (arrival_ns, turns) in enumerate(rows):
        for turn, (prompt, output, think_ns) in enumerate(turns):
            row = (len(found), arrival_ns, prompt, output, session, turn, think_ns)
            found.append(Request(*row))
    return found
