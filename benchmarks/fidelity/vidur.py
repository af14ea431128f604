"""Claim: on equal requests and equal costs, Tandem's policies give Vidur's latencies.

Vidur's lookup tables of Llama-2-7B on an A100 (7,424 blocks of 16, at most 128 sequences), its
requests and its results (vidur@7d47513) lie in ../shared/data/peers. Policies are Sarathi with a
token budget of 512 and vLLM-v0's order, run-ahead 1. Compared are p50, p90 and p99 of TTFT and
end-to-end latency over all requests; the value is the largest difference, as a share of the bar
(1 % for 4,000 requests, 1.5 % for 1,000). Numbers of restarts must be equal. One difference is by
construction: Tandem's clock counts whole nanoseconds.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd

from engine.contract.regions import PageSize, Tier
from engine.loop.engine import Engine
from engine.loop.state import VirtualClock
from engine.results.recorder import Recorder
from models.spec import ModelSpec
from policies.composed import Composed
from policies.kv.paged_restart import PagedRestart
from policies.scheduling.chunked_prefill import ChunkedPrefill
from policies.scheduling.continuous_batching import ContinuousBatching
from sim.executor import SimExecutor
from sim.foreign.vidur import VidurCost
from traces.serving.request import Request

LLAMA2_7B = ModelSpec(
    "llama2_7b", "llama", 32, 4096, 32, 32, 128, 11008, 32000, 4096, dtype="float16"
)
BLOCKS, PAGE_TOKENS, SEQUENCES = 7424, 16, 128
MEMORY = PagedRestart(watermark=0.01, prompts="reserved", spare_pages=1, gives_way=True)
POLICIES = {
    "sarathi": Composed(ChunkedPrefill(512, SEQUENCES), MEMORY),
    "vllm": Composed(ContinuousBatching(4096, SEQUENCES, padded=True, by_arrival=True), MEMORY),
}
BARS = {1000: 1.5, 4000: 1.0}  # percent


def read_requests(path: Path) -> list[Request]:
    """Vidur's request list: seconds, prompt and output tokens."""
    rows = pd.read_csv(path)
    columns = ("arrived_at", "num_prefill_tokens", "num_decode_tokens")
    times, prompts, outputs = (rows[name] for name in columns)
    return [
        Request(i, round(float(at) * 1e9), int(prompt), int(output))
        for i, (at, prompt, output) in enumerate(zip(times, prompts, outputs, strict=True))
    ]


def simulate(policy: Composed, requests: list[Request], cost: VidurCost) -> tuple[Engine, Recorder]:
    """One replay with run-ahead 1: Vidur forms a batch when the previous one has ended."""
    env, recorder = VirtualClock(), Recorder()
    page = PageSize.of(LLAMA2_7B, PAGE_TOKENS)
    capacity = {(Tier.GPU, 0): BLOCKS * page.nbytes, (Tier.HOST, 0): 0}
    executor = SimExecutor(env, cost)
    engine = Engine(env, policy, executor, capacity, page, depth=1, recorder=recorder)
    engine.replay(requests)
    return engine, recorder


def latencies_s(recorder: Recorder) -> dict[str, np.ndarray]:
    """TTFT and end-to-end latency of every request, in the order of their ids."""
    outcomes = [outcome for _, outcome in sorted(recorder.outcomes.items())]
    assert all(o.status == "finished" for o in outcomes), "a request did not finish"
    return {
        "ttft": np.array([o.token_ns[0] - o.arrival_ns for o in outcomes]) / 1e9,
        "e2e": np.array([o.token_ns[-1] - o.arrival_ns for o in outcomes]) / 1e9,
    }


def judge(peers: Path, kind: str, count: int, cost: VidurCost) -> float:
    """Replays one case and prints it; returns the worst difference as a share of its bar."""
    requests = read_requests(peers / f"inputs/sharegpt_n{count}_qps2_seed42.csv")
    theirs = pd.read_csv(peers / f"vidur_results/c_llama2-7b_{kind}_{count}_q2_requests.csv.gz")
    theirs = theirs.sort_values("Request Id")
    start_s = time.process_time()
    engine, recorder = simulate(POLICIES[kind], requests, cost)
    cpu_s = time.process_time() - start_s
    restarts = sum(o.restarts for o in recorder.outcomes.values())
    expected = int(theirs["request_num_restarts"].sum())
    print(
        f"{kind} n={count}: {engine.steps} steps, {restarts} restarts (Vidur {expected}), "
        f"{cpu_s:.1f} CPU s, {count / cpu_s:.0f} requests per CPU s"
    )
    worst = float(restarts != expected) * 10
    columns = {"ttft": "prefill_e2e_time", "e2e": "request_e2e_time"}
    for name, ours in latencies_s(recorder).items():
        other = theirs[columns[name]].to_numpy()
        gap = np.abs(ours - other)
        same = int((gap <= 1e-3).sum())
        print(
            f"  {name}: {same} of {count} within 1 ms, mean {ours.mean() / other.mean() - 1:+.3%}"
        )
        for p in (50, 90, 99):
            mine, vidur = np.percentile(ours, p), np.percentile(other, p)
            error = (mine / vidur - 1) * 100
            worst = max(worst, abs(error) / BARS[count])
            print(f"    p{p}: {mine:.4f} s, Vidur {vidur:.4f} s, {error:+.3f} %")
    return worst


def main() -> int:
    peers = Path(os.environ.get("TANDEM_SHARED", "../shared")) / "data" / "peers"
    cost = VidurCost.load(peers / "cost_tables" / "llama2-7b_a100_tp1.npz", LLAMA2_7B)
    counts = (1000,) if "--quick" in sys.argv[1:] else (1000, 4000)
    worst = max(judge(peers, kind, count, cost) for count in counts for kind in POLICIES)
    passed = worst <= 1.0
    print(f"vidur_worst_share_of_bar {worst:.3f} 1 1 {'pass' if passed else 'fail'}")
    return int(not passed)


if __name__ == "__main__":
    sys.exit(main())
