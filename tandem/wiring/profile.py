"""Device profiles of serving and training: measured once through the replay's own executor."""

from __future__ import annotations

import json
import random
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from analysis.distance import STEADY
from analysis.yaml_text import yaml_value
from engine.contract.layout import TrainingLayout
from engine.contract.regions import PageSize
from engine.results.plan_log import launches_of_plans
from engine.results.schema import read_table
from models.spec import ModelSpec
from sim.cost.adapters import AdapterRows, shape_of_rows
from sim.cost.tables import TableCost
from sim.cost.windows import WindowShape, recorded_window
from sim.fit.errors import ALL, errors_of, operator_errors
from sim.fit.fit_tables import RecordedTraining, all_observed, fit_observed, fit_training
from sim.fit.recorded_shapes import (
    HOST,
    NO_ADAPTERS,
    Adapted,
    Copied,
    Observed,
    Planned,
    observed,
)
from tandem.config.compose import composed
from tandem.config.composed_config import ComposedConfig
from tandem.wiring.backends import (
    MEASURED,
    backend_of,
    is_auto,
    measured_ns,
    trained_ns,
    with_reference,
)
from tandem.wiring.budget import GPU
from tandem.wiring.cost import COST, about, device_facts
from tandem.wiring.experiment import run_experiment
from tandem.wiring.folder import commit, running_folder, sole_user
from tandem.wiring.run_spec import RunSpec, builder_of, run_spec_of, spec_of, training_space
from tandem.wiring.training import Trainee, as_learned, trainees_of
from tandem.wiring.workload import REQUESTS, synthetic_requests, synthetic_stream
from traces.files import checked_text, seal, write_text
from traces.serving.request import TrainingJob
from traces.store import write_trace
from traces.training.samples import Finetuning

if TYPE_CHECKING:  # torch is slow to import
    from runtime.measure.unit_profile import LinkRates, UnitProfile

MOST_REQUESTS = 256  # of the fitted replay, where the scheduling allows larger batches still
REPLAYS = 2  # that are fitted, at the least: apart in time, because the machine's speed drifts
FITTED, HELD_OUT = "fitted", "held-out"  # folders of replays, followed by a number
AGAIN = "another replay: "  # rows of the held-out errors that are not of held-out shapes


def calibrate(
    point: ComposedConfig, folder: Path, replays: int = REPLAYS, streams: bool = False
) -> pd.DataFrame:
    """Profiles the backend of a configuration and fits its tables into `folder`.

    A grid of shapes is measured, with replays of synthetic requests through the whole engine before
    and after it. The replays show what the host needs and what launches take in their places. Half
    as many replays of other requests follow, which the fit does not see.

    Args:
        point: The composed configuration; its backend measures.
        folder: The new folder of the profile.
        replays: Fitted replays, more where the load of a shared machine should average out.
        streams: Requests arrive as the configuration says, for a profile of one load. In a steady
            stream launches take 2 to 8 % longer than launches of equal batch and contexts in
            replays that come all at once and ebb.

    Returns:
        Errors on what was held out, see `judged`.

    Raises:
        ValueError: The backend measures nothing, the folder is not empty, or a setting is wrong.
    """
    point = replace(point, config={**point.config, "replicas": 1})  # all are alike
    backend = point.config["backend"]["name"]
    if replays < REPLAYS:
        raise ValueError(f"replays={replays}: a fit takes {REPLAYS} or more")
    if backend not in MEASURED:
        raise ValueError(f"backend={backend} measures nothing; calibrate {' or '.join(MEASURED)}")
    if folder.is_dir() and any(folder.iterdir()):
        raise ValueError(f"{folder}: there is something in it already; give a new folder")
    run_spec_of(point)  # what is wrong is told before anything is written
    lock = folder.with_name(f".{folder.name}.lock")
    with sole_user(lock, f"{folder}: another calibration is running there"):
        return _measured(point, folder, replays, streams)


def _measured(point: ComposedConfig, folder: Path, replays: int, streams: bool) -> pd.DataFrame:
    """All that a profile is made of, aside and renamed in the end."""
    aside = running_folder(folder)
    shutil.rmtree(aside, ignore_errors=True)  # of a calibration that was killed
    seed = int(point.config["seed"])
    if is_auto(point.config):
        nominal_ns = measured_ns(run_spec_of(point).spec, seed)
        point = replace(point, config=with_reference(point.config, nominal_ns))
    aside.mkdir(parents=True)
    half = replays // 2
    for number in range(replays):
        if number == half:
            _profile_shapes(point, aside)
        fitted_replay(point, aside, number, streams)
    for number in range(half):
        _replay(point, aside, f"{HELD_OUT}-{number}", 2 * number + 1, REQUESTS, streams)
    table = judged(refitted(aside), aside)
    table.to_csv(aside / "errors.csv", encoding="utf-8")
    if folder.is_dir():
        folder.rmdir()
    aside.rename(folder)
    return table


