"""Fixed work that tells the machine's speed: the drift probe and the yardsticks of paced clocks."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any, Protocol

import simpy
import torch

from engine.contract.executor import Executor, Launch, Piece
from engine.contract.job import Job
from engine.contract.plan import Compute, Slice
from engine.contract.regions import Work
from models.spec import ModelSpec
from runtime.measure.driver import driving
from runtime.measure.shapes import probes
from runtime.serving.machine import GPU, ServingMachine
from runtime.training.optimizer import Optimizer
from runtime.training.trainer import build_trainee
from runtime.training.units import Units
from traces.training.recipe import Recipe

LOOK_S = 0.5  # a shared machine's speed wanders within a tenth of it: less would see mostly this
LEAST = 16  # rounds, however long they take


def probe(
    env: simpy.Environment,
    executor: Executor,
    machine: ServingMachine,
    look_s: float = LOOK_S,
    least: int = LEAST,
) -> dict[str, float]:
    """Median seconds of each probe launch over `look_s` of rounds; their first eighth warms up.

    The shapes take turns, as launches do in a replay: one shape alone, back to back, runs up to
    twice as fast from its caches and then says little about the machine. Takes an executor of the
    replay's own kind over the same machine, but on a clock of its own: a replay starts at time 0.
    Its pages are free before and after.
    """
    rounds, until_s = list[dict[str, int]](), time.perf_counter() + look_s
    with driving(env, executor, machine) as driver:
        shapes = probes(driver.limits, driver.page)
        while len(rounds) < least or time.perf_counter() < until_s:
            rounds.append({name: driver.run(shape).compute_ns for name, shape in shapes.items()})
    kept = rounds[len(rounds) // 8 :]
    return {name: median(taken_ns[name] for taken_ns in kept) / 1e9 for name in shapes}


def probe_plainly(look_s: float = LOOK_S, least: int = LEAST) -> dict[str, float]:
    """The same where nothing is served: a product and a copy of fixed sizes, beyond any cache."""
    rows = torch.zeros(512, 1024)
    square, far = torch.zeros(1024, 1024), torch.zeros(1 << 22)
    works = {"product": lambda: rows @ square, "copy": far.clone}
    rounds, until_s = list[dict[str, float]](), time.perf_counter() + look_s
    while len(rounds) < least or time.perf_counter() < until_s:
        rounds.append({name: _taken_s(work) for name, work in works.items()})
    kept = rounds[len(rounds) // 8 :]
    return {name: median(taken[name] for taken in kept) for name in works}


def _taken_s(work: Callable[[], object]) -> float:
    began_ns = time.thread_time_ns()
    work()
    return (time.thread_time_ns() - began_ns) / 1e9


def ratios(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """By what factor each probe took longer after the run than before it."""
    return {name: after[name] / before[name] for name in before}


DECODES, CONTEXT, PROMPT_TOKENS, PAGE_TOKENS = 8, 200, 128, 16
WINDOW = 5  # readings whose median counts
EVERY_NS = 25_000_000  # of work between two readings, at the least
SHARE = 5  # the work between is at least so many times the reading


class Yardstick(Protocol):
    """A fixed piece of work; `tokens` is how large it is."""

    @property
    def tokens(self) -> int: ...

    def timed_ns(self) -> int:
        """What it takes just now, in thread time."""


class Reference:
    """One step of alike jobs on the model that is served: what replays are made of.

    Each of `jobs` takes `tokens` behind a context of `context`. It goes the way of every launch,
    packing included, over the same weights: under a stream through memory on the other core, a
    smaller model's step was slowed by 4 % more than launches of this one.
    """

    def __init__(
        self, model: Any, spec: ModelSpec, jobs: int, context: int, tokens: int = 1
    ) -> None:
        pages = -(-(context + tokens) // PAGE_TOKENS)
        prompt = [i % spec.vocab_size for i in range(context + tokens)]
        prompts: dict[int, Sequence[int]] = dict.fromkeys(range(jobs), prompt)
        self._machine = ServingMachine(model, spec, PAGE_TOKENS, {GPU: jobs * pages}, prompts)
        tables = [list(range(i * pages, (i + 1) * pages)) for i in range(jobs)]
        pieces = tuple(Piece(i, tokens, context, True, table) for i, table in enumerate(tables))
        slices = tuple(Slice(Job(i, 0), tokens) for i in range(jobs))
        self._launch = Launch(Compute(slices), pieces=pieces)
        self.jobs, self.tokens = jobs, jobs * tokens

    def work(self) -> list[int]:
        """The step; returns its tokens, the same every time."""
        self._machine.execute(self._machine.prepare(self._launch))
        return [self._undone(job_id) for job_id in range(self.jobs)]

    def timed_ns(self) -> int:
        """What the step takes just now, in thread time."""
        start = time.thread_time_ns()
        self.work()
        return time.thread_time_ns() - start

    def _undone(self, job_id: int) -> int:
        job = self._machine.packer.transcripts[job_id]
        job.tickets.clear()
        return job.tokens.pop()


def references(model: Any, spec: ModelSpec) -> tuple[Reference, Reference]:
    """The two kinds of work: a decode step of eight jobs, and 128 tokens of one prompt."""
    context = min(CONTEXT, spec.max_positions - 1)
    tokens = min(PROMPT_TOKENS, spec.max_positions)
    return Reference(model, spec, DECODES, context), Reference(model, spec, 1, 0, tokens)


def settled_ns(works: Sequence[Yardstick], rounds: int = 10 * WINDOW) -> tuple[int, ...]:
    """What each takes once it is warm, in turns: the median of the second half of many rounds."""
    taken_ns = [[work.timed_ns() for work in works] for _ in range(2 * rounds)][rounds:]
    return tuple(round(median(times_ns)) for times_ns in zip(*taken_ns, strict=True))


class Gauge:
    """How slow one reference work is just now, against its nominal time."""

    def __init__(self, nominal_ns: int, work: Yardstick) -> None:
        if nominal_ns < 1:
            raise ValueError(f"the reference work's nominal time is {nominal_ns} ns: at least 1")
        self.nominal_ns, self._work = nominal_ns, work
        self._times_ns: deque[int] = deque(maxlen=WINDOW)
        self.last_ns, self.slowdown = 0, 1.0

    def measure(self) -> None:
        """Times the work once."""
        self.note(self._work.timed_ns())

    def note(self, taken_ns: int) -> None:
        """Counts a reading; `slowdown` is above one on a machine slower than nominal."""
        self._times_ns.append(taken_ns)
        self.last_ns, self.slowdown = taken_ns, median(self._times_ns) / self.nominal_ns

    def nominal_of(self, tokens: int) -> float:
        """What so many tokens of this kind of work take nominally, in ns."""
        return tokens * self.nominal_ns / self._work.tokens


class ClockPace:
    """Turns thread time into time of a machine on which the reference works take `nominal_ns`.

    The works, decodes and a prompt, are timed after every EVERY_NS of work (more where they take
    long themselves). Two, because a neighbour slows them unlike: decodes wait for memory, prompts
    compute. In an hour of busy neighbours, sums over 20 s of mixed launches wandered by 1.9 %
    against the decode step alone and by 0.6 % against both, those of 400-token prompts by 3.7 and
    1.5 % (standard deviations; decodes 0.7 %).
    """

    def __init__(self, nominal_ns: Sequence[int], works: Sequence[Yardstick]) -> None:
        self._decode, self._prompt = map(Gauge, nominal_ns, works)
        self._since_ns = 0
        for _ in range(3 * WINDOW):  # warms up; the last ones stay
            self.measure()

    @property
    def factor(self) -> float:
        """Of what is not a launch; above one on a machine faster than nominal."""
        return 1 / self._decode.slowdown

    def factor_of(self, slices: Sequence[Slice]) -> float:
        """Of a launch: the slowdowns of decodes and prompts, by the time that each should take."""
        if not slices:
            return self.factor
        sizes = [piece.tokens for piece in slices]
        decodes = sizes.count(1)
        decode_ns = self._decode.nominal_of(decodes)
        prompt_ns = self._prompt.nominal_of(sum(sizes) - decodes)
        slowed_ns = decode_ns * self._decode.slowdown + prompt_ns * self._prompt.slowdown
        return (decode_ns + prompt_ns) / slowed_ns

    def measure(self) -> None:
        """Times each reference work once."""
        self._decode.measure()
        self._prompt.measure()
        self._since_ns = 0

    def is_due(self, worked_ns: int) -> bool:
        """Whether enough work has passed, with this much more, to look again."""
        self._since_ns += worked_ns
        look_ns = self._decode.last_ns + self._prompt.last_ns
        return self._since_ns >= max(EVERY_NS, SHARE * look_ns)


ROWS = 96  # tokens of the one sequence that goes through a layer
NUMBERS = 1 << 20  # of an update: more than caches hold
VOCABULARY = 64  # of a model of which only its layer is of use


class TimedWork:
    """A fixed piece of work; `tokens` is how large it is."""

    tokens: int

    def work(self) -> object:
        """Does it."""
        raise NotImplementedError

    def timed_ns(self) -> int:
        """What it takes just now, in thread time."""
        start = time.thread_time_ns()
        self.work()
        return time.thread_time_ns() - start


class UnitWork(TimedWork):
    """Forward and backward of one layer as wide as the trainee's, on weights of its own."""

    tokens = ROWS

    def __init__(self, spec: ModelSpec, recipe: Recipe) -> None:
        small = replace(spec, num_layers=1, vocab_size=VOCABULARY)
        model = build_trainee(small, Recipe(dtype=recipe.dtype))
        self._units, rows = Units(model), min(ROWS, spec.max_positions)
        parameters = list(model.parameters())
        self._ids = torch.zeros(1, rows, dtype=torch.int64)
        shape, dtype = (1, rows, spec.hidden_size), getattr(torch, recipe.dtype)
        self._hidden = torch.linspace(-1, 1, rows * spec.hidden_size, dtype=dtype).view(shape)
        self._hidden.requires_grad_()
        self._flow = torch.ones(shape, dtype=dtype)
        self._wanted = [*(parameters[p] for p in self._units.parameters[1]), self._hidden]

    def work(self) -> Sequence[torch.Tensor]:
        """The gradients, the same every time."""
        with torch.enable_grad():
            out = self._units.run(1, self._hidden, self._ids)
            return torch.autograd.grad(out, self._wanted, self._flow)


