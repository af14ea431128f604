"""Which token each packed row is, where it stands in its job and where its KV goes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from engine.executor import Piece
from runtime.kv import Arena
from runtime.transcript import Transcript


class Columns(NamedTuple):
    """One number per row each. Lists: a few numbers cost more as arrays, one by one."""

    ids: list[int]  # 0 where the token is not known yet
    positions: list[int]
    slots: list[int]
    late: list[tuple[int, int]]  # such rows, and where in the ring their token will lie


def columns(pieces: Sequence[Piece], jobs: Sequence[Transcript], arena: Arena) -> Columns:
    """Of pieces in the order of the rows, and the jobs that they belong to."""
    size, stride, found = arena.page_tokens, arena.row_of(1), Columns([], [], [], [])
    ids, positions, slots, late = found
    for piece, job in zip(pieces, jobs, strict=True):
        count, at = piece.tokens, piece.context_tokens
        tokens, pages = job.tokens, job.pages
        if count == 1 and at < len(tokens):  # nearly all pieces of nearly all launches
            ids.append(tokens[at])
            positions.append(at)
            slots.append(pages[at // size] * stride + at % size)
            continue
        whole, known = range(at, at + count), tokens[at : at + count]
        late += [(len(ids) + i, job.ticket(at + i)) for i in range(len(known), count)]
        ids += known + [0] * (count - len(known))
        positions += whole
        slots += [pages[n // size] * stride + n % size for n in whole]
    return found
