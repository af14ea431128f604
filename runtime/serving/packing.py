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
    GatheredDecodes,
    Paged,
    PrefillSlice,
    Scratch,
    paged_of,
    table_of,
)
from runtime.serving.sampling import Sampling, draws


class RowColumns(NamedTuple):
    """Index numbers of a launch, one per row but for `counts`. Lists: short arrays cost more."""

    ids: list[int]  # 0 where the token is in flight
    positions: list[int]
    slots: list[int]
    counts: list[int]  # per piece: pages that it reads
    in_flight: list[tuple[int, int]]  # rows whose token is in flight, and its slot of the ring


def columns(pieces: Sequence[Piece], jobs: Sequence[Transcript], arena: Arena) -> RowColumns:
    """The columns of pieces in the order of the rows; `jobs` are those of the pieces."""
    size, stride, found = arena.page_tokens, arena.row_of(1), RowColumns([], [], [], [], [])
    ids, positions, slots, counts, in_flight = found
    for (_, count, at, _, _), job in zip(pieces, jobs, strict=True):
        tokens, pages, first = job.tokens, job.pages, at // size
        if count == 1 and at < len(tokens):  # nearly all pieces of nearly all launches
            ids.append(tokens[at])
            positions.append(at)
            slots.append(pages[first] * stride + at % size)
            counts.append(first + 1)
            continue
        known = tokens[at : at + count]
        in_flight += [(len(ids) + i, job.ticket(at + i)) for i in range(len(known), count)]
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
    in_flight: tuple[Tensor, Tensor] | None  # rows whose token is in flight, and their tickets
    draw: Draw | None

    @property
    def sampled(self) -> tuple[Piece, ...]:
        """The pieces that yield a token."""
        return () if self.draw is None else self.draw.pieces


class Transcript:
    """The tokens of one job and where its KV lies.

    Tokens are kept by position, so a job that starts again recomputes prompt and generated tokens
    and adds none. `tickets` holds the slot of the ring of each generated token, from its
    preparation on: a launch reads a token that is still in flight from that slot.
    """

    def __init__(self, prompt: Sequence[int]) -> None:
        self.tokens = list(prompt)
        self.prompt_tokens = len(self.tokens)
        self.tickets: list[int] = []
        self.pages = array("q")
        self.source: Sequence[
            int
        ] = ()  # the ledger's own list, kept so that its identity is unique

    def follow(self, pages: Sequence[int]) -> Sequence[int]:
        """Brings the page table up to date; returns the pages that are new in it.

        A table only grows while a job keeps its KV. After a restart or a swap it is another list,
        even of equal pages in equal order: the pages have been released meanwhile.
        """
        if pages is not self.source:
            self.source, self.pages = pages, array("q")
        new = pages[len(self.pages) :]
        self.pages.extend(new)
        return new

    def ticket(self, position: int) -> int:
        """The slot of the ring for the token at a position."""
        return self.tickets[position - self.prompt_tokens]

    def promise(self, position: int, ticket: int) -> None:
        """Notes the slot of the ring where a prepared launch will put the token of a position."""
        assert position - self.prompt_tokens == len(self.tickets), f"token {position} comes twice"
        self.tickets.append(ticket)

    def append(self, position: int, token: int) -> None:
        """Adds the token that a launch has yielded for a position."""
        assert position == len(self.tokens), f"token {position} comes after {len(self.tokens)}"
        self.tokens.append(token)


class Transcripts(dict[int, Transcript]):
    """The transcripts of all jobs, by job id; a missing one is made from the job's prompt."""

    def __init__(self, prompts: Mapping[int, Sequence[int]]) -> None:
        super().__init__()
        self._prompts = prompts

    def __missing__(self, job_id: int) -> Transcript:
        self[job_id] = Transcript(self._prompts[job_id])
        return self[job_id]


RING = 1 << 16  # sampled tokens that may be in flight at once


class Column(IntEnum):
    """The numbers of a row in a Frame."""

    TOKEN = 0  # where it is known
    POSITION = 1
    SLOT = 2  # for its keys and values
    SOURCE = 3  # slot of the ring where its token lies
    TICKET = 4  # slot of the ring for the token that it yields
    LENGTH = 5  # keys, its own included
    UNIFORM = 6  # its draw: the bits of a float64


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """The input of one graph replay. Rows behind `pieces` are padding and touch no page."""

    pieces: tuple[Piece, ...]  # one token each, and each yields one
    bucket: int
    columns: Tensor  # [len(Column), bucket], int64
    tables: Tensor  # [pieces, width] page ids, int32

    @property
    def sampled(self) -> tuple[Piece, ...]:
        """The pieces that yield a token."""
        return self.pieces


