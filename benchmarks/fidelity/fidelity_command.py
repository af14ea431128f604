"""Claim: `tandem fidelity` holds its bars on models, policies and requests that no other claim has.

Three workloads at 50 and 80 % of their capacity, five reruns each: a model and a policy that the
other claims of fidelity leave out, on ShareGPT conversations behind the 200 of those claims: 200,
of which Orca gets 100. The third model is a user's own yaml (benchmarks/fidelity/conf). Medians of
the reruns are held to 2 % of throughput, 5 % of mean TPOT and E2E and 3 % of peak KV, whatever
reruns vary by; the command prints every rerun. Run it alone, on a machine at rest: it takes hours.
`--only CASE` measures a part, such as tiny_opt-orca@50%; the table keeps the others as they were,
with their commits.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.fidelity import KV_PEAK, MUST_HOLD, STEADY_RERUNS, THROUGHPUT
from benchmarks.fidelity.cases import COLUMNS, measured_in_parts, reported
from tandem.wiring.workload import trace_file
from traces.store import read_trace, write_trace

CONF = Path(__file__).parent / "conf"
SHAREGPT = "data/sharegpt/sharegpt_v3_sample_dev.json.gz"
TOKENIZER = "data/tokenizers/llama2-tinyllama"
SEEN = 200  # requests that the other claims judge
LOADS = (0.5, 0.8)
BARS = {THROUGHPUT: 0.02, "mean_tpot_s": 0.05, "mean_e2e_s": 0.05, KV_PEAK: 0.03}
HELD = (STEADY_RERUNS, *MUST_HOLD)


@dataclass(frozen=True)
class UnseenWorkload:
    """A model and a policy that no other claim of fidelity has, and what else is set."""

    model: str
    policy: str
    more: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Its name in tables and folders."""
        return f"{self.model}-{self.policy}"

    @property
    def settings(self) -> list[str]:
        """Settings of the command."""
        chosen = [f"model={self.model}", f"policy={self.policy}", f"--config-dir={CONF}"]
        return [*chosen, "scheduling.max_jobs=48", *self.more]


WORKLOADS = (
    UnseenWorkload("tiny_qwen3", "vllm_v1"),
    UnseenWorkload("tiny_gpt2", "sarathi"),
    # Orca reserves a sequence of full length for each request: of 256 MiB it serves three at once,
    # and a replay takes twice the time of the others. A machine is seldom at rest for so long.
    UnseenWorkload("tiny_opt", "orca", ("device.memory_bytes=536870912", "limit=100")),
)

CASES = {f"{w.name}@{load:.0%}": (w, load) for w in WORKLOADS for load in LOADS}


def main() -> int:
    return measured_in_parts("fidelity_command", __doc__, [*CASES], "tiny_qwen3-vllm_v1@80%", parts)


def parts(only: Sequence[str], requests: int, reruns: int, root: Path) -> Iterator[pd.DataFrame]:
    """A judged table of each workload. SystemExit where the command was told to end."""
    trace = unseen_trace(root, requests)
    for workload in WORKLOADS:
        loads = [CASES[case][1] for case in only if CASES[case][0] == workload]
        if loads:
            words, name = [*workload.settings, "trace=file", f"trace.path={trace}"], workload.name
            yield judged(name, reported(name, words, loads, reruns, root / name), loads)


def unseen_trace(root: Path, count: int) -> Path:
    """Writes the `count` requests of ShareGPT that follow those of the other claims."""
    path = root / "unseen.parquet"
    if not path.is_file():
        shared = Path(os.environ.get("TANDEM_SHARED", "../shared"))
        named = {"path": str(shared / SHAREGPT), "tokenizer": str(shared / TOKENIZER)}
        rule = {"rule": "vllm_filter_plus_role_check"}
        requests = read_trace(trace_file({**named, **rule}, Path("outputs/cache")))
        kept = requests[SEEN : SEEN + count]
        if len(kept) < count:
            raise ValueError(f"{shared / SHAREGPT}: {len(requests)} requests, too few")
        renumbered = [replace(request, request_id=i) for i, request in enumerate(kept)]
        root.mkdir(parents=True, exist_ok=True)
        write_trace(path, renumbered, {"source": f"{SHAREGPT}, requests from {SEEN}", **rule})
    return path


def judged(name: str, found: Mapping[str, Any], loads: Sequence[float]) -> pd.DataFrame:
    """The figures of a report with the bars of this claim.

    A load without a report fails, as do a figure that is missing, too few steady reruns, and plans
    whose replay books other pages.
    """
    rows = []
    known = {part["load"]: part for part in found.get("loads", ())}
    for load in loads:
        case = f"{name}@{load:.0%}"
        if load not in known:
            rows.append((case, "report", 0.0, -1.0, -1.0, math.nan, math.inf))
            continue
        figures = {row["figure"]: row for row in known[load]["figures"]}
        for figure in BARS.keys() - figures.keys():
            rows.append((case, figure, math.nan, math.nan, math.nan, BARS[figure], math.inf))
        for figure, row in figures.items():
            bar, error = BARS.get(figure, math.nan), row["error"]
            is_broken = figure in HELD and figure in known[load]["failed"]
            is_broken |= figure in BARS and not math.isfinite(error)
            used = math.inf if is_broken else abs(error) / bar
            rows.append((case, figure, row["measured"], error, row["worst_rerun"], bar, used))
    return pd.DataFrame(rows, columns=COLUMNS)


if __name__ == "__main__":
    sys.exit(main())
