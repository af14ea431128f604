"""The part of a repeated plan in which all slices stay as long as they are."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from engine.executor import Launch, Pieces
from engine.plan import Compute
from engine.repeat import Repeat


class Leg(NamedTuple):
    """Steps of a run with one launch; `first` counts from the run's beginning.

    All slices but the last are decodes: one token each, and one more is sampled. The last may be a
    part of a prompt, which yields nothing, its end, which takes one step, or a decode like others.
    """

    first: int
    steps: int
    launch: Launch  # of its first step

    @property
    def op(self) -> Compute:
        assert isinstance(self.launch.op, Compute)
        return self.launch.op

    @property
    def pieces(self) -> Pieces:
        assert isinstance(self.launch.pieces, Pieces)
        return self.launch.pieces

    @property
    def job_ids(self) -> Sequence[int]:
        return self.pieces.job_ids

    @property
    def last_samples(self) -> bool:
        """Whether the last slice yields a token, too."""
        return self.pieces.samples[-1]

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
def _decodes(count: int) -> tuple[Sequence[int], Sequence[bool], Sequence[Sequence[int]]]:
    """Tokens, samples and page tables of so many decodes: kept once for all launches."""
    return (1,) * count, (True,) * count, ((),) * count


def legs(repeat: Repeat, count: int) -> list[Leg]:
    """The next steps of a repeated plan, with all jobs as they are."""
    jobs = [piece.job for piece in repeat.plan.slices]
    ids, contexts = [job.job_id for job in jobs], [job.computed_tokens for job in jobs]
    ones, trues, tables = _decodes(len(jobs))
    computed, known = jobs[-1].computed_tokens, jobs[-1].known_tokens
    found, at, end = list[Leg](), repeat.done, repeat.done + count
    while at < end:
        op, until = repeat.plan.launch(at), min(end, repeat.plan.until(at))
        first, steps, n = at - repeat.done, until - at, op.slices[-1].tokens
        samples = computed + n == known
        behind = array("q", [context + first for context in contexts])
        behind[-1] = computed
        tokens = ones if n == 1 else (*ones[1:], n)
        pieces = Pieces(ids, tokens, behind, trues if samples else (*trues[1:], False), tables)
        found.append(Leg(first, steps, Launch(op, (), pieces)))
        computed, known, at = computed + steps * n, known + steps * samples, until
    return found
