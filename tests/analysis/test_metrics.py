"""Metrics against numbers computed by hand on a toy run."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from analysis import metrics, usage
from analysis.run import Run, load
from tests.support.synthetic import MS, TWO, write

# The toy run TWO: request 0 prefills in 0-10 ms, request 1 (arrived at 5) in 10-20 ms, both decode
# in 20-25 ms, request 0 alone in 25-30 ms. Tokens of 0 at 10, 25, 30 ms; of 1 at 20, 25 ms.


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return load(write(tmp_path_factory.mktemp("runs") / "two"))


def with_requests(run: Run, **columns: object) -> Run:
    return replace(run, requests=run.requests.assign(**columns))


def test_latencies_per_request(run: Run) -> None:
    rows = metrics.per_request(run)
    assert rows["ttft_s"].tolist() == pytest.approx([0.010, 0.015])
    assert rows["tpot_s"].tolist() == pytest.approx([0.010, 0.005])
    assert rows["e2e_s"].tolist() == pytest.approx([0.030, 0.020])
    assert rows["norm_latency_s"].tolist() == pytest.approx([0.010, 0.010])
    assert rows["queue_s"].tolist() == pytest.approx([0.0, 0.005])


def test_itl_pools_every_gap(run: Run) -> None:
    assert sorted(metrics.itl(run)) == pytest.approx([0.005, 0.005, 0.015])


def test_tpot_of_a_single_token_is_undefined(run: Run) -> None:
    one = with_requests(run, output_tokens=[1, 2])
    assert metrics.per_request(one)["tpot_s"].isna().tolist() == [True, False]
    assert metrics.statistics(metrics.samples(one)["tpot"])["mean"] == pytest.approx(0.005)


def test_refused_requests_have_no_latency_but_count(run: Run) -> None:
    part = with_requests(run, status=["finished", "refused"])
    found = metrics.summary(part, slo={"e2e_s": 1.0})
    assert (found["num_finished"], found["num_refused"]) == (1, 1)
    assert found["mean_e2e_s"] == pytest.approx(0.030)
    assert found["slo_attainment"] == 0.5
    assert found["request_throughput"] == pytest.approx(1 / 0.030)


def test_throughput_runs_from_first_arrival_to_last_finish(run: Run) -> None:
    found = metrics.throughput(run)
    assert found["duration_s"] == pytest.approx(0.030)
    assert found["output_throughput"] == pytest.approx(5 / 0.030)
    assert found["total_token_throughput"] == pytest.approx(25 / 0.030)


def test_percentiles_are_linear() -> None:
    found = metrics.statistics(np.array([0.0, 1.0]))
    assert found == pytest.approx({"mean": 0.5, "p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99})
    assert metrics.statistics(np.empty(0)) == {}


def test_steady_window_drops_warm_up_and_drain(tmp_path) -> None:
    # One request per 100 ms, each 10 + 5 ms: in the window between the first and the ninth finish
    # lie 8 finishes and 16 tokens in 800 ms.
    toy = replace(TWO, arrivals_ns=[i * 100 * MS for i in range(10)], prompts=[10] * 10)
    run = load(write(tmp_path / "steady", toy, outputs=[2] * 10))
    found = metrics.token_figures(run)
    assert found["steady_duration_s"] == pytest.approx(0.8)
    assert found["steady_request_throughput"] == pytest.approx(10.0)
    assert found["steady_output_throughput"] == pytest.approx(20.0)


@pytest.mark.parametrize(
    ("slo", "met"),
    [
        ({"ttft_s": 0.012}, 1),
        ({"tpot_s": 0.007, "ttft_s": 0.012}, 0),
        ({"e2e_s": 0.030}, 2),
        ({"e2e_s": None}, 2),
    ],
)
def test_goodput_needs_all_limits(run: Run, slo: dict[str, float], met: int) -> None:
    found = metrics.goodput(run, slo)
    assert found["goodput"] == pytest.approx(met / 0.030)
    assert found["slo_attainment"] == met / 2


def test_a_single_token_meets_any_tpot(run: Run) -> None:
    one = with_requests(run, output_tokens=[1, 2])
    assert metrics.goodput(one, {"tpot_s": 0.001})["slo_attainment"] == 0.5


def test_unknown_slo_is_named(run: Run) -> None:
    with pytest.raises(ValueError, match=r"unknown SLO 'itl'.*ttft_s"):
        metrics.goodput(run, {"itl": 1.0})


def test_concurrency_counts_a_finish_before_an_arrival(run: Run) -> None:
    assert metrics.max_concurrency(run) == 2
    assert metrics.max_concurrency(with_requests(run, arrival_ns=[0, 30 * MS])) == 1


def test_memory_is_weighted_by_time(run: Run) -> None:
    # KV pages: 0 until 10 ms, 1 until 20 ms (request 0), 2 until 25 ms, 1 until 30 ms, then 0.
    use = usage.memory_use(run).set_index(["pool", "kind"])
    assert use.loc[("gpu:0", "kv"), "peak"] == 2000
    assert use.loc[("gpu:0", "kv"), "mean"] == pytest.approx((10 + 2 * 5 + 5) / 30 * 1000)
    assert use.loc[("gpu:0", "weight")].tolist() == [5000, 5000, 5000]
    assert use.loc[("gpu:0", "kv"), "fullest"] == 2000
    assert use.loc[("gpu:0", "used"), "peak"] == 7000
    assert ("gpu:0", "gradient") not in use.index and ("gpu:0", "measured") not in use.index


def test_kv_usage_leaves_the_weights_out(run: Run) -> None:
    assert usage.kv_usage(usage.pool_uses(run))["peak_kv_usage"] == pytest.approx(2000 / 95_000)


def test_last_of_several_values_at_one_time_holds() -> None:
    at, values = np.array([0, 10, 10]), np.array([1.0, 9.0, 3.0])
    for start_ns, wanted in ((0.0, 2.0), (10.0, 3.0)):
        for cut in range(4):  # in two blocks
            mean = usage.TimeMean(start_ns, 20.0)
            mean.add(at[:cut], values[:cut])
            mean.add(at[cut:], values[cut:])
            assert mean.value == pytest.approx(wanted)


def test_lanes_and_host_are_shares_of_the_run(tmp_path) -> None:
    run = load(write(tmp_path / "host", arrivals_ns=(0, 0), host_ns=MS))
    # One prefill of both (20 ms), decodes of 5 and 5 ms, 1 ms of host before each.
    assert usage.lane_shares(run) == pytest.approx({"0:compute": 30 / 33})
    assert usage.host_share(run) == pytest.approx(3 / 33)


def test_steps_are_grouped_by_their_tokens_and_lane(run: Run) -> None:
    lanes = ["compute"] * 3 + ["gpu->host"]
    steps = run.steps.assign(lane=lanes, prefill_tokens=[1, 1, 0, 0], decode_tokens=[0, 1, 1, 0])
    groups = usage.operations(replace(run, steps=steps))["group"]
    assert groups.tolist() == ["prefill", "mixed", "decode", "gpu->host"]


def test_summary_is_flat_and_leaves_undefined_out(run: Run) -> None:
    found = metrics.summary(run)
    assert all(isinstance(value, int | float | str) for value in found.values())
    assert all(value == value for value in found.values())
    assert found["p50_ttft_s"] == pytest.approx(0.0125)
    assert found["peak_gpu0_kv_bytes"] == 2000
    assert "goodput" not in found and "steady_duration_s" not in found
    nothing = metrics.summary(with_requests(run, status=["refused", "refused"]))
    assert nothing["num_finished"] == 0 and "mean_ttft_s" not in nothing
    assert "request_throughput" not in nothing


def test_a_summary_has_the_source_of_durations(run: Run) -> None:
    priced = {"backend": "sim", "cost_form": "roofline"}
    assert metrics.summary(replace(run, provenance=priced))["cost_form"] == "roofline"
    priced["backend"] = "cpu"  # there the roofline only answers the policy's `op_ns`
    assert metrics.summary(replace(run, provenance=priced))["cost_form"] == "measured"


def test_the_hit_rate_is_of_cached_and_prefilled_tokens(run: Run) -> None:
    assert metrics.prefix_hits(run, 20) == {}
    found = metrics.prefix_hits(with_requests(run, cached_tokens=[5, 0]), 20)
    assert found == {"prefix_hit_rate": 5 / (5 + 10 + 10)}
