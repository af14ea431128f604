"""Pieces of a launch as packed index tensors, and the transcripts that they are made from."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from itertools import accumulate, compress, groupby, islice, pairwise

import numpy as np
import torch
from torch import Tensor

from engine.executor import Piece
from engine.workspace import gathers
from runtime.attention import Chunk, Group, Rows, Scratch, Segment
from runtime.columns import columns
from runtime.frame import RING, Frame, bucket_for, columns_of
from runtime.kernels.shapes import rows_per_tile
from runtime.kv import Arena
from runtime.packed import Draw, Packed
from runtime.paged import Paged, paged_of, table_of
from runtime.sampling import Sampling, draws
from runtime.transcript import Transcript, Transcripts


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
            rows = Rows(self._arena, slots, (), (), (), Scratch(), paged)
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
    ) -> Rows:
        """For torch's attention; `tables` are those `gathered`, on the device."""
        segments, split = segments_of(prefills, tables), len(prefills)
        if self._pads_decodes:
            groups = self._groups(decodes, segments[-1].stop if segments else 0)
            return Rows(self._arena, slots, segments, (), groups, Scratch())
        chunks = chunks_of(decodes, gathered[split:], tables[split:])
        return Rows(self._arena, slots, segments, chunks, (), Scratch())

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

    def _groups(self, decodes: Sequence[Piece], start: int) -> tuple[Group, ...]:
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
            groups.append(Group(start, stop, self._send(tables.reshape(-1)), mask[:, None, None]))
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
) -> tuple[Chunk, ...]:
    """Decodes in order, by what is gathered at once."""
    keys = iter([piece.context_tokens + 1 for piece in decodes])
    pairs = zip(gathered, tables, strict=True)
    return tuple(
        Chunk(table, [*map(len, part)], [*islice(keys, len(part))]) for part, table in pairs
    )
