"""One run: from a configuration to a folder of results."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from analysis.run import RunFiles
from analysis.yaml_text import yaml_text
from engine.contract.executor import Launch
from engine.contract.plan import Compute
from engine.contract.regions import Place
from engine.loop.engine import Engine
from engine.results.plan_log import encode_layout
from engine.results.recorder import Recorder
from engine.results.schema import files_of
from sim.cost.policy_cost import PolicyCost
from tandem.cli.terminal import progress_bar
from tandem.compiled import form
from tandem.config.composed_config import ComposedConfig, with_absolute_paths
from tandem.config.slo import limits_of
from tandem.wiring.backends import Backend, backend_of, no_full_collections, resolved
from tandem.wiring.budget import GPU
from tandem.wiring.cost import profile_hash
from tandem.wiring.folder import (
    OK,
    RUNNING,
    commit,
    host,
    run_folder,
    versions,
    write_json,
    write_status,
)
from tandem.wiring.machines import pages_of, save_models, writes_checkpoints
from tandem.wiring.run_spec import RunSpec, run_spec_of
from tandem.wiring.training import LAYOUT
from tandem.wiring.workload import trace_hash
from traces.files import seal, write_text


def run_experiment(
    point: ComposedConfig, folder: Path, shows_progress: bool = False, keeps_rejected: bool = True
) -> dict[str, Any]:
    """Runs one point and writes its folder; returns the metrics.

    ValueError where the configuration is wrong, RunFailed where the run was; the folder then says
    so in status.json. `keeps_rejected`: also where nothing had begun yet.
    """
    point = replace(point, config=with_absolute_paths(point.config))
    with run_folder(folder, keeps_rejected) as aside:
        write_config(aside, point.config)
        point = replace(point, config=resolved(point.config))
        limits = limits_of(point.config["slo"])
        keeps_steps(point.config)  # a wrong setting is told before anything begins
        run_spec = run_spec_of(point)
        provenance = provenance_of(point, run_spec)
        write_json(aside / "provenance.json", provenance)
        if run_spec.trainees:
            told = encode_layout(run_spec.room.layout)
            write_text(aside / LAYOUT, json.dumps(told, separators=(",", ":")) + "\n")
            seal(aside, LAYOUT)
        provenance |= _carried_out(run_spec, point.config, aside, shows_progress)
        write_json(aside / "provenance.json", provenance)
        seal(aside, "provenance.json")
        metrics = _write_metrics(RunFiles(aside, provenance, point.config), limits)
        seal(aside, "metrics.json")
        write_status(aside, OK)  # the last: a run killed before it has not finished
        return metrics


def _carried_out(
    run_spec: RunSpec, config: Mapping[str, Any], folder: Path, shows_progress: bool
) -> dict[str, Any]:
    """The run itself: through the engine, or against a server, which has an engine of its own."""
    if config["backend"]["name"] == "openai":
        from tandem.wiring.openai import replay_server

        return replay_server(run_spec, config["backend"], folder, shows_progress)
    keeps = keeps_steps(config)
    with backend_of(run_spec, config["backend"]) as backend:
        if backend.machine is None:
            return replay(run_spec, backend, folder, shows_progress, keeps)
        writes_checkpoints(run_spec, backend.machine, folder)
        notes = replay(run_spec, backend, folder, shows_progress, keeps)
        save_models(run_spec, backend.machine, folder)
        return notes


def replay(
    run_spec: RunSpec,
    backend: Backend,
    folder: Path,
    shows_progress: bool = False,
    keeps_steps: bool = True,
) -> dict[str, Any]:
    """Replays the trace through the engine and writes the tables; returns notes on the run."""
    finetunes = any(trainee.job.finetunes for trainee in run_spec.trainees)
    names_tenants = any(item.tenant for item in run_spec.work)
    names_adapters = bool(run_spec.room.layout.adapters)
    learns = any(trainee.job.learns for trainee in run_spec.trainees)
    own = Recorder(backend.meter, keeps_steps, finetunes, names_tenants, names_adapters, learns)
    engine = engine_of(run_spec, backend, own)
    before = backend.probe()
    write_status(folder, RUNNING)
    shown = progress_bar(engine, run_spec.work, shows_progress)
    recorder, is_measured = engine.recorder, backend.machine is not None
    with files_of(folder, recorder.schemas) as files:
        if not is_measured:  # writing takes time, which a clock would count
            recorder.stream(files, [request.request_id for request in run_spec.requests])
        with no_full_collections(begins_with_one=backend.meter is not None), shown:
            engine.replay(run_spec.work)
        notes: dict[str, Any] = drift_of(before, backend.probe())
        if backend.fresh is not None:  # a simulation's rows are predictions themselves
            notes["workspace"] = _sampled(recorder, run_spec)
        if is_measured:
            recorder.stream(files, ())
        recorder.finish(backend.outputs, backend.loss_of)
    notes |= {"plans": engine.steps, "questions": engine.asked}
    notes["cost_extrapolated"] = dict(run_spec.cost.extrapolated)
    return notes


def _sampled(recorder: Recorder, run_spec: RunSpec) -> dict[str, float | int]:
    """The workspace of measured launches beside what a simulation predicts for these launches."""
    import pandas as pd

    from analysis.workspace import workspace_errors

    rows = [(run_spec.cost.peak_bytes(launch), nbytes) for launch, nbytes in _measured(recorder)]
    return workspace_errors(pd.DataFrame(rows, columns=["predicted", "measured"]))


def _measured(recorder: Recorder) -> Iterator[tuple[Launch, int]]:
    """Launches over all layers whose workspace was measured."""
    for *_, span, launch in recorder.steps:
        op = launch.op
        is_whole = isinstance(op, Compute) and all(piece.layers is None for piece in op.slices)
        if is_whole and span.peak_bytes is not None:
            yield launch, span.peak_bytes


RECORDS = ("auto", "all", "requests")


def keeps_steps(config: Mapping[str, Any]) -> bool:
    """Whether a run keeps steps, memory and plans. ValueError for a setting that does not exist."""
    record = config.get("record", "auto")  # settings of earlier versions have none
    if record not in RECORDS:
        raise ValueError(f"record={record}: there are {', '.join(RECORDS)}")
    if record == "requests" and _trains(config):
        raise ValueError(
            "record=requests: what is trained is told by its steps; take record=all, or train "
            "nothing (training=none)"
        )
    return bool(record != "requests")


def _trains(config: Mapping[str, Any]) -> bool:
    return config["training"].get("_target_") is not None


def as_swept(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of a point of a sweep, which keeps requests alone where they tell enough.

    The balance of several replicas is told by their steps.
    """
    is_simulated, is_alone = config["backend"]["name"] == "sim", config["replicas"] == 1
    serves_alone = is_simulated and is_alone and not _trains(config)
    is_auto = config.get("record") == "auto"
    return {**config, "record": "requests"} if is_auto and serves_alone else dict(config)


