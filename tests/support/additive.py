"""A known engine whose launches add up, and the steps it would record on a noisy clock."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import pyarrow as pa

from engine.contract.regions import PageSize
from engine.results.schema import STEPS
from models.spec import ModelSpec
from sim.cost.tables import TableCost
from sim.fit.fit_tables import fit

MODEL = ModelSpec("toy", "llama", 4, 256, 8, 4, 32, 704, 2048, 4096, dtype="float32")
PAGE = PageSize.of(MODEL, 16)
US = 1000
Slices = Sequence[tuple[int, int]]


def truth_ns(slices: Slices, samples: int) -> float:
    """An engine that adds up: steps of 16 rows in its products, squares in its attention."""
    total = sum(n for n, _ in slices)
    ns = 900 * US + 25 * US * total + 60 * US * -(-total // 16) + 12 * US * samples
    for n, context in slices:
        if not context:
            ns += 30 * US + 0.02 * US * n * n
        elif n == 1:
            ns += 40 * US + 0.35 * US * context
        else:
            ns += 60 * US + 0.4 * US * context + 0.04 * US * n * (context + n / 2)
    return ns


def copy_ns(nbytes: int, contended: bool) -> float:
    return 20 * US + nbytes * (1.4 if contended else 1.0)


def host_ns(items: int, prompts: int = 0) -> float:
    return 80 * US + 9 * US * items + 120 * US * prompts


def shapes(rng: random.Random) -> Iterator[tuple[Slices, int]]:
    """A calibration grid, three times each, then a replay's worth of mixed steps."""
    for _ in range(3):
        for n in (1, 2, 4, 8, 16, 32, 64):
            for context in (16, 64, 256, 1024, 2000):
                yield [(1, context)] * n, n
        for n in (1, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512):
            yield [(n, 0)], 1
            yield [(n, 0)], 0
        for n in (16, 64, 256):
            for context in (64, 256, 1024):
                yield [(n, context)], rng.randrange(2)
    yield from pilot(rng, 500)


def pilot(rng: random.Random, steps: int) -> Iterator[tuple[Slices, int]]:
    for _ in range(steps):
        decodes = rng.randrange(0, 48)
        slices = [(1, rng.randrange(8, 1800)) for _ in range(decodes)]
        samples = decodes
        if rng.random() < 0.5 or not slices:
            n, context = rng.randrange(1, 500), rng.choice([0, 0, 128, 400])
            slices.append((n, context if n > 1 else 0))
            samples += rng.randrange(2)
        yield slices, samples


class Log:
    """Rows of STEPS with a noisy clock."""

    def __init__(self, noise: float, seed: int) -> None:
        self.rows: list[dict[str, Any]] = []
        self._noise = np.random.default_rng(seed), noise
        self._now = 0

    def _varied(self, ns: float) -> int:
        rng, sigma = self._noise
        return round(ns * float(np.exp(rng.normal(0.0, sigma))))

    def launch(self, slices: Slices, samples: int) -> None:
        host = self._varied(host_ns(len(slices), sum(n > 1 for n, _ in slices)))
        tokens, contexts = [n for n, _ in slices], [c for _, c in slices]
        row = {"host_ns": host, "samples": samples, "tokens": tokens, "contexts": contexts}
        self._add("compute", self._varied(truth_ns(slices, samples)), row)

    def copy(self, direction: str, nbytes: int, contended: bool = False) -> None:
        host = self._varied(host_ns(1))
        row = {"host_ns": host, "samples": 0, "tokens": [], "contexts": [], "nbytes": nbytes}
        if contended:
            now, other = self._now, "->".join(reversed(direction.split("->")))
            self._add(other, self._varied(copy_ns(nbytes, True)), row)
            self._now = now
        self._add(direction, self._varied(copy_ns(nbytes, contended)), row)

    def _add(self, lane: str, duration: int, row: dict[str, Any]) -> None:
        step, start = len(self.rows), self._now
        self._now = start + duration
        base = {"step": step, "device": 0, "lane": lane, "issue_ns": start, "nbytes": 0}
        base |= {"start_ns": start, "end_ns": self._now, "prefill_tokens": 0, "decode_tokens": 0}
        self.rows.append(base | {"peak_bytes": None, "jobs": []} | row)

    def table(self) -> pa.Table:
        return pa.Table.from_pylist(self.rows, schema=STEPS)


def recorded(noise: float, seed: int = 0) -> Log:
    log, rng = Log(noise, seed), random.Random(seed)
    for slices, samples in shapes(rng):
        log.launch(slices, samples)
    for _ in range(3):
        for nbytes in (65536 << i for i in range(8)):
            log.copy("gpu->host", nbytes)
            log.copy("host->gpu", nbytes)
            log.copy("host->gpu", nbytes, contended=True)
    return log


@cache
def noisy_log() -> Log:
    """A profile with 3 % of noise; not to be changed."""
    return recorded(noise=0.03)


@cache
def fitted() -> TableCost:
    """What is fitted to it, once for all tests."""
    return fit(noisy_log().table(), MODEL, PAGE, source="a synthetic engine")


def unseen(cost: TableCost, count: int = 400) -> dict[str, np.ndarray[Any, Any]]:
    """Relative errors against the noiseless truth on steps of another seed, by class."""
    found: dict[str, list[float]] = {}
    for slices, samples in pilot(random.Random(99), count):
        predicted = cost.shape_ns([n for n, _ in slices], [c for _, c in slices], samples)
        decodes = sum(n == 1 and c > 0 for n, c in slices)
        kind = "decode" if decodes == len(slices) else "mixed" if decodes else "prefill"
        found.setdefault(kind, []).append(predicted / truth_ns(slices, samples) - 1)
    return {kind: np.array(values) for kind, values in found.items()}
