"""Decodes that move on together are told the same of as if each had moved by itself."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.contract.job import Job
from engine.contract.regions import PageSize, kv_place
from engine.fast_forward.decode_batch import DecodeBatch
from tests.support.strategies import cases

PAGE = PageSize(4, 10)
HELD = st.lists(st.integers(1, 30), max_size=6)  # tokens in KV when a job joins
MOVES = st.lists(st.tuples(HELD, st.integers(0, 9), st.sets(st.integers(0, 12))), max_size=5)


class Alone:
    """A decode by itself: tokens in KV, and pages as it needs them."""

    def __init__(self, job_id: int, computed: int) -> None:
        self.job = Job(job_id, 0, 1, computed + 1, computed)
        self.computed, self.table = computed, [0] * PAGE.count(computed)

    def move(self, steps: int) -> None:
        self.computed += steps
        self.table += [0] * (PAGE.count(self.computed) - len(self.table))


@given(moves=MOVES)
@cases(200)
def test_a_decode_batch_is_its_jobs_one_by_one(
    moves: list[tuple[list[int], int, set[int]]],
) -> None:
    """Some come in, all take some steps, some leave, and so on."""
    batch, inside, gone = DecodeBatch(PAGE), list[Alone](), list[Alone]()
    for held, steps, leaving in moves:
        first = len(inside) + len(gone)
        new = [Alone(first + i, computed) for i, computed in enumerate(held)]
        tables = {kv_place(one.job.job_id): one.table for one in new}
        pairs = [(one.job, kv_place(one.job.job_id)) for one in new]
        batch.join(pairs, tables, lambda job: 9)
        inside += new
        assert list(batch.ahead(steps, (5,))) == [*(one.computed + steps for one in inside), 5]
        batch.clock += steps
        for one in inside:
            one.move(steps)
        for one in (*inside, *gone):
            assert (one.job.computed_tokens, one.job.known_tokens) == (
                one.computed,
                one.computed + 1,
            )
        full = [(one.job, one.computed - steps) for one in inside if is_filled(one, steps)]
        assert [pair for pair in batch.filled(steps) if pair in full] == full
        for one in [one for one in inside if one.job.job_id in leaving]:
            batch.leave(batch.ids.index(one.job.job_id))
            inside.remove(one)
            gone.append(one)
        assert batch.jobs == [one.job for one in inside]


def is_filled(one: Alone, steps: int) -> bool:
    return one.computed // PAGE.tokens > (one.computed - steps) // PAGE.tokens


@given(held=HELD, tail=st.lists(st.integers(0, 30), max_size=3), steps=st.integers(0, 9))
@cases(100)
def test_contexts_ahead_are_those_of_later(held: list[int], tail: list[int], steps: int) -> None:
    batch, jobs = DecodeBatch(PAGE), [Job(i, 0, 1, n + 1, n) for i, n in enumerate(held)]
    tables = {kv_place(job.job_id): [0] * PAGE.count(job.computed_tokens) for job in jobs}
    batch.join([(job, kv_place(job.job_id)) for job in jobs], tables, lambda job: 9)
    now, tokens = batch.ahead(2, tail), [1] * len(held) + [3] * len(tail)
    later = now.after(steps, tokens)
    assert list(later) == [c + steps * n for c, n in zip(now, tokens, strict=True)]
    assert (now.lead, now.total) == (len(held), sum(held) + 2 * len(held))
    assert list(now.extremes) == ([min(held) + 2, max(held) + 2] if held else [])
