"""Claim: logs of vLLM 0.19 are predicted from kernel profiles that were not fitted to them.

Llama-3.1-8B, 300 ShareGPT requests at about 10 per second, on an RTX 4090 (2,588 blocks of 16: KV
is short, the run preempts) and an RTX PRO 6000 (KV is not binding: 20,000 blocks). Costs are
LLMServingSim's profiles of single layers, eager; the engines ran compiled, with CUDA graphs and
asynchronous scheduling. vLLM then plans step n+1 while step n runs, on the results of step n-1:
that is run-ahead 2. Requests arrive when they reached the engine by the log.

The run is built as `tandem run` builds it, from the overrides printed first. Nothing is fitted to a
judged log. Skew is the one constant that least squares finds in skew.csv.gz of the device; no skew,
and one constant per class of batches, are printed beside it. So are 200 us of host time per step,
hidden behind the device or not. The logged engines kept full pages for later requests and for their
own restarts (prefix caching, on by default), and so does the simulation. The row `no prefix
caching` shows the effect and has no bar, because no log without it exists. One page is vLLM's null
page. On both logs, with and without prefix caching, the decisions equal those of vLLM's loop as
written down without the engine (tests/sim/test_peers_logs.py). vllm_logs_speed.py judges the CPU
time.
"""

from __future__ import annotations

import gzip
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path

import numpy as np
import pandas as pd

from tandem.config.compose import composed
from tandem.wiring.backends import backend_of, no_full_collections
from tandem.wiring.budget import GPU
from tandem.wiring.experiment import engine_of
from tandem.wiring.machines import pages_of
from tandem.wiring.run_spec import RunSpec, run_spec_of
from traces.serving.request import Request
from traces.store import write_trace

NULL_PAGES = 1  # vLLM never allocates it
PLAIN = "memory.prefix_caching=false"
# Memory without a formula: from a bare CUDA context and a library's workspaces to those with graphs
# captured for every batch size. An assumption: the log does not show it.
RESERVES = (256 * 2**20, 1024 * 2**20)
PERCENTILES = (50, 90, 99)
COLUMNS = {"ttft": "ttft_s", "tpot": "tpot_ms", "e2e": "latency_s"}
SIM = {"name": "sim", "clock": "virtual"}


@dataclass(frozen=True)
class LoggedCase:
    """A logged engine, and the bars for the errors of its means in percent."""

    device: str
    pages: int
    sequences: int
    bars: dict[str, float]


@dataclass(frozen=True)
class Log:
    """Measurements of a logged engine by request, and its settings as overrides of `tandem run`."""

    case: LoggedCase
    measured: pd.DataFrame
    words: tuple[str, ...]  # all but its pages

    def run_spec(self, *words: str, pages: int | None = None) -> RunSpec:
        """The logged engine's settings, some of them changed, as `tandem run` builds them."""
        found = (self.case.pages if pages is None else pages) - NULL_PAGES
        return run_spec_of(composed([*self.words, f"budget.kv_pages={found}", *words]))

    def pages(self, reserve_bytes: int) -> int:
        """KV pages by the memory model, with a reserve of `reserve_bytes`."""
        words = [*self.words, f"device.reserve_bytes={reserve_bytes}"]
        return pages_of(run_spec_of(composed(words)))[GPU]


CASES = (
    LoggedCase("RTX4090", 2588, 256, {"ttft": 2.0, "tpot": 2.0, "e2e": 2.0}),
    LoggedCase("RTXPRO6000", 20000, 128, {"ttft": 5.0, "tpot": 2.0, "e2e": 2.5}),
)


def read_log(data: Path, case: LoggedCase, folder: Path) -> Log:
    """A log, with its requests as a trace in `folder`: arrivals at the engine, lengths, prompts."""
    name = f"{case.device}_Llama-3.1-8B"
    measured = pd.read_parquet(data / "measured" / f"vllm_{name}_requests.parquet")
    with gzip.open(
        data / "sharegpt" / "sharegpt_gpt4_llama3_ids_300.jsonl.gz", "rt", encoding="utf-8"
    ) as lines:
        prompts = [tuple(json.loads(line)["input_tok_ids"]) for line in lines]
    at_s = measured["queued_ts"] - measured["queued_ts"].min()
    rows = zip(at_s, measured["input_toks"], measured["output_toks"], prompts, strict=True)
    requests = [
        Request(i, round(at * 1e9), int(prompt), int(output), prompt_ids=ids)
        for i, (at, prompt, output, ids) in enumerate(rows)
    ]
    trace = folder / f"{case.device}.parquet"
    write_trace(trace, requests, {"source": f"vllm_{name}_requests.parquet"})
    words = (
        "model=llama3_8b",
        f"device={case.device.lower()}",
        "policy=vllm_v1",
        f"scheduling.max_jobs={case.sequences}",
        "depth=2",
        "trace=file",
        f"trace.path='{trace}'",
        "arrival=trace",
        f"profile='{data / 'peers' / 'kernel_profiles' / name}'",
    )
    return Log(case, measured, words)


