"""The yardstick of paced clocks: a fixed piece of work that tells how fast the machine is just now.

A shared machine changes its speed by a third within seconds, for whatever runs on it. A duration
counted in reference works instead of nanoseconds does not: both are slowed alike.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import Any

from engine.executor import Launch, Piece
from engine.job import Job
from engine.model import ModelSpec
from engine.plan import Compute, Slice
from runtime.machine import GPU, Machine

JOBS, CONTEXT, PAGE_TOKENS = 8, 200, 16
WINDOW = 7  # readings whose median counts
EVERY_NS = 25_000_000  # of work between two readings, at the least
SHARE = 10  # the work between is at least so many times the reading


class Reference:
    """One decode step of eight jobs on the model that is served: what replays are made of.

    It goes the way of every launch, packing included, over the same weights. How much a busy
    neighbour slows a piece of work depends on what it is made of: under a stream through memory on
    the other core, a smaller model's step was slowed by 4 % more than launches of this one, and
    these by 1 % more or less than each other (prefills of 400 tokens by 5 % less).
    """

    def __init__(self, model: Any, spec: ModelSpec) -> None:
        context = min(CONTEXT, spec.max_positions - 1)
        pages = -(-(context + 1) // PAGE_TOKENS)
        prompt = [i % spec.vocab_size for i in range(context + 1)]
        prompts: dict[int, Sequence[int]] = dict.fromkeys(range(JOBS), prompt)
        self._machine = Machine(model, spec, PAGE_TOKENS, {GPU: JOBS * pages}, prompts)
        tables = [list(range(i * pages, (i + 1) * pages)) for i in range(JOBS)]
        pieces = tuple(Piece(i, 1, context, True, table) for i, table in enumerate(tables))
        slices = tuple(Slice(Job(i, 0), 1) for i in range(JOBS))
        self._launch = Launch(Compute(slices), pieces=pieces)

    def work(self) -> list[int]:
        """The step; returns its tokens, the same every time."""
        self._machine.execute(self._machine.prepare(self._launch))
        return [self._undone(job_id) for job_id in range(JOBS)]

    def timed_ns(self) -> int:
        """What the step takes just now, in thread time."""
        start = time.thread_time_ns()
        self.work()
        return time.thread_time_ns() - start

    def _undone(self, job_id: int) -> int:
        job = self._machine.packer.transcripts[job_id]
        job.tickets.clear()
        return job.tokens.pop()


def settled_ns(reference: Reference, rounds: int = 10 * WINDOW) -> int:
    """What the work takes once it is warm: the median of the second half of many rounds."""
    return round(median([reference.timed_ns() for _ in range(2 * rounds)][rounds:]))


class Pace:
    """Turns thread time into time of a machine on which the reference work takes `nominal_ns`.

    The reference is timed after every EVERY_NS of work (more where it takes long itself), once;
    the median of the last readings counts, so a single hiccup does not.
    """

    def __init__(self, nominal_ns: int, reference: Reference) -> None:
        if nominal_ns < 1:
            raise ValueError(f"the reference work's nominal time is {nominal_ns} ns: at least 1")
        self._nominal_ns, self._reference = nominal_ns, reference
        self._times_ns: deque[int] = deque(maxlen=WINDOW)
        self._since_ns = 0
        for _ in range(3 * WINDOW):  # warms up; the last ones stay
            self.measure()

    @property
    def factor(self) -> float:
        """Above one on a machine faster than nominal."""
        return self._nominal_ns / median(self._times_ns)

    def measure(self) -> None:
        """Times the reference work once."""
        self._times_ns.append(self._reference.timed_ns())
        self._since_ns = 0

    def is_due(self, worked_ns: int) -> bool:
        """Whether enough work has passed, with this much more, to look again."""
        self._since_ns += worked_ns
        return self._since_ns >= max(EVERY_NS, SHARE * self._times_ns[-1])
