"""Claim: of a co-serving replay on a CPU at most 5 % of the thread's time goes to the host.

The workload is that of the claim of fidelity at 80 % of the capacity of serving: ShareGPT requests
beside a LoRA job, under `budget`, `slo` and `temporal`, on the service clock. The host decides,
checks and books plans, packs launches and settles them. Its share is that of the host's and all
launches' time together, so idle time does not count; of three replays the median is taken, of the
policies the worst. `slo` is quoted durations by the device's roofline, and its SLO is four times
the mean time per token of serving alone: on a CPU a token of a window takes as long as one of a
prompt, and twice leaves room for hardly a window. Replays in which no window goes forward fail
(under `budget` and `slo` none beside requests).

A plan takes the host a millisecond or two. What share that is depends on the launches, which take
twenty times as long for GPT-2 as for tiny_llama. The bar is held to both. The share that the host
would have beside launches of 32.6 ms, FlexLLM's shortest published time per output token, is
printed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from math import inf
from pathlib import Path
from statistics import median

from analysis.metrics import summary
from analysis.run import Run
from benchmarks.coserving.coserving_fidelity import POLICIES, settings_of
from tandem.fidelity.protocol import capacity, run, serving_alone

BAR = 0.05
LOAD, REPLAYS = 0.8, 3
SLO = 4.0  # of `slo`, in mean times per token of serving alone
PUBLISHED_NS = 32.6e6  # LLaMA-3.1-8B at one request per second, see flexllm_table.py
REQUESTS = {"gpt2": 8, "tiny_llama": 20}  # some thousand plans each
MEMORY = ("budget.kv_pages=2048", "device.memory_bytes=6000000000")  # for 48 long requests
MEASURED = ("backend=cpu", "backend.workspace_every=0", "backend.probe_look_s=null")


def host_share(done: Run) -> float:
    """The host's time over that of host and launches."""
    steps = done.steps
    host_ns = float(steps["host_ns"].sum())
    return host_ns / (host_ns + float((steps["end_ns"] - steps["start_ns"]).sum()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="half of the requests, one replay")
    parser.add_argument("--policies", nargs="+", default=[*POLICIES], choices=[*POLICIES])
    parser.add_argument("--load", type=float, default=LOAD)
    chosen = parser.parse_args()
    replays, worst = 1 if chosen.quick else REPLAYS, 0.0
    with tempfile.TemporaryDirectory() as temporary:
        for model, requests in REQUESTS.items():
            count = requests // 2 if chosen.quick else requests
            for policy in chosen.policies:
                words = [*settings_of(policy), f"model={model}", *MEMORY, f"limit={count}"]
                root = Path(temporary) / model / policy
                shares = measured(model, policy, words, root, chosen.load, replays)
                worst = max(worst, median(shares))
    print(f"coserving_host_share {worst:.4f} share {BAR} {'pass' if worst <= BAR else 'fail'}")
    return int(worst > BAR)


def measured(
    model: str, policy: str, words: Sequence[str], root: Path, load: float, replays: int
) -> list[float]:
    """The host's share of each replay at a share of the capacity of serving; tells of them."""
    rate = load * capacity(words, MEASURED, root / "capacity")
    words = [*words, *MEASURED, f"arrival.rate={rate}"]
    alone = run(serving_alone(words), root / "alone")
    if policy == "slo":
        words.append(f"scheduling.slo_s={SLO * float(summary(alone)['mean_tpot_s'])}")
    done = [run(words, root / f"run{i}") for i in range(replays)]
    shares, plans = [*map(host_share, done)], sum([len(one.plans) for one in done])
    host_ns = sum([one.steps["host_ns"].sum() for one in done]) / plans
    took_ns = sum([(one.steps["end_ns"] - one.steps["start_ns"]).sum() for one in done]) / plans
    work = "forward" if policy == "temporal" else "mixed"
    windows = sum([int(one.steps["work"].eq(work).sum()) for one in done])
    published = host_ns / (host_ns + PUBLISHED_NS)
    print(
        f"{model}, {policy}: {rate:.3g} requests/s, {windows} windows, host {median(shares):.2%} "
        f"({', '.join(f'{share:.2%}' for share in shares)}), {host_ns / 1e3:.0f} us a plan beside "
        f"{took_ns / 1e6:.1f} ms of launches, {published:.2%} beside published ones; serving alone "
        f"{host_share(alone):.2%}",
        flush=True,
    )
    return shares if windows else [inf]


if __name__ == "__main__":
    sys.exit(main())
