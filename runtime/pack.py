"""Pieces of a launch as packed index tensors: the only place that builds them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from engine.executor import Piece
from engine.workspace import gathers
from runtime.attention import Chunk, Group, Rows, Scratch, Segment
from runtime.frame import RING, Frame, bucket_for, columns_of
from runtime.kernels.shapes import rows_per_tile
from runtime.kv import Arena
from runtime.packed import Draw, Packed
from runtime.paged import paged_of, table_of
from runtime.sampling import Sampling, draws
from runtime.transcript import Transcript


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
        self.transcripts: dict[int, Transcript] = {}
        self._arena, self._prompts, self._sampling = arena, prompts, sampling
        self._device, self._pads_decodes = device, pads_decodes and shared is None
        self._shared, self._buckets = shared, tuple(buckets)
        self._ticket = 0

    def transcript(self, job_id: int) -> Transcript:
        """What is known of a job; starts with its prompt."""
        if job_id not in self.transcripts:
            self.transcripts[job_id] = Transcript(self._prompts[job_id])
        return self.transcripts[job_id]

    def frame(self, pieces: Sequence[Piece]) -> Frame | None:
        """A launch over all layers for a graph; None where there is none for it."""
        bucket = bucket_for(len(pieces), self._buckets)
        if bucket is None or not all(piece.tokens == 1 and piece.samples for piece in pieces):
            return None
        self._follow(pieces)
        index, late = self._columns((), pieces)
        tickets, uniform = self._promise(pieces)
        columns = columns_of(bucket, self._buckets[-1], index, late, tickets, uniform)
        tables = table_of(self._tables(pieces, self._counts(pieces)))
        return Frame(tuple(pieces), bucket, self._send(columns), self._send(tables))

    def pack(self, pieces: Sequence[Piece], samples: bool = True) -> Packed:
        """All index tensors of a launch. `samples` is False where the last layers come later."""
        prefills = [piece for piece in pieces if piece.tokens > 1]
        decodes = [piece for piece in pieces if piece.tokens == 1]
        if self._pads_decodes:
            decodes.sort(key=self._bucket)
        ordered = (*prefills, *decodes)
        self._follow(ordered)
        columns, in_flight = self._columns(prefills, decodes)
        index, late = self._send(columns), self._pair(in_flight)
        draw = self._draw(ordered) if samples else None
        if self._shared is not None:
            rows = self._paged_rows(index[2], prefills, decodes)
            return Packed(ordered, index[:1], index[1:2], rows, late, draw)
        segments = self._segments(prefills)
        chunks: tuple[Chunk, ...] = ()
        groups: tuple[Group, ...] = ()
        if self._pads_decodes:
            groups = self._groups(decodes, segments[-1].stop if segments else 0)
        else:
            chunks = self._chunks(decodes)
        rows = Rows(self._arena, index[2], segments, chunks, groups, Scratch())
        return Packed(ordered, index[:1], index[1:2], rows, late, draw)

    def _follow(self, pieces: Sequence[Piece]) -> None:
        """Brings all page tables up to date; what is new in them is held at once."""
        new: list[int] = []
        for piece in pieces:
            new += self.transcript(piece.job_id).follow(piece.pages)
        if new:
            self._arena.hold(new)

    def _paged_rows(
        self, slots: Tensor, prefills: Sequence[Piece], decodes: Sequence[Piece]
    ) -> Rows:
        """For our kernels."""
        assert self._shared is not None
        pieces = (*prefills, *decodes)
        tables = self._tables(pieces, self._counts(pieces))
        slices = [(piece.tokens, piece.context_tokens) for piece in prefills]
        contexts = [piece.context_tokens for piece in decodes]
        tile_rows = rows_per_tile(self._shared, self._arena.pages.dtype)
        paged = paged_of(tables, slices, contexts, tile_rows, self._send)
        return Rows(self._arena, slots, (), (), (), Scratch(), paged)

    def _columns(
        self, prefills: Sequence[Piece], decodes: Sequence[Piece]
    ) -> tuple[np.ndarray, list[tuple[int, int]]]:
        """[3, T]: token ids, positions, slots; and the rows whose id is not known yet."""
        split = sum(piece.tokens for piece in prefills)
        index = np.empty((3, split + len(decodes)), dtype=np.int64)
        late: list[tuple[int, int]] = []
        start = 0
        for piece in prefills:
            stop = start + piece.tokens
            self._fill(index[:, start:stop], piece, start, late)
            start = stop
        size, stride = self._arena.page_tokens, self._arena.row_of(1)
        ids, slots = [], []  # lists: writing single numbers into an array is slower
        for row, piece in enumerate(decodes, split):
            job, at = self.transcripts[piece.job_id], piece.context_tokens
            is_known = at < len(job.tokens)
            if not is_known:
                late.append((row, job.ticket(at)))
            ids.append(job.tokens[at] if is_known else 0)
            slots.append(job.pages[at // size] * stride + at % size)
        index[:, split:] = ids, [piece.context_tokens for piece in decodes], slots
        return index, late

    def _fill(
        self, index: np.ndarray, piece: Piece, start: int, late: list[tuple[int, int]]
    ) -> None:
        job, size = self.transcripts[piece.job_id], self._arena.page_tokens
        first, stop = piece.context_tokens, piece.context_tokens + piece.tokens
        known = job.tokens[first:stop]
        for at in range(first + len(known), stop):
            late.append((start + at - first, job.ticket(at)))
        index[0, : len(known)], index[0, len(known) :] = known, 0
        index[1] = positions = np.arange(first, stop)
        index[2] = job.page_of(positions, size) * self._arena.row_of(1) + positions % size

    def _segments(self, prefills: Sequence[Piece]) -> tuple[Segment, ...]:
        if not prefills:
            return ()
        counts = self._counts(prefills)
        segments, start = [], 0
        for piece, table in zip(prefills, self._table(prefills, counts).split(counts), strict=True):
            stop = start + piece.tokens
            segments.append(Segment(start, stop, piece.context_tokens, table))
            start = stop
        return tuple(segments)

    def _num_pages(self, piece: Piece) -> int:
        return -(-(piece.context_tokens + piece.tokens) // self._arena.page_tokens)

    def _counts(self, pieces: Sequence[Piece]) -> list[int]:
        """How many pages each piece reads."""
        return [self._num_pages(piece) for piece in pieces]

    def _bucket(self, piece: Piece) -> int:
        """Decodes of a bucket differ by less than a factor of two in pages."""
        return self._num_pages(piece).bit_length()

    def _chunks(self, decodes: Sequence[Piece]) -> tuple[Chunk, ...]:
        """Decodes in order, by what is gathered at once; all tables are one tensor."""
        if not decodes:
            return ()
        tokens = [piece.context_tokens + 1 for piece in decodes]
        counts = [-(-n // self._arena.page_tokens) for n in tokens]
        runs = gathers(counts, self._arena.layer_page_nbytes)
        sizes = [sum(counts[run]) for run in runs]
        tables = self._table(decodes, counts).split_with_sizes(sizes)
        pairs = zip(runs, tables, strict=True)
        return tuple(Chunk(table, counts[run], tokens[run]) for run, table in pairs)

    def _table(self, pieces: Sequence[Piece], counts: Sequence[int]) -> Tensor:
        """The first so many page ids of each piece, one after another, on the device."""
        return self._send(np.concatenate(self._tables(pieces, counts)))

    def _tables(self, pieces: Sequence[Piece], counts: Sequence[int]) -> list[np.ndarray]:
        """The same on the host, one by one."""
        pairs = zip(pieces, counts, strict=True)
        return [self.transcripts[piece.job_id].table(count) for piece, count in pairs]

    def _groups(self, decodes: Sequence[Piece], start: int) -> tuple[Group, ...]:
        """Decodes sorted by bucket as groups; tables are padded with a page that is written."""
        groups, size = [], self._arena.page_tokens
        for _, bucket in groupby(decodes, self._bucket):
            members = list(bucket)
            width = max(map(self._num_pages, members))
            tables = np.empty((len(members), width), dtype=np.int64)
            keys = np.array([piece.context_tokens + 1 for piece in members])
            for row, piece in enumerate(members):
                table = self.transcripts[piece.job_id].table(self._num_pages(piece))
                tables[row, : len(table)], tables[row, len(table) :] = table, table[-1]
            hidden = np.arange(width * size) >= keys[:, None]
            mask = torch.zeros(hidden.shape, dtype=self._arena.pages.dtype, device=self._device)
            mask.masked_fill_(self._send(hidden), float("-inf"))
            stop = start + len(members)
            groups.append(Group(start, stop, self._send(tables.reshape(-1)), mask[:, None, None]))
            start = stop
        return tuple(groups)

    def _draw(self, pieces: Sequence[Piece]) -> Draw | None:
        """Which rows yield tokens; promises each one a slot of the ring."""
        chosen, rows, last = [], [], -1
        for piece in pieces:
            last += piece.tokens
            if piece.samples:
                chosen.append(piece)
                rows.append(last)
        if not chosen:
            return None
        tickets, drawn = self._promise(chosen)
        uniform = None if drawn is None else torch.from_numpy(drawn).to(self._device)
        index = self._send(np.array([rows, tickets], dtype=np.int64))
        return Draw(tuple(chosen), index[0], index[1], uniform)

    def _promise(self, chosen: Sequence[Piece]) -> tuple[list[int], np.ndarray | None]:
        """A slot of the ring for the token that each will yield, and their draws."""
        places = [(piece.job_id, piece.context_tokens + piece.tokens) for piece in chosen]
        tickets = [(self._ticket + i) % RING for i in range(len(chosen))]
        self._ticket += len(chosen)
        for (job_id, position), ticket in zip(places, tickets, strict=True):
            self.transcripts[job_id].promise(position, ticket)
        drawn = None if self._sampling.is_greedy else draws(self._sampling.seed, places)
        return tickets, drawn

    def _pair(self, late: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor] | None:
        if not late:
            return None
        index = self._send(np.array(late, dtype=np.int64).T)
        return index[0], index[1]

    def _send(self, index: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(index))
        return tensor if self._device == "cpu" else tensor.to(self._device, non_blocking=True)