def finetunes(point: ComposedConfig) -> bool:
    """Whether a configuration finetunes on samples, beside what it serves."""
    node = point.config.get("training") or {}
    if node.get("_target_") is None:
        return False
    return isinstance(builder_of(point).build(node, "training"), Finetuning)


def fitted_replay(point: ComposedConfig, folder: Path, number: int, streams: bool = False) -> None:
    """Measures one more replay for the fit of a profile; see `calibrate`."""
    count = replayed_count(point.config["scheduling"])
    _replay(point, folder, f"{FITTED}-{number}", 2 * number, count, streams)


def refitted(folder: Path) -> TableCost:
    """Fits the tables of a profile to all that was measured for it, and writes them."""
    facts = about(folder)
    spec = ModelSpec(**facts["model"])
    cost = fitted(folder, spec, PageSize(facts["page_tokens"], facts["page_bytes"]))
    cost.save(folder / COST)
    return cost


def fitted(folder: Path, spec: ModelSpec, page: PageSize) -> TableCost:
    """The tables of a profile: launches from grid and replays together, the host from the replays.

    In the grid no policy decides and nothing is booked, so its host time is packing only. Its
    launches find warmer caches than launches of a replay, and count less.
    """
    launches = [o for o in observed(read_table(folder / "steps.parquet")) if _is_launched(o)]
    replayed = _replayed(folder, FITTED, spec)
    return fit_observed(replayed, spec, page, _source(folder), apart=launches)


def judged(cost: TableCost, folder: Path) -> pd.DataFrame:
    """Errors on held-out shapes by class, on replays that the fit has not seen, and by operator.

    An operator is a table of the cost; it is judged by what of both it rules, see operator_errors.
    The host is judged by those replays only: with shapes it packs, but decides and books nothing.
    """
    shapes = [o for o in observed(read_table(folder / "holdout.parquet")) if _is_launched(o)]
    replayed = _replayed(folder, HELD_OUT, cost.model)
    again = errors_of(cost, replayed)
    kept = {ALL, HOST} | {shape.group for shape, _ in replayed if isinstance(shape, Copied)}
    again = again[again.index.isin(kept)].rename(index=lambda name: AGAIN + name)
    return pd.concat([errors_of(cost, shapes), again, operator_errors(cost, [*shapes, *replayed])])


def _is_launched(found: Observed) -> bool:
    """No host's part of a plan."""
    return not isinstance(found[0], Planned)


def _replayed(folder: Path, kind: str, spec: ModelSpec) -> list[Observed]:
    """Durations in a profile's replays of one kind, windows of finetuning jobs among them."""
    found = list[Observed]()
    for path in sorted(folder.glob(f"{kind}-*/steps.parquet")):
        run = path.parent
        steps, adapted = read_table(path), _adapted_in(run)
        if (run / "samples.parquet").is_file():
            jobs, launches = _jobs_of(run), launches_of_plans(run / "plans.parquet")
            found += all_observed(RecordedTraining(steps, jobs, launches, adapted), spec)
        else:
            found += observed(steps, adapted)
    return found


def _adapted_in(run: Path) -> Mapping[int, Adapted]:
    """The requests of a run that ran through adapters, by number; empty where none did."""
    path = run / "config.yaml"
    config = yaml_value(checked_text(path), path) if path.is_file() else {}
    asked = config.get("adapters") or {}  # earlier versions' runs have none
    if not asked.get("count") and not asked.get("names"):
        return NO_ADAPTERS
    run_spec = run_spec_of(ComposedConfig({**config, "trusted": []}, ()))
    spec, rows = run_spec.spec, dict[str, tuple[AdapterRows, WindowShape]]()
    for adapter in run_spec.room.layout.adapters:
        own = shape_of_rows(spec, adapter.recipe, 0)
        rows[adapter.name] = own, recorded_window(spec, adapter.recipe)
    names = ["request_id", "adapter", "adapter_version"]
    found = read_table(run / "requests.parquet", columns=names).to_pylist()
    return {
        row["request_id"]: Adapted((row["adapter"], row["adapter_version"]), *rows[row["adapter"]])
        for row in found
        if row["adapter"]
    }


