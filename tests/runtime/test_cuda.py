"""The CUDA executor: its wiring over stand-ins for streams and events, and on a GPU for real."""

from __future__ import annotations

import ctypes
import gc
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import runtime.executors.cuda
import runtime.executors.device
from engine.contract.executor import Launch
from engine.contract.plan import Copy
from engine.contract.regions import PageSize
from engine.laws.check_replay import check_inputs, check_lanes
from engine.loop.engine import Engine
from engine.results.recorder import Recorder
from policies.composed import Composed
from runtime.executors.clock import Timeline, WallClock, anchored
from runtime.executors.cuda import CudaExecutor, CudaMark
from runtime.executors.device import budgets, clear_workspaces
from runtime.executors.streams import LaneWork
from runtime.measure.meter import CudaMeter
from runtime.serving.machine import GPU, ServingMachine
from sim.devices.kv_room import graph_bytes
from tests.support.hand_made import HOST, TINY, own_model
from tests.support.reference import compare, expected
from tests.support.serving import MEMORY, SCHEDULING, serve, short_requests

PAGE_TOKENS, PAGES = 16, 16
TOTAL = 1 << 40  # bytes of a stand-in's memory
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
    """torch.cuda as CudaExecutor uses it; a stream runs its launches at once."""

    def __init__(self) -> None:
        self.waited: list[tuple[Any, Any]] = []
        self.synchronized: list[Any] = []
        self.shares: dict[int, float] = {}  # of devices' memory that torch may take
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

    def take_over(self, monkeypatch: pytest.MonkeyPatch) -> StandIn:
        """Stands in for torch.cuda from here on, in all modules that drive streams."""
        for module in (runtime.executors.cuda, runtime.executors.device):
            monkeypatch.setattr(module, "cuda", self)
        return self

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        yield

    def synchronize(self, device: int) -> None:
        self.synchronized.append(device)

    # ---- memory: 1,000 bytes are held before every launch, 700 more at its peak, 64 remain
    def reset_peak_memory_stats(self, device: int) -> None: ...

    def reset_accumulated_memory_stats(self, device: int) -> None: ...

    def memory_stats_as_nested_dict(self, device: int) -> Any:
        held = {"current": 1064, "peak": 1700, "allocated": 900, "freed": 836}
        return {"allocated_bytes": {"all": held}}

    def empty_cache(self) -> None: ...

    def get_device_properties(self, device: int) -> Any:
        return SimpleNamespace(total_memory=TOTAL)

    def set_per_process_memory_fraction(self, share: float, device: int) -> None:
        self.shares[device] = share


def replay(box: ServingMachine, executor: CudaExecutor, memory: str, meter: Any = None) -> Recorder:
    page = PageSize.of(TINY, PAGE_TOKENS)
    capacity = {pool: arena.num_pages * page.nbytes for pool, arena in box.arenas.items()}
    policy = Composed(SCHEDULING["chunked_prefill"], MEMORY[memory])
    recorder = Recorder(meter)
    engine = Engine(executor.clock, policy, executor, capacity, page, recorder=recorder)
    engine.replay(short_requests(14, TINY.vocab_size))
    plans, spans = [row[-1] for row in recorder.plans], {s.op: s for s in recorder.spans}
    check_lanes(plans, spans)
    check_inputs(plans, spans)
    return recorder


def machine(device: str, **options: Any) -> ServingMachine:
    torch.set_num_threads(1)
    prompts = {r.request_id: r.prompt_ids or () for r in short_requests(14, TINY.vocab_size)}
    model = own_model(TINY).to(device)  # the CPU's weights, moved
    pools = {GPU: PAGES, HOST: 4 * PAGES}
    return ServingMachine(
        model, TINY, PageSize.of(TINY, PAGE_TOKENS), pools, prompts, device=device, **options
    )


