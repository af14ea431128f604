"""The result file of `vllm bench serve`, against numbers computed by hand on a toy run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from analysis.run import load
from analysis.vllm_json import vllm_result, write_vllm_json
from tests.support.synthetic import write

# The toy run (tests/analysis/test_metrics.py): tokens of request 0, arrived at 0, at 10, 25, 30 ms;
# of request 1, arrived at 5, at 20, 25 ms. Ten prompt tokens each.

# the keys of the file that vllm/benchmarks/serve.py writes
KEYS = {
    "date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id", "num_prompts",
    "request_rate", "burstiness", "max_concurrency", "duration", "completed", "failed",
    "total_input_tokens", "total_output_tokens", "request_throughput", "request_goodput",
    "output_throughput", "total_token_throughput", "input_lens", "output_lens", "ttfts", "itls",
    "start_times", "generated_texts", "errors", "max_output_tokens_per_s",
    "max_concurrent_requests", "rtfx",
}  # fmt: skip


def test_every_key_and_value(tmp_path: Path) -> None:
    found = vllm_result(load(write(tmp_path / "two")))
    names = ("mean", "median", "std", "p50", "p90", "p95", "p99")
    assert set(found) == KEYS | {
        f"{s}_{m}_ms" for s in names for m in ("ttft", "tpot", "itl", "e2el")
    }
    assert found["input_lens"] == [10, 10] and found["output_lens"] == [3, 2]
    assert found["ttfts"] == pytest.approx([0.010, 0.015])
    assert found["itls"] == [pytest.approx([0.015, 0.005]), pytest.approx([0.005])]
    assert found["start_times"] == pytest.approx([0.0, 0.005])
    assert (found["completed"], found["failed"], found["errors"]) == (2, 0, ["", ""])
    assert found["duration"] == pytest.approx(0.030)
    assert found["request_throughput"] == pytest.approx(2 / 0.030)
    assert found["total_token_throughput"] == pytest.approx(25 / 0.030)
    assert found["mean_ttft_ms"] == pytest.approx(12.5) == found["median_ttft_ms"]
    assert found["std_ttft_ms"] == pytest.approx(2.5)  # of the population, as numpy's default
    assert found["mean_tpot_ms"] == pytest.approx(7.5)
    assert found["mean_itl_ms"] == pytest.approx(25 / 3)
    assert found["p90_e2el_ms"] == pytest.approx(29.0)
    assert found["max_concurrent_requests"] == 2 and found["max_output_tokens_per_s"] == 5.0
    assert found["request_goodput"] is None


@pytest.mark.parametrize(
    ("arrival", "arrivals_ns", "rate", "clients"),
    [
        ({"rate": 4}, (0, 5_000_000), 4.0, None),
        ({}, (0, 5_000_000), 200.0, None),  # recorded: one gap of 5 ms
        ({"rate": None, "path": "t.csv"}, (0, 5_000_000), 200.0, None),
        ({}, (0, 0), "inf", None),
        ({"clients": 16, "think_s": 0.0}, (0, 5_000_000), "inf", 16),
    ],
)
def test_the_load_in_vllms_words(
    arrival: dict[str, object],
    arrivals_ns: tuple[int, int],
    rate: float | str,
    clients: int | None,
    tmp_path: Path,
) -> None:
    run = load(write(tmp_path / "two", arrivals_ns=arrivals_ns))
    found = vllm_result(replace(run, config={**run.config, "arrival": arrival}))
    assert found["request_rate"] == (rate if isinstance(rate, str) else pytest.approx(rate))
    assert found["max_concurrency"] == clients


def test_a_failed_request_is_an_error_without_output(tmp_path: Path) -> None:
    run = load(write(tmp_path / "two"))
    run = replace(run, requests=run.requests.assign(status=["finished", "unfinished"]))
    found = vllm_result(run, slo={"ttft_s": 0.011})
    assert (found["completed"], found["failed"]) == (1, 1)
    assert found["output_lens"] == [3, 0] and found["errors"] == ["", "unfinished"]
    assert found["ttfts"][1] == 0.0 and found["itls"][1] == []
    assert found["total_input_tokens"] == 10
    assert found["request_goodput"] == pytest.approx(1 / 0.030)


def test_a_run_in_which_nothing_finished(tmp_path: Path) -> None:
    run = load(write(tmp_path / "two"))
    found = vllm_result(replace(run, requests=run.requests.assign(status="refused")))
    assert (found["completed"], found["failed"], found["mean_ttft_ms"]) == (0, 2, 0.0)
    json.dumps(found, allow_nan=False)


def test_the_file_is_plain_json(tmp_path: Path) -> None:
    folder = write(tmp_path / "two")
    result = write_vllm_json(folder, tmp_path / "out" / "result.json")
    assert json.loads((tmp_path / "out" / "result.json").read_text()) == result
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["result.json"]
