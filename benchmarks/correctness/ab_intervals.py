"""Claim: the intervals of a comparison of settings say what is chance.

Runs of the real engine over the virtual executor, in process: Poisson arrivals, lengths of prompts
and outputs drawn per seed, a launch takes so much and so much more for each token. The load is the
rate over that served when all requests are there at once.

1. Equal runs: every difference is 0, and no interval leaves 0 out.
2. One policy against itself, 1,000 comparisons at 50 and at 80 % load: GROUP seeds against GROUP
   others (Welch), and GROUP pairs of independent seeds (paired t). The 95 % interval of mean TTFT,
   TPOT and E2E must leave 0 out in 3 to 8 %. The seeds of a comparison are disjoint. All come from
   one pool, reshuffled until there are enough comparisons: they are not all independent, which
   widens the spread of the share and leaves its mean.
3. Durations 3 % longer, SEEDS seeds a side of 200 requests each, paired: each of the three means
   must be told worse in 80 % of the trials, whose seeds are disjoint. Launches of both sides vary
   at random by 20 %, each by itself, so that pairs are not two times one run.
4. For one comparison of each kind `against`, which `tandem compare` uses, gives those intervals.
5. One pair of runs above 90 % load says that its intervals need seeds.
6. Printed without a bar: one pair of reruns of one trace, whose launches vary at random. Its
   intervals are over blocks of requests; how often do they leave 0 out?

The value is the share of 2. that lies farthest from 5 %.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from analysis.ab import told
from analysis.ab.differences import BUSY, LATENCIES, Against, against
from analysis.ab.groups import RunGroup
from analysis.ab.intervals import Interval, over_groups, over_pairs
from analysis.metrics import latencies
from analysis.run import Run
from engine.contract.executor import Launch
from engine.contract.regions import Tier
from engine.loop.engine import Engine
from engine.loop.state import VirtualClock
from engine.results.recorder import Recorder
from engine.results.schema import TABLES
from policies.composed import Composed
from policies.kv.paged_restart import PagedRestart
from policies.scheduling.chunked_prefill import ChunkedPrefill
from sim.executor import SimExecutor
from tests.support.queueing import PAGE, Constant
from traces.serving.request import Request

LOADS, LOW, HIGH = (0.5, 0.8), 0.03, 0.08
POOL, COMPARISONS, GROUP = 4000, 1000, 10
SLOWER, SEEDS, TRIALS, DETECTED = 1.03, 20, 25, 0.8
REQUESTS = 80
PAIRS, PAIR_REQUESTS, VARIES = 200, 200, 0.2  # standard deviation of a launch's log duration
LAUNCH_NS, TOKEN_NS = 4_000_000, 50_000
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Slowed(Constant):
    """Launches that are longer by a factor."""

    factor: float = 1.0

    def compute_ns(self, launch: Launch) -> int:
        return round(self.factor * super().compute_ns(launch))


@dataclass(frozen=True)
class Varied(Slowed):
    """Launches whose durations vary at random."""

    rng: np.random.Generator = field(default_factory=np.random.default_rng)

    def compute_ns(self, launch: Launch) -> int:
        return round(self.rng.lognormal(0.0, VARIES) * super().compute_ns(launch))


def requests_of(seed: int, rate: float, count: int) -> list[Request]:
    """Requests of one seed; all at once at an infinite rate."""
    rng = np.random.default_rng(seed)
    gaps_ns = rng.exponential(1e9 / rate, count) if np.isfinite(rate) else np.zeros(count)
    arrivals = np.cumsum(gaps_ns).astype(int).tolist()
    prompts, outputs = rng.integers(8, 129, count).tolist(), rng.integers(2, 17, count).tolist()
    return [Request(i, *row) for i, row in enumerate(zip(arrivals, prompts, outputs, strict=True))]


def run(
    requests: Sequence[Request],
    factor: float = 1.0,
    keeps_steps: bool = False,
    cost: Constant | None = None,
) -> Run:
    """A run of the engine, as `load` would read it."""
    env, recorder = VirtualClock(), Recorder(keeps_steps=keeps_steps)
    policy = Composed(ChunkedPrefill(128, 8), PagedRestart(watermark=0.0))
    cost = cost or Slowed(LAUNCH_NS, TOKEN_NS, factor=factor)
    room = {(Tier.GPU, 0): 256 * PAGE.nbytes}
    engine = Engine(env, policy, SimExecutor(env, cost), room, PAGE, depth=1, recorder=recorder)
    engine.replay(iter(requests))
    empty = {name: schema.empty_table() for name, schema in TABLES.items()}
    frames = {n: table.to_pandas() for n, table in (empty | recorder.tables()).items()}
    return Run(Path("run"), {"backend": "sim"}, {"seed": 0}, **frames)


def means(
    seed: int, rate: float, count: int, factor: float = 1.0, varies: bool = False
) -> list[float]:
    """Mean TTFT, TPOT and E2E of a run, in seconds; launches may vary by seed and factor."""
    rng = np.random.default_rng([seed, round(1000 * factor)])
    cost = Varied(LAUNCH_NS, TOKEN_NS, factor=factor, rng=rng) if varies else None
    rows = latencies(run(requests_of(seed, rate, count), factor, cost=cost))
    return [float(np.nanmean(rows[f"{metric}_s"])) for metric in LATENCIES]


def one_pair(rate: float, factor: float, count: int) -> Against:
    """A run of one seed against a slower one."""
    requests = requests_of(0, rate, count)
    sides = (run(requests, slowed, keeps_steps=True) for slowed in (1.0, factor))
    a, b = (RunGroup(name, {("0", 0): side}) for name, side in zip("AB", sides, strict=True))
    return against(a, b)


def alarms_of_one_pair(rate: float, pairs: int) -> Floats:
    """The share of pairs of reruns whose interval leaves 0 out, per metric."""
    found = []
    for seed in range(pairs):
        requests = requests_of(seed, rate, PAIR_REQUESTS)
        sides = []
        for i, name in enumerate("AB"):
            cost = Varied(LAUNCH_NS, TOKEN_NS, rng=np.random.default_rng([seed, i]))
            sides.append(RunGroup(name, {("0", 0): run(requests, cost=cost)}))
        rows = against(*sides)
        found.append([getattr(_interval(rows, m), "excludes_zero", False) for m in LATENCIES])
    shares: Floats = np.mean(found, axis=0)
    return shares


def equal_runs(rate: float, count: int) -> bool:
    """Whether equal runs differ in nothing, and no interval says otherwise."""
    found = one_pair(rate, 1.0, count)
    rows = [row.interval for row in found.rows]
    differences = [found.requests[f"{metric}_difference_s"].dropna() for metric in LATENCIES]
    return (
        all(row.value == 0 and not row.excludes_zero for row in rows)
        and sum(row.is_known for row in rows) >= 3 * 4
        and not any(values.any() for values in differences)
    )


Method = Callable[[Floats, Floats], Interval]
METHODS: dict[str, Method] = {"Welch": over_groups, "paired t": lambda a, b: over_pairs(b - a)}


def false_alarms(pool: Floats, comparisons: int, method: Method, seed: int) -> Floats:
    """The share of comparisons of disjoint seeds whose interval leaves 0 out, per metric."""
    rng, found = np.random.default_rng(seed), list[list[bool]]()
    while len(found) < comparisons:
        order = rng.permutation(len(pool))
        for at in range(0, len(pool) - 2 * GROUP + 1, 2 * GROUP):
            a, b = pool[order[at : at + GROUP]], pool[order[at + GROUP : at + 2 * GROUP]]
            columns = range(len(LATENCIES))
            found.append([method(a[:, i], b[:, i]).excludes_zero for i in columns])
    shares: Floats = np.mean(found[:comparisons], axis=0)
    return shares


def is_as_compared(rate: float) -> bool:
    """Whether `against` gives the intervals of 2. and 3. for the same runs."""
    seeds = range(2 * GROUP)
    plain, slow = (
        {(str(seed), 0): run(requests_of(seed, rate, REQUESTS), factor, True) for seed in seeds}
        for factor in (1.0, SLOWER)
    )
    halves = [*plain.items()][:GROUP], [*plain.items()][GROUP:]
    apart = against(*(RunGroup(name, dict(h)) for name, h in zip("AB", halves, strict=True)))
    paired = against(RunGroup("A", plain), RunGroup("B", slow))
    pool = np.array([means(seed, rate, REQUESTS) for seed in seeds])
    other = np.array([means(seed, rate, REQUESTS, SLOWER) for seed in seeds])
    ends = list[tuple[Interval | None, Interval]]()
    for i, metric in enumerate(LATENCIES):
        ends.append((_interval(apart, metric), over_groups(pool[:GROUP, i], pool[GROUP:, i])))
        ends.append((_interval(paired, metric), over_pairs(other[:, i] - pool[:, i])))
    return all(
        x is not None and np.allclose((x.low, x.high), (y.low, y.high), rtol=1e-9, atol=1e-12)
        for x, y in ends
    )


def _interval(found: Against, metric: str) -> Interval | None:
    row = found.row(metric)
    return row.interval if row else None


def detections(plain: Floats, slow: Floats, trials: int) -> Floats:
    """The share of trials that tell the slower policy worse, per metric."""
    found = []
    for trial in range(trials):
        own = slice(trial * SEEDS, (trial + 1) * SEEDS)
        rows = [over_pairs(slow[own, i] - plain[own, i]) for i in range(len(LATENCIES))]
        found.append([row.low > 0 for row in rows])
    shares: Floats = np.mean(found, axis=0)
    return shares


def main() -> int:
    is_quick = "--quick" in sys.argv[1:]
    pool_size, trials = (400, 10) if is_quick else (POOL, TRIALS)
    whole = run(requests_of(0, np.inf, 1000))
    finish = whole.requests["finish_ns"]
    capacity = len(finish) / (float(finish.max()) / 1e9)
    print(f"capacity {capacity:.2f} requests/s; seeds a side {GROUP}; requests a run {REQUESTS}")
    print(f"{'':<34}" + "".join(f"{name:>9}" for name in LATENCIES))
    shares, found = list[float](), list[float]()
    for load in LOADS:
        rate = load * capacity
        pool = np.array([means(seed, rate, REQUESTS) for seed in range(pool_size)])
        for name, method in METHODS.items():
            row = false_alarms(pool, COMPARISONS, method, seed=0)
            shares += row.tolist()
            _show(f"load {load:.0%}: excludes 0, {name}", row)
        count = trials * SEEDS
        sides = [
            np.array([means(s, rate, PAIR_REQUESTS, factor, varies=True) for s in range(count)])
            for factor in (1.0, SLOWER)
        ]
        row = detections(*sides, trials)
        found += row.tolist()
        _show(f"load {load:.0%}: 3 % slower is told", row)
        row = alarms_of_one_pair(rate, PAIRS // 10 if is_quick else PAIRS)
        _show(f"load {load:.0%}: excludes 0, one pair", row)
    is_equal = equal_runs(LOADS[0] * capacity, REQUESTS)
    print(f"equal runs: {'every difference is 0' if is_equal else 'a difference is told'}")
    is_same = is_as_compared(LOADS[0] * capacity)
    print(f"intervals of `tandem compare`: {'those above' if is_same else 'others'}")
    high = one_pair(0.95 * capacity, SLOWER, 500)
    says = high.needs_seeds and "The intervals need seeds" in told.table(high)
    print(f"one pair, load {high.load:.1%} (told above {BUSY:.0%}): needs seeds: {says}")
    farthest = max(shares, key=lambda share: abs(share - 0.05))
    passed = all(LOW <= share <= HIGH for share in shares) and min(found) >= DETECTED
    passed = passed and is_equal and is_same and says
    verdict = "pass" if passed else "fail"
    print(f"ab_intervals {100 * farthest:.2g} % {100 * LOW:g}-{100 * HIGH:g} {verdict}")
    return int(not passed)


def _show(name: str, row: Floats) -> None:
    print(f"{name:<34}" + "".join(f"{100 * share:>7.1f} %" for share in row))


if __name__ == "__main__":
    sys.exit(main())