def engine_of(run_spec: RunSpec, backend: Backend, recorder: Recorder | None = None) -> Engine:
    """The one engine, on a backend. Policies are quoted equal costs on every backend."""

    def held_bytes(place: Place) -> int:
        return engine.ledger.held_bytes[place]

    engine = Engine(
        backend.env,
        run_spec.policy,
        backend.executor,
        run_spec.room.capacity_bytes,
        run_spec.page,
        devices=run_spec.replicas,
        router=run_spec.router,
        depth=run_spec.depth,
        forced=run_spec.decoding.forced,
        layout=run_spec.room.layout,
        cost=PolicyCost(run_spec.quotes, held_bytes, run_spec.quote_pace),
        recorder=recorder or Recorder(backend.meter),
        returns_memory=not run_spec.is_replay,
    )
    return engine


def drift_of(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, Any]:
    """What the drift probes took before and after a measured run, and by what factor more."""
    if not before:
        return {}
    from runtime.measure.reference import ratios

    change = ratios(before, after)
    return {"probe_before": dict(before), "probe_after": dict(after), "probe_ratios": change}


def provenance_of(point: ComposedConfig, run_spec: RunSpec) -> dict[str, Any]:
    """Where the result comes from, however the run ends."""
    backend = point.config["backend"]
    is_predicted = backend["name"] in ("sim", "lockstep")
    has_kv = bool(run_spec.requests) and backend["name"] != "openai"  # a server plans its own
    return {
        **commit(),
        "versions": versions(),
        "form": form(),
        "host": host(),
        "backend": backend["name"],
        "clock": backend["clock"],
        "model": run_spec.spec.name,
        "device": run_spec.device.name,
        "cost_form": run_spec.durations.form if is_predicted else "measured",
        "quoted_cost_form": run_spec.quotes.form,  # what policies are told that operations take
        "cost_provenance": run_spec.cost.provenance,
        "profile_hash": profile_hash(point.config["profile"]),
        "replicas": run_spec.replicas,
        "depth": run_spec.depth,
        "seed": run_spec.seed,
        "trace_hash": trace_hash(run_spec.requests),
        "requests": len(run_spec.requests),
        "has_prompt_ids": all(r.prompt_ids is not None for r in run_spec.requests),
        **_trained(run_spec),
        **(_assumed(run_spec) if is_predicted else {}),
        "memory_plan": _memory_plan(run_spec) if has_kv else None,  # of a replica
        "kv_pages": pages_of(run_spec)[GPU] if has_kv else None,
        "overrides": list(point.overrides),
        "config_folders": [str(Path(folder).resolve()) for folder in point.folders],
    }


