"""Profiles training: short jobs of many shapes through the engine, and tables fitted to them."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.yaml_text import yaml_value
from engine.plan import PageSize
from engine.record import read_table
from sim.errors import errors_of, operator_errors
from sim.fit_training import Recorded, all_observed, fit_training
from sim.tables import TableCost
from tandem.compose import composed
from tandem.composed import Composed
from tandem.experiment import run_experiment
from tandem.folder import aside_of, sole_user
from tandem.pace import about, is_auto, trained_ns, with_reference
from tandem.profile import COST, device_facts
from tandem.provenance import commit
from tandem.setting import Setting, setting_of
from tandem.worlds import MEASURED
from traces.files import checked_text, seal, write_text

FITTED, HELD_OUT = "fitted-training", "held-out-training"  # folders of runs, followed by a number
# Updates on either tier, forwards that keep and others that are repeated.
STACKS = (("zero_offload", "keep"), ("train_on_device", "recompute"))
# Where only adapters train, those show a thousandth of what a link has to carry: frozen weights and
# activations. At one microbatch of each number of rows.
STREAMED = ("zero3_offload", "offload")
HELD = 8  # microbatches that the fit does not see
STEPS = 4  # of each job; the first warms up and is not kept
ROOM_BYTES = 8 << 30  # budgets are for runs: what is measured has room
BEYOND = 2  # times the microbatch of the configuration that is measured, for others of its kind
CHOSEN = ("policy", "scheduling", "memory", "planner", "trace", "limit", "training.sequence")
CHOSEN += ("training.num_steps", "training.microbatches", "budget", "profile")


def calibrate_training(point: Composed, folder: Path) -> pd.DataFrame:
    """Measures the training of a configuration in other shapes and fits its tables into `folder`.

    Each shape is a job of STEPS steps, once for each of STACKS; with adapters some STREAMED, too.
    Returns the errors on shapes that the fit has not seen, by kind of unit and work. ValueError
    where nothing is trained or measured.
    """
    backend = point.config["backend"]["name"]
    if backend not in (*MEASURED, "sim"):
        raise ValueError(f"backend={backend} measures nothing; calibrate {' or '.join(MEASURED)}")
    if folder.is_dir() and any(folder.iterdir()):
        raise ValueError(f"{folder}: there is something in it already; give a new folder")
    node = point.config["training"]
    if node.get("_target_") is None:
        raise ValueError("there is nothing to train: choose a job with training=...")
    shape = (node["sequences"], node["sequence_tokens"])
    setting = setting_of(_shaped(point, *shape, *STACKS[0]))
    if is_auto(point.config):
        (trainee,) = setting.trainees
        nominal_ns = trained_ns(trainee.spec, trainee.job.recipe)
        point = replace(point, config=with_reference(point.config, nominal_ns))
    lock = folder.with_name(f".{folder.name}.lock")
    with sole_user(lock, f"{folder}: another calibration is running there"):
        aside = aside_of(folder)
        shutil.rmtree(aside, ignore_errors=True)  # of a calibration that was killed
        aside.mkdir(parents=True)
        _measure(point, setting, aside)
        table = _fitted(setting, aside)
        if folder.is_dir():
            folder.rmdir()
        aside.rename(folder)
    return table


def _measure(point: Composed, setting: Setting, folder: Path) -> None:
    """All runs of a profile, in an order that makes no drift look like a size."""
    from runtime.training_shapes import TrainingLimits, grid, holdout

    (job,) = [trainee.job for trainee in setting.trainees]
    limits = TrainingLimits(setting.spec.max_positions, BEYOND * job.microbatch_tokens)
    shapes = grid(limits)
    fitted = [(shape, stack) for shape in shapes for stack in STACKS]
    if job.recipe.lora_rank is not None:
        fitted += [(shape, STREAMED) for shape in {shape.rows: shape for shape in shapes}.values()]
    random.Random(setting.seed).shuffle(fitted)
    unseen = holdout(limits, setting.seed, HELD)
    judged = [(shape, STACKS[i % len(STACKS)]) for i, shape in enumerate(unseen)]
    for kind, wanted in ((FITTED, fitted), (HELD_OUT, judged)):
        for number, (shape, stack) in enumerate(wanted):
            run_experiment(_shaped(point, *shape, *stack), folder / f"{kind}-{number}")
    write_text(folder / "profile.json", json.dumps(_facts(point, setting), indent=2) + "\n")
    seal(folder, "profile.json")


def _shaped(point: Composed, sequences: int, tokens: int, policy: str, modes: str) -> Composed:
    """The configuration with another microbatch, and another way through its step."""
    words = [word for word in point.overrides if not word.lstrip("+").startswith(CHOSEN)]
    words += [f"policy={policy}", f"planner.modes={modes}", "trace=none", "profile=null"]
    words += [f"training.sequences={sequences}", f"training.sequence_tokens={tokens}"]
    words += [f"training.num_steps={STEPS}", "training.microbatches=1"]
    words += [f"device.memory_bytes={ROOM_BYTES}", f"device.host_bytes={ROOM_BYTES}"]
    made = composed(words, str(point.folders[0]) if point.folders else None)
    # Only times are of use, and probes of drift want a model that serves.
    backend = {**point.config["backend"], "probe_look_s": None, "workspace_every": 0}
    return replace(made, config={**made.config, "backend": backend})


def _facts(point: Composed, setting: Setting) -> dict[str, Any]:
    """What was measured, and on what."""
    import torch

    from runtime.calibrate import cpu_name

    return {
        "hardware": cpu_name(),
        "torch": torch.__version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "model": asdict(setting.spec),
        "page_tokens": setting.room.page.tokens,
        "page_bytes": setting.room.page.nbytes,
        "seed": setting.seed,
        **commit(),
        **device_facts(setting.device),
        **point.config["backend"],
    }


def _fitted(setting: Setting, folder: Path) -> pd.DataFrame:
    """Fits the tables, writes them, and judges them by what was held out."""
    facts, spec = about(folder), setting.spec
    source = f"{facts['hardware']} ({facts['name']}, clock {facts['clock']}, {facts['date']})"
    page = PageSize(facts["page_tokens"], facts["page_bytes"])
    cost: TableCost = fit_training(recorded(folder, FITTED), spec, page, source)
    cost.save(folder / COST)
    table = judged(cost, recorded(folder, HELD_OUT))
    table.to_csv(folder / "errors.csv", encoding="utf-8")
    return table


def judged(cost: TableCost, runs: Sequence[Recorded] | Iterator[Recorded]) -> pd.DataFrame:
    """Errors on runs that a fit has not seen, by kind of unit and work, and by table."""
    found = [one for run in runs for one in all_observed(run, cost.model)]
    return pd.concat([errors_of(cost, found), operator_errors(cost, found)])


def recorded(folder: Path, kind: str) -> Iterator[Recorded]:
    """The runs of a profile of one kind, without the first step of each."""
    for run in sorted(folder.glob(f"{kind}-*")):
        config = yaml_value(checked_text(run / "config.yaml"), run / "config.yaml")
        setting = setting_of(Composed({**config, "trusted": []}, ()))
        layouts = setting.room.layout.training
        jobs = {t.job.job_id: (t.job, layouts[t.job.job_id]) for t in setting.trainees}
        steps = read_table(run / "steps.parquet").to_pandas()
        warm_ns = int(read_table(run / "training.parquet").to_pandas()["end_ns"].min())
        begins_ns = steps.groupby("step")["start_ns"].transform("min")  # plans are whole
        yield Recorded(steps[begins_ns >= warm_ns], jobs)
