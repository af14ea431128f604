"""Law 11b to the token: every launch finds the keys and values that its job needs in its pages."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence

from engine.contract import BrokenLaw
from engine.executor import Launch, Span
from engine.plan import Copy, PageSize, Pool, Tier

Token = Callable[[int, int], Hashable]  # what a job has at a position, with all before it
Slots = dict[int, Hashable]  # of a pool: room for one token each, and what lies there


class Contents:
    """Carries launches out in span time, on slots that hold names instead of numbers.

    What a launch reads must be there at its start and still at its end; from its start on, what
    it writes holds nothing for anybody else. `read_tokens` counts what was looked at.
    """

    def __init__(self, page: PageSize, token: Token) -> None:
        self.read_tokens = 0
        self._page, self._token = page, token
        self._memory: defaultdict[Pool, Slots] = defaultdict(dict)
        self._moving: dict[Launch, list[Hashable]] = {}

    def carry_out(self, runs: Iterable[tuple[Launch, Span]]) -> Contents:
        """All launches of a run. AssertionError where one reads what it must not."""
        events = []
        for number, (launch, span) in enumerate(runs):
            events += [(span.start_ns, 1, number, launch), (span.end_ns, 0, number, launch)]
        for _, starts, _, launch in sorted(events, key=lambda event: event[:3]):
            (self._copy if isinstance(launch.op, Copy) else self._compute)(launch, bool(starts))
        return self

    def _compute(self, launch: Launch, starts: bool) -> None:
        memory = self._memory[Tier.GPU, launch.op.lane[0]]
        for piece in launch.pieces:
            job_id, context = piece.job_id, piece.context_tokens
            slots = self._slots(piece.pages, context + piece.tokens)
            names = [self._token(job_id, at) for at in range(len(slots))]
            wrong = [at for at in range(context) if memory.get(slots[at]) != names[at]]
            if wrong:
                raise BrokenLaw(f"law 11b: job {job_id} reads foreign KV at {wrong[0]}")
            left: Sequence[Hashable] = [None] * piece.tokens if starts else names[context:]
            memory.update(zip(slots[context:], left, strict=True))
            self.read_tokens += context

    def _copy(self, launch: Launch, starts: bool) -> None:
        op = launch.op
        assert isinstance(op, Copy)
        tokens = launch.nbytes // self._page.nbytes * self._page.tokens
        source, target = self._memory[op.src.pool], self._memory[op.dst.pool]
        found = [source.get(slot) for slot in self._slots(launch.src_pages, tokens)]
        slots = self._slots(launch.dst_pages, tokens)
        if starts:
            self._moving[launch] = found
            target.update(dict.fromkeys(slots))
        else:
            if found != self._moving.pop(launch):
                raise BrokenLaw(f"law 11b: {op.src} has changed under its copy")
            target.update(zip(slots, found, strict=True))

    def _slots(self, pages: Sequence[int], tokens: int) -> list[int]:
        size = self._page.tokens
        return [pages[at // size] * size + at % size for at in range(tokens)]