def buckets_of(most: int) -> tuple[int, ...]:
    """Bucket sizes 1, 2, 4, 8, ... and `most` itself; empty for 0."""
    powers = [1 << i for i in range(most.bit_length()) if 1 << i < most]
    return (*powers, most) if most else ()


def bucket_for(rows: int, buckets: Sequence[int]) -> int | None:
    """The smallest bucket that holds `rows`; None where no bucket does."""
    at = bisect_left(buckets, rows)
    return buckets[at] if rows and at < len(buckets) else None


def ring_size(most: int) -> int:
    """Slots of the ring: tokens in flight, then a known token per row, then one for padding."""
    return RING + most + 1


def columns_of(
    bucket: int,
    most: int,
    index: np.ndarray,
    in_flight: Sequence[tuple[int, int]],
    tickets: Sequence[int],
    uniform: np.ndarray | None,
) -> np.ndarray:
    """All columns of a bucket, padding included.

    `index` is [3, rows]: tokens (0 for the rows of `in_flight`: row, slot of the ring), positions,
    slots. `most` is the largest bucket.
    """
    rows = index.shape[1]
    columns = padding(bucket, most)
    columns[[Column.TOKEN, Column.POSITION, Column.SLOT], :rows] = index
    for row, place in in_flight:
        columns[Column.SOURCE, row] = place
    columns[Column.TICKET, :rows] = tickets
    columns[Column.LENGTH, :rows] = index[1] + 1
    if uniform is not None:
        columns[Column.UNIFORM, :rows] = uniform.view(np.int64)
    return columns


