"""Claim: logs of vLLM 0.19 are predicted from kernel profiles that never saw them.

Llama-3.1-8B, 300 ShareGPT requests at about 10 per second, on an RTX 4090 (2,588 blocks of 16: KV
is short, the run preempts) and an RTX PRO 6000 (KV is not binding: 20,000 blocks). Costs are
LLMServingSim's profiles of single layers, eager; the engines ran compiled, with CUDA graphs and
asynchronous scheduling: vLLM decides step n+1 while step n runs and learns who ended in n-1, which
is our run-ahead 2. Requests arrive when the log says they reached the engine.

Nothing is fitted to a judged log. Skew comes from skew.csv.gz, where the profile's own meta.yaml
says that its skew was found usable (PRO 6000), else there is none (4090); all three are printed. So
are 200 us of host time per step, hidden behind the device or not. Pages handed from one request to
the next (prefix caching, on in the logs) are judged where the engine knows them.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
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
MEMORY = PagedRestart(watermark=0.0, prompts="must_fit", gives_way=True)
STEP_TOKENS, RUN_AHEAD = 2048, 2
RTX4090_BYTES, SHARE = 25_250_627_584, 0.9  # of the log's meta.json
RESERVES = (256 * 2**20, 1024 * 2**20)  # context growth and library workspaces; graphs
COLUMNS = {"ttft": "ttft_s", "tpot": "tpot_ms", "e2e": "latency_s"}


@dataclass(frozen=True)
class Case:
    """A log, the engine that wrote it, and its bars in percent of the mean."""

    device: str
    pages: int
    sequences: int
    skew: str
    bars: dict[str, float]


CASES = (
    Case("RTX4090", 2588, 256, "none", {"ttft": 2.0, "tpot": 2.0, "e2e": 2.0}),
    Case("RTXPRO6000", 20000, 128, "per_bucket", {"ttft": 5.0, "tpot": 2.0, "e2e": 2.5}),
)


def read_log(measured: Path, case: Case) -> pd.DataFrame:
    """The per-request log, in the order of arrival at the engine."""
    return pd.read_parquet(measured / f"vllm_{case.device}_Llama-3.1-8B_requests.parquet")


def requests_of(log: pd.DataFrame) -> list[Request]:
    """The same requests for us, from the first arrival on."""
    at_s = log["queued_ts"] - log["queued_ts"].min()
    rows = zip(at_s, log["input_toks"], log["output_toks"], strict=True)
    return [
        Request(i, round(at * 1e9), int(prompt), int(output))
        for i, (at, prompt, output) in enumerate(rows)
    ]


def simulate(log: pd.DataFrame, case: Case, cost: Any, pages: int) -> tuple[Engine, Recorder]:
    """One replay on the logged engine's settings."""
    env, recorder = simpy.Environment(), Recorder()
    policy = Composed(VllmV1(STEP_TOKENS, case.sequences), MEMORY)
    capacity = {(Tier.GPU, 0): pages * PAGE.nbytes, (Tier.HOST, 0): 0}
    engine = Engine(
        env, policy, SimExecutor(env, cost), capacity, PAGE, depth=RUN_AHEAD, recorder=recorder
    )
    engine.replay(requests_of(log))
    return engine, recorder


def latencies(recorder: Recorder) -> dict[str, np.ndarray]:
    """TTFT and end-to-end in seconds, TPOT in ms, by request."""
    outcomes = [outcome for _, outcome in sorted(recorder.outcomes.items())]
    assert all(o.status == "finished" for o in outcomes), "a request did not finish"
    first = np.array([o.token_ns[0] - o.arrival_ns for o in outcomes]) / 1e9
    last = np.array([o.token_ns[-1] - o.arrival_ns for o in outcomes]) / 1e9
    gaps = np.array([len(o.token_ns) - 1 for o in outcomes])
    return {"ttft": first, "tpot": (last - first) / gaps * 1e3, "e2e": last}


def run(log: pd.DataFrame, case: Case, cost: Any, pages: int, label: str) -> dict[str, float]:
    """Replays, prints a line and returns the errors of the means in percent."""
    start_s = time.process_time()
    engine, recorder = simulate(log, case, cost, pages)
    cpu_s, found = time.process_time() - start_s, latencies(recorder)
    errors = {k: (found[k].mean() / log[c].mean() - 1) * 100 for k, c in COLUMNS.items()}
    restarts = sum(o.restarts for o in recorder.outcomes.values())
    means = "  ".join(f"{name} {error:+6.2f} %" for name, error in errors.items())
    print(f"  {label:34} {means}   {engine.steps} steps, {restarts} restarts, {cpu_s:.1f} CPU s")
    if label == "judged":
        for name, column in COLUMNS.items():
            points = ((p, np.percentile(found[name], p), np.percentile(log[column], p)) for p in P)
            shown = (f"p{p} {ours:.3f} ({ours / vllm - 1:+.1%})" for p, ours, vllm in points)
            print(f"    {column}: mean {found[name].mean():.3f}", *shown)
    return errors


P = (50, 90, 99)


def judge(data: Path, case: Case, quick: bool) -> float:
    """One log, judged and taken apart; returns the worst error as a share of its bar."""
    log, folder = (
        read_log(data / "measured", case),
        data / "peers" / "kernel_profiles" / f"{case.device}_Llama-3.1-8B",
    )

    def cost(skew: str = case.skew, **given: int) -> Any:
        return KernelProfileCost.load(folder, LLAMA31_8B, skew, **given)

    print(f"{case.device}: {case.pages} pages, skew {case.skew}, run-ahead {RUN_AHEAD}")
    errors = run(log, case, cost(), case.pages, "judged")
    if not quick:
        for skew in ("none", "default", "per_bucket"):
            run(log, case, cost(skew), case.pages, f"skew {skew}")
        run(log, case, cost(host_ns_per_plan=200_000), case.pages, "+200 us of host time, hidden")
        run(log, case, cost(step_ns=200_000), case.pages, "+200 us of host time, not hidden")
        if case.device == "RTX4090":
            print_memory(log, case, cost())
    return max(abs(errors[name]) / bar for name, bar in case.bars.items())


def print_memory(log: pd.DataFrame, case: Case, cost: Any) -> None:
    """The pages our memory model finds at both ends of the reserve, and what they lead to."""
    for reserve in RESERVES:
        plan = plan_memory(
            LLAMA31_8B, RTX4090_BYTES, SHARE, STEP_TOKENS, case.sequences, reserve, PAGE.tokens
        )
        run(log, case, cost, plan.pages, f"reserve {reserve >> 20} MiB: {plan.pages} pages")


def main(words: Sequence[str]) -> int:
    data = Path(os.environ.get("TANDEM_SHARED", "../shared")) / "data"
    worst = max(judge(data, case, "--quick" in words) for case in CASES)
    passed = worst <= 1.0
    print(f"vllm_logs_worst_share_of_bar {worst:.3f} 1 1 {'pass' if passed else 'fail'}")
    return int(not passed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
