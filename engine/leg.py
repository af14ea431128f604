"""The part of a repeated plan in which all slices stay as long as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from operator import add, eq, itemgetter
from typing import NamedTuple

from engine.cohort import Behind
from engine.executor import Launch, Pieces
from engine.plan import Compute
from engine.repeat import Repeat


class Leg(NamedTuple):
    """Steps of a run with one launch; `first` counts from the run's beginning.

    A cohort of decodes leads its slices: one token each, and one more is sampled. Those in the tail
    may be parts of prompts, which yield nothing, their ends, which take one step, or decodes.
    """

    first: int
    steps: int
    op: Compute  # of its first step, and so its pieces
    pieces: Pieces

    @property
    def launch(self) -> Launch:
        """Of its first step."""
        return Launch(self.op, (), self.pieces)

    def cut(self, end: int) -> Leg:
        """What is left of it in a run of so many steps."""
        return self if self.first + self.steps <= end else self._replace(steps=end - self.first)

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
    if tail:
        ids += tuple([job.job_id for job in tail])
    contexts, known = [job.computed_tokens for job in tail], [job.known_tokens for job in tail]
    tokens: tuple[int, ...] = ()  # of the tail, and the same below
    samples: tuple[bool, ...] = ()
    steps = 0
    while first < count and (wanted := reach()) > 0:
        if first:
            contexts = [c + steps * n for c, n in zip(contexts, tokens, strict=True)]
            known = [k + steps * sampled for k, sampled in zip(known, samples, strict=True)]
        part, until = repeat.part(repeat.done + first)
        steps = min(wanted, min(count, until - repeat.done) - first)
        tokens = tuple(map(_tokens, part))
        samples = tuple(map(eq, map(add, contexts, tokens), known))
        now = cohort.ahead(first, contexts)
        pieces = Pieces(ids, ones + tokens, now, trues + samples, _no_tables(len(ids)))
        yield Leg(first, steps, repeat.launch(part), pieces)
        first += steps
