"""The CUDA executor: its wiring over stand-ins for streams and events, and on a GPU for real."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import runtime.cuda
from engine.checks import check_inputs, check_lanes
from engine.engine import Engine
from engine.executor import Launch
from engine.plan import Copy, PageSize
from engine.policy import Composed
from engine.recorder import Recorder
from runtime.clock import WallClock
from runtime.cuda import CudaExecutor, set_budget
from runtime.machine import GPU, Machine
from runtime.meter import CudaMeter
from runtime.timeline import Timeline
from sim.memory import graph_bytes
from tests.hand_made import HOST, TINY, own_model
from tests.reference import compare, expected
from tests.serving import MEMORY, SCHEDULING, serve, short_requests

PAGE_TOKENS, PAGES = 16, 16
gpu = pytest.mark.gpu
# Ways to attend; a GPU's torch brings triton along.
WAYS = {
    "sdpa": {},
    "kernels": {"kernels": True},
    "graphs": {"kernels": True, "graph_rows": 8},
}
has_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class Moment:
    """An event of a device whose clock is the host's, off by `ahead`."""

    def __init__(self, at_ns: int = 0, ahead: float = 1.0) -> None:
        self.at_ns, self.ahead = at_ns, ahead

    def elapsed_time(self, later: Moment) -> float:
        """As CUDA gives it: ms as a 32-bit float."""
        exact = (later.at_ns - self.at_ns) * self.ahead / 1e6
        return float(torch.tensor(exact, dtype=torch.float32))


class StandIn:
    """torch.cuda as CudaExecutor uses it, where a stream runs what it is given at once."""

    def __init__(self) -> None:
        self.waited: list[tuple[Any, Any]] = []
        self.synchronized: list[Any] = []
        waited, synchronized = self.waited, self.synchronized

        class Event(Moment):
            def __init__(self, enable_timing: bool = False) -> None:
                super().__init__()
                self.timed, self.stream = enable_timing, None

            def record(self, stream: Any) -> None:
                self.at_ns, self.stream = time.perf_counter_ns(), stream

            def query(self) -> bool:
                return self.stream is not None

            def synchronize(self) -> None:
                assert self.query()

            def elapsed_time(self, later: Event) -> float:
                assert self.timed and later.timed, "torch refuses untimed events"
                return super().elapsed_time(later)

        class Stream:
            def __init__(self, device: int) -> None:
                self.device = device

            def wait_event(self, event: Event) -> None:
                assert event.query(), "CUDA takes an unrecorded event for a past one"
                waited.append((self, event))

            def synchronize(self) -> None:
                synchronized.append(self)

        self.Event, self.Stream = Event, Stream

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        yield

    def synchronize(self, device: int) -> None:
        self.synchronized.append(device)

    def reset_peak_memory_stats(self, device: int) -> None: ...

    def memory_allocated(self, device: int) -> int:
        return 1000

    def max_memory_allocated(self, device: int) -> int:
        return 1700


def replay(box: Machine, executor: CudaExecutor, memory: str, meter: Any = None) -> Recorder:
    page = PageSize(PAGE_TOKENS, PAGE_TOKENS * TINY.kv_token_bytes)
    capacity = {pool: arena.num_pages * page.nbytes for pool, arena in box.arenas.items()}
    policy = Composed(SCHEDULING["chunked_prefill"], MEMORY[memory])
    recorder = Recorder(meter)
    engine = Engine(executor.clock, policy, executor, capacity, page, recorder=recorder)
    engine.replay(short_requests(14, TINY.vocab_size))
    plans, spans = [row[-1] for row in recorder.plans], {s.op: s for s in recorder.spans}
    check_lanes(plans, spans)
    check_inputs(plans, spans)
    return recorder


def machine(device: str, **options: Any) -> Machine:
    torch.set_num_threads(1)
    prompts = {r.request_id: r.prompt_ids or () for r in short_requests(14, TINY.vocab_size)}
    model = own_model(TINY).to(device)  # the CPU's weights, moved
    pools = {GPU: PAGES, HOST: 4 * PAGES}
    return Machine(model, TINY, PAGE_TOKENS, pools, prompts, device=device, **options)


