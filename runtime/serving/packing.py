"""Pieces of a launch as packed index tensors, and the transcripts that they are made from."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import accumulate, chain, compress, groupby, islice, pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.contract.executor import Piece
from models.workspace import gathers
from runtime.kernels.shapes import rows_per_tile
from runtime.serving.kv import Arena
from runtime.serving.paged import (
    AttentionRows,
    DecodeGroup,
    Paged,
    PrefillSlice,
    Scratch,
    Segment,
    paged_of,
    table_of,
)
from runtime.serving.sampling import Sampling, draws


class RowColumns(NamedTuple):
    """One number per row, but for `counts`. Lists: a few cost more as arrays, one by one."""

    ids: list[int]  # 0 where the token is not known yet
    positions: list[int]
    slots: list[int]
    counts: list[int]  # per piece: pages that it reads
    late: list[tuple[int, int]]  # such rows, and where in the ring their token will lie


def columns(pieces: Sequence[Piece], jobs: Sequence[Transcript], arena: Arena) -> RowColumns:
    """Of pieces in the order of the rows, and the jobs that they belong to."""
    size, stride, found = arena.page_tokens, arena.row_of(1), RowColumns([], [], [], [], [])
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


class Draw(NamedTuple):
    """The rows of a launch that yield a token, and where the tokens go."""

    pieces: tuple[Piece, ...]
    rows: Tensor  # [R]
    tickets: Tensor  # [R] slots of the ring
    uniform: Tensor | None  # [R] numbers in [0, 1), None if greedy


class Packed(NamedTuple):
    """One packed forward: prefill slices first, then one row per decode."""

    pieces: tuple[Piece, ...]  # in the order of the rows
    ids: Tensor  # [1, T]
    positions: Tensor  # [1, T]
    rows: AttentionRows
    late: tuple[Tensor, Tensor] | None  # rows whose token is in flight, and their tickets
    draw: Draw | None

    @property
    def sampled(self) -> tuple[Piece, ...]:
        """Those that yield a token."""
        return () if self.draw is None else self.draw.pieces


class Transcript:
    """The tokens of one job and where its KV lies.

    Tokens are kept by position, so a job that starts again computes prompt and generated tokens
    once more and adds none. `tickets` says, per generated token and as *prepared*, in which slot
    of the ring it lies (or will): that is how a launch reads a token still in flight.
    """

    def __init__(self, prompt: Sequence[int]) -> None:
        self.tokens = list(prompt)
        self.prompt_tokens = len(self.tokens)
        self.tickets: list[int] = []
        self.pages = array("q")
        self.source: Sequence[int] = ()  # the ledger's own list: kept, so that no other is it

    def follow(self, pages: Sequence[int]) -> Sequence[int]:
        """Brings the page table up to date; returns the pages that are new in it.

        A table only grows while a job keeps its KV; after a restart or a swap it is another one,
        even where the same pages came back in the same order: they have been released meanwhile.
        """
        if pages is not self.source:
            self.source, self.pages = pages, array("q")
        new = pages[len(self.pages) :]
        self.pages.extend(new)
        return new

    def ticket(self, position: int) -> int:
        """Where the token at a position lies in the ring."""
        return self.tickets[position - self.prompt_tokens]

    def promise(self, position: int, ticket: int) -> None:
        """A prepared launch will put the token of this position there."""
        assert position - self.prompt_tokens == len(self.tickets), f"token {position} comes twice"
        self.tickets.append(ticket)

    def append(self, position: int, token: int) -> None:
        """A launch has yielded the token of this position."""
        assert position == len(self.tokens), f"token {position} comes after {len(self.tokens)}"
        self.tokens.append(token)


class Transcripts(dict[int, Transcript]):
    """Those of all jobs, by job id; each starts with its prompt when it is first asked for."""

    def __init__(self, prompts: Mapping[int, Sequence[int]]) -> None:
        super().__init__()
        self._prompts = prompts

    def __missing__(self, job_id: int) -> Transcript:
        self[job_id] = Transcript(self._prompts[job_id])
        return self[job_id]


RING = 1 << 16  # sampled tokens that may be in flight at once


class Column(IntEnum):
    """What is said of a row, one number each."""

    TOKEN = 0  # if it is known
    POSITION = 1
    SLOT = 2  # for its keys and values
    SOURCE = 3  # where in the ring its token lies
    TICKET = 4  # where in the ring the token goes that it yields
    LENGTH = 5  # keys, its own included
    UNIFORM = 6  # its draw: the bits of a float64


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """What one replay reads. Rows behind `pieces` are padding: they read and write nothing."""

    pieces: tuple[Piece, ...]  # one token each, and each yields one
    bucket: int
    columns: Tensor  # [len(Column), bucket], int64
    tables: Tensor  # [pieces, width] page ids, int32

    @property
    def sampled(self) -> tuple[Piece, ...]:
        """Those that yield a token."""
        return self.pieces


def buckets_of(most: int) -> tuple[int, ...]:
    """1, 2, 4, 8, ... up to `most`, which is always one. None for 0."""
    powers = [1 << i for i in range(most.bit_length()) if 1 << i < most]
    return (*powers, most) if most else ()


def bucket_for(rows: int, buckets: Sequence[int]) -> int | None:
    """The smallest bucket for so many rows; None where there is none."""
    at = bisect_left(buckets, rows)
    return buckets[at] if rows and at < len(buckets) else None


def ring_size(most: int) -> int:
    """Tokens in flight, then a place per row for those that are known, then one for nobody's."""
    return RING + most + 1


