"""Profiles a device: the grid of shapes through the replay's own executor, written as tables."""

from __future__ import annotations

import json
import platform
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import simpy
import torch

from engine.contract.executor import Executor
from engine.results.schema import write_tables
from engine.results.tables import step_row, table_of
from runtime.measure.driver import DrivenRun, Driver, driving
from runtime.measure.reference import probe, ratios
from runtime.measure.shapes import Shape, ShapeRows, grid, holdout
from runtime.serving.machine import ServingMachine
from traces.files import seal, write_text

FEW_TOKENS, MANY_TOKENS = 16, 256  # up to here launches are short and noisy; beyond, long
BEFORE = Shape("decode", (ShapeRows(1, 256),) * 8)  # runs before a launch with prompts in replays


def profile(
    env: simpy.Environment,
    executor: Executor,
    machine: ServingMachine,
    folder: Path,
    *,
    seed: int = 0,
    held_out: int = 48,
    max_tokens: int = 2048,
    facts: Mapping[str, Any] | None = None,
    look: Callable[[], object] | None = None,
) -> Path:
    """Measures the grid and `held_out` other launches; writes a profile.

    steps.parquet and holdout.parquet hold spans in the STEPS schema: launches of one `step` were
    issued as one plan, so those that overlap contend. host_ns is the preparation only (packing):
    no policy has decided and no ledger has booked. profile.json says on what the spans were
    measured. Caches are as in a replay: `look` cools them, as do decodes before a prompt. A shape
    measured behind itself, undisturbed, was up to a tenth faster than in a replay.

    Args:
        env: The clock that the executor runs on.
        executor: An executor of the replay's class over `machine`.
        machine: A machine that serves on device 0.
        folder: Where the profile is written; made where it is missing.
        seed: Of the order of shapes, the held-out shapes and the synthetic jobs.
        held_out: Launches beside the grid.
        max_tokens: Most tokens that a launch of the grid computes.
        facts: Go into profile.json as they are: commit, device, clock.
        look: Called between launches, outside the executor's time, as a replay reads its meter.

    Returns:
        `folder`.

    Raises:
        AssertionError: A fact bears the name of a measurement.
    """
    began = time.perf_counter()
    before = probe(env, executor, machine)
    with driving(env, executor, machine, seed, max_tokens) as driver:
        tables = {
            name: _measure(driver, shapes, name, look or (lambda: None))
            for name, shapes in _shapes(driver, seed, held_out)
        }
    after = probe(env, executor, machine)
    between = {name: (before[name] * after[name]) ** 0.5 for name in before}
    about = _about(machine) | {"seed": seed, "probe_s": between}
    about["probe_ratios"] = ratios(before, after)
    about["took_s"] = round(time.perf_counter() - began, 2)
    assert not about.keys() & (facts or {}).keys(), "a fact would hide a measurement"
    _write(folder, tables, about | dict(facts or {}))
    return folder


def _shapes(driver: Driver, seed: int, held_out: int) -> list[tuple[str, list[Shape]]]:
    """The shapes to measure, by the name of their table."""
    fitted = grid(driver.limits, driver.page)
    judged = holdout(driver.limits, driver.page, seed, held_out)
    for shapes in (fitted, judged):
        random.Random(seed).shuffle(shapes)  # a slow drift must not look like a size
    return [("steps", fitted), ("holdout", judged)]


def _write(folder: Path, tables: Mapping[str, pa.Table], about: Mapping[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_tables(folder, tables)
    write_text(folder / "profile.json", json.dumps(about, indent=2) + "\n")
    seal(folder, "profile.json")


def repeats(shape: Shape) -> int:
    """Chooses how often a shape is run: short launches are noisy.

    Args:
        shape: The shape to measure.

    Returns:
        Runs of the shape; the first one warms up and is not kept.
    """
    tokens = sum(rows.tokens for rows in shape.rows)
    return 6 if tokens <= FEW_TOKENS else 3 if tokens <= MANY_TOKENS else 2


def _measure(
    driver: Driver, shapes: Sequence[Shape], label: str, look: Callable[[], object]
) -> pa.Table:
    """All kept runs of some shapes, one row per launch."""
    from tqdm import tqdm

    rows, step = [], 0
    for shape in tqdm(
        shapes, desc=f"measuring {label}", unit="shape", disable=None, file=sys.stderr
    ):
        for run in _in_place(driver, shape, look):
            for i, (launch, span) in enumerate(run.done):
                host_ns = 0 if i else run.host_ns
                rows.append(step_row(step, run.issue_ns, host_ns, span, launch))
            step += 1
    return table_of("steps", rows)


def _in_place(driver: Driver, shape: Shape, look: Callable[[], object]) -> Iterator[DrivenRun]:
    """Runs of a shape behind the launch that precedes it in replays: a decode follows a decode."""
    prompts = any(rows.tokens > 1 for rows in shape.rows)
    before = BEFORE if prompts and driver.limits.admit(BEFORE, driver.page) else None
    for number in range(repeats(shape)):
        if before is not None:
            driver.run(before)
        look()
        run = driver.run(shape)
        if number:
            yield run


def _about(machine: ServingMachine) -> dict[str, Any]:
    """Facts of the machine under measurement."""
    on_gpu = machine.device != "cpu"
    arena = next(iter(machine.arenas.values()))
    return {
        "hardware": torch.cuda.get_device_name(machine.device) if on_gpu else cpu_name(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "model": asdict(machine.spec),
        "page_tokens": arena.page_tokens,
        "page_bytes": arena.page_nbytes,
        "pages": {str(tier): arena.num_pages for (tier, _), arena in machine.arenas.items()},
    }


def cpu_name() -> str:
    """Looks up the name of this processor.

    Returns:
        The model name of /proc/cpuinfo; where it is missing, the name or the architecture that
        `platform` knows.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