def padding(bucket: int, most: int) -> np.ndarray:
    """Columns of padding rows: no keys, no slot, and a ticket that no job reads."""
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
        """
        Args:
            arena: The KV pages of the device.
            prompts: Token ids of each job's prompt.
            sampling: How tokens are chosen.
            device: Where the index tensors go.
            pads_decodes: Decodes attend in padded groups, where torch attends.
            shared: Heads that share a KV head, where the kernels attend; None: torch attends.
            buckets: Rows of the decode graphs.
        """
        self.transcripts = Transcripts(prompts)
        self.page_tokens = arena.page_tokens
        self._arena, self._sampling = arena, sampling
        self._device, self._pads_decodes = device, pads_decodes and shared is None
        self._shared, self._buckets = shared, tuple(buckets)
        self._ticket = 0

    def frame(self, pieces: Sequence[Piece]) -> Frame | None:
        """A launch over all layers as a Frame; None where no graph fits it."""
        bucket = bucket_for(len(pieces), self._buckets)
        if bucket is None or not all(piece.tokens == 1 and piece.samples for piece in pieces):
            return None
        jobs = self._follow(pieces)
        *known, counts, in_flight = columns(pieces, jobs, self._arena)
        index = np.array(known, dtype=np.int64)
        tickets, uniform = self._promise(pieces, jobs)
        padded = columns_of(bucket, self._buckets[-1], index, in_flight, tickets, uniform)
        tables = table_of([job.pages[:count] for job, count in zip(jobs, counts, strict=True)])
        return Frame(tuple(pieces), bucket, self._send(padded), self._send(tables))

    def pack(self, pieces: Sequence[Piece], samples: bool = True, windows: int = 0) -> Packed:
        """All index tensors of a launch. `samples` is False where the last layers come later.

        The first `windows` pieces finetune: they are the first prefill slices, of any length.
        """
        own, served = pieces[:windows], pieces[windows:]
        prefills = [*own, *(piece for piece in served if piece.tokens > 1)]
        decodes = [piece for piece in served if piece.tokens == 1]
        if self._pads_decodes:
            decodes.sort(key=self._bucket)
        ordered, split = (*prefills, *decodes), len(prefills)
        jobs = self._follow(ordered)
        *known, counts, in_flight = columns(ordered, jobs, self._arena)
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
        pair = self._pair(in_flight)
        return Packed(ordered, ids.unsqueeze(0), positions.unsqueeze(0), rows, pair, draw)

    def _follow(self, pieces: Sequence[Piece]) -> list[Transcript]:
        """The jobs, their page tables brought up to date; new pages of all are held at once."""
        transcripts, new = self.transcripts, list[int]()
        jobs = [transcripts[piece.job_id] for piece in pieces]
        for job, piece in zip(jobs, pieces, strict=True):
            pages = piece.pages
            if pages is not job.source or len(pages) != len(
                job.pages
            ):  # rare: most decodes have no new page
                new += job.follow(pages)
        if new:
            self._arena.hold(new)
        return jobs

    def _gathered(self, reads: list[array[int]], split: int) -> list[list[array[int]]]:
        """The tables that torch's attention gathers at once: of a prefill slice, of some decodes.

        `reads` are the tables of all pieces, of which the first `split` are prefill slices.
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
        """The rows for torch's attention; `tables` are `gathered`, on the device."""
        slices, split = slices_of(prefills, tables), len(prefills)
        if self._pads_decodes:
            groups = self._groups(decodes, slices[-1].stop if slices else 0)
            return AttentionRows(self._arena, slots, slices, (), groups, Scratch())
        runs = gathered_decodes(decodes, gathered[split:], tables[split:])
        return AttentionRows(self._arena, slots, slices, runs, (), Scratch())

    def _paged(
        self, prefills: Sequence[Piece], decodes: Sequence[Piece], reads: Sequence[array[int]]
    ) -> Paged:
        """The rows for the kernels."""
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
        """Decodes sorted by bucket as groups; a table is padded by its last page, a written one."""
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
        """The pieces that yield tokens, with last row, slot of the ring and draw of each."""
        flags = [piece.samples for piece in pieces] if jobs else []
        ends = islice(accumulate([piece.tokens for piece in pieces], initial=-1), 1, None)
        chosen, rows = tuple(compress(pieces, flags)), [*compress(ends, flags)]
        tickets, drawn = self._promise(chosen, [*compress(jobs, flags)])
        uniform = None if drawn is None else torch.from_numpy(drawn).to(self._device)
        return chosen, rows, tickets, uniform

    def _promise(
        self, chosen: Sequence[Piece], jobs: Sequence[Transcript]
    ) -> tuple[list[int], np.ndarray | None]:
        """A slot of the ring for the token of each piece, and its draw."""
        tickets = [i % RING for i in range(self._ticket, self._ticket + len(chosen))]
        self._ticket += len(chosen)
        positions = [piece.context_tokens + piece.tokens for piece in chosen]
        for job, position, ticket in zip(jobs, positions, tickets, strict=True):
            job.promise(position, ticket)
        if self._sampling.is_greedy:
            return tickets, None
        ids = [piece.job_id for piece in chosen]
        return tickets, draws(self._sampling.seed, list(zip(ids, positions, strict=True)))

    def _pair(self, in_flight: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor] | None:
        if not in_flight:
            return None
        index = self._send(np.array(in_flight, dtype=np.int64).T)
        return index[0], index[1]

    def _send_all(
        self, numbers: Sequence[list[int]], tables: Sequence[Sequence[array[int]]]
    ) -> Sequence[Tensor]:
        """A tensor per list of numbers and per run of tables; all go to the device as one copy."""
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


def slices_of(prefills: Sequence[Piece], tables: Sequence[Tensor]) -> tuple[PrefillSlice, ...]:
    """Prefill slices as they lie in the rows, with the pages that they read."""
    stops = accumulate([piece.tokens for piece in prefills])
    rows = zip(prefills, stops, tables, strict=False)  # decodes' tables lie behind
    return tuple(PrefillSlice(stop - p.tokens, stop, p.context_tokens, t) for p, stop, t in rows)


def gathered_decodes(
    decodes: Sequence[Piece], gathered: Sequence[Sequence[array[int]]], tables: Sequence[Tensor]
) -> tuple[GatheredDecodes, ...]:
    """Decodes in order, by the tables that are gathered at once."""
    keys = iter([piece.context_tokens + 1 for piece in decodes])
    pairs = zip(gathered, tables, strict=True)
    return tuple(
        GatheredDecodes(table, [*map(len, part)], [*islice(keys, len(part))])
        for part, table in pairs
    )
