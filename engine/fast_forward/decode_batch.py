"""Decodes that move on together: a step changes one clock, only a join or leave each column."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple, TypeVar

from engine.contract.executor import Contexts
from engine.contract.job import ALONE, Job, TokenClock
from engine.contract.plan import Grow, Slice, one_token
from engine.contract.regions import PageSize, Place

T = TypeVar("T")
Tables = tuple[list[int], ...]


class GrowCycle(NamedTuple):
    """The growth of decodes in turn, each by a page whenever its last one is full.

    With n tokens a page, `by_step[i]` is taken at steps i, i + n, ...; `pages` in all of these.
    """

    by_step: tuple[tuple[Grow, ...], ...]
    pages: int


def _in_turn(turns: list[T], now: int, count: int) -> list[T]:
    """The next `count` turns from one on, over and over."""
    end, n = now + count, len(turns)
    return turns[now:end] if end <= n else (turns * (end // n + 1))[now:end]


class DecodeBatch(TokenClock):
    """Jobs that each get one token at every step, column by column, in the order of admission.

    `clock` counts the steps, and the jobs move with it. Columns are as at clock 0 and never changed
    in place: launches and runs keep them. With n tokens a page, `turns[i]` holds a page for each
    job whose pages are full at clocks i, i + n, ...; it is None where a job holds pages to spare.
    `growing[i]` holds the page tables of these jobs.
    """

    __slots__ = (
        "contexts",
        "growing",
        "ids",
        "jobs",
        "left",
        "page",
        "past",
        "places",
        "slices",
        "soonest",
        "tables",
        "turns",
        "young_until",
    )

    def __init__(self, page: PageSize) -> None:
        super().__init__()
        self.page = page
        self.jobs: list[Job] = []
        self.ids: tuple[int, ...] = ()
        self.slices: tuple[Slice, ...] = ()
        self.places: tuple[Place, ...] = ()
        self.tables: Tables = ()  # page tables, which only grow
        self.contexts: tuple[int, ...] = ()  # tokens in KV
        self.left: tuple[int, ...] = ()  # the clock at which each job ends, which no policy may see
        self.soonest = 0  # the clock at which the first job ends
        self.turns: list[tuple[Grow, ...]] | None = [()] * page.tokens
        self.growing: list[Tables] = [()] * page.tokens
        self.past = 0  # sum of contexts
        self.young_until = 0  # from this clock on all jobs are behind their prompts

    def join(
        self,
        jobs: Iterable[tuple[Job, Place]],
        tables: Mapping[Place, list[int]],
        tokens_left: Callable[[Job], int],
    ) -> None:
        """Adds jobs behind all others, each with the place that it writes."""
        clock, (tokens, nbytes) = self.clock, self.page
        added: list[Job] = []
        places: list[Place] = []
        lists: list[list[int]] = []
        contexts: list[int] = []
        ends: list[int] = []
        for job, place in jobs:
            context, table = job.computed_tokens, tables[place]
            job._move_with(self)
            added.append(job)
            places.append(place)
            lists.append(table)
            contexts.append(context - clock)
            ends.append(tokens_left(job) + clock)
            behind = clock + job.prompt_tokens - context
            if behind > self.young_until:
                self.young_until = behind
            spare = len(table) * tokens - context
            if not 0 <= spare < tokens:
                self.turns = None
            if self.turns is not None:
                turn = (clock + spare) % tokens
                self.turns[turn] += (Grow(place, nbytes),)
                self.growing[turn] += (table,)
        if added:
            self.jobs = [*self.jobs, *added]
            self.ids += tuple([job.job_id for job in added])
            self.slices += tuple([one_token(job) for job in added])
            self.places += tuple(places)
            self.tables += tuple(lists)
            self.contexts += tuple(contexts)
            self.left += tuple(ends)
            self.soonest = min(self.left)
            self.past += sum(contexts)

    def leave(self, i: int) -> None:
        """Removes the job of column i."""
        if self.turns is not None:
            turn, place = -self.contexts[i] % self.page.tokens, self.places[i]
            at = [op.place for op in self.turns[turn]].index(place)
            self.turns[turn] = self.turns[turn][:at] + self.turns[turn][at + 1 :]
            self.growing[turn] = self.growing[turn][:at] + self.growing[turn][at + 1 :]
        self.jobs[i]._move_with(ALONE)
        self.past -= self.contexts[i]
        self.jobs = self.jobs[:i] + self.jobs[i + 1 :]
        self.ids = self.ids[:i] + self.ids[i + 1 :]
        self.slices = self.slices[:i] + self.slices[i + 1 :]
        self.places = self.places[:i] + self.places[i + 1 :]
        self.tables = self.tables[:i] + self.tables[i + 1 :]
        self.contexts = self.contexts[:i] + self.contexts[i + 1 :]
        self.left = self.left[:i] + self.left[i + 1 :]
        self.soonest = min(self.left, default=0)

    def fewest_left(self, otherwise: int) -> int:
        """Tokens until the first job is complete; `otherwise` in an empty batch."""
        return self.soonest - self.clock if self.left else otherwise

    def most_left(self) -> int:
        """Tokens until the last job is complete; 0 in an empty batch."""
        return max(self.left) - self.clock if self.left else 0

    def complete(self) -> list[Job]:
        """The jobs that have got their last token at this clock."""
        clock, left, at = self.clock, self.left, -1
        done: list[Job] = []
        if clock < self.soonest:
            return done
        for _ in range(left.count(clock)):
            at = left.index(clock, at + 1)
            done.append(self.jobs[at])
        return done

    def filled(self, steps: int) -> Iterator[tuple[Job, int]]:
        """Jobs that may have filled a page in the last steps, with their tokens before them."""
        n, turns = self.page.tokens, self.turns
        found: Iterable[int] = range(len(self.jobs))
        if turns is not None and steps < n:
            last = [turns[clock % n] for clock in range(self.clock - steps + 1, self.clock + 1)]
            owners = [op.place.region.owner for op in chain.from_iterable(last)]
            found = sorted(map(self.ids.index, owners))
        return ((self.jobs[i], self.contexts[i] + self.clock - steps) for i in found)

    def cycle(self) -> GrowCycle | None:
        """The growth from this clock on; None where a job holds pages to spare."""
        if self.turns is None:
            return None
        now = self.clock % self.page.tokens
        return GrowCycle((*self.turns[now:], *self.turns[:now]), len(self.jobs))

    def due(self, count: int) -> list[tuple[Grow, ...]]:
        """The growth at each of the next `count` steps."""
        assert self.turns is not None
        return _in_turn(self.turns, self.clock % self.page.tokens, count)

    def takers(self, count: int) -> list[Tables]:
        """The page tables that grow at each of the next `count` steps."""
        return _in_turn(self.growing, self.clock % self.page.tokens, count)

    def ahead(self, steps: int, tail: Sequence[int]) -> Contexts:
        """Contexts of the jobs after `steps` steps, and behind them those of other slices."""
        return Contexts(self.contexts, self.past, self.clock + steps, self.young_until, tail)
