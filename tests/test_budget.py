"""What a budget must hold for the longest request, to the page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tandem.compose import composed
from tandem.experiment import run_experiment
from tandem.setting import setting_of
from traces.request import Request
from traces.store import write_trace

TOKENS = 10 * 16  # ten pages


@pytest.mark.parametrize(
    ("policy", "least"),
    [
        ("chunked_restart", 10),
        ("chunked_swap", 10),
        ("vllm_v1", 10),
        ("vllm_v0", 11),
        ("sarathi", 11),
        ("chunked_reservation memory.max_tokens=159", 10),
        ("orca memory.max_tokens=200", 13),
    ],
)
def test_the_least_budget_that_is_accepted_serves_the_longest_request(
    policy: str, least: int, tmp_path: Path
) -> None:
    """vLLM v0's rules want a page free at every decode, or the job is refused on its way."""
    trace = tmp_path / "one.parquet"
    write_trace(trace, [Request(0, 0, 100, TOKENS - 100)], {})
    words = ["model=micro_llama", "trace=file", f"trace.path={trace}", "arrival=all_at_once"]
    words += f"policy={policy}".split()
    with pytest.raises(ValueError, match=f"raise budget.kv_pages to {least},"):
        setting_of(composed([*words, f"budget.kv_pages={least - 1}"]))
    with pytest.raises(
        ValueError, match=r"raise budget\.kv_bytes to"
    ) as told:  # the key that is set
        setting_of(composed([*words, "budget.kv_bytes=1"]))
    enough = re.search(r"kv_bytes to (\d+)", str(told.value))
    assert enough and setting_of(composed([*words, f"budget.kv_bytes={enough[1]}"]))
    metrics = run_experiment(composed([*words, f"budget.kv_pages={least}"]), tmp_path / "run")
    assert metrics["num_finished"] == 1


def test_a_reservation_that_the_longest_request_outgrows_is_told_before_anything_runs(
    tmp_path: Path,
) -> None:
    trace = tmp_path / "one.parquet"
    write_trace(trace, [Request(0, 0, 100, TOKENS - 100), Request(1, 0, 10, 10)], {})
    words = ["model=micro_llama", "trace=file", f"trace.path={trace}", "arrival=all_at_once"]
    words += ["policy=chunked_reservation", f"memory.max_tokens={TOKENS - 2}"]
    with pytest.raises(ValueError, match="max_tokens=158: the longest request needs 159; raise it"):
        setting_of(composed(words))
    allowed = composed([*words, "budget.may_refuse=true"])
    metrics = run_experiment(allowed, tmp_path / "run")
    assert (metrics["num_finished"], metrics["num_refused"]) == (1, 1)
