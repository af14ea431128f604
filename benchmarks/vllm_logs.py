"""Claim: logs of vLLM 0.19 are predicted from kernel profiles that never saw them.

Llama-3.1-8B, 300 ShareGPT requests at about 10 per second, on an RTX 4090 (2,588 blocks of 16: KV
is short, the run preempts) and an RTX PRO 6000 (KV is not binding: 20,000 blocks). Costs are
LLMServingSim's profiles of single layers, eager; the engines ran compiled, with CUDA graphs and
asynchronous scheduling: vLLM decides step n+1 while step n runs and learns who ended in n-1, which
is our run-ahead 2. Requests arrive when the log says they reached the engine.

Nothing is fitted to a judged log. Skew is the one constant that least squares finds in skew.csv.gz
of the same device; none, and one constant per class of batches, are printed beside it. So are 200
us of host time per step, hidden behind the device or not. The logged engines kept full pages for
later requests and for their own restarts (prefix caching, on by default), and so do we; the row
`no prefix caching` shows what that is worth. One page is vLLM's null page. Our decisions on both
logs are those of vLLM's loop written down without our engine (tests/test_peers_logs.py).
"""

from __future__ import annotations

import gzip
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import simpy

from engine.engine import Engine
from engine.model import ModelSpec
from engine.plan import PageSize, Tier
from engine.policy import Composed
from engine.recorder import Recorder
from policies.paged_restart import PagedRestart
from policies.vllm_v1 import VllmV1
from sim.executor import SimExecutor
from sim.kernel_profile import KernelProfileCost
from sim.memory import plan_memory
from traces.request import Request

LLAMA31_8B = ModelSpec("llama3.1_8b", "llama", 32, 4096, 32, 8, 128, 14336, 128256, 131072)
PAGE = PageSize(16, 16 * LLAMA31_8B.kv_token_bytes)
MEMORY = PagedRestart(watermark=0.0, prompts="must_fit", gives_way=True, prefix_caching=True)
PLAIN = replace(MEMORY, prefix_caching=False)
NULL_PAGES = 1  # that vLLM never hands out
STEP_TOKENS, RUN_AHEAD = 2048, 2
RTX4090_BYTES, SHARE = 25_250_627_584, 0.9  # of the log's meta.json
RESERVES = (256 * 2**20, 1024 * 2**20)  # context growth and library workspaces; graphs
PERCENTILES = (50, 90, 99)
COLUMNS = {"ttft": "ttft_s", "tpot": "tpot_ms", "e2e": "latency_s"}


@dataclass(frozen=True)
class Case:
    """A logged engine, and the bars for the errors of its means in percent."""

    device: str
    pages: int
    sequences: int
    bars: dict[str, float]


@dataclass(frozen=True)
class Log:
    """What a logged engine was asked and what it measured, by request."""

    case: Case
    measured: pd.DataFrame
    requests: tuple[Request, ...]
    profile: Path

    def cost(self, skew: str = "default", **given: int) -> Any:
        """The cost model of the device's kernel profile."""
        return KernelProfileCost.load(self.profile, LLAMA31_8B, skew, **given)


CASES = (
    Case("RTX4090", 2588, 256, {"ttft": 2.0, "tpot": 2.0, "e2e": 2.0}),
    Case("RTXPRO6000", 20000, 128, {"ttft": 5.0, "tpot": 2.0, "e2e": 2.5}),
)


def read_log(data: Path, case: Case) -> Log:
    """A log with its requests: arrivals at the engine, lengths and prompts."""
    name = f"{case.device}_Llama-3.1-8B"
    measured = pd.read_parquet(data / "measured" / f"vllm_{name}_requests.parquet")
    with gzip.open(data / "sharegpt" / "sharegpt_gpt4_llama3_ids_300.jsonl.gz", "rt") as lines:
        prompts = [tuple(json.loads(line)["input_tok_ids"]) for line in lines]
    at_s = measured["queued_ts"] - measured["queued_ts"].min()
    rows = zip(at_s, measured["input_toks"], measured["output_toks"], prompts, strict=True)
    requests = tuple(
        Request(i, round(at * 1e9), int(prompt), int(output), prompt_ids=ids)
        for i, (at, prompt, output, ids) in enumerate(rows)
    )
    return Log(case, measured, requests, data / "peers" / "kernel_profiles" / name)


