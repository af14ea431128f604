"""The seam between the engine and a backend: Launch and Span, Executor, Store, Meter, lanes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, compress, repeat
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import simpy
from simpy.events import URGENT

from engine.contract.plan import Lane, Op
from engine.contract.regions import Place, Pool


class Piece(NamedTuple):
    """One slice as it was when its launch was issued; the job itself moves on.

    Attributes:
        job_id: the job of the slice.
        tokens: tokens that the launch computes, behind the context.
        context_tokens: tokens whose keys and values are in the KV pages before the launch.
        samples: whether the slice reaches the last known token, so that it yields the next one.
        pages: the job's page table. It only grows, so its first
            ceil((context_tokens + tokens) / page size) entries stay as they were at issue.
    """

    job_id: int
    tokens: int
    context_tokens: int
    samples: bool
    pages: Sequence[int]


class Contexts(Sequence[int]):
    """Context tokens of each slice: of decodes that move together, then of a tail of slices.

    Contexts of decodes are stored as at clock 0, so that launches of later steps share them.

    Args:
        contexts: tokens of each decode at clock 0.
        past: their sum.
        clock: steps from clock 0 on.
        young_until: the clock from which on all decodes are behind their prompts.
        tail: tokens of each slice behind the decodes, as they are now.

    Attributes:
        lead: how many decodes there are.
        total: context tokens of all decodes now.
        are_generated: whether all decodes are behind their prompts.
        tail: as given.
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
        """The contexts some steps later.

        Args:
            steps: how many steps.
            tokens: tokens that each slice computes at each step.

        Returns:
            Contexts as they are then; those of decodes are shared with these.
        """
        tail = [c + steps * n for c, n in zip(self.tail, tokens[self.lead :], strict=True)]
        clock = self._clock + steps
        return Contexts(self._contexts, self._past, clock, self._young_until, tail)

    @property
    def extremes(self) -> tuple[int, ...]:
        """The smallest and the largest context of the decodes in tokens; () without decodes."""
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
    """The pieces of a launch, column by column; iteration makes rows.

    Args:
        job_ids: the job of each slice.
        tokens: tokens that each slice computes.
        contexts: tokens in KV before each slice.
        samples: whether each slice yields a token.
        tables: the page table of each job; () where no reader needs it.
    """

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
        """The jobs whose slices yield a token."""
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


class ServedLaunches(NamedTuple):
    """Many launches that only serve, as columns of numpy's int64.

    Attributes:
        tokens: tokens that each slice computes, launch by launch.
        contexts: tokens in KV before each slice.
        starts: the first slice of each launch, and behind them the number of all slices.
        samples: rows of each launch that yield a token.
    """

    tokens: npt.NDArray[np.int64]
    contexts: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]
    samples: npt.NDArray[np.int64]


@dataclass(slots=True, eq=False)
class Launch:
    """An operation as issued, with all that an executor must know to run it.

    Attributes:
        op: the operation.
        waits: operations of other lanes that must end before it starts.
        pieces: of a Compute, one piece per slice.
        nbytes: of a Copy or a Collective, the bytes that move.
        src_pages: of a Copy of KV, the page table of the source.
        dst_pages: of a Copy of KV, the page table of the destination, equal in length.
    """

    op: Op
    waits: tuple[Op, ...] = ()
    pieces: Sequence[Piece] = ()
    nbytes: int = 0
    src_pages: Sequence[int] = ()
    dst_pages: Sequence[int] = ()


class Span(NamedTuple):
    """When one operation ran, and the workspace it peaked at. Executors report nothing else.

    Attributes:
        op: the operation.
        start_ns: when it started, on the clock of the run.
        end_ns: when it ended.
        peak_bytes: the peak of its workspace; None where it is neither measured nor predicted.
        ended: jobs whose sampled token was an end of sequence (only without forced lengths).
    """

    op: Op
    start_ns: int
    end_ns: int
    peak_bytes: int | None = None
    ended: tuple[int, ...] = ()


class Store(Protocol):
    """Real memory of places that are no KV.

    Calls come in issue order, between the launches of a plan. A Copy makes its destination itself.
    Memory that is freed must stay until all launches issued before have ended.
    """

    def grow(self, place: Place, nbytes: int) -> None:
        """Takes memory for a place.

        Args:
            place: a new place, or one that is held and grows.
            nbytes: bytes to add.
        """

    def free(self, place: Place) -> None:
        """Gives back all memory of a place that is held.

        Args:
            place: a place that is held and is no KV.
        """


class Executor(ABC):
    """Runs launches on first-in-first-out lanes.

    Attributes:
        is_live: whether the clock passes by itself, so that the host's time has passed when
            `prepare` returns.
    """

    is_live: ClassVar[bool] = False

    @property
    def store(self) -> Store | None:
        """Memory of places that are no KV; None where they have none."""
        return None

    @abstractmethod
    def prepare(self, launches: Sequence[Launch]) -> int:
        """Gets the launches of a plan ready.

        Args:
            launches: all of the plan, in issue order.

        Returns:
            The host's time in ns for deciding, booking and preparing. The engine lets it pass
            before the launches run, unless the clock is live.
        """

    @abstractmethod
    def run(self, launch: Launch, done: Callable[[Span], None]) -> None:
        """Starts a prepared launch, behind its lane and its waits.

        Args:
            launch: one of the plan that was prepared last.
            done: called once at its end, with its span, on the engine's thread.
        """

    @abstractmethod
    def release(self, pool: Pool, pages: Sequence[int]) -> None:
        """Takes back the memory of idle KV pages, if it can.

        Args:
            pool: where the pages are.
            pages: page numbers that no place holds and no operation uses.
        """

    def peak_bytes(self, launch: Launch) -> int | None:
        """Predicts the workspace of a launch whose span has none.

        Args:
            launch: a launch that has ended.

        Returns:
            Bytes; None where they are unknown.
        """
        return None

    def served_peaks(self, launches: ServedLaunches) -> npt.NDArray[np.int64] | None:
        """`peak_bytes` of many launches that only serve.

        Args:
            launches: launches that have ended.

        Returns:
            Bytes of each; None where each launch must be asked for by itself.
        """
        return None


