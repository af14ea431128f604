"""The part of a repeated plan in which all slices stay as long as they are."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from operator import add, attrgetter, eq, itemgetter, mul

from engine.cohort import Behind
from engine.executor import Launch, Pieces
from engine.plan import Compute
from engine.repeat import Repeat


@dataclass(slots=True, eq=False)
class Leg:
    """Steps of a run with one launch; `first` counts from the run's beginning.

    A cohort of decodes leads its slices: one token each, and one more is sampled. Those in the tail
    may be parts of prompts, which yield nothing, their ends, which take one step, or decodes.
    """

    first: int
    steps: int
    op: Compute  # of its first step, and so its pieces
    pieces: Pieces
    launch: Launch  # of both

    def cut(self, end: int) -> None:
        """Leaves of it what there is in a run of so many steps."""
        self.steps = min(self.steps, end - self.first)

    def launch_at(self, step: int) -> Launch:
        """The launch of a step of the run. Page tables are left out: nothing here reads them."""
        behind, of = step - self.first, self.pieces
        if not behind:
            return self.launch
        contexts = of.contexts
        assert isinstance(contexts, Behind)
        later = contexts.after(behind, of.tokens)
        pieces = Pieces(of.job_ids, of.tokens, later, of.samples, of.tables)
        return Launch(self.op.again_as(self.op.slices), (), pieces)


_tokens = itemgetter(1)  # of a slice
_job_id, _computed, _known = map(attrgetter, ("job_id", "computed_tokens", "known_tokens"))


@cache
def _decodes(count: int) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    """Tokens and samples of so many decodes: kept once for all launches."""
    return (1,) * count, (True,) * count


@cache
def _no_tables(count: int) -> Sequence[Sequence[int]]:
    return ((),) * count


def legs(repeat: Repeat, count: int, reach: Callable[[], int]) -> Iterator[Leg]:
    """The next steps of a repeated plan, with all jobs as they are; `count` at most.

    `reach` says before each leg how many are wanted at once: none ends it.
    """
    cohort, tail, first = repeat.cohort, repeat.tail, 0
    ids, (ones, trues) = cohort.ids, _decodes(len(cohort.ids))
    contexts: list[int] = []  # of the tail, and the same below
    known: list[int] = []
    if tail:
        ids += tuple(map(_job_id, tail))
        contexts, known = list(map(_computed, tail)), list(map(_known, tail))
    tables = _no_tables(len(ids))
    tokens: tuple[int, ...] = ()
    samples: tuple[bool, ...] = ()
    steps = 0
    while first < count and (wanted := reach()) > 0:
        if first and tail:
            contexts = list(map(add, contexts, map(mul, itertools.repeat(steps), tokens)))
            known = list(map(add, known, map(mul, itertools.repeat(steps), samples)))
        part, until = repeat.part(repeat.done + first)
        steps = min(wanted, min(count, until - repeat.done) - first)
        now = cohort.ahead(first, contexts)
        if part:
            tokens = tuple(map(_tokens, part))
            samples = tuple(map(eq, map(add, contexts, tokens), known))
            pieces = Pieces(ids, ones + tokens, now, trues + samples, tables)
        else:
            pieces = Pieces(ids, ones, now, trues, tables)
        op = repeat.launch(part, repeat.done + first)
        yield Leg(first, steps, op, pieces, Launch(op, (), pieces))
        first += steps
