"""One definition of every latency and throughput, for predictions and measurements alike.

Names and definitions are vLLM's (`vllm bench serve`), in seconds. Other tools differ: TPOT may mean
e2e / output tokens (GuideLLM) or be called ITL (aiperf). Here TPOT leaves out the first token.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from analysis.classes import Slo, attained, class_figures, has_limits, met
from analysis.metric_names import LATENCIES, PERCENTILES
from analysis.replicas import imbalance
from analysis.run import Run
from analysis.training import training_summary
from analysis.usage import copied_bytes, host_share, kv_usage, lane_shares, memory_use, window_ns
from analysis.workspace import workspace_figures

Floats = NDArray[np.float64]

TRIM = 0.1  # share of the finishes cut off at each end of the steady window
_SAMPLES: WeakKeyDictionary[Run, dict[str, Floats]] = WeakKeyDictionary()


def per_request(run: Run) -> pd.DataFrame:
    """Latencies per request, indexed by request_id; NaN where undefined.

    ttft_s: first token - arrival, queueing included. tpot_s: (finish - first token) / (output - 1),
    undefined for one token or none. e2e_s: finish - arrival. norm_latency_s: e2e / output tokens.
    queue_s: first issue - arrival. Only finished requests have latencies, as in vLLM.
    """
    rows = run.requests.set_index("request_id").sort_index()
    counts = ["prompt_tokens", "output_tokens", "restarts", "swaps", "cached_tokens"]
    out = rows[["status", "slo", "device", *counts]].copy()
    done = rows["status"].eq("finished")
    arrival, finish = rows["arrival_ns"], rows["finish_ns"].where(done)
    first, tokens = rows["first_token_ns"].where(done), rows["output_tokens"]
    out["arrival_s"] = arrival / 1e9
    out["queue_s"] = (rows["scheduled_ns"].where(done) - arrival) / 1e9
    out["ttft_s"] = (first - arrival) / 1e9
    out["tpot_s"] = (finish - first) / (tokens - 1).where(tokens > 1) / 1e9
    out["e2e_s"] = (finish - arrival) / 1e9
    out["norm_latency_s"] = out["e2e_s"] / tokens.where(tokens > 0)
    return out


def itl(run: Run) -> Floats:
    """Every gap between consecutive tokens of a finished request, in seconds, pooled.

    A long request weighs more here than in TPOT, which has one value per request.
    """
    done = run.requests["status"].eq("finished")
    gaps = [np.diff(np.asarray(t, np.float64)) for t in run.requests.loc[done, "token_ns"]]
    return np.concatenate([*gaps, np.empty(0)]) / 1e9


def samples(run: Run) -> dict[str, Floats]:
    """The defined values of each latency: one per request, ITL pooled. Seconds.

    Computed once per run, because every figure and table reads them. Callers must not change them.
    """
    if run not in _SAMPLES:
        rows = per_request(run)
        _SAMPLES[run] = {
            name: itl(run) if name == "itl" else rows[f"{name}_s"].dropna().to_numpy(np.float64)
            for name in LATENCIES
        }
    return _SAMPLES[run]


def statistics(values: Floats) -> dict[str, float]:
    """Mean and percentiles (numpy's linear interpolation); empty where there are no values."""
    if not len(values):
        return {}
    found = np.percentile(values, PERCENTILES, method="linear")
    named = {f"p{q}": float(value) for q, value in zip(PERCENTILES, found, strict=True)}
    return {"mean": float(values.mean()), **named}


def throughput(run: Run) -> dict[str, float]:
    """Finished requests, their output tokens and all their tokens, per second of the window."""
    done = run.requests[run.requests["status"].eq("finished")]
    start, end = window_ns(run)
    duration_s = (end - start) / 1e9
    if not duration_s > 0:
        return {}
    output = float(done["output_tokens"].sum())
    return {
        "duration_s": duration_s,
        "request_throughput": len(done) / duration_s,
        "output_throughput": output / duration_s,
        "total_token_throughput": (output + float(done["prompt_tokens"].sum())) / duration_s,
    }


def steady_throughput(run: Run, trim: float = TRIM) -> dict[str, float]:
    """Throughput without warm-up and drain.

    The window leaves out the first and the last `trim` of the finishes. Finishes and tokens inside
    it count.
    """
    done = run.requests[run.requests["status"].eq("finished")]
    finish = np.sort(done["finish_ns"].to_numpy(np.float64))
    cut = int(len(finish) * trim)
    if len(finish) < 3 or cut == 0 or finish[cut - 1] >= finish[-cut - 1]:
        return {}
    start, end = finish[cut - 1], finish[-cut - 1]
    tokens = np.concatenate([np.asarray(t, np.float64) for t in done["token_ns"]])
    duration_s = float(end - start) / 1e9
    return {
        "steady_duration_s": duration_s,
        "steady_request_throughput": float(((finish > start) & (finish <= end)).sum()) / duration_s,
        "steady_output_throughput": float(((tokens > start) & (tokens <= end)).sum()) / duration_s,
    }


def goodput(run: Run, slo: Slo) -> dict[str, float]:
    """Requests that meet all limits, per second (goodput) and as a share (slo_attainment).

    Both are given over all requests and per SLO class of the trace. The share is of all requests:
    refused and unfinished ones miss their limits. ValueError for a limit outside SLO_KEYS.
    """
    has_limits(slo)
    rows, duration_s = per_request(run), throughput(run).get("duration_s")
    kept = met(rows, slo)
    out = {"slo_attainment": float(kept.mean())} if len(rows) else {}
    out |= {"goodput": float(kept.sum()) / duration_s} if duration_s else {}
    return out | attained(rows, kept, duration_s)


def max_concurrency(run: Run) -> int:
    """Most requests that had arrived and not finished at one time."""
    done = run.requests[run.requests["status"].eq("finished")]
    at = np.concatenate([done["arrival_ns"].to_numpy(float), done["finish_ns"].to_numpy(float)])
    change = np.repeat([1, -1], len(done))
    order = np.lexsort((change, at))  # a finish before an arrival at the same time
    return int(np.cumsum(change[order]).max(initial=0))


def prefix_hits(run: Run) -> dict[str, float]:
    """Share of tokens found in the prefix cache, of those and all prefilled ones.

    A restart counts its tokens again. Empty without hits.
    """
    found = float(run.requests["cached_tokens"].sum())
    computed = float(run.steps["prefill_tokens"].sum())
    return {"prefix_hit_rate": found / (found + computed)} if found else {}


def summary(run: Run, slo: Slo | None = None) -> dict[str, float | int | str]:
    """All metrics of a run as flat scalars, for metrics.json. Undefined metrics are left out.

    Metrics of serving need requests, those of training need steps. Goodput needs a limit of the
    SLO: without one it would equal the throughput. `fullest_` bytes of a pool's kinds add up to the
    peak of its `used`.
    """
    out: dict[str, float | int | str] = {"backend": run.backend, "cost_form": run.cost_form}
    out |= {"num_plans": len(run.plans)}
    out |= (_served(run, slo) if len(run.requests) else {}) | training_summary(run)
    for row in memory_use(run).to_dict("records"):
        key = f"{str(row['pool']).replace(':', '')}_{row['kind']}_bytes"
        out |= {f"peak_{key}": int(row["peak"]), f"mean_{key}": float(row["mean"])}
        if row["fullest"] > 0:
            out[f"fullest_{key}"] = int(row["fullest"])
    out |= workspace_figures(run)
    for lane, share in lane_shares(run).items():
        out[f"busy_share_{lane}"] = share
    return out | {"host_share": host_share(run), "copied_bytes": copied_bytes(run)}


def _served(run: Run, slo: Slo | None) -> dict[str, float | int]:
    """Metrics of requests."""
    out: dict[str, float | int] = {**_counts(run), **throughput(run), **steady_throughput(run)}
    out |= prefix_hits(run)
    if slo and has_limits(slo):
        out |= goodput(run, slo)
    out |= class_figures(per_request(run))
    for name, values in samples(run).items():
        out |= {f"{stat}_{name}_s": value for stat, value in statistics(values).items()}
    return out | kv_usage(run) | imbalance(run)


def _counts(run: Run) -> dict[str, int]:
    rows = run.requests
    out = {"num_requests": len(rows)}
    for status in ("finished", "refused", "unfinished"):
        out[f"num_{status}"] = int(rows["status"].eq(status).sum())
    out |= {name: int(rows[name].sum()) for name in ("restarts", "swaps", "cached_tokens")}
    out |= {"prompt_tokens": int(rows["prompt_tokens"].sum())}
    out |= {"output_tokens": int(rows["output_tokens"].sum())}
    return out | {"max_concurrency": max_concurrency(run)}
