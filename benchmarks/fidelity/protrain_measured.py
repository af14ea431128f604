"""Claim: ProTrain's planner foretells measured steps and peaks, and chooses close to the best.

Rules and probes are those of training_fidelity: tables are fitted to short jobs of two layers in
two other policies. Eight configurations of deeper models, in three recipes and in the memory that
the planner asks for, are measured on this CPU: the planner's own step, at the pace of the probes,
must be within 5 % on the service clock (median of five reruns). On the wall clock, with a link of
0.5 GB/s and all updates on the device, it is 10 %; other rows of the wall clock are printed. The
published figure is 4 %. The simulator's step stands beside, and its peak equals the measured one to
the byte: both are booked. So the books are held to a meter, in lockstep: storages to the byte, and
workspace by the rule of training_fidelity.
Then twelve configurations of one model that fit one budget run by turns on the service clock: the
planner's choice is at most 5 % slower than the fastest. Half of them are of the fastest twentieth.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd

from benchmarks.fidelity.cases import finish, say
from benchmarks.fidelity.training_cases import ADAMW, CALIBRATED, common
from benchmarks.fidelity.training_fidelity import (
    MEASURED,
    STEP,
    TrainingPair,
    calibrated,
    compared,
    memory_rows,
    peak_bytes,
    reruns,
    step_s,
)
from policies.planners.blocks import Configuration
from policies.planners.search import TimedConfiguration
from runtime.measure.shapes import Microbatch, TrainingLimits, training_grid
from tandem.cli.plan_choice import searched
from tandem.config.compose import composed
from tandem.fidelity.protocol import clock_of, run
from tandem.wiring.profile import BEYOND
from tandem.wiring.run_spec import run_spec_of

OUT = Path("benchmarks/results/protrain_measured.csv")
ROOM = ("device.memory_bytes=4000000000", "device.host_bytes=4000000000")
CHOICE = 0.05  # of the chosen configuration over the fastest
TRIED, TURNS = 12, 3  # configurations of one budget, and runs of each
SHARE = 0.5  # of the way from the least budget to what lets all persist
JOB = ("model.num_layers=8", "training.sequences=3", "training.sequence_tokens=88")


@dataclass(frozen=True)
class ConfiguredJob:
    """A job under one configuration of ProTrain, in the memory that the planner asks for.

    The planner is quoted the durations of `profile` on every side, measured runs included: which
    blocks swap follows from them.
    """

    layers: int
    shape: Microbatch
    knobs: Configuration
    recipe: str = ADAMW
    profile: Path | None = None

    @property
    def name(self) -> str:
        """Name in the table."""
        return " ".join(["protrain", *map(str, self.knobs), self.recipe])

    @property
    def job(self) -> tuple[str, ...]:
        """Overrides without a budget."""
        sequences, tokens = self.shape
        shape = (f"training.sequences={sequences}", f"training.sequence_tokens={tokens}")
        own = (*common(self.recipe), *ROOM, f"model.num_layers={self.layers}", *shape)
        quoted = () if self.profile is None else (f"quoted_profile={self.profile}",)
        return (*own, *configured(self.knobs), *quoted)

    def settings(self, num_steps: int) -> tuple[str, ...]:
        """Overrides of a run."""
        budget = planned(self.job).peak_bytes
        return (*self.job, f"budget.device_bytes={budget}", f"training.num_steps={num_steps}")

    @property
    def is_on_device(self) -> bool:
        """Whether all updates run on the device."""
        return self.knobs.persistent == self.layers


CASES = (
    ConfiguredJob(6, Microbatch(3, 120), Configuration(0, 2, 0, 0)),
    ConfiguredJob(6, Microbatch(3, 88), Configuration(2, 2, 1, 3)),
    ConfiguredJob(6, Microbatch(5, 72), Configuration(6, 0, 0, 6)),
    ConfiguredJob(6, Microbatch(3, 120), Configuration(0, 2, 0, 6), "lora"),
    ConfiguredJob(6, Microbatch(5, 72), Configuration(6, 0, 0, 0), "lora"),
    ConfiguredJob(6, Microbatch(3, 88), Configuration(0, 2, 0, 2), "bfloat16"),
    ConfiguredJob(6, Microbatch(3, 120), Configuration(3, 2, 1, 2), "bfloat16"),
    ConfiguredJob(6, Microbatch(5, 72), Configuration(6, 0, 0, 3), "bfloat16"),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clocks", nargs="+", default=[*STEP], choices=[*STEP])
    parser.add_argument("--reruns", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12, help="of a judged run")
    parser.add_argument("--quick", action="store_true", help="two cases, 2 reruns, service clock")
    parser.add_argument("--keep", type=Path, help="folder for all runs, to go on with if stopped")
    chosen = parser.parse_args()
    cases = CASES
    if chosen.quick:
        cases, chosen.clocks, chosen.reruns = CASES[:2], ["service"], 2
    limits = TrainingLimits(4096, BEYOND * CALIBRATED.rows)
    assert not {case.shape for case in cases} & {*training_grid(limits)}, "shapes are unseen"
    with tempfile.TemporaryDirectory() as temporary:
        root = (chosen.keep or Path(temporary)).resolve()
        rows = [row for clock in chosen.clocks for row in estimated(cases, clock, chosen, root)]
        if not chosen.quick:
            rows += chosen_among(root / "service")
    columns = ["case", "figure", "measured", "error", "worst_rerun", "bar", "used"]
    table = pd.DataFrame(rows, columns=columns)
    is_whole = not chosen.quick and set(chosen.clocks) == set(STEP)
    out = OUT if is_whole else OUT.with_stem(f"{OUT.stem}_part")
    return finish("protrain_measured_worst", table, out)


Row = tuple[str, str, float, float, float, float, float]


# ---- the estimator
def estimated(
    cases: Sequence[ConfiguredJob], clock: str, chosen: argparse.Namespace, root: Path
) -> Iterator[Row]:
    """Rows of all configurations on one clock."""
    for case in cases:
        profile = calibrated(clock, case.recipe, root / clock / f"profile-{case.recipe}")
        own = replace(case, profile=profile)
        pairs = reruns(own, clock, profile, chosen, root / clock)
        bar = STEP[clock] if clock == "service" or case.is_on_device else math.nan
        yield from judged(f"{case.name} {clock}", own, pairs, chosen.reruns, bar)
        if clock == "service":
            for name, figure, *found, held in memory_rows(own).itertuples(index=False):
                yield name, figure, *found, held, _used(found[1], held)


def judged(
    name: str,
    case: ConfiguredJob,
    pairs: Sequence[TrainingPair],
    wanted: int,
    bar: float,
) -> Iterator[Row]:
    """The planner's step and the simulator's against the measured one, and the peaks."""
    lacks = len(pairs) - wanted
    yield name, "steady_reruns", float(len(pairs)), float(lacks), math.nan, 0.0, _used(lacks, 0.0)
    if not pairs:
        return
    own_s = planned(case.job).step_ns / 1e9
    planner = np.array([(step_s(pair.measured), own_s * pair.pace) for pair in pairs])
    simulator = np.array([(step_s(p.measured), step_s(p.predicted)) for p in pairs])
    peaks = np.array([(peak_bytes(p.measured), peak_bytes(p.predicted)) for p in pairs])
    for figure, values, held in (
        ("planner_step_s", planner, bar),
        ("simulated_step_s", simulator, math.nan),
        ("peak_device_bytes", peaks, 0.0),
    ):
        measured, error, worst = compared(values)
        yield name, figure, measured, error, worst, held, _used(error, held)
    paces = [pair.pace - 1 for pair in pairs]
    middle = float(np.median(paces))
    yield name, "pace", 1 + middle, middle, max(paces, key=abs), math.nan, math.nan


def _used(error: float, bar: float) -> float:
    """The used share of a bar; a bar of 0 allows no error."""
    return abs(error) / bar if bar != 0 else math.inf if error else 0.0


def configured(knobs: Configuration) -> tuple[str, ...]:
    """Overrides that give all knobs."""
    pairs = zip(knobs._fields, knobs, strict=True)
    return ("policy=protrain", *[f"planner.{name}={value}" for name, value in pairs])


def all_planned(words: Sequence[str]) -> list[TimedConfiguration]:
    """What the planner says of all configurations that the words allow, the fastest first."""
    point = composed([*words, "backend=sim"])
    found = searched(point, run_spec_of(point))
    assert found is not None, "protrain searches"
    return found.space.everything()


def planned(words: Sequence[str]) -> TimedConfiguration:
    """What the planner says of the one configuration that the words give."""
    (one,) = all_planned(words)
    return one


# ---- the choice
def chosen_among(root: Path) -> list[Row]:
    """The planner's choice in one budget, measured by turns with others that fit."""
    profile = calibrated("service", ADAMW, root / f"profile-{ADAMW}")
    job = (*common(ADAMW), *JOB, *ROOM, f"quoted_profile={profile}")
    found = all_planned((*job, "policy=protrain"))
    whole = [one for one in found if one.knobs.persistent == max(o.knobs.persistent for o in found)]
    most = min([one.peak_bytes for one in whole if one.knobs.checkpoints == one.knobs.swaps == 0])
    least = min([one.peak_bytes for one in found])
    budget = int(least + SHARE * (most - least))
    fitting = [one for one in found if one.peak_bytes <= budget]
    near, last = max(TRIED // 2, len(fitting) // 20), len(fitting) - 1
    half = np.linspace(0, near, TRIED // 2, endpoint=False)
    places = [*half.round().astype(int), *np.linspace(near, last, TRIED // 2).round().astype(int)]
    tried = [fitting[place].knobs for place in dict.fromkeys(places)]  # the choice is first
    assert len(tried) == TRIED, f"only {len(fitting)} configurations fit"
    backend = (*MEASURED, "backend.clock=service", clock_of(profile))
    common_words = (*job, f"budget.device_bytes={budget}", "training.num_steps=12", *backend)
    steps = {knobs: list[float]() for knobs in tried}
    for turn in range(TURNS):
        for knobs in tried:
            folder = root / "choice" / f"{'-'.join(map(str, knobs))}-{turn}"
            steps[knobs].append(step_s(run((*common_words, *configured(knobs)), folder)))
        say(f"turn {turn} of {TURNS}: {len(tried)} configurations")
    medians = {knobs: float(np.median(taken)) for knobs, taken in steps.items()}
    fastest = min(medians.values())
    rows = list[Row]()
    for knobs in tried:
        name, over = " ".join(["choice", *map(str, knobs)]), medians[knobs] / fastest - 1
        bar = CHOICE if knobs == tried[0] else math.nan
        worst = max(steps[knobs]) / fastest - 1
        rows.append((name, "over_fastest", medians[knobs], over, worst, bar, _used(over, bar)))
    return rows


if __name__ == "__main__":
    sys.exit(main())