def _jobs_of(run: Path) -> dict[int, tuple[TrainingJob, TrainingLayout]]:
    """The training jobs of a run with their layouts, built from its configuration again.

    A job that learns has its samples in the order in which they came.
    """
    config = yaml_value(checked_text(run / "config.yaml"), run / "config.yaml")
    run_spec = run_spec_of(ComposedConfig({**config, "trusted": []}, ()))
    layouts = run_spec.room.layout.training
    jobs = [as_learned(t.job, run) for t in run_spec.trainees]
    return {job.job_id: (job, layouts[job.job_id]) for job in jobs}


def is_steady(table: pd.DataFrame) -> bool:
    """Whether the machine was as fast in the held-out replays as in the fitted ones.

    `table` is what `calibrate` returns. Single launches scatter; their sum does not, unless the
    machine has changed: up to 1.2 % in 20 of 24 calibrations here, up to 3 % in 23, 8.5 % in one.
    """
    return abs(float(table["total"][AGAIN + ALL])) <= STEADY


def _profile_shapes(point: ComposedConfig, folder: Path) -> None:
    from runtime.measure.calibrate import profile

    run_spec, node = run_spec_of(point), point.config["backend"]
    facts = {**commit(), **device_facts(run_spec.device), **node}
    with backend_of(run_spec, node) as backend:
        serving = backend.serving
        assert backend.fresh is not None and serving is not None, "a measured backend has a machine"
        with backend.fresh() as (env, executor, meter):
            look = None if meter is None else meter.read
            profile(env, executor, serving, folder, seed=run_spec.seed, facts=facts, look=look)


def replayed_count(scheduling: Mapping[str, Any] | None) -> int:
    """Requests of the fitted replay: as many as the scheduling would serve together."""
    node = scheduling or {}
    while "max_jobs" not in node:  # of a policy that shares the device, or around such a one
        if (inner := node.get("sharing") or node.get("serving")) is None:
            break
        node = inner
    return min(max(REQUESTS, int(node.get("max_jobs", REQUESTS))), MOST_REQUESTS)


def _replay(
    point: ComposedConfig, folder: Path, name: str, number: int, count: int, streams: bool
) -> None:
    """Synthetic requests through the whole engine, into a folder of that name.

    So many at once, or a stream with arrivals of its own: those of the configuration's seed are
    what will be predicted.
    """
    config, trace = point.config, folder / f"{name}-trace.parquet"
    positions, seed = spec_of(point).max_positions, int(config["seed"]) + number
    changed: dict[str, Any] = {"trace": {"path": str(trace)}, "limit": None, "replayed": None}
    if streams:
        seed += 1
        drawn, changed["seed"] = synthetic_stream(positions, seed), seed
    else:
        drawn = synthetic_requests(positions, seed, count)
        changed["arrival"] = {"_target_": "traces.serving.arrivals.AllAtOnce"}
    write_trace(trace, drawn, {"source": "made up by tandem/wiring/workload.py", "seed": seed})
    changed["backend"] = {**config["backend"], "workspace_every": 0}  # only times are of use
    changed |= _roomy(point)
    if finetunes(point):  # on other samples than those of the configuration's seed, too
        recipe = config["training"]["recipe"]
        recipe = {**recipe, "seed": int(recipe["seed"]) + 1 + number}
        changed["training"] = {**config["training"], "recipe": recipe}
    run_experiment(replace(point, config={**config, **changed}), folder / name)


def _roomy(point: ComposedConfig) -> dict[str, Any]:
    """Settings by which other requests find the KV of a configuration, whatever their steps take.

    A policy may start all prompts together: those of a fitted replay are other ones, and may need
    more than is set aside for the largest step. A GPU has the memory that it has.
    """
    run_spec = run_spec_of(point)
    if not run_spec.device.is_cpu:
        return {}
    kv_bytes = run_spec.room.capacity_bytes[GPU] - run_spec.room.memory.weights
    memory_bytes = max(run_spec.device.memory_bytes, ROOM_BYTES)
    return {
        "device": {**point.config["device"], "memory_bytes": memory_bytes},
        "budget": {**point.config["budget"], "kv_bytes": kv_bytes, "kv_pages": None},
    }


def _source(folder: Path) -> str:
    facts = about(folder)
    return f"{facts['hardware']} ({facts['name']}, clock {facts['clock']}, {facts['date']})"


