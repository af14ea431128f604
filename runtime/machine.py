"""The real work of a launch, without a clock: forwards over packed rows and copies of pages."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from engine.executor import Launch, Piece
from engine.model import ModelSpec
from engine.plan import Copy, Kind, Pool, Slice, Tier, Work
from runtime.kv import Arena, copy_pages, paired_runs
from runtime.model import Decoder
from runtime.pack import RING, Packed, Packer
from runtime.sampling import Sampling, choose

GPU: Pool = (Tier.GPU, 0)


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Neighbouring slices of a Compute that do the same: one packed forward."""

    work: Work
    layers: range
    slices: tuple[Slice, ...]
    packed: Packed


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A launch with all its index tensors: either parts of a Compute, or moves of a Copy."""

    launch: Launch
    parts: tuple[Part, ...] = ()
    moves: tuple[tuple[int, int, int], ...] = ()


class Machine:
    """One device with its host: the model, the KV arenas and every job's tokens.

    Not a clock: executors say when and measure. `prepare` belongs to the engine's thread and
    follows issue order; `execute` may run on one thread per lane.
    """

    def __init__(
        self,
        model: Any,
        spec: ModelSpec,
        page_tokens: int,
        num_pages: Mapping[Pool, int],
        prompts: Mapping[int, Sequence[int]],
        sampling: Sampling | None = None,
        eos_ids: Collection[int] = (),
        device: str = "cpu",
        pads_decodes: bool | None = None,
        number: int = 0,
    ) -> None:
        """`pads_decodes`: attend decodes in padded groups; None: where the device is a GPU.

        `number` is the device's in lanes and pools.
        """
        self.spec, self.device = spec, device
        self.sampling = sampling or Sampling()
        self.eos_ids = frozenset(eos_ids)
        self.decoder = Decoder(model)
        self.arenas = {
            pool: Arena(spec, page_tokens, count, pool[0], device)
            for pool, count in num_pages.items()
        }
        pads = device != "cpu" if pads_decodes is None else pads_decodes
        self.packer = Packer(self.arenas[Tier.GPU, number], prompts, self.sampling, device, pads)
        self._ring = torch.zeros(RING, dtype=torch.int64, device=device)
        self._hidden: dict[tuple[int, int], Tensor] = {}  # (job, microbatch): between layers

    # ---- before
    def prepare(self, launch: Launch) -> Prepared:
        """Builds what a launch needs. To be called once per launch, in issue order."""
        op = launch.op
        if isinstance(op, Copy):
            return self._prepare_copy(launch, op)
        pairs = list(zip(op.slices, launch.pieces, strict=True))
        return Prepared(
            launch,
            tuple(
                self._part(work, layers, tuple(group))
                for (work, layers), group in groupby(pairs, self._unit)
            ),
        )

    def _unit(self, pair: tuple[Slice, Piece]) -> tuple[Work, range]:
        layers = pair[0].layers
        return pair[0].work, range(self.spec.num_layers) if layers is None else layers

    def _part(self, work: Work, layers: range, group: Sequence[tuple[Slice, Piece]]) -> Part:
        if work is not Work.FORWARD:
            raise NotImplementedError(f"the runtime has no {work} yet: only serving runs")
        slices, pieces = zip(*group, strict=True)
        packed = self.packer.pack(pieces, samples=layers.stop == self.spec.num_layers)
        order = {piece.job_id: part for piece, part in zip(pieces, slices, strict=True)}
        return Part(work, layers, tuple(order[p.job_id] for p in packed.pieces), packed)

    def _prepare_copy(self, launch: Launch, op: Copy) -> Prepared:
        if op.src.region.kind is not Kind.KV:
            raise NotImplementedError(f"the runtime cannot copy {op.src.region.kind} yet")
        src, dst = self.arenas[op.src.pool], self.arenas[op.dst.pool]
        count = launch.nbytes // src.page_nbytes  # the tables may have grown since the booking
        src_pages, dst_pages = launch.src_pages[:count], launch.dst_pages[:count]
        src.check(src_pages)
        dst.hold(dst_pages)
        moves = paired_runs(src_pages, dst_pages)
        return Prepared(launch, moves=tuple(moves))

    # ---- the work
    def execute(self, prepared: Prepared) -> tuple[int, ...]:
        """Carries a launch out and waits for it; returns jobs that sampled an end of sequence."""
        return self.collect(prepared, self.start(prepared))

    @torch.no_grad()
    def start(self, prepared: Prepared) -> tuple[Tensor | None, ...]:
        """Carries a launch out; on a GPU, puts it on the current stream. Tokens per part."""
        op = prepared.launch.op
        if isinstance(op, Copy):
            copy_pages(self.arenas[op.src.pool], self.arenas[op.dst.pool], prepared.moves)
            return ()
        return tuple(self._forward(part) for part in prepared.parts)

    def collect(self, prepared: Prepared, tokens: Sequence[Tensor | None]) -> tuple[int, ...]:
        """Writes down the sampled tokens; waits for them where they are still on their way."""
        ended = []
        for part, sampled in zip(prepared.parts, tokens, strict=True):
            draw = part.packed.draw
            if draw is None or sampled is None:
                continue
            for piece, token in zip(draw.pieces, sampled.tolist(), strict=True):
                at = piece.context_tokens + piece.tokens
                self.packer.transcripts[piece.job_id].append(at, token)
                if token in self.eos_ids:
                    ended.append(piece.job_id)
        return tuple(ended)

    def _forward(self, part: Part) -> Tensor | None:
        """Rows through layers; the sampled tokens, [R], if these were the last layers."""
        packed, layers = part.packed, part.layers
        hidden = self._enter(part) if layers.start else self._embed(packed)
        angles = self.decoder.angles(hidden, packed.positions)
        for layer in layers:
            hidden = self.decoder.layer(layer, hidden, angles, packed.rows)
        packed.rows.masks.clear()
        if layers.stop < self.spec.num_layers:
            self._leave(part, hidden)
        if packed.draw is None:
            return None
        logits = self.decoder.logits(hidden, packed.draw.rows)
        tokens = choose(logits, self.sampling, packed.draw.uniform)
        self._ring.index_copy_(0, packed.draw.tickets, tokens)
        return tokens

    def _embed(self, packed: Packed) -> Tensor:
        ids = packed.ids
        if packed.late is not None:
            rows, tickets = packed.late
            ids = ids.index_copy(1, rows, self._ring.index_select(0, tickets)[None])
        return self.decoder.embed(ids, packed.positions)

    def _enter(self, part: Part) -> Tensor:
        """The rows as an earlier launch left them below these layers."""
        return torch.cat([self._hidden.pop(self._key(s)) for s in part.slices], dim=1)

    def _leave(self, part: Part, hidden: Tensor) -> None:
        sizes = [piece.tokens for piece in part.packed.pieces]
        for piece, rows in zip(part.slices, hidden.split(sizes, dim=1), strict=True):
            self._hidden[self._key(piece)] = rows

    def _key(self, piece: Slice) -> tuple[int, int]:
        return piece.job.job_id, piece.microbatch

    # ---- after
    def release(self, pool: Pool, pages: Sequence[int]) -> None:
        """Nobody uses these pages now: their memory goes back to the system."""
        self.arenas[pool].release(pages)

    def outputs(self, job_id: int) -> list[int]:
        """The token ids a job has generated so far."""
        job = self.packer.transcript(job_id)
        return job.tokens[job.prompt_tokens :]
