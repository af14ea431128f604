"""Decodes that move on together: looked at when they come and go, not at every step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from engine.job import Job
from engine.plan import Grow, GrowCycle, PageSize, Place, Slice, one_token

Turns = tuple[tuple[Grow, ...], ...]


class Cohort:
    """Jobs of which each gets one token at every step, column by column, in order of admission.

    `clock` counts its steps. Columns are as at clock 0 and never changed in place: launches and
    runs keep them. `turns[i]`: whose pages are full at clocks i, i + n, ..., of n tokens a page;
    None where somebody holds pages to spare.
    """

    __slots__ = (
        "clock",
        "contexts",
        "ids",
        "jobs",
        "left",
        "page",
        "past",
        "places",
        "slices",
        "turns",
        "young_until",
    )

    def __init__(self, page: PageSize) -> None:
        self.page, self.clock = page, 0
        self.jobs: list[Job] = []
        self.ids: tuple[int, ...] = ()
        self.slices: tuple[Slice, ...] = ()
        self.places: tuple[Place, ...] = ()
        self.contexts: tuple[int, ...] = ()  # tokens in KV
        self.left: tuple[int, ...] = ()  # tokens to the end, which no policy may see
        self.turns: Turns | None = ((),) * page.tokens
        self.past = 0  # sum of contexts
        self.young_until = 0  # from this clock on all are behind their prompts

    def join(
        self,
        jobs: Iterable[tuple[Job, Place]],
        held_bytes: Mapping[Place, int],
        tokens_left: Callable[[Job], int],
    ) -> None:
        """They have come behind all others, each with the place that it writes."""
        clock, (tokens, nbytes) = self.clock, self.page
        for job, place in jobs:
            context = job.computed_tokens
            self.jobs = [*self.jobs, job]
            self.ids += (job.job_id,)
            self.slices += (one_token(job),)
            self.places += (place,)
            self.contexts += (context - clock,)
            self.left += (tokens_left(job) + clock,)
            self.past += context - clock
            self.young_until = max(self.young_until, clock + job.prompt_tokens - context)
            spare = held_bytes.get(place, 0) // nbytes * tokens - context
            if self.turns is not None:
                turn, turns = (clock + spare) % tokens, [*self.turns]
                turns[turn] += (Grow(place, nbytes),)
                self.turns = tuple(turns) if 0 <= spare < tokens else None

    def leave(self, i: int) -> None:
        """The one at that place is in it no more."""
        place = self.places[i]
        self.past -= self.contexts[i]
        self.jobs = self.jobs[:i] + self.jobs[i + 1 :]
        self.ids = self.ids[:i] + self.ids[i + 1 :]
        self.slices = self.slices[:i] + self.slices[i + 1 :]
        self.places = self.places[:i] + self.places[i + 1 :]
        self.contexts = self.contexts[:i] + self.contexts[i + 1 :]
        self.left = self.left[:i] + self.left[i + 1 :]
        if self.turns is not None:
            own = Grow(place, self.page.nbytes)
            turns = [tuple([o for o in t if o != own]) if own in t else t for t in self.turns]
            self.turns = tuple(turns)

    def fewest_left(self, otherwise: int) -> int:
        """Tokens until the first of them is complete; `otherwise` where nobody is in it."""
        return min(self.left) - self.clock if self.left else otherwise

    def complete(self) -> list[Job]:
        """Those that have all their tokens."""
        clock = self.clock
        return [job for job, left in zip(self.jobs, self.left, strict=True) if left <= clock]

    def cycle(self) -> GrowCycle | None:
        """Whose pages are full from now on, step by step."""
        if self.turns is None:
            return None
        now = self.clock % self.page.tokens
        return GrowCycle(self.turns[now:] + self.turns[:now])

    def due(self, count: int) -> list[tuple[Grow, ...]]:
        """Whose pages are full at each of the next steps."""
        assert self.turns is not None
        now, n = self.clock % self.page.tokens, self.page.tokens
        return list((self.turns * ((now + count) // n + 1))[now : now + count])


class Behind(Sequence[int]):
    """Contexts of a cohort so many steps from now, and behind them those of other slices."""

    __slots__ = ("_clock", "_contexts", "are_generated", "tail", "total")

    def __init__(self, cohort: Cohort, steps: int, tail: tuple[int, ...]) -> None:
        clock = cohort.clock + steps
        self._contexts, self._clock, self.tail = cohort.contexts, clock, tail
        self.total = cohort.past + clock * len(cohort.contexts)  # of the cohort
        self.are_generated = clock >= cohort.young_until  # what the cohort decodes: no prompts

    def __len__(self) -> int:
        return len(self._contexts) + len(self.tail)

    def __iter__(self) -> Iterator[int]:
        clock = self._clock
        return chain([context + clock for context in self._contexts], self.tail)

    def __getitem__(self, index: Any) -> Any:
        return tuple(self)[index]