@pytest.mark.broad(2)
@pytest.mark.parametrize("memory", MEMORY)
def test_wiring_gives_the_cpu_executors_tokens_and_a_wait_per_wait(
    memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in, box = StandIn().take_over(monkeypatch), machine("cpu")
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


@pytest.mark.parametrize("late_ns", [0, 5_000, 20_000, 50_000, 200_000])
def test_spans_of_a_lane_never_overlap_however_late_its_anchor(late_ns: int) -> None:
    """Back to back on a stream; at 20 us, 197 of 200 such runs overlapped."""
    for seed in range(20):
        rng, clock = random.Random(seed), SimpleNamespace(now=10_000_000 + late_ns)
        timeline, spans = Timeline(clock, Moment(10_000_000)), [(0, 0)]
        for i in range(100):
            start_ns = 11_000_000 + i * 5_001_500
            end_ns = start_ns + 5_000_000
            clock.now = end_ns + rng.randint(2_000, 110_000)
            issued_ns = start_ns - 4_000_000 if i else start_ns - 50_000
            moments = Moment(start_ns), Moment(end_ns)
            spans.append(timeline.span_ns(*moments, issued_ns))
            assert issued_ns <= spans[-1][0] and spans[-1][1] <= clock.now
        assert all(a[1] <= b[0] <= b[1] for a, b in pairwise(spans))
        far = max(abs(end - start - 5_000_000) for start, end in spans[1:])
        assert far <= late_ns + 1_000, "what is cut off is the anchor's error, no more"


def test_an_anchor_lies_in_the_tightest_of_several_looks() -> None:
    clock, ends = SimpleNamespace(now=1_000), iter((900, 40, 7, 12_000, 60, 300, 50, 80))

    def happen() -> Moment:
        clock.now += 3
        moment = Moment(clock.now)
        clock.now += next(ends)  # synchronize() returns late
        return moment

    timeline = anchored(clock, happen)
    start_ns = clock.now + 1_000
    clock.now += 10_000
    found = timeline.span_ns(Moment(start_ns), Moment(start_ns + 100), 0)
    assert abs(found[0] - start_ns) <= 5 and not list(ends)


def test_a_span_starts_behind_what_its_launch_has_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also on two devices whose anchors differ, whichever mark is asked first."""
    stand_in, box = StandIn().take_over(monkeypatch), machine("cpu")
    with CudaExecutor(WallClock(), box) as executor:
        clock = executor.clock
        clock.start()
        lane = executor._open_lane_on((0, "compute"))
        marks = [CudaMark(LaneWork(None, ()), lane) for _ in range(3)]
        for mark, behind in zip(marks, ((), marks[:1], marks[:2]), strict=True):
            mark.begin, mark.end, mark.behind = stand_in.Event(True), stand_in.Event(True), behind
            mark.end.record(None)
            mark.begin.at_ns = mark.end.at_ns - 500_000  # all of them at once, by their events
        assert marks[2].end_ns >= marks[1].end_ns
        times = [mark._times() for mark in marks]
    assert times[0][1] <= times[1][0] and times[1][1] <= times[2][0]
    assert not any(mark.behind for mark in marks), "known once"


def test_statistics_are_read_once_a_launch_and_the_engines_thread_wakes_on_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch builds its flat dictionary in 0.4 ms, and each of its single figures from that."""
    stand_in, box, reads = StandIn().take_over(monkeypatch), machine("cpu"), []
    read = stand_in.memory_stats_as_nested_dict
    stand_in.memory_stats_as_nested_dict = lambda device: reads.append(device) or read(device)
    slack = []

    def run() -> None:
        with CudaExecutor(WallClock(), box) as executor:
            slack.append(ctypes.CDLL(None).prctl(30))  # PR_GET_TIMERSLACK, ns
            recorder = replay(box, executor, "paged_restart")
        computing = [span for span in recorder.spans if not isinstance(span.op, Copy)]
        assert len(reads) == len(computing) > 0
        assert all(span.peak_bytes == 700 for span in computing)

    engine = threading.Thread(target=run)
    engine.start()
    engine.join()
    assert slack == [1], "50 us otherwise"


def test_a_budget_beyond_the_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = StandIn().take_over(monkeypatch)
    with pytest.raises(ValueError, match="does not fit GPU 0"), budgets({0: TOTAL + 1}):
        pass
    assert stand_in.shares == {0: 1.0}


def test_a_budget_has_a_floor_and_ends_with_its_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """0.7 MiB, a sixth of some states, are less than one of torch's segments."""
    stand_in, cleared = StandIn().take_over(monkeypatch), list[bool]()
    monkeypatch.setattr(runtime.executors.device, "clear_workspaces", lambda: cleared.append(True))
    for wanted in (700_000, 3 << 30):
        with pytest.raises(KeyError), budgets({0: wanted, 1: wanted}):
            assert stand_in.shares == dict.fromkeys((0, 1), max(wanted, 1 << 30) / TOTAL)
            raise KeyError
        assert stand_in.shares == {0: 1.0, 1: 1.0}
    assert len(cleared) == 2, "what others' products left does not count"


def test_executors_and_captures_share_a_stream_for_each_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """cuBLAS keeps 32 MiB for every stream that it has ever seen."""
    stand_in, box = StandIn(), machine("cpu")
    made = []

    class Stream(stand_in.Stream):  # type: ignore[misc, name-defined]
        def __init__(self, device: int) -> None:
            super().__init__(device)
            made.append(device)

    stand_in.Stream = Stream
    stand_in.take_over(monkeypatch)
    for _ in range(3):
        with CudaExecutor(WallClock(), box) as executor:
            replay(box, executor, "paged_swap")
            box.packer.transcripts.clear()
    assert made == [0] * 4, "uploads, computing, two directions of copies"


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
    gc.collect()
    clear_workspaces()  # a machine's construction does it, too
    torch.cuda.empty_cache()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    box = machine("cuda", **options)
    assert (box.graph_bytes[0] > 0) == ("graph_rows" in options)
    assert box.graph_bytes[0] <= graph_bytes(
        TINY, options.get("graph_rows", 0), PageSize.of(TINY, PAGE_TOKENS)
    )
    meter = CudaMeter(0, [box.arenas[HOST].pages], graph_bytes=box.graph_bytes[0])
    with CudaExecutor(WallClock(), box) as executor:
        recorder = replay(box, executor, "paged_swap", meter)
    given = TINY.weight_bytes + PAGES * PageSize.of(TINY, PAGE_TOKENS).nbytes + box.graph_bytes[0]
    rows = recorder.tables()["memory"].to_pandas()
    held = rows[(rows["cause"] == "settle") & (rows["tier"] == "gpu")]["measured_bytes"] - before
    extra = held - given - box._ring.untyped_storage().nbytes()
    # Rotary tables, index tensors and tokens of two launches in flight, cuBLAS's workspace once.
    assert (extra >= 0).all() and (extra < 64 << 20).all()
    steps = recorder.tables()["steps"].to_pandas()
    assert (steps[steps["lane"] == "compute"]["peak_bytes"] > 0).all()
