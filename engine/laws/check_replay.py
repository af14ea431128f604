"""The laws of a finished replay, checked from what was issued and when it ran."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

from engine.contract.executor import Launch, Span
from engine.contract.plan import Compute, Copy, Free, Lane, Op, Plan
from engine.contract.regions import Kind, PageSize, Place, Pool, Tier
from engine.contract.rules import BrokenLaw
from engine.memory.scoreboard import Life

FOREVER_NS = 1 << 62
_Part = tuple[int, int, int]  # from when, until when, bytes


def operations(plans: Iterable[Plan]) -> list[Op]:
    """The operations of plans that run on a lane, in issue order.

    Args:
        plans: in issue order.

    Returns:
        Copies, collectives and launches.
    """
    return [op for plan in plans for op in plan.ops if isinstance(op, Op)]


def check_lanes(plans: Iterable[Plan], spans: Mapping[Op, Span]) -> None:
    """Law 5: a lane runs one operation at a time, in issue order.

    Args:
        plans: in issue order.
        spans: when each of their operations ran.

    Raises:
        BrokenLaw: two spans of a lane overlap, or a span ends before it starts.
    """
    end_ns: dict[Lane, int] = defaultdict(int)
    for op in operations(plans):
        span = spans[op]
        if span.start_ns < end_ns[op.lane]:
            raise BrokenLaw(f"law 5: lane {op.lane} runs two operations at once")
        if span.end_ns < span.start_ns:
            raise BrokenLaw(f"law 5: an operation on {op.lane} ends before it starts")
        end_ns[op.lane] = span.end_ns


def check_capacity(
    lives: Iterable[Life], spans: Mapping[Op, Span], capacity_bytes: Mapping[Pool, int]
) -> dict[Pool, int]:
    """Law 11b: no pool overflows in span time.

    Bytes live from the start of their first user (from the beginning, if they were resident) to
    the end of their last one, or to their Free where that came later. Lives that share the contents
    of a page count once.

    Args:
        lives: of the run's Journal.
        spans: when each operation ran.
        capacity_bytes: bytes of each pool.

    Returns:
        The peak of each pool in bytes.

    Raises:
        BrokenLaw: a peak is above its capacity.
    """
    marks: dict[Pool, list[tuple[int, int, int]]] = defaultdict(list)
    used = [life for life in lives if life.users or life.freed_ns is None]
    shared = {(life.place.pool, p) for life in used if life.is_shared for p in life.pages}
    episodes: dict[tuple[Pool, int], list[list[_Part]]] = defaultdict(list)
    for life in used:
        pool, (start_ns, end_ns) = life.place.pool, _span(life, spans)
        pages = [page for page in life.pages if (pool, page) in shared]
        page_nbytes = life.nbytes // len(life.pages) if pages else 0
        marks[pool] += _marks((start_ns, end_ns, life.nbytes - len(pages) * page_nbytes))
        for page in pages:
            found = episodes[pool, page]
            if not (life.is_shared and found):
                found.append([])  # new contents
            found[-1].append((start_ns, end_ns, page_nbytes))
    for (pool, _), found in episodes.items():
        marks[pool] += [mark for parts in found for part in _joined(parts) for mark in _marks(part)]
    return {pool: _peak(pool, rows, capacity_bytes[pool]) for pool, rows in marks.items()}


def _span(life: Life, spans: Mapping[Op, Span]) -> tuple[int, int]:
    start_ns = spans[life.users[0]].start_ns if life.users else life.taken_ns
    if life.freed_ns is None:
        return start_ns, FOREVER_NS
    return start_ns, max(life.freed_ns, *(spans[op].end_ns for op in life.users))


def _joined(parts: Iterable[_Part]) -> list[_Part]:
    """Stretches in which at least one of the parts lives."""
    found: list[_Part] = []
    for start_ns, end_ns, nbytes in sorted(parts):
        if found and start_ns <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end_ns), nbytes)
        else:
            found.append((start_ns, end_ns, nbytes))
    return found


def _marks(part: _Part) -> list[tuple[int, int, int]]:
    start_ns, end_ns, nbytes = part
    return [(start_ns, 1, nbytes), (end_ns, 0, -nbytes)]


def _peak(pool: Pool, marks: list[tuple[int, int, int]], capacity_bytes: int) -> int:
    level = peak = 0
    for _, _, nbytes in sorted(marks):  # at equal times, what ends makes room first
        level += nbytes
        peak = max(peak, level)
    if peak > capacity_bytes:
        raise BrokenLaw(f"law 11b: {pool} held {peak} bytes of {capacity_bytes} in span time")
    return peak


def check_inputs(plans: Iterable[Plan], spans: Mapping[Op, Span]) -> int:
    """Law 11b: every operation reads what it would read if all ran in issue order.

    Each write leaves a stamp made of the operation and all it read; the stamps seen in span time
    must be those of issue order. Keys and values that are given back and begun again lie on other
    pages: they are other memory.

    Args:
        plans: in issue order.
        spans: when each of their operations ran.

    Returns:
        The number of operations compared.

    Raises:
        BrokenLaw: an operation reads stale data.
    """
    touched = _touched([*plans])
    order = [*touched]
    index = {op: i for i, op in enumerate(order)}
    expected = _stamps_in_order(touched, index)
    memory: dict[_Lived, int] = {}
    seen: dict[Op, tuple[int, ...]] = {}
    events = [(spans[op].start_ns, 1, index[op], op) for op in order]
    events += [(spans[op].end_ns, 0, index[op], op) for op in order]
    for _, starts, i, op in sorted(events, key=lambda event: event[:3]):
        if starts:
            seen[op] = tuple(memory.get(p, 0) for p in touched[op][0])
        else:
            memory.update((p, _stamp(op, i, seen[op], p)) for p in touched[op][1])
    wrong = [index[op] for op in order if seen[op] != expected[op]]
    if wrong:
        raise BrokenLaw(
            f"law 11b: {len(wrong)} operations read stale data, the first is number {wrong[0]}"
        )
    return len(order)


_Lived = tuple[Place, int]  # of KV: how often the place has been given back before


def _touched(plans: Iterable[Plan]) -> dict[Op, tuple[list[_Lived], list[_Lived]]]:
    """What each operation reads and writes, in issue order."""
    lives, found = Counter[Place](), dict[Op, tuple[list[_Lived], list[_Lived]]]()
    for plan in plans:
        for op in plan.ops:
            if isinstance(op, Free) and op.place.region.kind is Kind.KV:
                lives[op.place] += 1
            elif isinstance(op, Op):
                sides = (_inputs(op), _outputs(op))
                reads, writes = ([(place, lives[place]) for place in side] for side in sides)
                found[op] = reads, writes
    return found


def _stamps_in_order(
    touched: Mapping[Op, tuple[list[_Lived], list[_Lived]]], index: Mapping[Op, int]
) -> dict[Op, tuple[int, ...]]:
    memory: dict[_Lived, int] = {}
    expected = {}
    for op, (reads, writes) in touched.items():
        expected[op] = tuple(memory.get(p, 0) for p in reads)
        memory.update((p, _stamp(op, index[op], expected[op], p)) for p in writes)
    return expected


def _inputs(op: Op) -> tuple[Place, ...]:
    if isinstance(op, Copy):
        return (op.src,)
    return (*op.reads, *op.writes, *(op.after if isinstance(op, Compute) else ()))


def _outputs(op: Op) -> tuple[Place, ...]:
    return (op.dst,) if isinstance(op, Copy) else op.writes


def _stamp(op: Op, index: int, seen: tuple[int, ...], place: _Lived) -> int:
    return seen[0] if isinstance(op, Copy) else hash((index, seen, place))


Token = Callable[[int, int], Hashable]  # of a job at a position, with all tokens before it
Slots = dict[int, Hashable]  # of a pool: room for one token each, and what lies there


class Contents:
    """Carries launches out in span time, on slots that hold names instead of numbers.

    The context that a launch reads must be there at its start and still at its end. From its start
    on, the slots that it writes hold nothing for other launches. `read_tokens` counts the context
    tokens that were compared.

    Args:
        page: the page size of KV.
        token: names the token of a job at a position, with all tokens before it.
    """

    def __init__(self, page: PageSize, token: Token) -> None:
        self.read_tokens = 0
        self._page, self._token = page, token
        self._memory: defaultdict[Pool, Slots] = defaultdict(dict)
        self._moving: dict[Launch, list[Hashable]] = {}

    def carry_out(self, runs: Iterable[tuple[Launch, Span]]) -> Contents:
        """Carries out all launches of a run, each with its span.

        Raises:
            BrokenLaw: a launch reads foreign KV, or a copy's source changes under it.
        """
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
        tokens = len(launch.src_pages) * self._page.tokens  # none of what is no KV
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
