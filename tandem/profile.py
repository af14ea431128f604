"""Device profiles: measured once through the replay's own executor, then read by simulations."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.drift import STEADY
from engine.model import ModelSpec
from engine.plan import PageSize
from engine.record import read_table
from sim.device import Device
from sim.errors import ALL, errors_of, operator_errors
from sim.fit import fit_observed
from sim.shapes import HOST, Copied, Observed, Planned, observed
from sim.tables import TableCost
from tandem.composed import Composed
from tandem.experiment import run_experiment
from tandem.folder import aside_of, sole_user
from tandem.made_up import REQUESTS, requests, stream
from tandem.pace import about, is_auto, measured_ns, with_reference
from tandem.provenance import commit
from tandem.setting import setting_of, spec_of
from tandem.worlds import MEASURED, world_of
from traces.store import write_trace

COST = "cost.json"
MOST_REQUESTS = 256  # of the fitted replay, where the scheduling allows larger batches still
REPLAYS = 2  # that are fitted, at the least: apart in time, since the machine's moods last
FITTED, HELD_OUT = "fitted", "held-out"  # folders of replays, followed by a number
AGAIN = "another replay: "  # rows of the held-out errors that are not of held-out shapes


def calibrate(
    point: Composed, folder: Path, replays: int = REPLAYS, streams: bool = False
) -> pd.DataFrame:
    """Profiles the backend of a configuration and fits its tables into `folder`.

    A grid of shapes, and replays of made-up requests through the whole engine before and behind it,
    which show what the host needs and what launches take in their places: `replays` of them, more
    where a neighbour's moods should average out. Then half as many of other requests, which the
    fit does not see. `streams`: they arrive as the configuration says, for a profile of one load;
    in a steady stream launches took 2 to 8 % longer here than those of equal batch and contexts in
    replays that come all at once and ebb. Returns the errors on what was held out, see `judged`.
    """
    point = replace(point, config={**point.config, "replicas": 1})  # all are alike
    backend = point.config["backend"]["name"]
    if replays < REPLAYS:
        raise ValueError(f"replays={replays}: a fit takes {REPLAYS} or more")
    if backend not in MEASURED:
        raise ValueError(f"backend={backend} measures nothing; calibrate {' or '.join(MEASURED)}")
    if folder.is_dir() and any(folder.iterdir()):
        raise ValueError(f"{folder}: there is something in it already; give a new folder")
    setting_of(point)  # what is wrong is told before anything is written
    lock = folder.with_name(f".{folder.name}.lock")
    with sole_user(lock, f"{folder}: another calibration is running there"):
        return _measured(point, folder, replays, streams)


def _measured(point: Composed, folder: Path, replays: int, streams: bool) -> pd.DataFrame:
    """All that a profile is made of, aside and renamed in the end."""
    aside = aside_of(folder)
    shutil.rmtree(aside, ignore_errors=True)  # of a calibration that was killed
    seed = int(point.config["seed"])
    if is_auto(point.config):
        nominal_ns = measured_ns(setting_of(point).spec, seed)
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


def fitted_replay(point: Composed, folder: Path, number: int, streams: bool = False) -> None:
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

    In the grid nobody decides and nothing is booked, so its host time is packing only, and its
    launches find warmer caches than those of a replay: they count less.
    """
    launches = [o for o in observed(read_table(folder / "steps.parquet")) if _is_launched(o)]
    replayed = [row for table in _steps(folder, FITTED) for row in observed(table)]
    return fit_observed(replayed, spec, page, _source(folder), apart=launches)


def judged(cost: TableCost, folder: Path) -> pd.DataFrame:
    """Errors on held-out shapes by class, on replays that the fit has not seen, and by operator.

    An operator is a table of the cost; it is judged by what of both it rules, see operator_errors.
    The host is judged by those replays only: with shapes it packs, but decides and books nothing.
    """
    shapes = [o for o in observed(read_table(folder / "holdout.parquet")) if _is_launched(o)]
    replayed = [o for table in _steps(folder, HELD_OUT) for o in observed(table)]
    again = errors_of(cost, replayed)
    kept = {ALL, HOST} | {shape.group for shape, _ in replayed if isinstance(shape, Copied)}
    again = again[again.index.isin(kept)].rename(index=lambda name: AGAIN + name)
    return pd.concat([errors_of(cost, shapes), again, operator_errors(cost, [*shapes, *replayed])])


