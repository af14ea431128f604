"""The seam between deciding and doing: what executors are given and report, and their lanes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, compress, repeat
from typing import Any, NamedTuple, Protocol

import simpy

from engine.contract.plan import Lane, Op
from engine.contract.regions import Place, Pool


class Piece(NamedTuple):
    """One slice as it was when its launch was issued (the job itself has moved on since).

    `context_tokens` are in the KV pages already; the launch adds `tokens` behind them. `pages`
    is the job's page table: it only ever grows, so the first
    ceil((context_tokens + tokens) / page) entries stay what they were at issue.
    """

    job_id: int
    tokens: int
    context_tokens: int
    samples: bool  # the slice reaches the last known token, so it yields the next one
    pages: Sequence[int]


class Contexts(Sequence[int]):
    """Context tokens of each slice: of decodes that move together, then of a tail of slices.

    The decodes' are kept as at clock 0, so that a launch some steps later shares them: `lead` of
    them, `total` tokens in all, `are_generated` where all are behind their prompts.
    """

    __slots__ = (
        "_clock",
        "_contexts",
        "_past",
        "_young_until",
        "are_generated",
        "lead",
        "tail",
        "total",
    )

    def __init__(
        self,
        contexts: tuple[int, ...],
        past: int,
        clock: int,
        young_until: int,
        tail: Sequence[int],
    ) -> None:
        self._contexts, self._past, self._clock = contexts, past, clock
        self._young_until, self.tail = young_until, tail
        self.lead = len(contexts)  # decodes
        self.total = past + clock * self.lead
        self.are_generated = clock >= young_until

    def after(self, steps: int, tokens: Sequence[int]) -> Contexts:
        """Contexts so many steps later, with slices of so many tokens each."""
        tail = [c + steps * n for c, n in zip(self.tail, tokens[self.lead :], strict=True)]
        clock = self._clock + steps
        return Contexts(self._contexts, self._past, clock, self._young_until, tail)

    @property
    def extremes(self) -> tuple[int, ...]:
        """The least and the largest context of the decodes; none where there are none."""
        found = (min(self._contexts), max(self._contexts)) if self._contexts else ()
        return tuple([context + self._clock for context in found])

    def __len__(self) -> int:
        return len(self._contexts) + len(self.tail)

    def __iter__(self) -> Iterator[int]:
        clock = self._clock
        return chain([context + clock for context in self._contexts], self.tail)

    def __getitem__(self, index: Any) -> Any:
        return tuple(self)[index]


class Pieces(Sequence[Piece]):
    """The pieces of a launch, column by column; made into rows only for those who read rows."""

    __slots__ = ("contexts", "job_ids", "samples", "tables", "tokens")

    def __init__(
        self,
        job_ids: Sequence[int],
        tokens: Sequence[int],
        contexts: Sequence[int],
        samples: Sequence[bool],
        tables: Sequence[Sequence[int]],
    ) -> None:
        self.job_ids, self.tokens, self.contexts = job_ids, tokens, contexts
        self.samples, self.tables = samples, tables

    @property
    def sampled_ids(self) -> tuple[int, ...]:
        """Whose slices yield a token."""
        ids, samples = self.job_ids, self.samples
        return tuple(ids if all(samples) else compress(ids, samples))

    def __len__(self) -> int:
        return len(self.job_ids)

    def __iter__(self) -> Iterator[Piece]:
        rows = zip(self.job_ids, self.tokens, self.contexts, self.samples, self.tables, strict=True)
        return map(tuple.__new__, repeat(Piece), rows)  # a Piece each, without Python's own call

    def __getitem__(self, index: Any) -> Any:
        return tuple(self)[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)


@dataclass(slots=True, eq=False)
class Launch:
    """An operation as issued: what it waits for and all that an executor must know to run it.

    A Compute has one piece per slice. A Copy has its bytes and, for KV, the page tables on both
    sides (equal in length).
    """

    op: Op
    waits: tuple[Op, ...] = ()
    pieces: Sequence[Piece] = ()
    nbytes: int = 0
    src_pages: Sequence[int] = ()
    dst_pages: Sequence[int] = ()


class Span(NamedTuple):
    """When one operation ran, and the workspace it peaked at. Executors report nothing else.

    `peak_bytes` is None where nothing measured or predicted it. `ended` names the jobs whose
    sampled token was an end of sequence (only where lengths are not forced).
    """

    op: Op
    start_ns: int
    end_ns: int
    peak_bytes: int | None = None
    ended: tuple[int, ...] = ()


class Store(Protocol):
    """Real memory that is no KV, told of in issue order, between the launches of a plan.

    A copy makes its destination itself. What is freed stays until all earlier users have ended.
    """

    def grow(self, place: Place, nbytes: int) -> None:
        """Bytes are taken for a place."""

    def free(self, place: Place) -> None:
        """A place is given back."""


class Executor(Protocol):
    """Runs launches on first-in-first-out lanes.

    May have `peak_bytes(launch)`: the workspace it predicts where its spans say none; and a
    `store`, where places that are no KV have memory.
    """

    def prepare(self, launches: Sequence[Launch]) -> int:
        """Gets a plan's launches ready, in issue order; returns the host's time in ns.

        The host's time is what deciding, booking and preparing took. On a virtual clock the
        engine lets it pass before the launches run; on a live one it has passed already.
        """

    def run(self, launch: Launch, done: Callable[[Span], None]) -> None:
        """Starts a prepared launch; calls `done` once, on the engine's thread, at its end."""

    def release(self, pool: Pool, pages: Sequence[int]) -> None:
        """These KV pages are in nobody's use now; their memory may go back to the system."""