FITTED_TRAINING, HELD_OUT_TRAINING = (
    "fitted-training",
    "held-out-training",
)  # folders of runs, followed by a number
# Updates on either tier, forwards that keep activations and forwards that are repeated.
STACKS = (("zero_offload", "keep"), ("train_on_device", "recompute"))
# Where only adapters train, those show a thousandth of what a link has to carry: frozen weights and
# activations. At one microbatch of each number of rows.
STREAMED = ("zero3_offload", "offload")
HELD = 8  # microbatches that the fit does not see
STEPS = 4  # of each job; the first warms up and is not kept
ROOM_BYTES = 8 << 30  # budgets are for runs: what is measured has room
BEYOND = 2  # times the microbatch of the configuration that is measured, for larger ones
CHOSEN = (
    *("policy", "scheduling", "memory", "planner", "trace", "limit", "training.sequence"),
    *("training.num_steps", "training.microbatches", "budget", "profile"),
)


def calibrate_training(point: ComposedConfig, folder: Path) -> pd.DataFrame:
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
    run_spec = run_spec_of(_shaped(point, *shape, *STACKS[0]))
    if is_auto(point.config):
        (trainee,) = run_spec.trainees
        nominal_ns = trained_ns(trainee.spec, trainee.job.recipe)
        point = replace(point, config=with_reference(point.config, nominal_ns))
    lock = folder.with_name(f".{folder.name}.lock")
    with sole_user(lock, f"{folder}: another calibration is running there"):
        aside = running_folder(folder)
        shutil.rmtree(aside, ignore_errors=True)  # of a calibration that was killed
        aside.mkdir(parents=True)
        _measure(point, run_spec, aside)
        table = _fitted(run_spec, aside)
        if folder.is_dir():
            folder.rmdir()
        aside.rename(folder)
    return table


def _measure(point: ComposedConfig, run_spec: RunSpec, folder: Path) -> None:
    """All runs of a profile, in an order that makes no drift look like a size."""
    from runtime.measure.shapes import TrainingLimits
    from runtime.measure.shapes import training_grid as grid
    from runtime.measure.shapes import training_holdout as holdout

    (job,) = [trainee.job for trainee in run_spec.trainees]
    limits = TrainingLimits(run_spec.spec.max_positions, BEYOND * job.microbatch_tokens)
    shapes = grid(limits)
    fitted = [(shape, stack) for shape in shapes for stack in STACKS]
    if job.recipe.lora_rank is not None:
        fitted += [(shape, STREAMED) for shape in {shape.rows: shape for shape in shapes}.values()]
    random.Random(run_spec.seed).shuffle(fitted)
    unseen = holdout(limits, run_spec.seed, HELD)
    judged_training = [(shape, STACKS[i % len(STACKS)]) for i, shape in enumerate(unseen)]
    for kind, wanted in ((FITTED_TRAINING, fitted), (HELD_OUT_TRAINING, judged_training)):
        for number, (shape, stack) in enumerate(wanted):
            run_experiment(_shaped(point, *shape, *stack), folder / f"{kind}-{number}")
    write_text(folder / "profile.json", json.dumps(_facts(point, run_spec), indent=2) + "\n")
    seal(folder, "profile.json")


def _shaped(
    point: ComposedConfig, sequences: int, tokens: int, policy: str, modes: str
) -> ComposedConfig:
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


def _facts(point: ComposedConfig, run_spec: RunSpec) -> dict[str, Any]:
    """What was measured, and on what."""
    import torch

    from runtime.measure.calibrate import cpu_name

    return {
        "hardware": cpu_name(),
        "torch": torch.__version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "model": asdict(run_spec.spec),
        "page_tokens": run_spec.page.tokens,
        "page_bytes": run_spec.page.nbytes,
        "seed": run_spec.seed,
        **commit(),
        **device_facts(run_spec.device),
        **point.config["backend"],
    }


def _fitted(run_spec: RunSpec, folder: Path) -> pd.DataFrame:
    """Fits the tables, writes them, and judges them by what was held out."""
    facts, spec = about(folder), run_spec.spec
    source = f"{facts['hardware']} ({facts['name']}, clock {facts['clock']}, {facts['date']})"
    page = PageSize(facts["page_tokens"], facts["page_bytes"])
    cost: TableCost = fit_training(recorded(folder, FITTED_TRAINING), spec, page, source)
    cost.save(folder / COST)
    table = judged_training(cost, recorded(folder, HELD_OUT_TRAINING))
    table.to_csv(folder / "errors.csv", encoding="utf-8")
    return table


