"""Decode batches as CUDA graphs: one per bucket of rows, over buffers that never move."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, cuda

from runtime.executors.device import clear_workspaces, stream_of
from runtime.serving.kv import Arena
from runtime.serving.packing import RING, Column, Draw, Frame, Packed, padding
from runtime.serving.paged import ALIGNED, AttentionRows, Paged, Scratch, padded

WARM_UPS = 2  # before a capture: kernels are compiled and libraries set up outside of it

Step = Callable[[], Tensor]  # computes the buffers' decode batch; its tokens never move


class DecodeGraphs:
    """Replays decode batches. All buckets share input buffers and the memory of their results."""

    def __init__(
        self,
        buckets: Sequence[int],
        max_pages: int,
        arena: Arena,
        ring: Tensor,
        forward: Callable[[Packed], Tensor],
        is_greedy: bool,
        record: Callable[[Step], Step],
    ) -> None:
        """
        Args:
            buckets: Rows of the graphs, in rising order.
            max_pages: Most pages of a job.
            arena: The KV pages of the device.
            ring: Sampled tokens in flight.
            forward: Computes a packed forward over all layers; leaves its tokens in the ring.
            is_greedy: Whether no draws are read.
            record: Turns a step into its replay: a Capture, or `direct` without a GPU.
        """
        most, device = buckets[-1], ring.device
        self._arena, self._ring, self._forward, self._is_greedy = arena, ring, forward, is_greedy
        self._columns = torch.from_numpy(padding(padded(most, 2), most)).to(device)
        shape = (most, padded(max_pages, ALIGNED))  # both aligned as a launch's: see paged.py
        self._tables = torch.zeros(shape, dtype=torch.int32, device=device)
        self._order = torch.arange(most, device=device)
        self._nothing = torch.zeros((0, 3), dtype=torch.int32, device=device)
        # The largest first: all smaller graphs fit into the memory that it took.
        self._steps = {b: record(partial(self._step, b)) for b in reversed(buckets)}

    def run(self, frame: Frame) -> Tensor:
        """The tokens of a frame's rows, [rows]; they lie in the ring too."""
        self._columns[:, : frame.bucket].copy_(frame.columns)
        rows, width = frame.tables.shape
        self._tables[:rows, :width].copy_(frame.tables)
        return self._steps[frame.bucket]()[:rows].clone()

    def _step(self, bucket: int) -> Tensor:
        self._ring[RING : RING + bucket].copy_(self._columns[Column.TOKEN, :bucket])
        return self._forward(self._packed(bucket))

    def _packed(self, bucket: int) -> Packed:
        """The buffers as a packed forward; every row's token is read from the ring."""
        columns, order = self._columns[:, :bucket], self._order[:bucket]
        empty = self._nothing
        paged = Paged(self._tables[:bucket], empty, empty, columns[Column.LENGTH], 0)
        rows = AttentionRows(self._arena, columns[Column.SLOT], (), (), (), Scratch(), paged)
        uniform = None if self._is_greedy else columns[Column.UNIFORM].view(torch.float64)
        draw = Draw((), order, columns[Column.TICKET], uniform)
        ids, positions = (
            columns[Column.TOKEN : Column.TOKEN + 1],
            columns[Column.POSITION : Column.POSITION + 1],
        )
        return Packed((), ids, positions, rows, (order, columns[Column.SOURCE]), draw)


def direct(step: Step) -> Step:
    """No capture: a replay is the step itself."""
    return step


class Capture:
    """Records steps as CUDA graphs in one pool of memory, on a stream of their own.

    The workspaces of libraries lie in the pool too: they are cleared before a capture, so that the
    graph takes its own, and after it, so that the next capture may take the memory.
    """

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self._side = stream_of(self._device.index or 0, "captures")
        self._pool: Any = cuda.graph_pool_handle()

    def __call__(self, step: Step) -> Step:
        """Must be called without autograd, and while no launch runs on the device."""
        with cuda.device(self._device):
            self._side.wait_stream(cuda.current_stream())
            with cuda.stream(self._side):
                for _ in range(WARM_UPS):
                    step()
            self._side.synchronize()
            clear_workspaces()
            graph = cuda.CUDAGraph()
            with cuda.graph(graph, pool=self._pool, stream=self._side):
                tokens = step()
            clear_workspaces()

        def replay() -> Tensor:
            graph.replay()
            return tokens

        return replay

    @property
    def nbytes(self) -> int:
        """Bytes that the graphs keep beside the allocator's requested bytes.

        That is all of their segments but the tensors that live there.
        """
        own = [s for s in cuda.memory_snapshot() if tuple(s["segment_pool_id"]) == (*self._pool,)]
        return sum(int(s["total_size"]) - int(s["requested_size"]) for s in own)
