"""`tandem calibrate --units`: times, bytes and peaks of each unit of a model that trains."""

from __future__ import annotations

import csv
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from statistics import median

from engine.contract.regions import Tier
from models.training.shape import UnitShape
from runtime.measure.unit_profile import (
    UnitProfile,
    UnitProfiler,
    link_rates,
    missed_share,
    needed_bytes,
)
from tandem.cli.terminal import shown_bytes, shown_seconds
from tandem.config.compose import composed
from tandem.config.composed_config import ComposedConfig
from tandem.wiring.run_spec import builder_of, spec_of, training_space
from tandem.wiring.training import Trainee, trainees_of

FILE = "units.csv"
POLICY = ("policy=", "scheduling", "memory", "planner", "trace=", "limit=", "profile=")
TIMES = ("forward_ns", "backward_ns", "update_ns", "host_update_ns")
SIZES = ("weight_bytes", "saved_bytes", "between_bytes", "peak_bytes")
HEADS = ("forward", "backward", "update", "on the host", "weights", "kept", "of it between", "peak")


def measured_units(point: ComposedConfig, folder: Path) -> Iterator[str]:
    """Measures the units of what a point trains, and writes them to `folder`/units.csv.

    Args:
        point: A model, a training job, a budget and a backend that measures.
        folder: Made where it is missing.

    Returns:
        Lines for the terminal.

    Raises:
        ValueError: The backend measures nothing, there is nothing to train, a unit needs more than
            the device has, or the file is there already.
    """
    path = folder / FILE
    if path.exists():
        raise ValueError(f"{path} is there already; give a new folder")
    backend = point.config["backend"]["name"]
    if backend not in ("cpu", "cuda"):
        raise ValueError(f"backend={backend} measures no units; take cpu or cuda")
    trainee = _trainee(point)
    _check_room(point, trainee)
    profiles = list(_measured(trainee, backend, point.config["backend"]["clock"]))
    folder.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows([UnitProfile._fields, *profiles])
    yield from _table(profiles)
    yield from _told(profiles, trainee)
    if backend == "cuda":
        rates = link_rates("cuda:0")
        yield "link: " + ", ".join(
            f"{name.replace('_', ' ')} {rate / 1e9:.3g} GB/s"
            for name, rate in rates._asdict().items()
        )
    yield f"units: {path}"


def _trainee(point: ComposedConfig) -> Trainee:
    """What the point trains; no policy decides about units alone."""
    if (point.config.get("training") or {}).get("_target_") is None:
        raise ValueError("there is nothing to train: choose a job with training=...")
    words = [word for word in point.overrides if not word.lstrip("+~").startswith(POLICY)]
    config_dir = str(point.folders[0]) if point.folders else None
    plain = composed([*words, "policy=train_on_device", "trace=none"], config_dir)
    found = trainees_of(plain.config, builder_of(plain), spec_of(plain), ())
    if len(found) != 1 or found[0].shape.windows is not None:
        raise ValueError("units are those of one training job: take training=random or sample")
    return found[0]


def _check_room(point: ComposedConfig, trainee: Trainee) -> None:
    """ValueError where a unit alone needs more than the device has."""
    has = training_space(point)[Tier.GPU, 0]
    needs = [needed_bytes(trainee.shape, unit) for unit in range(trainee.job.num_units)]
    if max(needs) > has:
        unit = needs.index(max(needs))
        raise ValueError(
            f"unit {unit} of {trainee.spec.name} takes {max(needs):,} bytes to be measured, and "
            f"the device has {has:,}: give budget.device_bytes={max(needs)}, or fewer tokens"
        )


def _measured(trainee: Trainee, backend: str, clock: str) -> Iterator[UnitProfile]:
    import torch
    from tqdm import tqdm

    torch.set_num_threads(1)  # a device's stand-in is one core
    torch.set_flush_denormal(True)
    now = time.thread_time_ns if clock == "service" else time.perf_counter_ns
    device = "cuda:0" if backend == "cuda" else "cpu"
    profiler = UnitProfiler(trainee.spec, trainee.job, device, now)
    bar = {"desc": "measuring units", "unit": "unit", "disable": None, "file": sys.stderr}
    for unit in tqdm(range(profiler.num_units), **bar):
        yield profiler.measure(unit)


def _table(profiles: Sequence[UnitProfile]) -> Iterator[str]:
    """A line for each run of equal units, with medians of their times."""
    yield f"{'units':<12}" + "".join([f"{head:>15}" for head in HEADS])
    for sizes, group in groupby(profiles, key=lambda one: [getattr(one, n) for n in SIZES]):
        rows = [*group]
        first, last = rows[0].unit, rows[-1].unit
        name = str(first) if first == last else f"{first} to {last}"
        times = [median([getattr(row, field) for row in rows]) for field in TIMES]
        cells = [*map(_milliseconds, times), *map(shown_bytes, sizes)]
        yield f"{name:<12}" + "".join([f"{cell:>15}" for cell in cells])


def _milliseconds(ns: float) -> str:
    return f"{ns / 1e6:.3f} ms"


def _told(profiles: Sequence[UnitProfile], trainee: Trainee) -> Iterator[str]:
    """A step with everything on the device, what hooks miss, and whether formulas agree."""
    count, shape = trainee.job.microbatches, trainee.shape
    once = sum([one.update_ns for one in profiles])
    each = sum([one.forward_ns + one.backward_ns for one in profiles])
    step, plural = shown_seconds((count * each + once) / 1e9), "es" * (count > 1)
    yield f"a step of {count} microbatch{plural}: {step} with everything on the device"
    yield (
        f"hooks on modules miss {missed_share(profiles, shape):.0%} of the activations that a step "
        "keeps: operations between modules make them"
    )
    differ = [
        one.unit for one, own in zip(profiles, shape.units, strict=True) if _differs(one, own)
    ]
    if differ:
        yield f"bytes of units {', '.join(map(str, differ))} differ from what plans count with"
    else:
        yield "bytes are those that plans count with"


def _differs(measured: UnitProfile, counted: UnitShape) -> bool:
    names = ("saved_bytes", "forward_bytes", "light_bytes", "backward_bytes")
    return any([getattr(measured, name) != getattr(counted, name) for name in names])
