"""The yardstick of paced clocks: a fixed piece of work that tells how fast the machine is just now.

A shared machine changes its speed by a third within seconds, for whatever runs on it. A duration
counted in reference works instead of nanoseconds does not: both are slowed alike.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from statistics import median

from engine.executor import Launch, Piece
from engine.job import Job
from engine.model import ModelSpec
from engine.plan import Compute, Slice
from runtime.machine import GPU, Machine
from runtime.model import build_model

YARDSTICK = ModelSpec("yardstick", "llama", 4, 128, 4, 4, 32, 352, 512, 512, dtype="float32")
JOBS, CONTEXT, PAGE_TOKENS = 8, 200, 16


class Reference:
    """One decode step of eight jobs on a small model: what replays are made of; 1 to 3 ms.

    It goes the way of every launch, packing included. Bare tensor operations of the same sizes
    followed the machine's moods less well: Python, dispatch and kernels are not slowed alike.
    """

    def __init__(self) -> None:
        pages = -(-(CONTEXT + 1) // PAGE_TOKENS)
        prompt = list(range(CONTEXT + 1))
        prompts: dict[int, Sequence[int]] = dict.fromkeys(range(JOBS), prompt)
        model = build_model(YARDSTICK, seed=0)
        self._machine = Machine(model, YARDSTICK, PAGE_TOKENS, {GPU: JOBS * pages}, prompts)
        tables = [list(range(i * pages, (i + 1) * pages)) for i in range(JOBS)]
        pieces = tuple(Piece(i, 1, CONTEXT, True, table) for i, table in enumerate(tables))
        slices = tuple(Slice(Job(i, 0), 1) for i in range(JOBS))
        self._launch = Launch(Compute(slices), pieces=pieces)

    def work(self) -> list[int]:
        """The step; returns its tokens, the same every time."""
        self._machine.execute(self._machine.prepare(self._launch))
        return [self._undone(job_id) for job_id in range(JOBS)]

    def _undone(self, job_id: int) -> int:
        job = self._machine.packer.transcripts[job_id]
        job.tickets.clear()
        return job.tokens.pop()


class Pace:
    """Turns thread time into time of a machine on which the reference work takes `nominal_ns`.

    The reference is timed after every `every_ns` of work, once; the median of the last `window`
    counts, so a single hiccup does not.
    """

    def __init__(self, nominal_ns: int, every_ns: int = 25_000_000, window: int = 7) -> None:
        if nominal_ns < 1:
            raise ValueError(f"the reference work's nominal time is {nominal_ns} ns: at least 1")
        self._nominal_ns, self._every_ns = nominal_ns, every_ns
        self._reference = Reference()
        self._times_ns: deque[int] = deque(maxlen=window)
        self._since_ns = 0
        for _ in range(3 * window):  # warms up; the last ones stay
            self.measure()

    @property
    def factor(self) -> float:
        """Above one on a machine faster than nominal."""
        return self._nominal_ns / median(self._times_ns)

    def measure(self) -> None:
        """Times the reference work once."""
        start = time.thread_time_ns()
        self._reference.work()
        self._times_ns.append(time.thread_time_ns() - start)
        self._since_ns = 0

    def is_due(self, worked_ns: int) -> bool:
        """Whether enough work has passed, with this much more, to look again."""
        self._since_ns += worked_ns
        return self._since_ns >= self._every_ns
