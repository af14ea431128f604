"""Law 11b to the token: every launch finds the keys and values that its job needs in its pages."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence

from engine.executor import Launch, Span
from engine.plan import Copy, PageSize, Pool, Tier

Token = Callable[[int, int], Hashable]  # what a job has at a position, with all before it
Slot = tuple[Pool, int]  # room for one token


class Contents:
    """Carries launches out in span time, on slots that hold names instead of numbers.

    What a launch reads must be there at its start and still at its end; from its start on, what
    it writes holds nothing for anybody else. `read_tokens` counts what was looked at.
    """

    def __init__(self, page: PageSize, token: Token) -> None:
        self.read_tokens = 0
        self._page, self._token = page, token
        self._memory: dict[Slot, Hashable] = {}
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
        pool = (Tier.GPU, launch.op.lane[0])
        for piece in launch.pieces:
            job_id, context = piece.job_id, piece.context_tokens
            slots = self._slots(pool, piece.pages, context + piece.tokens)
            for at, slot in enumerate(slots[:context]):
                found = self._memory.get(slot)
                assert found == self._token(job_id, at), f"job {job_id} reads foreign KV at {at}"
            for at, slot in enumerate(slots[context:], context):
                self._memory[slot] = None if starts else self._token(job_id, at)
            self.read_tokens += context

    def _copy(self, launch: Launch, starts: bool) -> None:
        op = launch.op
        assert isinstance(op, Copy)
        tokens = launch.nbytes // self._page.nbytes * self._page.tokens
        found = [self._memory.get(s) for s in self._slots(op.src.pool, launch.src_pages, tokens)]
        targets = self._slots(op.dst.pool, launch.dst_pages, tokens)
        if starts:
            self._moving[launch] = found
            self._memory.update(dict.fromkeys(targets))
        else:
            assert found == self._moving.pop(launch), f"{op.src} has changed under its copy"
            self._memory.update(zip(targets, found, strict=True))

    def _slots(self, pool: Pool, pages: Sequence[int], tokens: int) -> list[Slot]:
        size = self._page.tokens
        return [(pool, pages[at // size] * size + at % size) for at in range(tokens)]