@dataclass(frozen=True)
class Simulated:
    """A simulated run: times of tokens by request, and counts."""

    times: dict[int, list[int]]
    steps: int
    restarts: int
    cached_tokens: int

    def __str__(self) -> str:
        return f"{self.steps} steps, {self.restarts} restarts, {self.cached_tokens} tokens found"


def simulate(setting: RunSpec) -> Simulated:
    """Simulates a logged engine's settings."""
    with backend_of(setting, SIM) as world, no_full_collections(begins_with_one=False):
        engine = engine_of(setting, world)
        engine.replay(setting.requests)
    outcomes = engine.recorder.outcomes
    return Simulated(
        {i: outcome.token_ns for i, outcome in outcomes.items()},
        engine.steps,
        sum(outcome.restarts for outcome in outcomes.values()),
        sum(outcome.cached_tokens for outcome in outcomes.values()),
    )


def latencies(requests: Sequence[Request], times: dict[int, list[int]]) -> dict[str, np.ndarray]:
    """TTFT and end-to-end in seconds, TPOT in ms, by request."""
    pairs = [(r, times[r.request_id]) for r in requests]
    assert all(len(t) == r.output_tokens for r, t in pairs), "a request did not finish"
    first = np.array([t[0] - r.arrival_ns for r, t in pairs]) / 1e9
    last = np.array([t[-1] - r.arrival_ns for r, t in pairs]) / 1e9
    gaps = np.array([r.output_tokens - 1 for r, _ in pairs])
    return {"ttft": first, "tpot": (last - first) / gaps * 1e3, "e2e": last}


def run(log: Log, label: str, *words: str, pages: int | None = None) -> dict[str, float]:
    """Replays, prints a line and returns the errors of the means in percent."""
    setting = log.run_spec(*words, pages=pages)
    start_s = time.process_time()
    done = simulate(setting)
    cpu_s, found = time.process_time() - start_s, latencies(setting.requests, done.times)
    vllm = {name: log.measured[column].to_numpy() for name, column in COLUMNS.items()}
    errors = {name: (found[name].mean() / vllm[name].mean() - 1) * 100 for name in COLUMNS}
    means = "  ".join(f"{name} {error:+6.2f} %" for name, error in errors.items())
    print(f"  {label:34} {means}   {done}, {cpu_s:.1f} CPU s")
    for name in COLUMNS if label == "judged" else ():
        points = ((np.percentile(x[name], p) for x in (found, vllm)) for p in PERCENTILES)
        shown = (
            f"p{p} {ours:.3f} ({ours / theirs - 1:+.1%})"
            for p, (ours, theirs) in zip(PERCENTILES, points, strict=True)
        )
        print(f"    {COLUMNS[name]}: mean {found[name].mean():.3f}", *shown)
    return errors


def judge(log: Log, quick: bool) -> float:
    """Judges one log and prints variants; returns the worst error as a share of its bar."""
    case = log.case
    print(f"{case.device}: {case.pages} pages, at most {case.sequences} sequences")
    print(f"  {' '.join(word for word in log.words if '/' not in word)}")
    errors = run(log, "judged")
    if not quick:
        run(log, "no prefix caching", PLAIN)
        print("    (not judged: the logged engine had prefix caching on)")
        for skew in ("none", "per_bucket"):
            run(log, f"skew {skew}", f"kernel_profile.skew={skew}")
        run(log, "+200 us of host time, hidden", "kernel_profile.host_ns_per_plan=200_000")
        run(log, "+200 us of host time, not hidden", "kernel_profile.step_ns=200_000")
        run(log, "tokens padded to graphs", "kernel_profile.graphs=true")
    worst = max(abs(errors[name]) / bar for name, bar in case.bars.items())
    if case.device == "RTX4090" and not (quick or holds_memory(log)):
        return inf
    return worst


def holds_memory(log: Log) -> bool:
    """Whether the engine's pages lie between those of the memory model at both ends of the reserve;
    prints a replay with each."""
    found = [log.pages(reserve) for reserve in RESERVES]
    for reserve, pages in zip(RESERVES, found, strict=True):
        kept = f"device.reserve_bytes={reserve}"
        run(log, f"reserve {reserve >> 20} MiB: {pages} pages", kept, pages=pages)
    print(f"    (the engine had {log.case.pages} pages)")
    return found[1] <= log.case.pages <= found[0]


def main(words: Sequence[str]) -> int:
    data = Path(os.environ.get("TANDEM_SHARED", "../shared")).resolve() / "data"
    with tempfile.TemporaryDirectory() as folder:
        logs = [read_log(data, case, Path(folder)) for case in CASES]
        worst = max(judge(log, "--quick" in words) for log in logs)
    passed = worst <= 1.0
    print(f"vllm_logs_worst_share_of_bar {worst:.3f} 1 1 {'pass' if passed else 'fail'}")
    return int(not passed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
