"""Claim: what learning from feedback does on a CPU is predicted: training, latencies, peaks, hits.

200 ShareGPT requests through an adapter, half of whose answers get feedback two seconds later, at
50, 80 and 120 % of the capacity of serving, five reruns each, by the protocol of
coserving_fidelity.py. `alchemist` trains behind records of prompts, `recompute` without, and
`separate` on a device of its own: it serves alone, and another run trains on the feedback that has
come by the clock of the first, predicted from a prediction. Medians of the reruns are held to 5 %
of trained tokens per second (those of samples that are through), 5 % of mean TPOT (or what reruns
vary by, at most 10 %), 3 % of the peaks of KV and of the device's memory, at 50 % load to 10 % of
mean TTFT, and the share of records that were used to 2 points.

Run it alone, on a machine at rest; it takes hours. `--only CASE` measures a part.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import pandas as pd

from analysis.distance import drift
from analysis.fidelity import (
    DEVICE_PEAK,
    HITS,
    KV_PEAK,
    TRAINED,
    TTFT_UP_TO,
    counts,
    figures_of,
)
from analysis.run import load as load_run
from benchmarks.coserving.coserving_fidelity import HELD
from benchmarks.fidelity.cases import COLUMNS, measured_in_parts, reported, say
from tandem.fidelity.protocol import PACE, calibrated, clock_of, run

LOADS = (0.5, 0.8, 1.2)
BAR, HITS_BAR = 0.05, 0.02
SERVED = (
    *("experiment=fidelity_chunked", "model=micro_llama", "adapters.count=1"),
    *("budget.kv_pages=4096", "device.memory_bytes=4000000000", "device.host_bytes=12000000000"),
)
LEARNING = (
    *("training=feedback", "training.publish=a0", "training.sequence_tokens=512"),
    *("training.data.delay_s=2", "training.microbatches=4", "training.staleness=4"),
)
SHARING = (
    *("policy=alchemist", "scheduling.sharing.token_budget=128"),
    "scheduling.sharing.serving.max_jobs=48",
)
POLICIES = {
    "alchemist": (*SHARING, *LEARNING),
    "recompute": (*SHARING, *LEARNING, "scheduling.record=none"),
    "separate": (*("policy=adapters", "scheduling.token_budget=128", "scheduling.max_jobs=48"),),
}
ALONE = (  # what the other device of `separate` runs
    *("trace=none", "model=micro_llama", "policy=coserve", "training=feedback"),
    *("training/data=feedback_of_run", "training.data.feedback.delay_s=2"),
    *("training.sequence_tokens=512", "training.microbatches=4"),
    *("scheduling.token_budget=512", "device.memory_bytes=4000000000"),
)
LEARNS_ALONE = (*SERVED, *POLICIES["recompute"], f"{PACE}auto")  # what its profile is made of
MEASURED, REPLAYS = ("backend=cpu", "backend.workspace_every=0"), 2
Figures = defaultdict[str, list[float]]
CASES = {f"{policy}@{load:.0%}": (policy, load) for policy in POLICIES for load in LOADS}


def main() -> int:
    return measured_in_parts("feedback_fidelity", __doc__, [*CASES], "alchemist@80%", parts)


def parts(only: Sequence[str], requests: int, reruns: int, root: Path) -> Iterator[pd.DataFrame]:
    """A judged table of each policy. SystemExit where the command was told to end."""
    for policy, settings in POLICIES.items():
        loads = [CASES[case][1] for case in only if CASES[case][0] == policy]
        if not loads:
            continue
        folder, words = root / policy, [*SERVED, *settings, f"limit={requests}"]
        found = reported(policy, words, loads, reruns, folder)
        for load in loads:
            yield judged(policy, load, found)
            if policy == "separate":
                profile = calibrated([*LEARNS_ALONE, *MEASURED], root / "apart", REPLAYS, say)
                yield trained_apart(folder / f"load-{load * 100:g}", profile, load, reruns)


def judged(policy: str, load: float, found: Mapping[str, Any]) -> pd.DataFrame:
    """The figures of a report of `tandem fidelity`, held to the bars of this claim."""
    case = f"{policy}@{load:.0%}"
    known = next((part for part in found.get("loads", ()) if part["load"] == load), None)
    bars = {"mean_tpot_s": BAR, KV_PEAK: 0.03}
    if policy != "separate":
        bars |= {TRAINED: BAR, DEVICE_PEAK: 0.03}
    if load <= TTFT_UP_TO:
        bars["mean_ttft_s"] = 0.1
    if policy == "alchemist":
        bars[HITS] = HITS_BAR
    rows = list[tuple[object, ...]]()
    for row in known["figures"] if known else ():
        figure, error = row["figure"], row["error"]
        bar = row["bar"] if figure in ("mean_tpot_s",) else bars.get(figure, math.nan)
        is_broken = figure in HELD and known is not None and figure in known["failed"]
        off = math.inf if error is None else abs(error)
        if figure == HITS:
            off *= row["measured"]  # in points
        used = math.inf if is_broken else off / bar if figure in bars else math.nan
        bar = bar if figure in bars else math.nan
        rows.append((case, figure, row["measured"], error, row["worst_rerun"], bar, used))
    lacks = {*bars} - {str(row[1]) for row in rows}
    rows += [(case, figure, 0.0, -1.0, -1.0, math.nan, math.inf) for figure in sorted(lacks)]
    return pd.DataFrame(rows, columns=COLUMNS)


def trained_apart(folder: Path, profile: Path, load: float, reruns: int) -> pd.DataFrame:
    """Training on another device, on feedback as the measured runs have it, and as predicted.

    The profile is one of windows: that of serving alone has no prices of them.
    """
    words = [*ALONE, f"training.data.run={folder / 'predicted'}", f"profile={profile}"]
    predicted = run(words, folder / "apart" / "predicted")
    guess, errors, values = figures_of(predicted), Figures(list), Figures(list)
    steady = steady_runs(folder)[:reruns]
    for served in steady:
        words = [*ALONE, f"training.data.run={served}", *MEASURED, clock_of(profile)]
        done = figures_of(run(words, folder / "apart" / served.parent.name))
        for figure in (TRAINED, DEVICE_PEAK):
            errors[figure].append(guess[figure] / done[figure] - 1)
            values[figure].append(done[figure])
    case, bars = f"separate@{load:.0%}", {TRAINED: BAR, DEVICE_PEAK: 0.03}
    rows = [
        (case, f, median(values[f]), median(own), max(own, key=abs), bars[f], used_of(own, bars[f]))
        for f, own in errors.items()
    ]
    if len(steady) < reruns:
        rows.append((case, "steady_reruns, apart", len(steady), -1.0, -1.0, math.nan, math.inf))
    return pd.DataFrame(rows, columns=COLUMNS)


def steady_runs(folder: Path) -> list[Path]:
    """The measured runs of a case that count, in their order."""
    found = sorted(folder.glob("run*/measured"), key=lambda path: int(path.parent.name[3:]))
    moves = {path: drift(load_run(path)) for path in found}
    return [path for path, moved in moves.items() if moved is not None and counts(moved)]


def used_of(errors: Sequence[float], bar: float) -> float:
    """The share of a bar that the median of errors uses."""
    return abs(median(errors)) / bar


if __name__ == "__main__":
    sys.exit(main())
