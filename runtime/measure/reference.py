"""Fixed work that shows the machine's speed: the drift probe, and the reference works of a pace."""

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
from engine.contract.regions import PageSize, Work
from models.spec import ModelSpec
from runtime.measure.driver import driving
from runtime.measure.shapes import probes
from runtime.serving.machine import GPU, ServingMachine
from runtime.training.optimizer import Optimizer
from runtime.training.trainer import build_trainee
from runtime.training.units import Units
from traces.training.recipe import Recipe

LOOK_S = 0.5  # long against the swings of a shared machine's speed, which take a tenth of it
MIN_ROUNDS = 16  # however long they take


def probe(
    env: simpy.Environment,
    executor: Executor,
    machine: ServingMachine,
    look_s: float = LOOK_S,
    min_rounds: int = MIN_ROUNDS,
) -> dict[str, float]:
    """Times the probe shapes in rounds; the first eighth of the rounds warms up.

    The shapes take turns, as launches do in a replay: one shape alone, back to back, runs up to
    twice as fast from its caches and says little about the machine. All pages are free before and
    after.

    Args:
        env: A clock of its own: a replay starts at time 0.
        executor: An executor of the replay's class over `machine`, on that clock.
        machine: A machine that serves on device 0.
        look_s: Real seconds of rounds.
        min_rounds: Rounds in any case.

    Returns:
        Median seconds by the name of the shape.
    """
    rounds, until_s = list[dict[str, int]](), time.perf_counter() + look_s
    with driving(env, executor, machine) as driver:
        shapes = probes(driver.limits, driver.page)
        while len(rounds) < min_rounds or time.perf_counter() < until_s:
            rounds.append({name: driver.run(shape).compute_ns for name, shape in shapes.items()})
    kept = rounds[len(rounds) // 8 :]
    return {name: median(taken_ns[name] for taken_ns in kept) / 1e9 for name in shapes}


def probe_plainly(look_s: float = LOOK_S, min_rounds: int = MIN_ROUNDS) -> dict[str, float]:
    """Times a product and a copy beyond any cache: the probe of a machine that serves nothing.

    Args:
        look_s: Real seconds of rounds; the first eighth of the rounds warms up.
        min_rounds: Rounds in any case.

    Returns:
        Median seconds of thread time by the name of the work.
    """
    rows = torch.zeros(512, 1024)
    square, far = torch.zeros(1024, 1024), torch.zeros(1 << 22)
    works = {"product": lambda: rows @ square, "copy": far.clone}
    rounds, until_s = list[dict[str, float]](), time.perf_counter() + look_s
    while len(rounds) < min_rounds or time.perf_counter() < until_s:
        rounds.append({name: _taken_s(work) for name, work in works.items()})
    kept = rounds[len(rounds) // 8 :]
    return {name: median(taken[name] for taken in kept) for name in works}


def _taken_s(work: Callable[[], object]) -> float:
    began_ns = time.thread_time_ns()
    work()
    return (time.thread_time_ns() - began_ns) / 1e9


def ratios(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Compares two probes of one machine.

    Args:
        before: Seconds by name, before a run.
        after: Seconds by name, after it.

    Returns:
        By name, the factor by which the work took longer after the run.
    """
    return {name: after[name] / before[name] for name in before}


# ---- reference works of serving
DECODES, CONTEXT, PROMPT_TOKENS, PAGE_TOKENS = 8, 200, 128, 16
WINDOW = 5  # readings whose median counts
EVERY_NS = 25_000_000  # of work between two readings, at the least
SHARE = 5  # the work between is at least so many times the reading


class Yardstick(Protocol):
    """A fixed piece of work; `tokens` is its size."""

    @property
    def tokens(self) -> int: ...

    def timed_ns(self) -> int:
        """Times the work once.

        Returns:
            Thread CPU time in ns.
        """
        ...


class TimedWork:
    """A Yardstick by its `work`."""

    tokens: int

    def work(self) -> object:
        """Does the work once.

        Returns:
            Its results, equal every time.

        Raises:
            NotImplementedError: always; each work overrides this method.
        """
        raise NotImplementedError

    def timed_ns(self) -> int:
        """See Yardstick."""
        start = time.thread_time_ns()
        self.work()
        return time.thread_time_ns() - start


class Reference(TimedWork):
    """One step of equal jobs on the served model: a launch as replays have them.

    The step takes the path of every launch, packing included, over the served weights: under a
    stream through memory on the other core, a smaller model's step was slowed by 4 % more than
    launches of this one.
    """

    def __init__(
        self, model: Any, spec: ModelSpec, jobs: int, context: int, tokens: int = 1
    ) -> None:
        """
        Args:
            model: The served Hugging Face model.
            spec: Its spec.
            jobs: Jobs of the step.
            context: Tokens of each job in the KV before the step.
            tokens: Tokens that each job computes: 1 is a decode.
        """
        page = PageSize.of(spec, PAGE_TOKENS)
        pages = page.count(context + tokens)
        prompt = [i % spec.vocab_size for i in range(context + tokens)]
        prompts: dict[int, Sequence[int]] = dict.fromkeys(range(jobs), prompt)
        self._machine = ServingMachine(model, spec, page, {GPU: jobs * pages}, prompts)
        tables = [list(range(i * pages, (i + 1) * pages)) for i in range(jobs)]
        pieces = tuple(Piece(i, tokens, context, True, table) for i, table in enumerate(tables))
        slices = tuple(Slice(Job(i, 0), tokens) for i in range(jobs))
        self._launch = Launch(Compute(slices), pieces=pieces)
        self.jobs, self.tokens = jobs, jobs * tokens

    def work(self) -> list[int]:
        """Does the step.

        Returns:
            The sampled token of each job, equal every time.
        """
        self._machine.execute(self._machine.prepare(self._launch))
        return [self._undone(job_id) for job_id in range(self.jobs)]

    def _undone(self, job_id: int) -> int:
        job = self._machine.packer.transcripts[job_id]
        job.tickets.clear()
        return job.tokens.pop()


def references(model: Any, spec: ModelSpec) -> tuple[Reference, Reference]:
    """Makes the two reference works of serving.

    Args:
        model: The served Hugging Face model.
        spec: Its spec; of few positions, the works are shorter.

    Returns:
        A decode step of eight jobs, and a prefill of 128 tokens.
    """
    context = min(CONTEXT, spec.max_positions - 1)
    tokens = min(PROMPT_TOKENS, spec.max_positions)
    return Reference(model, spec, DECODES, context), Reference(model, spec, 1, 0, tokens)


def settled_ns(works: Sequence[Yardstick], rounds: int = 10 * WINDOW) -> tuple[int, ...]:
    """Times works in turns until they are warm: their nominal times.

    Args:
        works: The reference works of one clock.
        rounds: Rounds that count; as many before them warm up.

    Returns:
        Median thread time in ns, per work.
    """
    taken_ns = [[work.timed_ns() for work in works] for _ in range(2 * rounds)][rounds:]
    return tuple(round(median(times_ns)) for times_ns in zip(*taken_ns, strict=True))


class Gauge:
    """The slowdown of one reference work against its nominal time."""

    def __init__(self, nominal_ns: int, work: Yardstick) -> None:
        """
        Args:
            nominal_ns: Thread time of the work on the nominal machine.
            work: The reference work.

        Raises:
            ValueError: `nominal_ns` is below 1.
        """
        if nominal_ns < 1:
            raise ValueError(f"the reference work's nominal time is {nominal_ns} ns: at least 1")
        self.nominal_ns, self._work = nominal_ns, work
        self._times_ns: deque[int] = deque(maxlen=WINDOW)
        self.last_ns, self.slowdown = 0, 1.0

    def measure(self) -> None:
        """Times the work once."""
        self.note(self._work.timed_ns())

    def note(self, taken_ns: int) -> None:
        """Counts a reading; `slowdown` is above one on a machine slower than nominal.

        Args:
            taken_ns: Thread time of the work.
        """
        self._times_ns.append(taken_ns)
        self.last_ns, self.slowdown = taken_ns, median(self._times_ns) / self.nominal_ns

    def nominal_of(self, tokens: int) -> float:
        """Scales the nominal time of the work.

        Args:
            tokens: Tokens of this kind of work.

        Returns:
            Their nominal time in ns.
        """
        return tokens * self.nominal_ns / self._work.tokens


class ClockPace:
    """Turns thread time into time of a machine on which the reference works take `nominal_ns`.

    The works, decodes and a prompt, are timed after every EVERY_NS of work (more where they take
    long themselves). They are two, because a neighbour on the machine slows them by different
    factors: decodes wait for memory, prompts compute. Beside an hour of busy neighbours, sums over
    20 s of hybrid launches wandered by 1.9 % against the decode step alone and by 0.6 % against
    both works; sums of 400-token prompts wandered by 3.7 % and 1.5 % (standard deviations).
    """

    def __init__(self, nominal_ns: Sequence[int], works: Sequence[Yardstick]) -> None:
        """
        Args:
            nominal_ns: Nominal thread time of each work.
            works: The decode step, then the prompt.

        Raises:
            ValueError: A nominal time is below 1.
        """
        self._decode, self._prompt = map(Gauge, nominal_ns, works)
        self._since_ns = 0
        for _ in range(3 * WINDOW):  # warms up; the last ones stay
            self.measure()

    @property
    def factor(self) -> float:
        """The factor of all time outside launches; above one on a machine faster than nominal."""
        return 1 / self._decode.slowdown

    def factor_of(self, slices: Sequence[Slice]) -> float:
        """Weighs the slowdowns of decodes and prompts by their nominal times in a launch.

        Args:
            slices: The slices of a Compute; none for any other operation.

        Returns:
            Nominal ns per measured ns of the launch.
        """
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
        """Counts work that has been done; call it once per piece of work.

        Args:
            worked_ns: Time of the work.

        Returns:
            Whether the reference works are to be timed again.
        """
        self._since_ns += worked_ns
        look_ns = self._decode.last_ns + self._prompt.last_ns
        return self._since_ns >= max(EVERY_NS, SHARE * look_ns)


# ---- reference works of training
ROWS = 96  # tokens of the one sequence that goes through a layer
NUMBERS = 1 << 20  # of an update: more than caches hold
VOCABULARY = 64  # small: only the layer of the model is timed


class UnitWork(TimedWork):
    """Forward and backward of one layer as wide as the trainee's, on weights of its own."""

    tokens = ROWS

    def __init__(self, spec: ModelSpec, recipe: Recipe) -> None:
        """
        Args:
            spec: The trainee's spec.
            recipe: Its recipe, of which the dtype counts.
        """
        small = replace(spec, num_layers=1, vocab_size=VOCABULARY)
        model = build_trainee(small, Recipe(dtype=recipe.dtype))
        self._units, rows = Units(model), min(ROWS, spec.max_positions)
        parameters = list(model.parameters())
        self._ids = torch.zeros(1, rows, dtype=torch.int64)
        shape, dtype = (1, rows, spec.hidden_size), getattr(torch, recipe.dtype)
        self._hidden = torch.linspace(-1, 1, rows * spec.hidden_size, dtype=dtype).view(shape)
        self._hidden.requires_grad_()
        self._output_gradient = torch.ones(shape, dtype=dtype)
        self._inputs = [*(parameters[p] for p in self._units.parameters[1]), self._hidden]

    def work(self) -> Sequence[torch.Tensor]:
        """Runs the layer forward and backward.

        Returns:
            The gradients of its parameters and of its input, equal every time.
        """
        with torch.enable_grad():
            out = self._units.run(1, self._hidden, self._ids)
            return torch.autograd.grad(out, self._inputs, self._output_gradient)


class UpdateWork(TimedWork):
    """AdamW over NUMBERS parameters."""

    tokens = NUMBERS

    def __init__(self, recipe: Recipe) -> None:
        """
        Args:
            recipe: The trainee's recipe, of which the dtype counts.
        """
        dtype = getattr(torch, recipe.dtype)
        self._optimizer = Optimizer(Recipe(dtype=recipe.dtype), num_steps=1)
        self._weights = [torch.ones(NUMBERS, dtype=dtype)]
        self._gradients = [torch.full((NUMBERS,), 1e-3, dtype=dtype)]
        count = self._optimizer.num_sections
        self._sections = [[torch.full((NUMBERS,), 1e-3)] for _ in range(count)]

    def work(self) -> None:
        """Does one update."""
        with torch.no_grad():
            self._optimizer.update(0, self._weights, self._gradients, self._sections, None)


def training_references(spec: ModelSpec, recipe: Recipe) -> tuple[UnitWork, UpdateWork]:
    """Makes the two reference works of training: products compute, updates wait for memory.

    Args:
        spec: The trainee's spec.
        recipe: Its recipe.

    Returns:
        The work of a unit, and the work of an update.
    """
    return UnitWork(spec, recipe), UpdateWork(recipe)


class TrainingClockPace(ClockPace):
    """A ClockPace by the works of a unit and an update. All but updates go by the unit's."""

    def factor_of(self, slices: Sequence[Slice]) -> float:
        """See ClockPace: of an update its own slowdown, of all else the unit's.

        Args:
            slices: The slices of a Compute; none for any other operation.

        Returns:
            Nominal ns per measured ns of the launch.
        """
        if any(piece.work is Work.UPDATE for piece in slices):
            return 1 / self._prompt.slowdown
        return self.factor
