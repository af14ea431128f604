"""Shared parts of the fidelity claims: measured reruns beside their predictions, judged by row.

A profile is calibrated on synthetic shapes and lengths; the judged trace is ShareGPT. Every
measured run has drift probes before and after it. A run is discarded if a probe moved by more than
3 %, and a calibration if its held-out replay is off by more than 3 % in all: the machine was not
steady. Neither rule looks at the error of a judged run. An error is the median over reruns, whose
signs may cancel: the worst rerun is published beside it. A shared machine's speed changes by a
third within seconds, so both clocks count time in reference works (runtime/measure/reference.py),
in calibrations and runs. Changes that these do not follow last for minutes (large batches took 8 %
longer half an hour after their calibration), so measurement and calibration take turns: before and
after every judged run, a replay of synthetic requests at the case's rate adds to the calibration of
its tables. Run it alone: with the other core busy, launches moved against the reference work by
4 %.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pandas as pd

from analysis.distance import STEADY, drift
from analysis.metrics import summary
from analysis.run import Run, load
from tandem.cli.calibrate import main as calibrate
from tandem.cli.compare import replay_of
from tandem.config.compose import composed
from tandem.wiring.experiment import run_experiment
from tandem.wiring.folder import OK, commit, host, running_folder, status_of
from tandem.wiring.profile import FITTED, fitted_replay, is_steady, refitted

AT_PACE = "_at_pace_"  # in names of figures at another step time
KV_PEAK = 0.03
ATTEMPTS = 6  # measured runs per accepted one, at the most
METRICS = ("ttft", "tpot", "e2e")
STATS = ("mean", "p50", "p90", "p99")
COLUMNS = ["case", "figure", "measured", "error", "worst_rerun", "rerun_iqr"]
# Files of a profile, without its replays.
GRID = ("profile.json", "steps.parquet", "holdout.parquet", "hashes.json")
PACE = "backend.reference_ns="
# Rows that are 1 if a property holds for all reruns; the claim fails if one is not.
MUST_HOLD = ("kv_peak_replayed_equal", "swapped_in_every_run", "bytes_copied_replayed_equal")
NEVER_ABOVE = 0.10  # for mean TPOT and E2E


@dataclass(frozen=True)
class Case:
    """One point: its settings, and the folder of its runs."""

    name: str
    settings: tuple[str, ...]
    folder: Path
    calibration: Path  # the profile with the grid of shapes

    @property
    def profile(self) -> Path:
        """The profile that is fitted to replays between the case's runs."""
        return self.folder / "profile"

    @property
    def predicted(self) -> tuple[str, ...]:
        """Settings of a simulation."""
        return (*self.settings, f"profile={self.profile}")


@dataclass(frozen=True)
class Pair:
    """A measured run, its prediction, and its plan log replayed in the simulator."""

    measured: Run
    predicted: Run
    replayed: Run


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def run(settings: Sequence[str], folder: Path, replaces: bool = False) -> Run:
    """Runs into a folder of its own, or loads the run that a stopped claim has left there.

    Remains of a killed or failed run are removed. A run of other settings or of another commit is
    removed with `replaces`; otherwise it raises ValueError.
    """
    if status_of(folder) == OK:
        found = load(folder)
        made_of = found.provenance["overrides"], found.provenance["commit"]
        if made_of == ([*settings], commit()["commit"]):
            return found
        if not replaces:
            raise ValueError(
                f"{folder} holds a run of other settings or of another commit; "
                "give a new folder with --keep"
            )
        say(f"{folder}: a run of other settings or of another commit is replaced")
    cleared(folder)
    run_experiment(composed(list(settings)), folder)
    return load(folder)


def cleared(folder: Path) -> None:
    """Removes a run's folder, and the remains of a killed run beside it."""
    for path in (folder, running_folder(folder)):
        shutil.rmtree(path, ignore_errors=True)