class Repeater(Executor):
    """An executor that knows beforehand when its launches will run."""

    @abstractmethod
    def repeat(self, launch: Launch, count: int) -> tuple[Sequence[int], int] | None:
        """Predicts launches in a row, each behind the tokens of the one before.

        Args:
            launch: the first of them.
            count: how many.

        Returns:
            The duration of each in ns, and the host's time of each in ns. None where durations are
            known only when launches run.
        """

    @abstractmethod
    def end_times_ns(self, ops: Sequence[Op]) -> list[int]:
        """When operations in flight will end.

        Args:
            ops: operations that run.

        Returns:
            The end of each in ns, in their order.
        """

    @abstractmethod
    def hold(self, launch: Launch, span: Span, done: Callable[[Span], None]) -> None:
        """Occupies the launch's lane until a span ends.

        Args:
            launch: it names the lane.
            span: when it runs.
            done: called at the span's end, with the span.
        """


def due_ns(executor: Executor, host_ns: int) -> int:
    """The host time of a plan that must pass before its launches run, in ns.

    Args:
        executor: of the run.
        host_ns: what its `prepare` returned.

    Returns:
        `host_ns` on a virtual clock; 0 on a live one, where it has passed.
    """
    return 0 if executor.is_live else host_ns


class Reading(NamedTuple):
    """What the machine says a pool holds now; never a figure of the ledger.

    Attributes:
        persistent_bytes: bytes that outlive operations, by the allocator.
        process_bytes: bytes of the process, by the operating system; None where unknown.
    """

    persistent_bytes: int
    process_bytes: int | None = None


class Meter(Protocol):
    """Reads what the allocator or the operating system really holds."""

    def read(self) -> Mapping[Pool, Reading]:
        """Reads all pools. It is called at each settle, so it must be cheap.

        Returns:
            One reading per pool.
        """


class Lanes:
    """Places each launch behind its lane and its waits, for executors of virtual time.

    Args:
        env: the clock of the run.
    """

    def __init__(self, env: simpy.Environment) -> None:
        self._env = env
        self._free_ns: dict[Lane, int] = defaultdict(int)
        self._end_ns: dict[Op, int] = {}

    def start_ns(self, lane: Lane, waits: Iterable[Op]) -> int:
        """When a launch can start, if it is placed now.

        Args:
            lane: the lane that it runs on.
            waits: operations that must end first.

        Returns:
            The latest of now, the end of the lane's last launch and the ends of `waits`, in ns.
        """
        start_ns, end_times_ns = max(int(self._env.now), self._free_ns[lane]), self._end_ns
        for op in waits:
            end_ns = end_times_ns.get(op, 0)
            if end_ns > start_ns:
                start_ns = end_ns
        return start_ns

    def end_times_ns(self, ops: Sequence[Op]) -> list[int]:
        """When operations in flight will end.

        Args:
            ops: operations that were placed and have not ended.

        Returns:
            The end of each in ns, in their order.
        """
        return [self._end_ns[op] for op in ops]

    def place(
        self,
        launch: Launch,
        duration_ns: int,
        done: Callable[[Span], None],
        peak_bytes: int | None = None,
        ended: tuple[int, ...] = (),
    ) -> None:
        """Gives a launch its span.

        Args:
            launch: it starts behind its lane and its waits.
            duration_ns: how long it runs.
            done: called with the span at its end.
            peak_bytes: the workspace of the span.
            ended: the jobs of the span whose sampled token ended them.
        """
        op = launch.op
        lane = op.lane
        start = self.start_ns(lane, launch.waits)
        self.hold(lane, Span(op, start, start + duration_ns, peak_bytes, ended), done)

    def hold(self, lane: Lane, span: Span, done: Callable[[Span], None]) -> None:
        """Occupies a lane until a span's end and calls `done` then.

        At one moment ends come before arrivals and timers, whenever each was scheduled.

        Args:
            lane: the lane.
            span: of the operation that occupies it.
            done: called with the span at its end.
        """
        op = span.op
        self._free_ns[lane] = self._end_ns[op] = span.end_ns

        def settle(_: simpy.Event) -> None:
            del self._end_ns[op]  # no launch waits for a settled operation
            done(span)

        end_event(self._env, span.end_ns - int(self._env.now)).callbacks.append(settle)


def end_event(env: simpy.Environment, delay_ns: int) -> Any:
    """The event of an end so much later: a timeout that comes before arrivals of its moment."""
    ended = simpy.Event(env)
    ended._ok, ended._value = True, None
    env.schedule(ended, URGENT, delay_ns)
    return ended
