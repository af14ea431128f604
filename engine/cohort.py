"""Decodes that move on together: looked at when they come and go, not at every step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

from engine.job import Job


class Cohort:
    """Jobs of which each gets one token at every step, column by column.

    Columns are as they were `ahead` steps ago, and never changed in place: launches keep them.
    """

    __slots__ = ("ahead", "contexts", "ids", "jobs", "left", "past", "young_until")

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self.ids: tuple[int, ...] = ()
        self.contexts: tuple[int, ...] = ()  # tokens in KV
        self.left: tuple[int, ...] = ()  # tokens to the end, which no policy may see
        self.past = 0  # sum of contexts
        self.ahead = 0
        self.young_until = 0  # from so many steps on all are behind their prompts

    def join(self, jobs: Sequence[Job], tokens_left: Callable[[Job], int]) -> None:
        """They have come behind all others."""
        ahead, contexts = self.ahead, [job.computed_tokens for job in jobs]
        self.jobs = [*self.jobs, *jobs]
        self.ids += tuple([job.job_id for job in jobs])
        self.contexts += tuple([context - ahead for context in contexts])
        self.left += tuple([tokens_left(job) + ahead for job in jobs])
        self.past += sum(contexts) - ahead * len(jobs)
        missing = [job.prompt_tokens - n for job, n in zip(jobs, contexts, strict=True)]
        self.young_until = max(self.young_until, ahead + max(missing, default=0))

    def leave(self, i: int) -> None:
        """The one at that place is in it no more."""
        i %= len(self.jobs)
        self.past -= self.contexts[i]
        self.jobs = self.jobs[:i] + self.jobs[i + 1 :]
        self.ids = self.ids[:i] + self.ids[i + 1 :]
        self.contexts = self.contexts[:i] + self.contexts[i + 1 :]
        self.left = self.left[:i] + self.left[i + 1 :]

    def advance(self, steps: int) -> None:
        """All get so many tokens."""
        self.ahead += steps

    def fewest_left(self, otherwise: int) -> int:
        """Tokens until the first of them is complete; `otherwise` where nobody is in it."""
        return min(self.left) - self.ahead if self.left else otherwise

    def complete(self) -> list[Job]:
        """Those that have all their tokens."""
        ahead = self.ahead
        return [job for job, left in zip(self.jobs, self.left, strict=True) if left <= ahead]


class Behind(Sequence[int]):
    """Contexts of a cohort so many steps from now, and behind them those of other slices."""

    __slots__ = ("_ahead", "_contexts", "are_generated", "tail", "total")

    def __init__(self, cohort: Cohort, steps: int, tail: tuple[int, ...]) -> None:
        ahead = cohort.ahead + steps
        self._contexts, self._ahead, self.tail = cohort.contexts, ahead, tail
        self.total = cohort.past + ahead * len(cohort.contexts)  # of the cohort
        self.are_generated = ahead >= cohort.young_until  # what the cohort decodes: no prompts

    def __len__(self) -> int:
        return len(self._contexts) + len(self.tail)

    def __iter__(self) -> Iterator[int]:
        ahead = self._ahead
        return chain([context + ahead for context in self._contexts], self.tail)

    def __getitem__(self, index: Any) -> Any:
        return tuple(self)[index]