@pytest.mark.parametrize("memory", MEMORY)
def test_wiring_gives_the_cpu_executors_tokens_and_a_wait_per_wait(
    memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in, box = StandIn(), machine("cpu")
    monkeypatch.setattr(runtime.cuda, "cuda", stand_in)
    waits = []
    with CudaExecutor(WallClock(), box) as executor:
        start = executor.run

        def run(launch: Launch, done: Any) -> None:
            waits.append(sum(op in executor._marks for op in launch.waits))
            start(launch, done)

        executor.run = run
        recorder = replay(box, executor, memory)
    requests = short_requests(14, TINY.vocab_size)
    served = serve(TINY, requests, "chunked_prefill", memory, gpu_pages=2 * PAGES)
    assert {i: box.outputs(i) for i in recorder.outcomes} == served.outputs
    assert len(stand_in.waited) == sum(waits) + len(waits)  # and each for its upload
    assert sum(waits) > 0 or memory != "paged_swap"
    peaks = {isinstance(span.op, Copy): span.peak_bytes for span in recorder.spans}
    assert peaks[False] == 700 and peaks.get(True) is None
    now_ns = executor.clock.now
    assert all(0 <= s.start_ns <= s.end_ns <= now_ns for s in recorder.spans)


@pytest.mark.parametrize("ahead", [1.0, 1.0001, 0.9999])
def test_a_drifting_device_keeps_causality_and_durations(ahead: float) -> None:
    """100 ppm is far worse than real clocks; a minute of launches of 3 ms, polled at once."""

    class Now:
        now = 0

    clock, start_ns = Now(), 5_000_000
    clock.now = start_ns
    timeline = Timeline(clock, Moment(start_ns, ahead))
    spans = []
    for i in range(2000):
        issued_ns = start_ns + i * 30_000_000
        begin, end = Moment(issued_ns + 10_000, ahead), Moment(issued_ns + 3_010_000, ahead)
        clock.now = issued_ns + 3_030_000
        spans.append(timeline.span_ns(begin, end, issued_ns))
        assert issued_ns <= spans[-1][0] and spans[-1][1] <= clock.now
    assert all(abs(end - start - 3_000_000 * ahead) < 1_000 for start, end in spans)
    assert spans == sorted(spans)


def test_a_budget_beyond_the_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Small:
        total_memory = 1 << 20

    stand_in = StandIn()
    stand_in.get_device_properties = lambda device: Small
    monkeypatch.setattr(runtime.cuda, "cuda", stand_in)
    with pytest.raises(ValueError, match="does not fit GPU 0"):
        set_budget(1 << 21)


@gpu
@has_gpu
@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("memory", MEMORY)
def test_tokens_on_a_gpu_equal_generate(memory: str, options: dict[str, Any]) -> None:
    """fp32 without TF32. A request may leave generate() at a near tie only; printed."""
    torch.backends.cuda.matmul.allow_tf32 = False
    box = machine("cuda", **options)
    with CudaExecutor(WallClock(), box) as executor:
        recorder = replay(box, executor, memory)
    requests = short_requests(14, TINY.vocab_size)
    outputs = {i: box.outputs(i) for i in recorder.outcomes}
    found = compare(outputs, expected(TINY, requests))
    print(f"{memory}: {found.equal} requests equal, {found.near_ties} near ties")
    assert not found.wrong


@gpu
@has_gpu
def test_spans_of_streams_lie_on_the_runs_clock_and_swaps_overlap_nothing_they_read() -> None:
    box = machine("cuda")
    with CudaExecutor(WallClock(), box) as executor:
        recorder = replay(box, executor, "paged_swap")  # checks lanes and inputs itself
        now_ns = executor.clock.now
    lanes = {span.op.lane[1] for span in recorder.spans}
    assert lanes == {"compute", "gpu->host", "host->gpu"}
    assert all(0 < s.start_ns < s.end_ns <= now_ns for s in recorder.spans)


@gpu
@has_gpu
@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
def test_the_allocators_bytes_are_weights_arena_and_graphs(options: dict[str, Any]) -> None:
    torch.cuda.empty_cache()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    box = machine("cuda", **options)
    assert (box.graph_bytes[0] > 0) == ("graph_rows" in options)
    assert box.graph_bytes[0] <= graph_bytes(TINY, options.get("graph_rows", 0), PAGE_TOKENS)
    meter = CudaMeter(0, [box.arenas[HOST].pages], graph_bytes=box.graph_bytes[0])
    with CudaExecutor(WallClock(), box) as executor:
        recorder = replay(box, executor, "paged_swap", meter)
    given = TINY.weight_bytes + PAGES * PAGE_TOKENS * TINY.kv_token_bytes + box.graph_bytes[0]
    rows = recorder.tables()["memory"].to_pandas()
    held = rows[(rows["cause"] == "settle") & (rows["tier"] == "gpu")]["measured_bytes"] - before
    extra = held - given - box._ring.untyped_storage().nbytes()
    # Rotary tables, index tensors and tokens of two launches in flight, cuBLAS's workspace once.
    assert (extra >= 0).all() and (extra < 64 << 20).all()
    steps = recorder.tables()["steps"].to_pandas()
    assert (steps[steps["lane"] == "compute"]["peak_bytes"] > 0).all()
