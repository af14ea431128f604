"""Folders of finished runs without running any: what `tandem sweep` leaves, by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from tests.support.synthetic import write


def finished(
    root: Path,
    name: str,
    overrides: list[str],
    rate: float,
    rate_of: str = "arrival",
    **metrics: Any,
) -> Path:
    """A run folder with a toy's tables, and with these metrics as if they were its own."""
    config = {
        "seed": 0,
        "scheduling": {"_target_": "policies.scheduling.chunked_prefill.ChunkedPrefill"},
        "memory": {"_target_": "policies.kv.paged_restart.PagedRestart"},
        rate_of: {"rate": rate},
        "slo": {"ttft_s": 0.012, "tpot_s": None, "e2e_s": None},
        "trusted": [],
    }
    folder = write(root / name, provenance={"overrides": overrides, "model": "toy"})
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / "metrics.json").write_text(json.dumps({"backend": "sim", **metrics}))
    return folder


def failed(root: Path, name: str, error: str) -> Path:
    """A run folder that has nothing but its failure."""
    (root / name).mkdir(parents=True)
    status = {"status": "failed", "error": error}
    (root / name / "status.json").write_text(json.dumps(status))
    return root / name


def grid(root: Path) -> Path:
    """Two policies at three rates with two seeds, one point failed; figures one can check.

    `fast` serves every rate up to 4/s and then 4/s; `slow` up to 2/s and then 2/s.
    """
    for policy, most in (("fast", 4.0), ("slow", 2.0)):
        for rate in (1.0, 2.0, 4.0, 8.0):
            for seed in (0, 1):
                words = ["slo=chat", f"policy={policy}", f"arrival.rate={rate:g}", f"seed={seed}"]
                good = min(rate, most)
                finished(
                    root,
                    f"{policy}-{rate:g}-{seed}",
                    words,
                    rate,
                    goodput=good + (0.1 if seed else -0.1),
                    slo_attainment=min(1.0, most / rate),
                    request_throughput=good,
                    output_throughput=100 * good,
                    p50_ttft_s=0.01,
                    p99_ttft_s=0.02 * rate * (3 if policy == "slow" else 1),
                    p99_tpot_s=0.004 * rate,
                    p99_e2e_s=0.5,
                )
    failed(root, "dead", "its worker was killed by SIGKILL, 3 times")
    return root
