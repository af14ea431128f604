"""Claim: step time and peak memory of training are predicted, then measured on this CPU.

Tables are fitted to short jobs of two layers in two policies, without pressure. Judged jobs have
other depths, microbatches, policies, modes of activations and tight budgets. Both clocks count time
in reference works (runtime/measure/reference.py), because the machine's speed changes by a third
within seconds. Slower changes are seen by a probe, a job of the calibration's kind, before and
after every judged run: its step over the one that was measured behind the calibration is the pace
of the run's prediction. A run is discarded if its two probes differ by more than 3 %. None of this
looks at the judged run, nor at what tables say of the probe; the prediction without a pace is
printed beside it. Step time must be within 5 % on the
service clock and 10 % on the wall clock, with copies throttled to 0.5 GB/s; the device's peak by
both ledgers within 3 %. A meter that is independent of the ledger checks it in lockstep: bytes
between launches are equal but for token ids, and the workspace of each launch of a unit is within
5 %.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import pandas as pd

from analysis.distance import STEADY
from analysis.fidelity import middle
from analysis.run import Run
from analysis.training import training_summary
from analysis.usage import pools
from benchmarks.fidelity.cases import keep, say, verdict_of
from benchmarks.fidelity.launch_peaks import watched
from benchmarks.fidelity.training_cases import CALIBRATED, ROOMY, TrainingCase, check_unseen, common
from runtime.measure.shapes import Microbatch
from tandem.config.compose import composed
from tandem.fidelity.protocol import ATTEMPTS, clock_of, run
from tandem.wiring.profile import calibrate_training

OUT = Path("benchmarks/results/training_fidelity.csv")
STEP = {"service": 0.05, "wall": 0.10}
PEAK, TRANSIENT = 0.03, 0.05
COLUMNS = ["case", "figure", "measured", "error", "worst_rerun", "bar"]
MEASURED = ("backend=cpu", "backend.probe_look_s=null")  # probes are jobs here
PROBE = ("policy=zero_offload", "planner.modes=keep", "model.num_layers=2", *ROOMY)
PROBE += ("training.sequences=4", "training.sequence_tokens=64", "training.num_steps=24")
STILL = ("device.host_plan_ns=0", "device.host_slice_ns=0")  # a meter finds nothing in flight
AT_CALIBRATION = 3  # probes behind a calibration
CASES = (
    TrainingCase("zero3_offload", "keep", 6, Microbatch(3, 120), 0.6),
    TrainingCase("zero_offload", "recompute", 4, Microbatch(2, 152), 0.5, microbatches=2),
    TrainingCase("fsdp2_offload", "offload", 5, Microbatch(5, 72), 0.4),
    TrainingCase("train_lru", "keep", 5, Microbatch(7, 40), 0.6),
    TrainingCase("train_opt", "recompute", 6, Microbatch(1, 200), 0.4),
    TrainingCase("patrickstar", "keep", 6, Microbatch(3, 88), 0.6),
)
QUICK = (CASES[0], CASES[5])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clocks", nargs="+", default=[*STEP], choices=[*STEP])
    parser.add_argument("--reruns", type=int, default=5)
    parser.add_argument("--steps", type=int, default=16, help="of a judged run")
    parser.add_argument("--quick", action="store_true", help="two cases, 2 reruns, 8 steps")
    parser.add_argument("--keep", type=Path, help="folder for all runs, to go on with if stopped")
    chosen = parser.parse_args()
    if chosen.quick:
        chosen.reruns, chosen.steps = 2, 8
    cases = QUICK if chosen.quick else CASES
    is_whole = not chosen.quick and set(chosen.clocks) == set(STEP)
    table = measured(chosen, cases, OUT, is_whole)
    return verdict_of("training_fidelity_worst", table)


def measured(
    chosen: argparse.Namespace, cases: Sequence[TrainingCase], out: Path, is_whole: bool
) -> pd.DataFrame:
    """All cases, judged, with their CSV. An unfinished table is kept beside it as it grows."""
    check_unseen(cases)
    part_of = out.with_stem(f"{out.stem}_part")
    with tempfile.TemporaryDirectory() as temporary:
        table = pd.DataFrame(columns=COLUMNS)
        for part in parts(chosen, cases, chosen.keep or Path(temporary)):
            table = pd.concat([table, part]) if len(table) else part
            keep(judged(table), part_of)
    if is_whole:
        for path in (part_of, part_of.with_suffix(".json")):
            path.unlink()
        keep(judged(table), out)
    return judged(table)


def parts(
    chosen: argparse.Namespace, cases: Sequence[TrainingCase], root: Path
) -> Iterator[pd.DataFrame]:
    """Memory first; then each clock with a calibration per recipe, case by case."""
    for case in cases:
        yield memory_rows(case)
    for clock in chosen.clocks:
        for case in cases:
            profile = calibrated(clock, case.recipe, root / clock / f"profile-{case.recipe}")
            runs = reruns(case, clock, profile, chosen, root / clock)
            yield timed_rows(case, clock, runs, chosen.reruns)


# ---- time
@dataclass(frozen=True)
class TrainingPair:
    """A measured run with its prediction, and the pace of the probes beside it."""

    measured: Run
    predicted: Run
    unpaced: Run  # the prediction without a pace
    pace: float


def calibrated(clock: str, recipe: str, folder: Path) -> Path:
    """A profile of two layers, made once."""
    if not folder.is_dir():
        say(f"calibrating {recipe}, clock {clock}")
        sequences, tokens = CALIBRATED
        words = [*common(recipe), *MEASURED, "model.num_layers=2", "policy=zero_offload"]
        words += [f"backend.clock={clock}", "backend.reference_ns=auto"]
        words += [f"training.sequences={sequences}", f"training.sequence_tokens={tokens}"]
        say(calibrate_training(composed(words), folder).to_string())
    return folder


class JudgedJob(Protocol):
    """What is measured: a name for the table, a recipe with a calibration, and the settings."""

    @property
    def name(self) -> str: ...

    @property
    def recipe(self) -> str: ...

    def settings(self, num_steps: int) -> tuple[str, ...]: ...


def reruns(
    case: JudgedJob, clock: str, profile: Path, chosen: argparse.Namespace, root: Path
) -> list[TrainingPair]:
    """Accepted runs: as many as --reruns, or fewer if the machine is not steady for long enough."""
    backend = (*MEASURED, f"backend.clock={clock}", clock_of(profile))
    folder, settings = root / case.name.replace(" ", "-"), case.settings(chosen.steps)
    job = (*common(case.recipe), *PROBE)
    probe = probe_of((*job, *backend), profile)
    accepted = list[TrainingPair]()
    before = probed((*job, *backend), folder / "probe-0") / probe
    for attempt in range(ATTEMPTS * chosen.reruns):
        measured = run((*settings, *backend), folder / f"run-{attempt}")
        after = probed((*job, *backend), folder / f"probe-{attempt + 1}") / probe
        moved = after / before - 1
        say(f"{case.name}, {clock}: run {attempt}, probes at {after:.3f}, moved {moved:+.1%}")
        if abs(moved) <= STEADY:
            pace = (before + after) / 2
            words = (*settings, f"profile={profile}")
            predicted = run((*words, f"pace={pace:.6f}"), folder / f"predicted-{attempt}")
            accepted.append(TrainingPair(measured, predicted, run(words, folder / "unpaced"), pace))
        before = after
        if len(accepted) == chosen.reruns:
            break
    return accepted


def probe_of(settings: Sequence[str], profile: Path) -> float:
    """The median step of the probes behind a calibration, measured before its first case."""
    found = [
        probed(settings, profile.with_name(f"{profile.name}-probe-{number}"))
        for number in range(AT_CALIBRATION)
    ]
    return float(np.median(found))


def probed(settings: Sequence[str], folder: Path) -> float:
    """The settled step of the probe, measured."""
    return step_s(run(settings, folder))


def timed_rows(
    case: JudgedJob, clock: str, pairs: Sequence[TrainingPair], wanted: int
) -> pd.DataFrame:
    """Medians over reruns of step time and peak, with their signed errors."""
    name = f"{case.name} {clock}"
    rows = [(name, "steady_reruns", float(len(pairs)), len(pairs) / wanted - 1, np.nan, 0.0)]
    if pairs:
        paces = np.array([pair.pace for pair in pairs])
        steps = np.array([(step_s(p.measured), step_s(p.predicted)) for p in pairs])
        unpaced = np.array([(step_s(p.measured), step_s(p.unpaced)) for p in pairs])
        peaks = np.array([(peak_bytes(p.measured), peak_bytes(p.predicted)) for p in pairs])
        rows.append((name, "step_s", *compared(steps), STEP[clock]))
        rows.append((name, "step_s_unpaced", *compared(unpaced), np.nan))
        rows.append((name, "peak_device_bytes", *compared(peaks), PEAK))
        rows.append((name, "pace", float(np.median(paces)), *middle(paces - 1), np.nan))
    return pd.DataFrame(rows, columns=COLUMNS)


def compared(values: np.ndarray) -> tuple[float, float, float]:
    """The median measurement (first column), the median error, the worst error."""
    return float(np.median(values[:, 0])), *middle(values[:, 1] / values[:, 0] - 1)


def step_s(done: Run) -> float:
    """The mean of the settled steps."""
    return float(training_summary(done)["mean_train_step_s"])


def peak_bytes(done: Run) -> float:
    """Most bytes booked on the device."""
    return float(pools(done)["gpu:0"]["used_bytes"].max())


# ---- memory
def memory_rows(case: TrainingCase) -> pd.DataFrame:
    """Errors of the ledger against a meter, and of booked workspace against launches."""
    say(f"{case.name}: memory")
    found = watched(composed([*case.settings(num_steps=3), *STILL, "backend=lockstep"]))
    errors = found.transient_errors
    worst = float(errors.iloc[int(errors.abs().to_numpy().argmax())])
    largest = float(found.launches["measured"].max())
    off, exact = float(found.off_bytes.abs().max()), 0.0 if found.is_exact else np.inf
    rows = [
        (case.name, "persistent_off_bytes", off, exact, np.nan, 0.0),
        (case.name, "transient_bytes", largest, worst, worst, TRANSIENT),
    ]
    return pd.DataFrame(rows, columns=COLUMNS)


# ---- the verdict
def judged(table: pd.DataFrame) -> pd.DataFrame:
    """The table with the used share of each bar (above 1 fails; a bar of 0 allows no error)."""
    error, bar = table["error"].abs(), table["bar"]
    share = (error / bar.where(bar > 0)).where(bar.notna())
    never = bar.eq(0) & (error > 0)
    return table.assign(used=share.mask(bar.eq(0), 0.0).mask(never, np.inf))


if __name__ == "__main__":
    sys.exit(main())