def columns_of(
    bucket: int,
    most: int,
    index: np.ndarray,
    late: Sequence[tuple[int, int]],
    tickets: Sequence[int],
    uniform: np.ndarray | None,
) -> np.ndarray:
    """All columns of a bucket, padding included.

    `index` is [3, rows]: tokens (0 where it is `late`: row, place in the ring), positions, slots.
    `most` is the largest bucket there is.
    """
    rows = index.shape[1]
    columns = padding(bucket, most)
    columns[[Column.TOKEN, Column.POSITION, Column.SLOT], :rows] = index
    for row, place in late:
        columns[Column.SOURCE, row] = place
    columns[Column.TICKET, :rows] = tickets
    columns[Column.LENGTH, :rows] = index[1] + 1
    if uniform is not None:
        columns[Column.UNIFORM, :rows] = uniform.view(np.int64)
    return columns


def padding(bucket: int, most: int) -> np.ndarray:
    """Columns of rows that are nobody's: no keys, no slot, a token that goes nowhere."""
    columns = np.zeros((len(Column), bucket), dtype=np.int64)
    columns[Column.SLOT] = -1
    columns[Column.SOURCE] = RING + np.arange(bucket)
    columns[Column.TICKET] = RING + most
    return columns


class Packer:
    """Builds packed forwards and keeps each job's transcript between them."""

    def __init__(
        self,
        arena: Arena,
        prompts: Mapping[int, Sequence[int]],
        sampling: Sampling,
        device: str = "cpu",
        pads_decodes: bool = False,
        shared: int | None = None,
        buckets: Sequence[int] = (),
    ) -> None:
        """`shared`: heads that share a KV head, where our kernels attend; None: where torch does.

        `buckets`: rows of the graphs that there are for decodes.
        """
        self.transcripts = Transcripts(prompts)
        self._arena, self._sampling = arena, sampling
        self._device, self._pads_decodes = device, pads_decodes and shared is None
        self._shared, self._buckets = shared, tuple(buckets)
        self._ticket = 0

    def frame(self, pieces: Sequence[Piece]) -> Frame | None:
        """A launch over all layers for a graph; None where there is none for it."""
        bucket = bucket_for(len(pieces), self._buckets)
        if bucket is None or not all(piece.tokens == 1 and piece.samples for piece in pieces):
            return None
        jobs = self._follow(pieces)
        *known, counts, late = columns(pieces, jobs, self._arena)
        index = np.array(known, dtype=np.int64)
        tickets, uniform = self._promise(pieces, jobs)
        padded = columns_of(bucket, self._buckets[-1], index, late, tickets, uniform)
        tables = table_of([job.pages[:count] for job, count in zip(jobs, counts, strict=True)])
        return Frame(tuple(pieces), bucket, self._send(padded), self._send(tables))

    def pack(self, pieces: Sequence[Piece], samples: bool = True) -> Packed:
        """All index tensors of a launch. `samples` is False where the last layers come later."""
        prefills = [piece for piece in pieces if piece.tokens > 1]
        decodes = [piece for piece in pieces if piece.tokens == 1]
        if self._pads_decodes:
            decodes.sort(key=self._bucket)
        ordered, split = (*prefills, *decodes), len(prefills)
        jobs = self._follow(ordered)
        *known, counts, late = columns(ordered, jobs, self._arena)
        chosen, ends, tickets, drawn = self._choose(ordered, jobs if samples else ())
        reads = [job.pages[:count] for job, count in zip(jobs, counts, strict=True)]  # page ids
        gathered = self._gathered(reads, split)
        numbers = (*known, ends, tickets)
        ids, positions, slots, sampled, places, *tables = self._send_all(numbers, gathered)
        if self._shared is None:
            rows = self._rows(slots, prefills, decodes, gathered, tables)
        else:
            paged = self._paged(prefills, decodes, reads)
            rows = AttentionRows(self._arena, slots, (), (), (), Scratch(), paged)
        draw = Draw(chosen, sampled, places, drawn) if chosen else None
        pair = self._pair(late)
        return Packed(ordered, ids.unsqueeze(0), positions.unsqueeze(0), rows, pair, draw)

    def _follow(self, pieces: Sequence[Piece]) -> list[Transcript]:
        """The jobs, their page tables brought up to date; what is new in them is held at once."""
        transcripts, new = self.transcripts, list[int]()
        jobs = [transcripts[piece.job_id] for piece in pieces]
        for job, piece in zip(jobs, pieces, strict=True):
            pages = piece.pages
            if pages is not job.source or len(pages) != len(job.pages):  # not so in most decodes
                new += job.follow(pages)
        if new:
            self._arena.hold(new)
        return jobs

    def _gathered(self, reads: list[array[int]], split: int) -> list[list[array[int]]]:
        """Tables of what torch's attention gathers at once: a slice of a prompt, some decodes.

        `reads` are of all pieces; of these the first `split` are slices of prompts.
        """
        if self._shared is not None:
            return []
        slices, decodes = reads[:split], [] if self._pads_decodes else reads[split:]
        runs = gathers([*map(len, decodes)], self._arena.layer_page_nbytes)
        return [*([table] for table in slices), *(decodes[run] for run in runs)]

    def _rows(
        self,
        slots: Tensor,
        prefills: Sequence[Piece],
        decodes: Sequence[Piece],
        gathered: Sequence[Sequence[array[int]]],
        tables: Sequence[Tensor],
    ) -> AttentionRows:
        """For torch's attention; `tables` are those `gathered`, on the device."""
        segments, split = segments_of(prefills, tables), len(prefills)
        if self._pads_decodes:
            groups = self._groups(decodes, segments[-1].stop if segments else 0)
            return AttentionRows(self._arena, slots, segments, (), groups, Scratch())
        chunks = chunks_of(decodes, gathered[split:], tables[split:])
        return AttentionRows(self._arena, slots, segments, chunks, (), Scratch())

    def _paged(
        self, prefills: Sequence[Piece], decodes: Sequence[Piece], reads: Sequence[array[int]]
    ) -> Paged:
        """For our kernels."""
        assert self._shared is not None
        slices = [(piece.tokens, piece.context_tokens) for piece in prefills]
        contexts = [piece.context_tokens for piece in decodes]
        tile_rows = rows_per_tile(self._shared, self._arena.pages.dtype)
        return paged_of(reads, slices, contexts, tile_rows, self._send)

    def _num_pages(self, piece: Piece) -> int:
        return -(-(piece.context_tokens + piece.tokens) // self._arena.page_tokens)

    def _bucket(self, piece: Piece) -> int:
        """Decodes of a bucket differ by less than a factor of two in pages."""
        return self._num_pages(piece).bit_length()

    def _groups(self, decodes: Sequence[Piece], start: int) -> tuple[DecodeGroup, ...]:
        """Decodes sorted by bucket as groups; tables are padded with a page that is written."""
        groups, size = [], self._arena.page_tokens
        for _, bucket in groupby(decodes, self._bucket):
            members = list(bucket)
            width = max(map(self._num_pages, members))
            tables = np.empty((len(members), width), dtype=np.int64)
            keys = np.array([piece.context_tokens + 1 for piece in members])
            for row, piece in enumerate(members):
                table = self.transcripts[piece.job_id].pages[: self._num_pages(piece)]
                tables[row, : len(table)], tables[row, len(table) :] = table, table[-1]
            hidden = np.arange(width * size) >= keys[:, None]
            mask = torch.zeros(hidden.shape, dtype=self._arena.pages.dtype, device=self._device)
            mask.masked_fill_(self._send(hidden), float("-inf"))
            stop = start + len(members)
            groups.append(
                DecodeGroup(start, stop, self._send(tables.reshape(-1)), mask[:, None, None])
            )
            start = stop
        return tuple(groups)

    def _choose(
        self, pieces: Sequence[Piece], jobs: Sequence[Transcript]
    ) -> tuple[tuple[Piece, ...], list[int], list[int], Tensor | None]:
        """Pieces that yield tokens, their last rows, their slots of the ring, and their draws."""
        flags = [piece.samples for piece in pieces] if jobs else []
        ends = islice(accumulate([piece.tokens for piece in pieces], initial=-1), 1, None)
        chosen, rows = tuple(compress(pieces, flags)), [*compress(ends, flags)]
        tickets, drawn = self._promise(chosen, [*compress(jobs, flags)])
        uniform = None if drawn is None else torch.from_numpy(drawn).to(self._device)
        return chosen, rows, tickets, uniform

    def _promise(
        self, chosen: Sequence[Piece], jobs: Sequence[Transcript]
    ) -> tuple[list[int], np.ndarray | None]:
        """A slot of the ring for the token that each will yield, and their draws."""
        tickets = [i % RING for i in range(self._ticket, self._ticket + len(chosen))]
        self._ticket += len(chosen)
        positions = [piece.context_tokens + piece.tokens for piece in chosen]
        for job, position, ticket in zip(jobs, positions, tickets, strict=True):
            job.promise(position, ticket)
        if self._sampling.is_greedy:
            return tickets, None
        ids = [piece.job_id for piece in chosen]
        return tickets, draws(self._sampling.seed, list(zip(ids, positions, strict=True)))

    def _pair(self, late: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor] | None:
        if not late:
            return None
        index = self._send(np.array(late, dtype=np.int64).T)
        return index[0], index[1]

    def _send_all(
        self, numbers: Sequence[list[int]], tables: Sequence[Sequence[array[int]]]
    ) -> Sequence[Tensor]:
        """A tensor for each of both; tables end to end. All go up as one: few calls, not many."""
        whole, ends = array("q"), [0]
        for column in numbers:
            whole.fromlist(column)
            ends.append(len(whole))
        for part in tables:
            for table in part:
                whole += table
            ends.append(len(whole))
        sizes = [end - start for start, end in pairwise(ends)]
        return self._up(torch.frombuffer(whole, dtype=torch.int64)).split_with_sizes(sizes)

    def _send(self, index: np.ndarray) -> Tensor:
        return self._up(torch.from_numpy(np.ascontiguousarray(index)))

    def _up(self, tensor: Tensor) -> Tensor:
        return tensor if self._device == "cpu" else tensor.to(self._device, non_blocking=True)


def segments_of(prefills: Sequence[Piece], tables: Sequence[Tensor]) -> tuple[Segment, ...]:
    """Slices of prompts as they lie in the rows, with the pages that they read."""
    stops = accumulate([piece.tokens for piece in prefills])
    rows = zip(prefills, stops, tables, strict=False)  # decodes' tables lie behind
    return tuple(Segment(stop - p.tokens, stop, p.context_tokens, t) for p, stop, t in rows)


def chunks_of(
    decodes: Sequence[Piece], gathered: Sequence[Sequence[array[int]]], tables: Sequence[Tensor]
) -> tuple[PrefillSlice, ...]:
    """Decodes in order, by what is gathered at once."""
    keys = iter([piece.context_tokens + 1 for piece in decodes])
    pairs = zip(gathered, tables, strict=True)
    return tuple(
        PrefillSlice(table, [*map(len, part)], [*islice(keys, len(part))]) for part, table in pairs
    )
