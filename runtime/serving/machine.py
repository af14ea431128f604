"""The machine that serves: forwards over packed rows and copies of pages, without a clock."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.contract.executor import Launch, Piece
from engine.contract.plan import Compute, Copy, Slice
from engine.contract.regions import Kind, PageSize, Pool, Tier, Work
from models.spec import ModelSpec
from runtime.executors.device import clear_workspaces
from runtime.executors.machine import Machine, Tokens
from runtime.serving.graphs import Capture, DecodeGraphs, direct
from runtime.serving.kv import Arena, copy_pages, paired_runs
from runtime.serving.model import Decoder
from runtime.serving.packing import Frame, Packed, Packer, buckets_of, ring_size
from runtime.serving.sampling import Sampling, choose

GPU: Pool = (Tier.GPU, 0)


Context = Callable[[], AbstractContextManager[Any]]
"""Made as a launch begins, for its layers."""
Through = Callable[[Sequence[Slice], Packed], Context | None]


class LaunchPart(NamedTuple):
    """Neighbouring slices of a Compute over equal layers: one packed forward."""

    layers: range
    packed: Packed | Frame
    slices: tuple[Slice, ...] = ()  # in the order of the rows, where these are not all layers
    through: Context | None = None  # runs rows through adapters


class Prepared(NamedTuple):
    """A launch with all its index tensors: either parts of a Compute, or moves of a Copy."""

    launch: Launch
    parts: tuple[LaunchPart, ...] = ()
    moves: tuple[tuple[int, int, int], ...] = ()


class ServingMachine(Machine[Prepared]):
    """One device with its host: the model, the KV arenas and every job's tokens."""

    store = None  # beside its weights it holds only KV

    def __init__(
        self,
        model: Any,
        spec: ModelSpec,
        page: PageSize,
        num_pages: Mapping[Pool, int],
        prompts: Mapping[int, Sequence[int]],
        sampling: Sampling | None = None,
        eos_ids: Collection[int] = (),
        device: str = "cpu",
        pads_decodes: bool | None = None,
        number: int = 0,
        kernels: bool = False,
        graph_rows: int = 0,
    ) -> None:
        """
        Args:
            model: A Hugging Face model on the device.
            spec: Its spec.
            page: A KV page of the model.
            num_pages: KV pages of each pool of the device.
            prompts: Token ids of each job's prompt.
            sampling: How tokens are chosen; None: greedily.
            eos_ids: Tokens that end a job; none where lengths are forced.
            device: torch's name of the device.
            pads_decodes: Decodes attend in padded groups; None: only on a GPU.
            number: Of the device in lanes and pools.
            kernels: Triton's kernels attend instead of torch.
            graph_rows: With kernels, decode batches of up to this size are replayed as CUDA graphs
                (on a CPU: computed in the graphs' buffers).
        """
        self.spec, self.device = spec, device
        self.through: Through | None = None  # makes what runs rows of a launch through adapters
        self.sampling = sampling or Sampling()
        self.eos_ids = frozenset(eos_ids)
        self.decoder = _decoder(model, kernels)
        self.arenas = {
            pool: Arena(spec, page, count, pool[0], device) for pool, count in num_pages.items()
        }
        pads = device != "cpu" if pads_decodes is None else pads_decodes
        shared = spec.num_heads // spec.num_kv_heads if kernels else None
        buckets = buckets_of(graph_rows) if kernels else ()
        arena = self.arenas[Tier.GPU, number]
        self.packer = Packer(arena, prompts, self.sampling, device, pads, shared, buckets)
        self._all_layers = range(spec.num_layers)
        self._ring = torch.zeros(ring_size(graph_rows), dtype=torch.int64, device=device)
        self._hidden: dict[tuple[int, int], Tensor] = {}  # (job, microbatch): between layers
        self.graph_bytes: dict[int, int] = {
            number: 0
        }  # per device, beside what its allocator counts
        if shared is not None:
            self._warm_up(arena, shared)
        self._graphs = self._record(buckets, arena, number) if buckets else None

    @torch.no_grad()
    def _warm_up(self, arena: Arena, shared: int) -> None:
        """Compiles the kernels, so that no launch has to."""
        from runtime.kernels.warm import warm_up  # Triton

        warm_up(self.decoder, arena, shared, self.device)
        if self.device != "cpu":
            torch.cuda.synchronize(self.device)
            clear_workspaces()

    @torch.no_grad()
    def _record(self, buckets: Sequence[int], arena: Arena, number: int) -> DecodeGraphs:
        """Captures the graphs of decode steps, some tenths of a second each."""
        longest = -(-self.spec.max_positions // arena.page_tokens)
        capture = None if self.device == "cpu" else Capture(self.device)

        def forward(packed: Packed) -> Tensor:
            tokens = self._forward(packed, self._all_layers, ())
            assert tokens is not None
            return tokens

        graphs = DecodeGraphs(
            buckets, min(longest, arena.num_pages), arena, self._ring, forward,
            self.sampling.is_greedy, capture or direct,
        )  # fmt: skip
        self.graph_bytes[number] = capture.nbytes if capture else 0
        return graphs

    # ---- before
    def prepare(self, launch: Launch) -> Prepared:
        """See Machine."""
        op = launch.op
        if isinstance(op, Copy):
            return self._prepare_copy(launch, op)
        assert isinstance(op, Compute), "a served Compute has no group"
        pieces, parts, stop = tuple(launch.pieces), list[LaunchPart](), 0
        for unit, run in groupby([(piece.work, piece.layers) for piece in op.slices]):
            start, stop = stop, stop + len(list(run))
            parts.append(self._part(*unit, op.slices[start:stop], pieces[start:stop]))
        return Prepared(launch, tuple(parts))

    def _part(
        self, work: Work, layers: range | None, slices: Sequence[Slice], pieces: Sequence[Piece]
    ) -> LaunchPart:
        if work is not Work.FORWARD:
            raise NotImplementedError(f"a machine that serves does no {work}: TrainingMachine does")
        layers = self._all_layers if layers is None else layers
        if layers == self._all_layers:
            if self.through is not None and any(s.job.adapter is not None for s in slices):
                return self._adapted(layers, slices, pieces)
            return LaunchPart(layers, self.packer.frame(pieces) or self.packer.pack(pieces))
        if any([piece.job.adapter is not None for piece in slices]):
            raise NotImplementedError("requests run through adapters in all layers at once")
        packed = self.packer.pack(pieces, layers.stop == self.spec.num_layers)
        by_job = {piece.job_id: part for piece, part in zip(pieces, slices, strict=True)}
        return LaunchPart(layers, packed, tuple(by_job[piece.job_id] for piece in packed.pieces))

    def _adapted(
        self, layers: range, slices: Sequence[Slice], pieces: Sequence[Piece]
    ) -> LaunchPart:
        """A forward of which some rows run through adapters; no graph is recorded of such."""
        packed = self.packer.pack(pieces)
        assert self.through is not None, "requests run through adapters, and the machine has none"
        return LaunchPart(layers, packed, through=self.through(slices, packed))

    def _prepare_copy(self, launch: Launch, op: Copy) -> Prepared:
        if op.src.region.kind is not Kind.KV:
            raise NotImplementedError(f"a machine that serves copies no {op.src.region.kind}")
        src, dst = self.arenas[op.src.pool], self.arenas[op.dst.pool]
        count = launch.nbytes // src.page_nbytes  # the tables may have grown since the booking
        src_pages, dst_pages = launch.src_pages[:count], launch.dst_pages[:count]
        src.check(src_pages)
        dst.hold(dst_pages)
        moves = paired_runs(src_pages, dst_pages)
        return Prepared(launch, moves=tuple(moves))

    # ---- the work
    def execute(self, prepared: Prepared) -> tuple[int, ...]:
        """See Machine."""
        ended = self.collect(prepared, self.start(prepared))
        if self.device != "cpu":  # neither a copy nor a launch without tokens was waited for
            torch.cuda.current_stream(self.device).synchronize()
        return ended

    @torch.no_grad()
    def start(self, prepared: Prepared) -> tuple[Tensor | None, ...]:
        """See Machine."""
        op = prepared.launch.op
        if isinstance(op, Copy):
            copy_pages(self.arenas[op.src.pool], self.arenas[op.dst.pool], prepared.moves)
            return ()
        return tuple(self._run(part) for part in prepared.parts)

    def collect(self, prepared: Prepared, tokens: Tokens) -> tuple[int, ...]:
        """See Machine; waits for the tokens where they are still on the device."""
        ended, transcripts = [], self.packer.transcripts
        for part, sampled in zip(prepared.parts, tokens, strict=True):
            if sampled is None:
                continue
            for piece, token in zip(part.packed.sampled, sampled.tolist(), strict=True):
                at = piece.context_tokens + piece.tokens
                transcripts[piece.job_id].append(at, token)
                if token in self.eos_ids:
                    ended.append(piece.job_id)
        return tuple(ended)

    def _run(self, part: LaunchPart) -> Tensor | None:
        """The sampled tokens, [R], of a packed forward or a graph."""
        if isinstance(part.packed, Frame):
            assert self._graphs is not None
            return self._graphs.run(part.packed)
        if part.through is None:
            return self._forward(part.packed, part.layers, part.slices)
        with part.through():
            return self._forward(part.packed, part.layers, part.slices)

    def _forward(self, packed: Packed, layers: range, slices: Sequence[Slice]) -> Tensor | None:
        """Runs rows through layers; returns the sampled tokens, [R], behind the last layer."""
        hidden = self._enter(slices) if layers.start else self.embed(packed)
        angles = self.decoder.angles(hidden, packed.positions)
        for layer in layers:
            hidden = self.decoder.layer(layer, hidden, angles, packed.rows)
        packed.rows.scratch.clear()
        if layers.stop < self.spec.num_layers:
            self._leave(packed, slices, hidden)
        return self.sample(packed, hidden)

    def sample(self, packed: Packed, hidden: Tensor) -> Tensor | None:
        """The tokens of rows behind the last layer, [R]; None where the launch yields none."""
        if packed.draw is None:
            return None
        logits = self.decoder.logits(hidden, packed.draw.rows)
        tokens = choose(logits, self.sampling, packed.draw.uniform)
        self._ring.index_copy_(0, packed.draw.tickets, tokens)
        return tokens

    def embed(self, packed: Packed) -> Tensor:
        """The rows below the first layer, [1, T, hidden]."""
        ids = packed.ids
        if packed.in_flight is not None:
            rows, tickets = packed.in_flight
            ids = ids.index_copy(1, rows, self._ring.index_select(0, tickets)[None])
        return self.decoder.embed(ids, packed.positions)

    def _enter(self, slices: Sequence[Slice]) -> Tensor:
        """The rows as an earlier launch has left them below these layers."""
        return torch.cat([self._hidden.pop(self._key(s)) for s in slices], dim=1)

    def _leave(self, packed: Packed, slices: Sequence[Slice], hidden: Tensor) -> None:
        sizes = [piece.tokens for piece in packed.pieces]
        for piece, rows in zip(slices, hidden.split(sizes, dim=1), strict=True):
            self._hidden[self._key(piece)] = rows

    def _key(self, piece: Slice) -> tuple[int, int]:
        return piece.job.job_id, piece.microbatch

    # ---- after
    def release(self, pool: Pool, pages: Sequence[int]) -> None:
        """See Machine."""
        self.arenas[pool].release(pages)

    def outputs(self, job_id: int) -> list[int]:
        """See Machine."""
        job = self.packer.transcripts[job_id]
        return job.tokens[job.prompt_tokens :]


def _decoder(model: Any, fused: bool) -> Decoder:
    if not fused:
        return Decoder(model)
    from runtime.serving.fused import FusedDecoder  # Triton

    return FusedDecoder(model)