def due_ns(env: simpy.Environment, host_ns: int) -> int:
    """How much of a plan's host time has still to pass before its launches run."""
    return 0 if getattr(env, "is_live", False) else host_ns


class VirtualClock(simpy.Environment):
    """A clock that can pass over a stretch of time in which nothing happens, without an event."""

    def passes_to(self, at_ns: int) -> bool:
        """Sets the clock, unless an event lies up to that moment; whether it did."""
        if self.peek() <= at_ns:
            return False
        self._now = at_ns
        return True


def passed_to(env: simpy.Environment, at_ns: int) -> bool:
    """Whether a clock has passed to a moment by itself; if not, the caller waits for an event."""
    return isinstance(env, VirtualClock) and env.passes_to(at_ns)


class Reading(NamedTuple):
    """What the machine says a pool holds now: never taken from our own counters.

    `persistent_bytes` outlives operations, `process_bytes` is the operating system's view.
    """

    persistent_bytes: int
    process_bytes: int | None = None


class Meter(Protocol):
    """Reads what the allocator or the system really holds."""

    def read(self) -> Mapping[Pool, Reading]:
        """One reading per pool; called at each settle, so it must be cheap."""


class Lanes:
    """Places each launch behind its lane and its waits; shared by every virtual-time executor."""

    def __init__(self, env: simpy.Environment) -> None:
        self._env = env
        self._free_ns: dict[Lane, int] = defaultdict(int)
        self._end_ns: dict[Op, int] = {}

    def start_ns(self, lane: Lane, waits: Iterable[Op]) -> int:
        """When a launch on a lane can start, if it is placed now."""
        start_ns, end_times_ns = max(int(self._env.now), self._free_ns[lane]), self._end_ns
        for op in waits:
            end_ns = end_times_ns.get(op, 0)
            if end_ns > start_ns:
                start_ns = end_ns
        return start_ns

    def end_times_ns(self, ops: Sequence[Op]) -> list[int]:
        """When operations in flight will end."""
        return [self._end_ns[op] for op in ops]

    def place(
        self,
        launch: Launch,
        duration_ns: int,
        done: Callable[[Span], None],
        peak_bytes: int | None = None,
        ended: tuple[int, ...] = (),
    ) -> None:
        """Gives the launch its span and calls `done` at its end."""
        op = launch.op
        lane = op.lane
        start = self.start_ns(lane, launch.waits)
        self.hold(lane, Span(op, start, start + duration_ns, peak_bytes, ended), done)

    def hold(self, lane: Lane, span: Span, done: Callable[[Span], None]) -> None:
        """Occupies a lane until a span's end and calls `done` then."""
        op = span.op
        self._free_ns[lane] = self._end_ns[op] = span.end_ns

        def settle(_: simpy.Event) -> None:
            del self._end_ns[op]  # nobody waits for what has settled
            done(span)

        self._env.timeout(span.end_ns - int(self._env.now)).callbacks.append(settle)
