"""Decode graphs without a GPU: their steps run in the same buffers, uncaptured."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import runtime.executors.device
import runtime.kernels
import runtime.serving.graphs
from engine.contract.executor import Piece
from engine.contract.regions import PageSize
from models.spec import ModelSpec
from runtime.kernels import MAX_HEAD_DIM, are_chosen, check_shape
from runtime.serving.graphs import Capture, DecodeGraphs, direct
from runtime.serving.kv import Arena
from runtime.serving.packing import RING, Column, Packed, Packer, buckets_of, ring_size
from runtime.serving.sampling import Sampling
from sim.devices.kv_room import GRAPH_RESERVE_BYTES, graph_bytes
from tandem.config.compose import composed
from tandem.wiring.budget import GPU
from tandem.wiring.run_spec import run_spec_of
from tests.support.hand_made import TINY

MOST = 4


class Counting:
    """A forward whose next token is the last one plus 1; notes its inputs."""

    def __init__(self) -> None:
        self.ring = torch.zeros(ring_size(MOST), dtype=torch.int64)
        self.shown: list[tuple[list[int], list[int], list[list[int]]]] = []

    def __call__(self, packed: Packed) -> Tensor:
        assert (
            packed.in_flight is not None
            and packed.draw is not None
            and packed.rows.paged is not None
        )
        tokens = self.ring.index_select(0, packed.in_flight[1]) + 1
        self.ring.index_copy_(0, packed.draw.tickets, tokens)
        paged = packed.rows.paged
        lengths = paged.lengths.tolist()
        self.shown.append((lengths, packed.rows.slots.tolist(), paged.tables.tolist()))
        return tokens


def test_a_replay_reads_known_tokens_and_those_in_flight_and_leaves_no_trace_of_padding() -> None:
    forward, arena = Counting(), Arena(TINY, PageSize.of(TINY, 4), num_pages=9)
    prompts = {1: [100, 200], 2: [300], 3: [400, 401, 402]}
    packer = Packer(arena, prompts, Sampling(), shared=2, buckets=buckets_of(MOST))
    buckets = buckets_of(MOST)
    graphs = DecodeGraphs(buckets, 3, arena, forward.ring, forward, True, direct)
    tables = {1: [5, 6], 2: [7], 3: [8]}

    def run(*rows: tuple[int, int]) -> list[int]:
        frame = packer.frame([Piece(i, 1, context, True, tables[i]) for i, context in rows])
        assert frame is not None
        return graphs.run(frame).tolist()

    assert run((1, 1), (2, 0), (3, 2)) == [201, 301, 403]
    assert run((3, 3), (1, 2)) == [404, 202]  # of the step before, whose tokens are in flight
    assert run((1, 3)) == [203]
    assert [len(lengths) for lengths, _, _ in forward.shown] == [4, 2, 1]
    lengths, slots, shown = forward.shown[0]
    assert lengths == [2, 1, 3, 0] and slots[3] == -1 and shown[0][0] == 5
    assert forward.ring[:6].tolist() == [201, 301, 403, 404, 202, 203]
    assert not forward.ring[6:RING].any()


def test_buffers_start_as_padding_so_that_a_capture_writes_nothing() -> None:
    forward, arena = Counting(), Arena(TINY, PageSize.of(TINY, 4), num_pages=9)

    def recorded(step):  # type: ignore[no-untyped-def]
        step()
        return step

    DecodeGraphs(buckets_of(MOST), 3, arena, forward.ring, forward, False, recorded)
    assert [lengths for lengths, _, _ in forward.shown] == [[0] * 4, [0] * 2, [0]]
    assert all(slot == -1 for _, slots, _ in forward.shown for slot in slots)
    assert not forward.ring[:RING].any()
    assert len(Column) == 7


class Capturing:
    """torch.cuda as captures use it: notes what happens, in order."""

    def __init__(self) -> None:
        self.log, noted = [], self

        class Stream:
            def __init__(self, device: int) -> None:
                noted.log.append("made")

            def wait_stream(self, other: object) -> None: ...

            def synchronize(self) -> None: ...

        class CUDAGraph:
            def replay(self) -> None:
                noted.log.append("replay")

        self.Stream, self.CUDAGraph = Stream, CUDAGraph

    def graph_pool_handle(self) -> tuple[int, int]:
        return (0, 7)

    def device(self, device: object) -> AbstractContextManager[None]:
        return nullcontext()

    stream = device

    def current_stream(self) -> None: ...

    @contextmanager
    def graph(self, graph: object, pool: object, stream: object) -> Iterator[None]:
        assert pool == (0, 7) and stream is not None, "or torch makes one of its own"
        self.log.append("capture")
        yield
        self.log.append("captured")

    def memory_snapshot(self) -> list[dict[str, object]]:
        pool = {"segment_pool_id": (0, 7), "total_size": 1000, "requested_size": 300}
        return [pool, pool | {"segment_pool_id": (0, 0)}, pool | {"requested_size": 0}]


def test_captures_share_a_stream_and_keep_no_librarys_workspace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """cuBLAS's workspace lies in the pool during a capture. Live tensors there count once."""
    stand_in = Capturing()
    for module in (runtime.serving.graphs, runtime.executors.device):
        monkeypatch.setattr(module, "cuda", stand_in)
    monkeypatch.setattr(
        runtime.serving.graphs, "clear_workspaces", lambda: stand_in.log.append("clear")
    )
    for _ in range(2):
        capture = Capture("cuda:0")
        for tokens in (torch.ones(1), torch.zeros(1)):
            replay = capture(lambda tokens=tokens: stand_in.log.append("step") or tokens)
            assert replay() is tokens
    once = ["step", "step", "clear", "capture", "step", "captured", "clear", "replay"]
    assert stand_in.log == ["made", *once * 4]
    assert capture.nbytes == 700 + 1000, "torch calls the rest requested"


