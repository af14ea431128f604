"""Which token each packed row is, where it stands in its job and where its KV goes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, islice
from typing import NamedTuple

from engine.executor import Piece
from runtime.kv import Arena
from runtime.transcript import Transcript


class Columns(NamedTuple):
    """One number per row, but for `counts`. Lists: a few cost more as arrays, one by one."""

    ids: list[int]  # 0 where the token is not known yet
    positions: list[int]
    slots: list[int]
    counts: list[int]  # per piece: pages that it reads
    late: list[tuple[int, int]]  # such rows, and where in the ring their token will lie


def columns(pieces: Sequence[Piece], jobs: Sequence[Transcript], arena: Arena) -> Columns:
    """Of pieces in the order of the rows, and the jobs that they belong to."""
    size, stride, found = arena.page_tokens, arena.row_of(1), Columns([], [], [], [], [])
    ids, positions, slots, counts, late = found
    for (_, count, at, _, _), job in zip(pieces, jobs, strict=True):
        tokens, pages, first = job.tokens, job.pages, at // size
        if count == 1 and at < len(tokens):  # nearly all pieces of nearly all launches
            ids.append(tokens[at])
            positions.append(at)
            slots.append(pages[first] * stride + at % size)
            counts.append(first + 1)
            continue
        known = tokens[at : at + count]
        late += [(len(ids) + i, job.ticket(at + i)) for i in range(len(known), count)]
        ids += known + [0] * (count - len(known))
        positions += range(at, at + count)
        counts.append(-(-(at + count) // size))
        rows = [range(n * stride, n * stride + size) for n in pages[first : counts[-1]]]
        slots += islice(chain.from_iterable(rows), at % size, at % size + count)
    return found
