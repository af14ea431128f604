"""The virtual-clock executors: real work, spans on lanes, and the times of host and launches."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress

import pytest
import simpy
import torch

from engine.contract.executor import Executor, Launch, Span
from engine.contract.plan import Copy
from engine.contract.regions import Tier, kv_place
from engine.loop.state import VirtualClock
from runtime.executors.lockstep import CpuExecutor, LockstepExecutor
from runtime.executors.wall import Link
from runtime.serving.machine import GPU
from sim.cost.contract import LaunchCost
from sim.executor import SimExecutor
from tests.support.hand_made import TINY, HandMade, make_prompts


class Fixed(LaunchCost):
    """Durations that are checked by hand."""

    form, provenance = "made up", "a test"

    def compute_ns(self, launch: Launch) -> int:
        return 1000 * sum(piece.tokens for piece in launch.pieces)

    def copy_ns(self, launch: Launch, contended: bool = False) -> int:
        return 154 if contended else 77

    def host_ns(self, launches: Sequence[Launch]) -> int:
        return 5 * len(launches)

    def peak_bytes(self, launch: Launch) -> int | None:
        return 123


def swap_out(made: HandMade, job_id: int) -> Launch:
    """A copy of all pages of a job to the host's first pages."""
    pages = made.pages[job_id]
    op = Copy(kv_place(job_id), kv_place(job_id, Tier.HOST))
    nbytes = len(pages) * made.machine.arenas[(Tier.GPU, 0)].page_nbytes
    return Launch(op, (), (), nbytes, pages, range(len(pages)))


@pytest.fixture
def made() -> HandMade:
    return HandMade(TINY, make_prompts([5, 30], TINY.vocab_size))


def swap_in(made: HandMade, job_id: int) -> Launch:
    """A copy of the host's first pages to free ones of the device."""
    op, there = Copy(kv_place(job_id, Tier.HOST), kv_place(job_id)), made.free[GPU][:2]
    return Launch(op, (), (), 2 * made.machine.arenas[GPU].page_nbytes, range(2), there)


def spans(env: simpy.Environment, executor: Executor, launches: Sequence[Launch]) -> list[Span]:
    found = list[Span]()
    assert executor.prepare(launches) == 5 * len(launches)
    for launch in launches:
        executor.run(launch, found.append)
    env.run()
    return found


def test_lockstep_does_the_work_in_the_simulators_time(made: HandMade) -> None:
    """Also where copies contend: one rule, in one place."""
    first, second = made.launch((7, 5), (10, 30)), made.launch((7, 1), (10, 1))
    launches = [first, second, swap_out(made, 10), swap_in(made, 99)]
    env, other = VirtualClock(), VirtualClock()
    predicted = SimExecutor(env, Fixed())
    found = spans(env, executor := LockstepExecutor(made.machine, predicted), launches)
    assert found == spans(other, SimExecutor(other, Fixed()), launches)
    times = {span.op: (span.start_ns, span.end_ns) for span in found}
    expected = [(0, 35_000), (35_000, 37_000), (0, 77), (0, 154)]
    assert [times[launch.op] for launch in launches] == expected
    assert [executor.peak_bytes(launch) for launch in launches] == [123, 123, None, None]
    assert [len(made.machine.outputs(i)) for i in (7, 10)] == [2, 2]


def test_a_launch_that_is_executed_has_ended(
    made: HandMade, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also launches that fetch nothing from a GPU: copies, and layers that sample nothing."""
    waited = []

    class Stream:
        def synchronize(self) -> None:
            waited.append(True)

    made.run((7, 5))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    box = made.machine
    box.device = "cuda:0"
    box.execute(box.prepare(swap_out(made, 7)))
    assert waited == [True]


def test_cpu_measures_compute_and_charges_copies_at_the_speed_of_the_link(made: HandMade) -> None:
    env, spans = VirtualClock(), list[Span]()
    links = {"gpu->host": Link(1e6, 500)}
    executor = CpuExecutor(env, made.machine, links)
    compute = made.launch((7, 5), (10, 30))
    copy = swap_out(made, 10)
    executor.prepare([compute, copy])
    before = time.thread_time_ns()
    executor.run(compute, spans.append)
    spent = time.thread_time_ns() - before
    executor.run(copy, spans.append)
    env.run()
    took = {span.op: span.end_ns - span.start_ns for span in spans}
    assert 0.5 * spent < took[compute.op] <= spent
    assert took[copy.op] == 500 + copy.nbytes * 1000  # ns per byte at 1 MB/s
    host, gpu = made.machine.arenas[(Tier.HOST, 0)], made.machine.arenas[(Tier.GPU, 0)]
    whole = slice(0, 30 // made.page_tokens)  # full pages: the last one has unwritten tokens
    assert host.pages[whole].equal(gpu.pages[made.pages[10][whole]])


def test_host_time_is_what_the_thread_spends_between_operations(made: HandMade) -> None:
    executor = CpuExecutor(VirtualClock(), made.machine)
    first = made.launch((7, 5))
    executor.prepare([first])
    executor.run(first, lambda span: None)
    begin = time.thread_time_ns()
    spin(3_000_000)  # a slow policy
    for error in (None, OSError("no such file")):
        with suppress(OSError), executor.paused():
            spin(25_000_000)  # a slow meter, also one that fails
            if error:
                raise error
    spent = executor.prepare([made.launch((7, 1))])
    whole = time.thread_time_ns() - begin
    assert 3_000_000 <= spent < whole - 50_000_000 + 1_000_000


def spin(thread_ns: int) -> None:
    """Burns CPU time of this thread."""
    until = time.thread_time_ns() + thread_ns
    while time.thread_time_ns() < until:
        pass