def test_heads_that_no_program_holds_are_refused_in_one_line() -> None:
    check_shape(replace(TINY, head_dim=MAX_HEAD_DIM))
    with pytest.raises(ValueError, match=r"heads of 512 numbers.*attention=sdpa") as refused:
        check_shape(replace(TINY, head_dim=512))
    assert "\n" not in str(refused.value)


def test_kernels_are_left_out_with_one_line_where_triton_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runtime.kernels, "available", lambda: False)
    assert not are_chosen("triton")
    assert capsys.readouterr().err.count("\n") == 1
    assert not are_chosen("sdpa") and not capsys.readouterr().err
    monkeypatch.setattr(runtime.kernels, "available", lambda: True)
    assert are_chosen("triton")
    with pytest.raises(ValueError, match="triton or sdpa"):
        are_chosen("flash")


def test_graphs_take_their_memory_from_the_kv_in_every_backend() -> None:
    def room(rows: int):  # type: ignore[no-untyped-def]
        words = ["model=llama3_8b", "device=h200", "limit=10", f"budget.graph_rows={rows}"]
        return run_spec_of(composed(words)).room

    plain, graphed = room(0), room(64)
    spec = ModelSpec.from_hf(
        {
            "model_type": "llama",
            "num_hidden_layers": 32,
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "intermediate_size": 14336,
            "vocab_size": 128256,
            "max_position_embeddings": 131072,
            "torch_dtype": "bfloat16",
        }
    )
    page = PageSize.of(spec, 16)
    taken = graph_bytes(spec, 64, page)
    # Logits are the largest moment; a table of 8,192 pages a row; 1,024 splits of four heads.
    logits = 64 * (4096 + 4096 + 128256) * 2 + 2 * 64 * 128 * 2
    assert taken == logits + 64 * (56 + 32768) + 1024 * 4 * 4 * 129 + GRAPH_RESERVE_BYTES
    assert graphed.memory.reserve - plain.memory.reserve == taken
    missing = plain.capacity_bytes[GPU] - graphed.capacity_bytes[GPU]
    assert 0 <= missing - taken + graphed.page.nbytes <= 2 * graphed.page.nbytes
    assert (plain.graph_rows, graphed.graph_rows) == (0, 64) and graph_bytes(spec, 0, page) == 0
    with pytest.raises(ValueError, match="graph_rows=-1"):
        room(-1)