def calibrated(
    name: str, settings: Sequence[str], backend: Sequence[str], folder: Path, replays: int
) -> Path:
    """Calibrates a profile into `folder` on a steady machine, fitted to `replays` replays.

    Discarded profiles stay beside it. RuntimeError after ATTEMPTS unsteady calibrations.
    """
    for _ in range(ATTEMPTS):
        if not folder.is_dir():
            say(f"calibrating for {name}")
            calibrate([*settings, *backend, "--out", str(folder), "--replays", str(replays)])
        if is_steady(pd.read_csv(folder / "errors.csv", index_col="class")):
            return folder
        number = len(list(folder.parent.glob(f"{folder.name}-unsteady*")))
        folder.rename(folder.with_name(f"{folder.name}-unsteady{number}"))
        say(f"{name}: the machine changed during the calibration, which is discarded")
    raise RuntimeError(f"{name}: no steady calibration in {ATTEMPTS}; go on later, with --keep")


def clock_of(profile: Path) -> str:
    """The override with a profile's clock: one clock for all policies makes them comparable.

    Calibrations within one hour gave decode steps of 2.2 to 4.4 ms.
    """
    about = json.loads((profile / "profile.json").read_text(encoding="utf-8"))
    return PACE + json.dumps(about["reference_ns"], separators=(",", ":"))


def capacity(
    settings: Sequence[str], backend: Sequence[str], folder: Path, replaces: bool = False
) -> float:
    """Requests per second with all requests at once, measured; `replaces` as in `run`."""
    done = run((*settings, *backend, "arrival=all_at_once"), folder, replaces)
    return float(summary(done)["request_throughput"])


def reruns(case: Case, backend: Sequence[str], count: int) -> list[Pair]:
    """`count` accepted pairs, or fewer if the machine is not steady for long enough."""
    accepted = list[Path]()
    for attempt in range(ATTEMPTS * count):
        synthetic_replay(case, backend, attempt)
        folder = case.folder / f"run{attempt}"
        moved = drift(run((*case.settings, *backend), folder / "measured"))
        assert moved is not None, "a measured run has probes"
        say(f"{case.name}: run {attempt}, probes moved {moved:.1%}")
        accepted += [folder] if moved <= STEADY else []
        if len(accepted) == count:
            break
    synthetic_replay(case, backend, attempt + 1)
    refitted(case.profile)
    return [pair(case, folder) for folder in accepted]


def synthetic_replay(case: Case, backend: Sequence[str], number: int) -> None:
    """Adds a replay of synthetic requests to the case's profile, unless it is there."""
    if number == 0:
        case.profile.mkdir(parents=True, exist_ok=True)
        for name in GRID:  # also in a resumed claim: the earlier one may have stopped here
            shutil.copy(case.calibration / name, case.profile)
    if status_of(case.profile / f"{FITTED}-{number}") != OK:
        fitted_replay(composed([*case.settings, *backend]), case.profile, number, streams=True)


def pair(case: Case, folder: Path) -> Pair:
    """A measured run with its prediction, and with its plans replayed in the simulator."""
    measured = load(folder / "measured")
    predicted = run(case.predicted, folder / "predicted")
    replayed = folder / "replayed"
    if not (replayed / "metrics.json").is_file():
        replay_of(predicted, measured, replayed)
    return Pair(measured, predicted, load(replayed))


def kv_peak_pages(run: Run) -> int:
    """Most KV pages that were booked on the device."""
    rows = run.memory[run.memory["tier"].eq("gpu") & run.memory["cause"].eq("issue")]
    return int(rows["kv_pages"].max())