def _assumed(run_spec: RunSpec) -> dict[str, str]:
    """What times rest on that was never measured; empty where nothing of the kind is used."""
    if not run_spec.has_two_lanes:
        return {}
    share = f"{run_spec.lane_share:g} of the device's rate (lane_share)"
    return {"assumed": f"while both compute lanes are busy, each has {share}"}


def _trained(run_spec: RunSpec) -> dict[str, Any]:
    """How large what is trained is, in how many chunks it lies, how many steps it is to do, in
    what memory, and how long a step takes by the planner; empty where nothing is trained."""
    if not run_spec.trainees:
        return {}
    numbers = [p.elements for trainee in run_spec.trainees for p in trainee.shape.parameters]
    chunks = [c for layout in run_spec.room.layout.training.values() for c in layout.chunks]
    states = [c.weight_bytes + c.gradient_bytes + c.optimizer_bytes for c in chunks]
    capacity = run_spec.room.capacity_bytes.items()
    foretold = [layout.step_ns for layout in run_spec.room.layout.training.values()]
    return {
        **({"foretold_step_s": foretold[0] / 1e9} if len(foretold) == 1 and foretold[0] else {}),
        "parameters": sum(numbers),
        "chunks": len(chunks),
        "state_bytes": sum(states),
        "train_steps_asked": sum(
            trainee.job.num_steps - trainee.job.begun_steps for trainee in run_spec.trainees
        ),
        "capacity_bytes": {f"{tier}:{device}": nbytes for (tier, device), nbytes in capacity},
    }


def _memory_plan(run_spec: RunSpec) -> dict[str, int]:
    """What a device's memory is for, in bytes; its KV may have been given instead."""
    memory = run_spec.room.memory
    return {
        "usable_bytes": memory.usable,
        "weight_bytes": memory.weights,
        "activation_bytes": memory.activation,
        "reserve_bytes": memory.reserve,
        "kv_bytes": pages_of(run_spec)[GPU] * memory.page,
    }


def write_config(folder: Path, config: Mapping[str, Any]) -> None:
    """config.yaml of a run folder: what it takes to run it again."""
    write_text(folder / "config.yaml", yaml_text(dict(config)))
    seal(folder, "config.yaml")


def _write_metrics(run: RunFiles, limits: Mapping[str, Any]) -> dict[str, Any]:
    from analysis.metrics import summary

    metrics = dict(summary(run, limits or None))
    write_json(run.folder / "metrics.json", metrics)
    return metrics
