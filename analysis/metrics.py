"""One definition of every latency and throughput, for predictions and measurements alike.

Names and definitions are vLLM's (`vllm bench serve`), in seconds. Other tools differ: TPOT may mean
e2e / output tokens (GuideLLM) or be called ITL (aiperf). Here TPOT leaves out the first token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from analysis.classes import (
    Slo,
    adapter_figures,
    attained,
    class_figures,
    has_limits,
    met,
    service_figures,
    tenant_figures,
)
from analysis.columns import Block, CountedNumbers, percentiles, sorted_by
from analysis.metric_names import LATENCIES, PERCENTILES
from analysis.replicas import imbalance, replica_rows
from analysis.run import Run, RunFacts, whole
from analysis.usage import LaneTimes, kv_usage, lane_times, pool_uses, use_rows, window_ns
from analysis.workspace import workspace_figures

if TYPE_CHECKING:
    import pandas as pd

Floats = NDArray[np.float64]

TRIM = 0.1  # share of the finishes cut off at each end of the steady window
_SAMPLES: WeakKeyDictionary[RunFacts, dict[str, Floats]] = WeakKeyDictionary()
COUNTS = ("prompt_tokens", "output_tokens", "restarts", "swaps", "cached_tokens")
READ = ["request_id", "status", "slo", "device", "arrival_ns", "scheduled_ns", "first_token_ns"]
READ += ["finish_ns", *COUNTS]
OF_A_REQUEST = ("arrival_s", "queue_s", "ttft_s", "tpot_s", "e2e_s", "norm_latency_s")


def latencies(run: RunFacts) -> Block:
    """Columns of the requests by request_id, and their latencies; NaN where undefined.

    ttft_s: first token - arrival, queueing included. tpot_s: (finish - first token) / (output - 1),
    undefined for one token or none. e2e_s: finish - arrival. norm_latency_s: e2e / output tokens.
    queue_s: first issue - arrival. Only finished requests have latencies, as in vLLM.
    """
    names = [*READ, "tenant"] if run.keeps("requests", "tenant") else READ
    rows = sorted_by(run.columns("requests", names), "request_id")
    done = rows["status"].is_("finished")
    arrival, finish = rows["arrival_ns"], np.where(done, rows["finish_ns"], np.nan)
    first, tokens = np.where(done, rows["first_token_ns"], np.nan), rows["output_tokens"]
    e2e_s = (finish - arrival) / 1e9
    found = {
        "arrival_s": arrival / 1e9,
        "queue_s": (np.where(done, rows["scheduled_ns"], np.nan) - arrival) / 1e9,
        "ttft_s": (first - arrival) / 1e9,
        "tpot_s": (finish - first) / np.where(tokens > 1, tokens - 1, np.nan) / 1e9,
        "e2e_s": e2e_s,
        "norm_latency_s": e2e_s / np.where(tokens > 0, tokens, np.nan),
    }
    return rows | found


def per_request(run: Run) -> pd.DataFrame:
    """The latencies of `latencies` as a frame, indexed by request_id."""
    rows = run.requests.set_index("request_id").sort_index()
    found = latencies(run)
    out = rows[["status", "slo", "device", *COUNTS]]
    return out.assign(**{name: found[name] for name in OF_A_REQUEST})


def itl(run: RunFacts) -> Floats:
    """Every gap between consecutive tokens of a finished request, in seconds, pooled.

    A long request weighs more here than in TPOT, which has one value per request.
    """
    found = [
        block["token_ns"].gaps(block["status"].is_("finished"))
        for block in run.blocks("requests", ("status", "token_ns"))
    ]
    return np.concatenate(found) / 1e9


def samples(run: RunFacts) -> dict[str, Floats]:
    """The defined values of each latency: one per request, ITL pooled. Seconds.

    Computed once per run, because every figure and table reads them. Callers must not change them.
    """
    if run not in _SAMPLES:
        found = {**_request_samples(latencies(run)), "itl": itl(run)}
        _SAMPLES[run] = {name: found[name] for name in LATENCIES}
    return _SAMPLES[run]


def _request_samples(rows: Block) -> dict[str, Floats]:
    found = {name: rows[f"{name}_s"] for name in LATENCIES if name != "itl"}
    return {name: values[~np.isnan(values)] for name, values in found.items()}


def statistics(values: Floats) -> dict[str, float]:
    """Mean and percentiles (numpy's linear interpolation); empty where there are no values."""
    if not len(values):
        return {}
    found = np.percentile(values, PERCENTILES, method="linear")
    named = {f"p{q}": float(value) for q, value in zip(PERCENTILES, found, strict=True)}
    return {"mean": float(values.mean()), **named}


def _counted_statistics(gaps_ns: CountedNumbers) -> dict[str, float]:
    """`statistics` of gaps in seconds, of which equal ones are counted."""
    values, counts = gaps_ns.sorted()
    if not len(values):
        return {}
    values = values / 1e9
    found = percentiles(values, counts, PERCENTILES)
    named = {f"p{q}": value for q, value in zip(PERCENTILES, found, strict=True)}
    return {"mean": float((values * counts).sum() / counts.sum()), **named}


def throughput(run: RunFacts) -> dict[str, float]:
    """Finished requests, their output tokens and all their tokens, per second of the window."""
    rows = run.columns("requests", ("status", "prompt_tokens", "output_tokens"))
    done = rows["status"].is_("finished")
    start, end = window_ns(run)
    duration_s = (end - start) / 1e9
    if not duration_s > 0:
        return {}
    output = float(rows["output_tokens"][done].sum())
    return {
        "duration_s": duration_s,
        "request_throughput": int(done.sum()) / duration_s,
        "output_throughput": output / duration_s,
        "total_token_throughput": (output + float(rows["prompt_tokens"][done].sum())) / duration_s,
    }


def steady_window_ns(run: RunFacts, trim: float = TRIM) -> tuple[float, float, int] | None:
    """The window without warm-up and drain, and the finishes inside it.

    The window leaves out the first and the last `trim` of the finishes. None where nothing is left.
    """
    rows = run.columns("requests", ("status", "finish_ns"))
    finish = np.sort(rows["finish_ns"][rows["status"].is_("finished")].astype(float))
    cut = int(len(finish) * trim)
    if len(finish) < 3 or cut == 0 or finish[cut - 1] >= finish[-cut - 1]:
        return None
    start, end = finish[cut - 1], finish[-cut - 1]
    return float(start), float(end), int(((finish > start) & (finish <= end)).sum())


def token_figures(run: RunFacts, trim: float = TRIM) -> dict[str, float]:
    """Throughput in the steady window, whose tokens count by their own times, and ITL."""
    window, tokens = steady_window_ns(run, trim), 0
    gaps, num_blocks, gaps_ns = np.empty(0, np.int64), 0, CountedNumbers()
    for block in run.blocks("requests", ("status", "token_ns")):
        done, times = block["status"].is_("finished"), block["token_ns"]
        if window is not None:
            own = times.of(done)
            tokens += int(((own > window[0]) & (own <= window[1])).sum())
        if num_blocks:
            gaps_ns.add(gaps)
        gaps, num_blocks = times.gaps(done), num_blocks + 1
    out: dict[str, float] = {}
    if window is not None:
        duration_s = (window[1] - window[0]) / 1e9
        out["steady_duration_s"] = duration_s
        out["steady_request_throughput"] = window[2] / duration_s
        out["steady_output_throughput"] = tokens / duration_s
    if num_blocks == 1:
        found = statistics(gaps / 1e9)
    else:
        gaps_ns.add(gaps)
        found = _counted_statistics(gaps_ns)
    return out | {f"{stat}_itl_s": value for stat, value in found.items()}


def goodput(run: RunFacts, slo: Slo) -> dict[str, float]:
    """Requests that meet all limits, per second (goodput) and as a share (slo_attainment).

    Both are given over all requests and per SLO class of the trace. The share is of all requests:
    refused and unfinished ones miss their limits. ValueError for a limit outside SLO_KEYS.
    """
    has_limits(slo)
    rows, duration_s = latencies(run), throughput(run).get("duration_s")
    kept = met(rows, slo)
    out = {"slo_attainment": float(kept.mean())} if len(kept) else {}
    out |= {"goodput": float(kept.sum()) / duration_s} if duration_s else {}
    return out | attained(rows, kept, duration_s)


def max_concurrency(run: RunFacts) -> int:
    """Most requests that had arrived and not finished at one time."""
    rows = run.columns("requests", ("status", "arrival_ns", "finish_ns"))
    done = rows["status"].is_("finished")
    at = np.concatenate([rows[name][done].astype(float) for name in ("arrival_ns", "finish_ns")])
    change = np.repeat([1, -1], int(done.sum()))
    order = np.lexsort((change, at))  # a finish before an arrival at the same time
    return int(np.cumsum(change[order]).max(initial=0))


def prefix_hits(run: RunFacts, prefill_tokens: int) -> dict[str, float]:
    """Share of tokens found in the prefix cache, of those and all prefilled ones.

    A restart counts its tokens again. Empty without hits.
    """
    found = float(run.columns("requests", ("cached_tokens",))["cached_tokens"].sum())
    return {"prefix_hit_rate": found / (found + float(prefill_tokens))} if found else {}


def window_tokens(run: RunFacts) -> int:
    """Tokens of finetuning windows in launches that serve, which count as prefilled there."""
    if not run.rows("samples") or not run.rows("requests"):
        return 0
    requests, found = run.columns("requests", ("request_id",))["request_id"], 0
    for block in run.blocks("steps", ("prefill_tokens", "jobs", "tokens")):
        serves = block["prefill_tokens"] > 0
        jobs, tokens = block["jobs"].of(serves), block["tokens"].of(serves)
        found += int(tokens[~np.isin(jobs, requests)].sum())
    return found


def summary(run: RunFacts, slo: Slo | None = None) -> dict[str, float | int | str]:
    """All metrics of a run as flat scalars, for metrics.json. Undefined metrics are left out.

    Metrics of serving need requests, those of training need steps. Goodput needs a limit of the
    SLO: without one it would equal the throughput. `fullest_` bytes of a pool's kinds add up to the
    peak of its `used`. A run that kept no steps has the metrics of its requests.
    """
    out: dict[str, float | int | str] = {"backend": run.backend, "cost_form": run.cost_form}
    has_steps = run.has("steps")
    if has_steps:
        out |= {"num_plans": run.rows("plans")}
    times = lane_times(run) if has_steps else None
    uses = pool_uses(run) if has_steps else {}
    if run.rows("requests"):
        out |= _served(run, slo, times) | kv_usage(uses)
        if times is not None:
            out |= imbalance(replica_rows(run, uses, times.lane_shares))
    out |= service_figures(run) | adapter_figures(run)
    if run.rows("training"):
        from analysis.training import training_summary

        out |= training_summary(whole(run))
    if run.rows("samples"):
        from analysis.training import finetuning_summary, record_summary, stall_shares

        out |= finetuning_summary(run) | record_summary(run)
        out |= stall_shares(run) if has_steps else {}
    for pool, kind, peak, mean, fullest in use_rows(uses):
        key = f"{pool.replace(':', '')}_{kind}_bytes"
        out |= {f"peak_{key}": int(peak), f"mean_{key}": float(mean)}
        if fullest is not None and fullest > 0:
            out[f"fullest_{key}"] = int(fullest)
    if times is None:
        return out
    out |= workspace_figures(run, times.peak_bytes)
    out |= {f"busy_share_{lane}": share for lane, share in times.lane_shares.items()}
    return out | {"host_share": times.host_share, "copied_bytes": times.copied_bytes}


def _served(run: RunFacts, slo: Slo | None, times: LaneTimes | None) -> dict[str, float | int]:
    """Metrics of requests."""
    out: dict[str, float | int] = {**_counts(run), **throughput(run)}
    of_tokens, rows = token_figures(run), latencies(run)
    out |= {name: value for name, value in of_tokens.items() if name.startswith("steady_")}
    if times is not None:
        out |= prefix_hits(run, times.prefill_tokens - window_tokens(run))
    if slo and has_limits(slo):
        out |= goodput(run, slo)
    out |= class_figures(rows)
    out |= tenant_figures(rows) if "tenant" in rows else {}
    values = _request_samples(rows)
    for name in LATENCIES:
        if name == "itl":
            out |= {key: value for key, value in of_tokens.items() if key.endswith("_itl_s")}
        else:
            found = statistics(values[name])
            out |= {f"{stat}_{name}_s": value for stat, value in found.items()}
    return out


def _counts(run: RunFacts) -> dict[str, int]:
    rows = run.columns("requests", ("status", *COUNTS))
    out = {"num_requests": len(rows["restarts"])}
    for status in ("finished", "refused", "unfinished"):
        out[f"num_{status}"] = int(rows["status"].is_(status).sum())
    out |= {name: int(rows[name].sum()) for name in ("restarts", "swaps", "cached_tokens")}
    out |= {name: int(rows[name].sum()) for name in ("prompt_tokens", "output_tokens")}
    return out | {"max_concurrency": max_concurrency(run)}