def table_of(case: Case, pairs: Sequence[Pair], wanted: int) -> pd.DataFrame:
    """Per metric and statistic: medians over reruns of both values and of the signed error."""
    rows = [(case.name, "steady_reruns", float(len(pairs)), len(pairs) / wanted - 1, 0.0, 0.0)]
    if not pairs:
        return pd.DataFrame(rows, columns=COLUMNS)
    values = [(summary(p.measured), summary(p.predicted)) for p in pairs]
    for key in ("request_throughput", *(f"{s}_{m}_s" for m in METRICS for s in STATS)):
        real = np.array([float(m[key]) for m, _ in values])
        error = np.array([float(p[key]) / float(m[key]) - 1 for m, p in values])
        low, high = np.percentile(real, (25, 75))
        spread = float((high - low) / np.median(real))
        rows.append((case.name, key, float(np.median(real)), *middle(error), spread))
    peaks = np.array([kv_peak_pages(p.predicted) / kv_peak_pages(p.measured) - 1 for p in pairs])
    equal = all(kv_peak_pages(p.replayed) == kv_peak_pages(p.measured) for p in pairs)
    pages = float(np.median([kv_peak_pages(p.measured) for p in pairs]))
    rows.append((case.name, "kv_peak_pages", pages, *middle(peaks), 0.0))
    rows.append((case.name, "kv_peak_replayed_equal", float(equal), 0.0, 0.0, 0.0))
    for name in pairs[0].measured.provenance["probe_ratios"]:
        ratios = np.array([p.measured.provenance["probe_ratios"][name] for p in pairs])
        rows.append((case.name, f"probe_{name}_after_over_before", 1.0, *middle(ratios - 1), 0.0))
    return pd.DataFrame(rows, columns=COLUMNS)


def middle(errors: np.ndarray) -> tuple[float, float]:
    """The median of signed errors, and the error that is farthest from zero."""
    return float(np.median(errors)), float(errors[np.abs(errors).argmax()])


def bars(row: Mapping[str, object], judges_ttft: bool) -> float | None:
    """The largest error that passes; None for a figure without a bar.

    Throughput 2 %. Mean TPOT and E2E: 5 %, or the spread of reruns if that is more, never above
    10 %. TTFT 10 %, and only well below saturation, where requests do not queue. KV peak 3 %.
    """
    figure, spread = str(row["figure"]), float(str(row["rerun_iqr"]))
    if figure == "request_throughput":
        return 0.02
    if figure in ("mean_tpot_s", "mean_e2e_s"):
        return min(NEVER_ABOVE, max(0.05, spread))
    if figure == "mean_ttft_s":
        return 0.10 if judges_ttft else None
    return KV_PEAK if figure == "kv_peak_pages" else None


def judged(table: pd.DataFrame, judges_ttft: bool) -> pd.DataFrame:
    """The table with its bars, and the used share of each bar (above 1 fails)."""
    table = table.copy()
    table["bar"] = [bars(row, judges_ttft) for row in table.to_dict("records")]
    table["used"] = table["error"].abs() / table["bar"].astype(float)
    broken = table["figure"].isin(MUST_HOLD) & table["measured"].lt(1)
    broken |= table["figure"].eq("steady_reruns") & table["error"].lt(0)
    table.loc[broken, "used"] = np.inf
    return table


def keep(table: pd.DataFrame, out: Path) -> None:
    """Writes the CSV, and beside it the commit, machine and date of its figures."""
    out.parent.mkdir(parents=True, exist_ok=True)
    table.to_csv(out, index=False)
    about = {**commit(), **host(), "date": datetime.now(UTC).isoformat(timespec="seconds")}
    out.with_suffix(".json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")


def finish(name: str, table: pd.DataFrame, out: Path) -> int:
    """Writes the CSV, prints the table and the claim; returns the exit status."""
    keep(table, out)
    return verdict_of(name, table)


def verdict_of(name: str, table: pd.DataFrame) -> int:
    """Prints the table and the claim; returns the exit status."""
    print(table.to_string(index=False, float_format=lambda x: f"{x:.4g}", na_rep="-"))
    worst = float(table["used"].max())
    verdict = "pass" if worst <= 1 else "fail"
    print(f"{name} {worst:.3g} of_bar 1 {verdict}")
    return int(verdict == "fail")