class UpdateWork(TimedWork):
    """AdamW over NUMBERS."""

    tokens = NUMBERS

    def __init__(self, recipe: Recipe) -> None:
        dtype = getattr(torch, recipe.dtype)
        self._optimizer = Optimizer(Recipe(dtype=recipe.dtype), num_steps=1)
        self._weights = [torch.ones(NUMBERS, dtype=dtype)]
        self._gradients = [torch.full((NUMBERS,), 1e-3, dtype=dtype)]
        count = self._optimizer.num_sections
        self._sections = [[torch.full((NUMBERS,), 1e-3)] for _ in range(count)]

    def work(self) -> None:
        """One update."""
        with torch.no_grad():
            self._optimizer.update(0, self._weights, self._gradients, self._sections, None)


def training_references(spec: ModelSpec, recipe: Recipe) -> tuple[UnitWork, UpdateWork]:
    """The two kinds of work, which a neighbour slows unlike: products compute, updates wait for
    memory."""
    return UnitWork(spec, recipe), UpdateWork(recipe)


class TrainingPace(ClockPace):
    """The pace of a clock by these two works. The host and all else goes by the unit's."""

    def factor_of(self, slices: Sequence[Slice]) -> float:
        """Of a launch."""
        if any(piece.work is Work.UPDATE for piece in slices):
            return 1 / self._prompt.slowdown
        return self.factor