def _is_launched(found: Observed) -> bool:
    """No host's part of a plan."""
    return not isinstance(found[0], Planned)


def _steps(folder: Path, kind: str) -> list[Any]:
    """The steps of a profile's replays of one kind."""
    return [read_table(path) for path in sorted(folder.glob(f"{kind}-*/steps.parquet"))]


def is_steady(table: pd.DataFrame) -> bool:
    """Whether the machine was the same in the held-out replays as in those that were fitted.

    `table` is what `calibrate` returns. Single launches scatter; their sum does not, unless the
    machine has changed: up to 1.2 % in 20 of 24 calibrations here, up to 3 % in 23, 8.5 % in one.
    """
    return abs(float(table.loc[AGAIN + ALL, "total"])) <= STEADY


def read_cost(folder: Path, spec: ModelSpec, device: Device, page_tokens: int) -> TableCost:
    """The tables of a profile. ValueError if there are none, or they are of something else."""
    path = folder / COST
    if not path.is_file():
        raise ValueError(
            f"profile={folder}: no {COST} and no tables of another simulator there; make a profile "
            "with `tandem calibrate`"
        )
    cost = TableCost.load(path).as_deep_as(spec)
    if asdict(cost.model) != asdict(spec):
        raise ValueError(
            f"profile={folder} was measured with model {cost.model.name}, not {spec.name}; "
            f"run `tandem calibrate model={spec.name}`"
        )
    if cost.page.tokens != page_tokens:
        raise ValueError(
            f"profile={folder} was measured with page_tokens={cost.page.tokens}, not {page_tokens}"
        )
    measured = about(folder)
    for name, value in device_facts(device).items():
        if measured.get(name, value) != value:
            raise ValueError(
                f"profile={folder} was measured with {name} {measured[name]}, not {value}; "
                "calibrate with the settings that you run with"
            )
    return cost


def device_facts(device: Device) -> dict[str, Any]:
    """What of a device decides over a profile: its name and its link."""
    return {
        "device": device.name,
        "to_device_bytes_per_s": device.to_device_bytes_per_s,
        "to_host_bytes_per_s": device.to_host_bytes_per_s,
        "link_ns": device.link_ns,
    }


def _profile_shapes(point: Composed, folder: Path) -> None:
    from runtime.calibrate import profile

    setting, backend = setting_of(point), point.config["backend"]
    facts = {**commit(), **device_facts(setting.device), **backend}
    with world_of(setting, backend) as world:
        assert world.fresh is not None, "a measured backend has a machine"
        with world.fresh() as (env, executor, meter):
            look = None if meter is None else meter.read
            profile(env, executor, world.machine, folder, seed=setting.seed, facts=facts, look=look)


def replayed_count(scheduling: Mapping[str, Any] | None) -> int:
    """Requests of the fitted replay: as many as the scheduling would serve together."""
    most = int((scheduling or {}).get("max_jobs", REQUESTS))
    return min(max(REQUESTS, most), MOST_REQUESTS)


def _replay(
    point: Composed, folder: Path, name: str, number: int, count: int, streams: bool
) -> None:
    """Made-up requests through the whole engine, into a folder of that name.

    So many at once, or a stream with arrivals of its own: those of the configuration's seed are
    what will be predicted.
    """
    config, trace = point.config, folder / f"{name}-trace.parquet"
    positions, seed = spec_of(point).max_positions, int(config["seed"]) + number
    changed: dict[str, Any] = {"trace": {"path": str(trace)}, "limit": None, "replayed": None}
    if streams:
        seed += 1
        made_up, changed["seed"] = stream(positions, seed), seed
    else:
        made_up = requests(positions, seed, count)
        changed["arrival"] = {"_target_": "traces.arrivals.AllAtOnce"}
    write_trace(trace, made_up, {"source": "made up by tandem/made_up.py", "seed": seed})
    changed["backend"] = {**config["backend"], "workspace_every": 0}  # only times are of use
    run_experiment(replace(point, config={**config, **changed}), folder / name)


def _source(folder: Path) -> str:
    facts = about(folder)
    return f"{facts['hardware']} ({facts['name']}, clock {facts['clock']}, {facts['date']})"
