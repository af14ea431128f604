"""Launches shapes through an executor without an engine: what probes and calibration measure."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

import numpy as np
import simpy

from engine.contract.executor import Executor, Launch, Piece, Span, due_ns
from engine.contract.job import Job
from engine.contract.plan import Compute, Copy, Slice
from engine.contract.regions import Pool, Tier, kv_place
from runtime.measure.shapes import Move, Shape, ShapeLimits, ShapeRows
from runtime.serving.machine import ServingMachine
from runtime.serving.packing import Transcript

GPU: Pool = (Tier.GPU, 0)
HOST: Pool = (Tier.HOST, 0)
FIRST_ID = 1 << 40  # of synthetic jobs: above every request id of a trace


class DrivenRun:
    """One plan as it ran: its launches with their spans, and the host's time before them."""

    def __init__(self, issue_ns: int, host_ns: int, done: Sequence[tuple[Launch, Span]]) -> None:
        """
        Args:
            issue_ns: When the plan was issued, on the clock of its environment.
            host_ns: What Executor.prepare has reported for the plan.
            done: Each launch with its span, in the order of their ends.
        """
        self.issue_ns, self.host_ns, self.done = issue_ns, host_ns, done

    @property
    def compute_ns(self) -> int:
        """How long the plan's Compute ran; 0 for a plan of copies."""
        lengths = (s.end_ns - s.start_ns for x, s in self.done if isinstance(x.op, Compute))
        return sum(lengths)


class Driver:
    """Launches a shape over synthetic jobs as one plan, and waits until all of it has ended.

    Works between replays, on their machine and class of executor: it takes unused pages and gives
    them back with `close`. Page tables are scattered, as after many allocations.
    """

    def __init__(
        self,
        env: simpy.Environment,
        executor: Executor,
        machine: ServingMachine,
        seed: int = 0,
        max_tokens: int = 2048,
    ) -> None:
        """
        Args:
            env: The clock that the executor runs on.
            executor: An executor over `machine`.
            machine: A machine that serves on device 0.
            seed: Of the synthetic prompts and page tables.
            max_tokens: Most tokens that a launch may compute.
        """
        self.env, self.executor, self.machine = env, executor, machine
        self._max_tokens = max_tokens  # of a launch
        arena = machine.arenas[GPU]
        self.page = arena.page
        rng = np.random.default_rng(seed)
        self._scattered = {
            pool: rng.permutation(arena.num_pages).tolist()
            for pool, arena in machine.arenas.items()
        }
        self._touched = {pool: 0 for pool in machine.arenas}
        self._ids = count(FIRST_ID)
        self._prompt = rng.integers(machine.spec.vocab_size, size=self.limits.positions).tolist()

    @property
    def limits(self) -> ShapeLimits:
        """The shapes that fit on this machine."""
        arenas = self.machine.arenas
        host = arenas[HOST].num_pages if HOST in arenas else 0
        return ShapeLimits(
            self.machine.spec.max_positions, arenas[GPU].num_pages, host, self._max_tokens
        )

    def run(self, shape: Shape) -> DrivenRun:
        """Launches a shape once.

        Args:
            shape: A shape that `limits` admit.

        Returns:
            The plan as it ran, in the executor's time.

        Raises:
            AssertionError: A pool has too few pages for the shape.
        """
        launches = list(self._launches(shape))
        done: list[tuple[Launch, Span]] = []
        times: list[int] = []
        self.executor.prepare(())  # so that the synthetic jobs' time is not the plan's
        self.env.process(self._plan(launches, times, done))
        self.env.run()
        for launch in launches:
            for piece in launch.pieces:
                del self.machine.packer.transcripts[piece.job_id]
        return DrivenRun(times[0], times[1], done)

    def close(self) -> None:
        """Gives all pages back that launches have taken."""
        for pool, number in self._touched.items():
            self.executor.release(pool, self._scattered[pool][:number])

    def _plan(
        self, launches: Sequence[Launch], times: list[int], done: list[tuple[Launch, Span]]
    ) -> Generator[simpy.Event, Any, None]:
        """Issues a plan as the engine does."""
        issue_ns, host_ns = int(self.env.now), self.executor.prepare(launches)
        times += [issue_ns, host_ns]
        if wait_ns := due_ns(self.executor, host_ns):
            yield self.env.timeout(wait_ns)
        by_op = {launch.op: launch for launch in launches}
        for launch in launches:
            self.executor.run(launch, lambda span: done.append((by_op[span.op], span)))

    def _launches(self, shape: Shape) -> Iterator[Launch]:
        taken = 0
        jobs = [next(self._ids) for _ in shape.rows]
        pieces = []
        for job_id, rows in zip(jobs, shape.rows, strict=True):
            need = self.page.count(rows.tokens + rows.context)
            pieces.append(self._piece(job_id, rows, self._take(GPU, taken, need)))
            taken += need
        if pieces:
            slices = tuple(Slice(Job(p.job_id, 0), p.tokens) for p in pieces)
            yield Launch(Compute(slices), pieces=tuple(pieces))
        moved = 0
        for move in shape.moves:
            yield self._copy(move, taken + moved, moved)
            moved += move.pages

    def _piece(self, job_id: int, rows: ShapeRows, pages: Sequence[int]) -> Piece:
        """A job as its earlier launches have left it, with its context in pages."""
        known = rows.context + rows.tokens
        job = self.machine.packer.transcripts[job_id] = Transcript(self._prompt[:known])
        job.follow(pages[: self.page.count(rows.context)])
        return Piece(job_id, rows.tokens, rows.context, rows.samples, pages)

    def _copy(self, move: Move, on_gpu: int, on_host: int) -> Launch:
        owner = next(self._ids)
        gpu_pages = self._take(GPU, on_gpu, move.pages)
        host_pages = self._take(HOST, on_host, move.pages)
        gpu, host = kv_place(owner), kv_place(owner, Tier.HOST)
        nbytes = move.pages * self.page.nbytes
        if move.to_host:
            return Launch(Copy(gpu, host), (), (), nbytes, gpu_pages, host_pages)
        return Launch(Copy(host, gpu), (), (), nbytes, host_pages, gpu_pages)

    def _take(self, pool: Pool, first: int, number: int) -> Sequence[int]:
        pages: list[int] = self._scattered[pool][first : first + number]
        assert len(pages) == number, f"a shape needs more pages than {pool} has"
        if first + number > (touched := self._touched[pool]):
            self.machine.arenas[pool].hold(pages[max(0, touched - first) :])
            self._touched[pool] = first + number
        return pages


@contextmanager
def driving(
    env: simpy.Environment,
    executor: Executor,
    machine: ServingMachine,
    seed: int = 0,
    max_tokens: int = 2048,
) -> Iterator[Driver]:
    """Opens a Driver and closes it with the block.

    Args:
        env: See Driver, as all others.
        executor: Runs the launches.
        machine: Serves on device 0.
        seed: Of the synthetic prompts and page tables.
        max_tokens: Most tokens that a launch may compute.

    Yields:
        The driver.
    """
    driver = Driver(env, executor, machine, seed, max_tokens)
    try:
        yield driver
    finally:
        driver.close()
