"""A run as the result file of `vllm bench serve`, for scripts that read such files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from analysis.classes import Slo, has_limits
from analysis.metrics import goodput, max_concurrency, per_request, samples, throughput
from analysis.run import Run, load
from analysis.usage import window_ns

Floats = NDArray[np.float64]
NAMES = {"ttft": "ttft", "tpot": "tpot", "itl": "itl", "e2e": "e2el"}  # Tandem's -> vLLM's
PERCENTILES = (50, 90, 95, 99)


def vllm_result(run: Run, slo: Slo | None = None) -> dict[str, Any]:
    """The keys of vLLM's `--save-result --save-detailed` file (vllm/benchmarks/serve.py).

    Latencies in its lists are seconds, in its statistics milliseconds; requests in order of id.
    Three things differ: times run from the arrival, not from the sending; `max_concurrent_requests`
    is the exact maximum, not one per second; generated texts are empty.
    """
    rows = per_request(run)
    done = rows["status"].eq("finished")
    rates = throughput(run)
    limits = slo if has_limits(slo) else None
    result: dict[str, Any] = {
        **_head(run),
        "duration": rates.get("duration_s", 0.0),
        "completed": int(done.sum()),
        "failed": int((~done).sum()),
        "total_input_tokens": int(rows["prompt_tokens"][done].sum()),
        "total_output_tokens": int(rows["output_tokens"][done].sum()),
        "request_throughput": rates.get("request_throughput", 0.0),
        "request_goodput": goodput(run, limits).get("goodput", 0.0) if limits else None,
        "output_throughput": rates.get("output_throughput", 0.0),
        "total_token_throughput": rates.get("total_token_throughput", 0.0),
        **_lists(run, rows, done),
        "max_output_tokens_per_s": _peak_tokens_per_s(run),
        "max_concurrent_requests": max_concurrency(run),
        "rtfx": 0.0,
    }
    for name, vllm_name in NAMES.items():
        result |= _statistics(vllm_name, samples(run)[name] * 1e3)
    return result


def write_vllm_json(folder: Path | str, out: Path | str, slo: Slo | None = None) -> dict[str, Any]:
    """Reads a run folder and writes the file whole or not at all; returns its content."""
    result, out = vllm_result(load(folder), slo), Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    aside = out.with_name(f".{out.name}.tmp")
    aside.write_text(json.dumps(result, allow_nan=False) + "\n", encoding="utf-8")
    aside.rename(out)
    return result


def _head(run: Run) -> dict[str, Any]:
    arrival = run.config.get("arrival") or {}
    made = datetime.fromtimestamp((run.folder / "requests.parquet").stat().st_mtime, UTC)
    return {
        "date": made.strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": f"tandem-{run.backend}",
        "backend": f"tandem-{run.backend}",
        "label": run.name,
        "model_id": run.provenance.get("model"),
        "tokenizer_id": None,
        "num_prompts": len(run.requests),
        "request_rate": _request_rate(run, arrival),
        "burstiness": arrival.get("burstiness", 1.0),
        "max_concurrency": arrival.get("clients"),
    }


def _request_rate(run: Run, arrival: Mapping[str, Any]) -> float | str:
    """The configured rate; "inf" is vLLM's word for all at once, or as fast as clients allow.

    Recorded arrivals have their mean rate.
    """
    if (rate := arrival.get("rate")) is not None:
        return float(rate)
    at_ns = run.requests["arrival_ns"]
    span_s = float(at_ns.max() - at_ns.min()) / 1e9 if len(at_ns) else 0.0
    return "inf" if "clients" in arrival or not span_s else (len(at_ns) - 1) / span_s


def _lists(run: Run, rows: pd.DataFrame, done: pd.Series) -> dict[str, Any]:
    """One entry per request; a failed one has no output, a TTFT of 0 and its status as error."""
    tokens = run.requests.set_index("request_id").sort_index()["token_ns"]
    gaps: list[Any] = [
        np.diff(np.asarray(t, np.float64)) / 1e9 if ok else []
        for t, ok in zip(tokens, done, strict=True)
    ]
    return {
        "input_lens": rows["prompt_tokens"].tolist(),
        "output_lens": rows["output_tokens"].where(done, 0).tolist(),
        "ttfts": rows["ttft_s"].fillna(0.0).tolist(),
        "itls": [list(map(float, each)) for each in gaps],
        "start_times": rows["arrival_s"].tolist(),
        "generated_texts": [""] * len(rows),
        "errors": ["" if ok else status for ok, status in zip(done, rows["status"], strict=True)],
    }


def _statistics(name: str, values: Floats) -> dict[str, float]:
    """Mean, median, population standard deviation and percentiles; 0 without values, as in vLLM."""
    held = values if len(values) else np.zeros(1)
    out = {f"mean_{name}_ms": float(held.mean()), f"median_{name}_ms": float(np.median(held))}
    out[f"std_{name}_ms"] = float(held.std())
    cuts = np.percentile(held, PERCENTILES)
    return out | {f"p{p}_{name}_ms": float(c) for p, c in zip(PERCENTILES, cuts, strict=True)}


def _peak_tokens_per_s(run: Run) -> float:
    """Most tokens delivered in one of the seconds counted from the first arrival."""
    done = run.requests[run.requests["status"].eq("finished")]
    times = np.concatenate([np.asarray(t, np.float64) for t in done["token_ns"]] or [np.empty(0)])
    if not len(times):
        return 0.0
    seconds = ((times - window_ns(run)[0]) // 1e9).astype(np.int64)
    return float(np.bincount(seconds).max())
