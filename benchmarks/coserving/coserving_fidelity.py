"""Claim: what co-serving does on a CPU is predicted: finetuning, latencies and peaks of memory.

200 ShareGPT requests beside a LoRA job, under three policies, at 50, 80 and 120 % of the capacity
of serving alone, five reruns each. `tandem fidelity` does it: the profile is calibrated on
synthetic requests and on other samples, and each load's is fitted to such replays between the
judged runs; neither sees what is judged. Medians of the reruns are held to 5 % of finetuned tokens
per second, 5 % of mean TPOT (or what reruns vary by, at most 10 %), 3 % of the peaks of KV and of
the device's memory, and at 50 % load to 10 % of mean TTFT. Throughput, E2E and TTFT elsewhere are
printed beside. Decisions of `slo` rest on quoted durations: the first calibration quotes them on
both sides.

A token of a small model on a CPU takes the time of its products, however many go together, so
windows are small: a step has 128 tokens. Run it alone, on a machine at rest; it takes hours.
`--only CASE` measures a part, such as slo@80%; the table keeps the others as they were, with their
commits.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.fidelity import (
    DEVICE_PEAK,
    FINETUNED,
    KV_PEAK,
    MUST_HOLD,
    STEADY_RERUNS,
    TTFT_UP_TO,
)
from benchmarks.fidelity.cases import COLUMNS, measured_in_parts, reported

LOADS = (0.5, 0.8, 1.2)
SERVED = (
    "experiment=fidelity_chunked",
    "model=micro_llama",
    "scheduling.serving.token_budget=128",
    "scheduling.serving.max_jobs=48",
    "budget.kv_pages=4096",  # as for the claim of serving alone
)
FINETUNED_BESIDE = (  # samples enough for any run: the job ends with the last request
    "training=finetune",
    "training.sequence_tokens=512",
    "training.data.mean_tokens=192",
    "training.data.count=4096",
    "training.num_steps=4096",
    "training.microbatches=4",
)
POLICIES = {
    "budget": ("policy=coserve", "scheduling.token_budget=128"),
    "slo": ("policy=coserve_slo", "scheduling.token_budget=512", "scheduling.slo_s=0.012"),
    "temporal": ("policy=temporal", "scheduling.every=32"),
}
CASES = {f"{policy}@{load:.0%}": (policy, load) for policy in POLICIES for load in LOADS}
JUDGED = (FINETUNED, "mean_tpot_s", KV_PEAK, DEVICE_PEAK)  # and TTFT at a low load
HELD = (STEADY_RERUNS, *MUST_HOLD)


def main() -> int:
    return measured_in_parts("coserving_fidelity", __doc__, [*CASES], "budget@80%", parts)


def parts(only: Sequence[str], requests: int, reruns: int, root: Path) -> Iterator[pd.DataFrame]:
    """A judged table of each policy. SystemExit where the command was told to end."""
    for policy in POLICIES:
        loads = [CASES[case][1] for case in only if CASES[case][0] == policy]
        if loads:
            words = [*settings_of(policy), f"limit={requests}"]
            yield judged(policy, reported(policy, words, loads, reruns, root / policy), loads)


def settings_of(policy: str) -> list[str]:
    """Settings of a policy beside the job: one of `budget`, `slo`, `temporal`."""
    return [*SERVED, *POLICIES[policy], *FINETUNED_BESIDE]


def judged(name: str, found: Mapping[str, Any], loads: Sequence[float]) -> pd.DataFrame:
    """The figures of a report of `tandem fidelity`, held to the bars of this claim.

    A load without a report fails, as do one without finetuning, too few steady reruns, and plans
    whose replay books other pages.
    """
    rows = []
    known = {part["load"]: part for part in found.get("loads", ())}
    for load in loads:
        case = f"{name}@{load:.0%}"
        figures = known[load]["figures"] if load in known else []
        for row in figures:
            figure, bar = row["figure"], math.nan
            if figure in JUDGED or (figure == "mean_ttft_s" and load <= TTFT_UP_TO):
                bar = row["bar"]
            is_broken = figure in (*HELD, *JUDGED) and figure in known[load]["failed"]
            used = math.inf if is_broken and math.isnan(bar) else _used(row["error"], bar)
            rows.append(
                (case, figure, row["measured"], row["error"], row["worst_rerun"], bar, used)
            )
        lacks = {*JUDGED} - {row["figure"] for row in figures}
        rows += [(case, figure, 0.0, -1.0, -1.0, math.nan, math.inf) for figure in sorted(lacks)]
    return pd.DataFrame(rows, columns=COLUMNS)


def _used(error: float | None, bar: float) -> float:
    """The used share of a bar; an error that is no number uses any bar up."""
    if math.isnan(bar):
        return math.nan
    return math.inf if error is None else abs(error) / bar


if __name__ == "__main__":
    sys.exit(main())
