"""The part of a repeated plan in which all slices stay as long as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
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
    launch: Launch  # of its first step
    tail: tuple[tuple[int, bool], ...]  # tokens, and whether one more is sampled

    @property
    def op(self) -> Compute:
        assert isinstance(self.launch.op, Compute)
        return self.launch.op

    @property
    def pieces(self) -> Pieces:
        assert isinstance(self.launch.pieces, Pieces)
        return self.launch.pieces

    @property
    def sampled_ids(self) -> tuple[int, ...]:
        """Whose slices yield tokens."""
        return self.pieces.sampled_ids

    def cut(self, end: int) -> Leg:
        """What is left of it in a run of so many steps."""
        return self if self.first + self.steps <= end else self._replace(steps=end - self.first)

    def launch_at(self, step: int) -> Launch:
        """The launch of a step of the run. Page tables are left out: nothing here reads them."""
        behind, of = step - self.first, self.pieces
        if not behind:
            return self.launch
        contexts = [c + behind * n for c, n in zip(of.contexts, of.tokens, strict=True)]
        pieces = Pieces(of.job_ids, of.tokens, contexts, of.samples, of.tables)
        return Launch(self.op.again_as(self.op.slices), (), pieces)


@cache
def _decodes(count: int) -> tuple[tuple[int, ...], tuple[bool, ...], Sequence[Sequence[int]]]:
    """Tokens, samples and page tables of so many decodes: kept once for all launches."""
    return (1,) * count, (True,) * count, ((),) * count


def legs(repeat: Repeat, count: int, reach: Callable[[], int]) -> Iterator[Leg]:
    """The next steps of a repeated plan, with all jobs as they are; `count` at most.

    `reach` says before each leg how many are wanted at once: none ends it.
    """
    cohort, tail = repeat.cohort, repeat.tail
    lead, ids = len(cohort.jobs), cohort.ids + tuple([job.job_id for job in tail])
    ones, trues, tables = _decodes(len(ids))
    done = [(job.computed_tokens, job.known_tokens) for job in tail]
    single, first = ((1, True),) * len(tail), 0
    contexts: tuple[int, ...] = ()
    while first < count and (wanted := reach()) > 0:
        part, until = repeat.part(repeat.done + first)
        steps = min(wanted, min(count, until - repeat.done) - first)
        tokens, samples, moves = ones, trues, single
        if tail:
            pairs = zip(part, done, strict=True)
            moves = tuple([(p.tokens, c + p.tokens == k) for p, (c, k) in pairs])
            contexts = tuple([computed for computed, _ in done])
        if moves != single:
            tokens = (*ones[:lead], *[n for n, _ in moves])
            samples = (*trues[:lead], *[sampled for _, sampled in moves])
        behind = Behind(cohort, first, contexts)
        launch = Launch(repeat.launch(part), (), Pieces(ids, tokens, behind, samples, tables))
        yield Leg(first, steps, launch, moves)
        if tail:
            moved = zip(done, moves, strict=True)
            done = [(c + steps * n, k + steps * sampled) for (c, k), (n, sampled) in moved]
        first += steps
