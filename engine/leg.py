"""The part of a repeated plan in which all slices stay as long as they are."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from engine.cohort import Behind, Cohort
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
    def samples_all(self) -> bool:
        """Whether each of its slices yields tokens."""
        return False not in self.pieces.samples

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


def legs(repeat: Repeat, cohort: Cohort, count: int) -> list[Leg]:
    """The next steps of a repeated plan, with all jobs as they are."""
    lead, plan, found = len(cohort.jobs), repeat.plan, list[Leg]()
    jobs = repeat.jobs[lead:]
    ids = (*cohort.ids, *[job.job_id for job in jobs])
    ones, trues, tables = _decodes(len(ids))
    at, end, single = repeat.done, repeat.done + count, ((1, True),) * len(jobs)
    done = [(job.computed_tokens, job.known_tokens) for job in jobs]
    while at < end:
        op, until = plan.launch(at), min(end, plan.until(at))
        first, steps, parts = at - repeat.done, until - at, op.slices[lead:]
        tail = tuple([(p.tokens, c + p.tokens == k) for p, (c, k) in zip(parts, done, strict=True)])
        tokens, samples = ones, trues
        if tail != single:
            tokens = (*ones[:lead], *[n for n, _ in tail])
            samples = (*trues[:lead], *[sampled for _, sampled in tail])
        behind = Behind(cohort, first, tuple([computed for computed, _ in done]))
        launch = Launch(op, (), Pieces(ids, tokens, behind, samples, tables))
        found.append(Leg(first, steps, launch, tail))
        moved = zip(done, tail, strict=True)
        done = [(c + steps * n, k + steps * sampled) for (c, k), (n, sampled) in moved]
        at = until
    return found
