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
    lead, plan = len(cohort.jobs), repeat.plan
    jobs = repeat.jobs[lead:]
    ids = (*cohort.ids, *[job.job_id for job in jobs])
    ones, trues, tables = _decodes(len(ids))
    computed, known = [job.computed_tokens for job in jobs], [job.known_tokens for job in jobs]
    found, at, end = list[Leg](), repeat.done, repeat.done + count
    while at < end:
        op, until = plan.launch(at), min(end, plan.until(at))
        first, steps = at - repeat.done, until - at
        parts = [piece.tokens for piece in op.slices[lead:]]
        ends = [c + n == k for n, c, k in zip(parts, computed, known, strict=True)]
        tokens = (*ones[:lead], *parts) if max(parts) > 1 else ones
        samples = trues if all(ends) else (*trues[:lead], *ends)
        behind = Behind(cohort, first, tuple(computed))
        launch = Launch(op, (), Pieces(ids, tokens, behind, samples, tables))
        found.append(Leg(first, steps, launch, tuple(zip(parts, ends, strict=True))))
        computed = [c + steps * n for c, n in zip(computed, parts, strict=True)]
        known = [k + steps * sampled for k, sampled in zip(known, ends, strict=True)]
        at = until
    return found