def judged_training(
    cost: TableCost, runs: Sequence[RecordedTraining] | Iterator[RecordedTraining]
) -> pd.DataFrame:
    """Errors on runs that a fit has not seen, by kind of unit and work, and by table."""
    found = [one for run in runs for one in all_observed(run, cost.model)]
    return pd.concat([errors_of(cost, found), operator_errors(cost, found)])


def recorded(folder: Path, kind: str) -> Iterator[RecordedTraining]:
    """The runs of a profile of one kind, without the first step of each."""
    for run in sorted(folder.glob(f"{kind}-*")):
        jobs = _jobs_of(run)
        steps = read_table(run / "steps.parquet").to_pandas()
        warm_ns = int(read_table(run / "training.parquet").to_pandas()["end_ns"].min())
        begins_ns = steps.groupby("step")["start_ns"].transform("min")  # plans are whole
        yield RecordedTraining(steps[begins_ns >= warm_ns], jobs)


# ---- units of a model that trains
OF_POLICY = ("policy=", "scheduling", "memory", "planner", "profile=")
OF_SERVING = ("trace", "arrival", "limit=", "lengths=", "adapters", "tenants", "sampling", "slo")


@dataclass(frozen=True)
class ProfiledUnits:
    """The units of a model that trains, each measured alone.

    Attributes:
        job: What trains.
        units: By unit; see runtime.measure.unit_profile.
        missed_share: Of the activations that a step keeps, the share that hooks on modules miss.
        differing: Units whose bytes are not those that plans count with.
        link: Of a GPU; None of a CPU, whose link has a set speed.
    """

    job: TrainingJob
    units: Sequence[UnitProfile]
    missed_share: float
    differing: Sequence[int]
    link: LinkRates | None


def profile_units(point: ComposedConfig) -> ProfiledUnits:
    """Measures the units of what a point trains, whatever its policy.

    ValueError where the backend measures nothing, where there is nothing to train or several jobs
    do, or where one unit alone needs more than the device has.
    """
    from runtime.measure.unit_profile import differing_units, link_rates, missed_share

    backend = point.config["backend"]["name"]
    if backend not in MEASURED:
        raise ValueError(f"backend={backend} measures no units; take {' or '.join(MEASURED)}")
    if (point.config.get("training") or {}).get("_target_") is None:
        raise ValueError("there is nothing to train: choose a job with training=...")
    words = [
        word
        for word in point.overrides
        if not word.lstrip("+~").startswith((*OF_POLICY, *OF_SERVING))
    ]
    config_dir = str(point.folders[0]) if point.folders else None
    plain = composed([*words, "policy=train_on_device", "trace=none"], config_dir)
    trainees = trainees_of(plain.config, builder_of(plain), spec_of(plain), ())
    if len(trainees) != 1 or trainees[0].shape.windows is not None:
        raise ValueError("units are those of one training job: take training=random or sample")
    (trainee,) = trainees
    _check_units_fit(trainee, training_space(point)[GPU])
    units = list(_measured_units(trainee, backend, point.config["backend"]["clock"]))
    missed, differing = missed_share(units, trainee.shape), differing_units(units, trainee.shape)
    link = link_rates("cuda:0") if backend == "cuda" else None
    return ProfiledUnits(trainee.job, units, missed, differing, link)


def _check_units_fit(trainee: Trainee, has_bytes: int) -> None:
    from runtime.measure.unit_profile import needed_bytes

    needs = [needed_bytes(trainee.shape, unit) for unit in range(trainee.job.num_units)]
    if (most := max(needs)) > has_bytes:
        raise ValueError(
            f"unit {needs.index(most)} of {trainee.spec.name} takes {most:,} bytes to be measured, "
            f"and the device has {has_bytes:,}: give budget.device_bytes={most}, or fewer tokens"
        )


def _measured_units(trainee: Trainee, backend: str, clock: str) -> Iterator[UnitProfile]:
    import torch
    from tqdm import tqdm

    from runtime.measure.unit_profile import UnitProfiler

    torch.set_num_threads(1)  # a device's stand-in is one core
    torch.set_flush_denormal(True)
    now = time.thread_time_ns if clock == "service" else time.perf_counter_ns
    device = "cuda:0" if backend == "cuda" else "cpu"
    profiler = UnitProfiler(trainee.spec, trainee.job, device, now)
    numbers = tqdm(
        range(profiler.num_units), "measuring units", unit="unit", disable=None, file=sys.stderr
    )
    for unit in numbers:
        yield profiler.measure(unit)