@dataclass(frozen=True)
class Simulated:
    """Our simulator's run: times of tokens by request, and what happened."""

    times: dict[int, list[int]]
    steps: int
    restarts: int
    cached_tokens: int

    def __str__(self) -> str:
        return f"{self.steps} steps, {self.restarts} restarts, {self.cached_tokens} tokens found"


def simulate(log: Log, cost: Any, pages: int, memory: PagedRestart = MEMORY) -> Simulated:
    """Our simulator on the logged engine's settings."""
    env, recorder = simpy.Environment(), Recorder()
    policy = Composed(VllmV1(STEP_TOKENS, log.case.sequences), memory)
    capacity = {(Tier.GPU, 0): (pages - NULL_PAGES) * PAGE.nbytes, (Tier.HOST, 0): 0}
    executor = SimExecutor(env, cost)
    engine = Engine(env, policy, executor, capacity, PAGE, depth=RUN_AHEAD, recorder=recorder)
    engine.replay(log.requests)
    outcomes = recorder.outcomes
    return Simulated(
        {i: outcome.token_ns for i, outcome in outcomes.items()},
        engine.steps,
        sum(outcome.restarts for outcome in outcomes.values()),
        sum(outcome.cached_tokens for outcome in outcomes.values()),
    )


def latencies(log: Log, times: dict[int, list[int]]) -> dict[str, np.ndarray]:
    """TTFT and end-to-end in seconds, TPOT in ms, by request."""
    pairs = [(r, times[r.request_id]) for r in log.requests]
    assert all(len(t) == r.output_tokens for r, t in pairs), "a request did not finish"
    first = np.array([t[0] - r.arrival_ns for r, t in pairs]) / 1e9
    last = np.array([t[-1] - r.arrival_ns for r, t in pairs]) / 1e9
    gaps = np.array([r.output_tokens - 1 for r, _ in pairs])
    return {"ttft": first, "tpot": (last - first) / gaps * 1e3, "e2e": last}


def run(
    log: Log, label: str, cost: Any, pages: int, memory: PagedRestart = MEMORY
) -> dict[str, float]:
    """Replays, prints a line and returns the errors of the means in percent."""
    start_s = time.process_time()
    done = simulate(log, cost, pages, memory)
    cpu_s, found = time.process_time() - start_s, latencies(log, done.times)
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
    """One log, judged and taken apart; returns the worst error as a share of its bar."""
    case = log.case
    print(f"{case.device}: {case.pages} pages, at most {case.sequences} sequences")
    errors = run(log, "judged", log.cost(), case.pages)
    if not quick:
        run(log, "no prefix caching", log.cost(), case.pages, PLAIN)
        for skew in ("none", "per_bucket"):
            run(log, f"skew {skew}", log.cost(skew), case.pages)
        hidden, shown = log.cost(host_ns_per_plan=200_000), log.cost(step_ns=200_000)
        run(log, "+200 us of host time, hidden", hidden, case.pages)
        run(log, "+200 us of host time, not hidden", shown, case.pages)
        if case.device == "RTX4090":
            judge_memory(log)
    return max(abs(errors[name]) / bar for name, bar in case.bars.items())


def judge_memory(log: Log) -> None:
    """The pages our memory model finds at both ends of the reserve, and what they lead to."""
    for reserve in RESERVES:
        given = (LLAMA31_8B, RTX4090_BYTES, SHARE, STEP_TOKENS, log.case.sequences, reserve)
        pages = plan_memory(*given, PAGE.tokens).pages
        run(log, f"reserve {reserve >> 20} MiB: {pages} pages", log.cost(), pages)


def main(words: Sequence[str]) -> int:
    data = Path(os.environ.get("TANDEM_SHARED", "../shared")) / "data"
    worst = max(judge(read_log(data, case), "--quick" in words) for case in CASES)
    passed = worst <= 1.0
    print(f"vllm_logs_worst_share_of_bar {worst:.3f} 1 1 {'pass' if passed else 'fail'}")
    return int(not passed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
