"""Foreign kernel profiles as cost models: tables, skew, sanity filters and the memory model."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from engine.contract.executor import Launch, Piece, Pieces
from engine.contract.job import Job
from engine.contract.plan import Compute, Slice
from engine.contract.regions import PageSize, kv_place
from engine.fast_forward.decode_batch import DecodeBatch
from models.spec import ModelSpec
from sim.cost.contract import ShapePriced
from sim.cost.piecewise import Ragged
from sim.devices.device import Device
from sim.devices.kv_room import plan_memory
from sim.foreign.aiconfigurator import AiConfiguratorCost, keep_sane, product_table
from sim.foreign.kernel_profile import GRAPH_SIZES, SKEWS, KernelProfileCost, Mix, Skew, fit_skew
from tandem.config.build import Builder
from tandem.config.compose import composed

LLAMA31_8B = ModelSpec("llama3.1_8b", "llama", 32, 4096, 32, 8, 128, 14336, 128256, 131072)
RTX4090_BYTES = 25_250_627_584  # of the log's meta.json


@pytest.fixture(scope="module")
def rtx4090(shared: Path) -> Path:
    return shared / "data" / "peers" / "kernel_profiles" / "RTX4090_Llama-3.1-8B"


@pytest.fixture(scope="module")
def plain(rtx4090: Path) -> KernelProfileCost:
    """Its costs, with contexts priced at their mean."""
    return KernelProfileCost.load(rtx4090, LLAMA31_8B, "none")


@pytest.fixture(scope="module", params=SKEWS)
def padded(rtx4090: Path, request: pytest.FixtureRequest) -> KernelProfileCost:
    """Its costs with graphs, for each option for unequal contexts."""
    return KernelProfileCost.load(rtx4090, LLAMA31_8B, request.param, padded_to=GRAPH_SIZES)


def h200() -> Device:
    device = Builder().build(composed(["device=h200"]).config["device"], "device")
    assert isinstance(device, Device)
    return device


# ---- ragged tables
def test_ragged_is_exact_at_nodes_and_straight_between() -> None:
    rows = [(0, 0, 1.0), (0, 10, 3.0), (4, 0, 5.0), (4, 20, 9.0)]  # inner axes end at 10 and at 20
    table = Ragged.of(rows)
    for *point, value in rows:
        assert table.value(point) == value
    assert table.value((0, 5)) == 2.0
    assert table.value((2, 10)) == (3.0 + 7.0) / 2
    assert table.value((4, 30)) == 11.0, "a straight line beyond the last node"
    assert table.value((-1, -5)) == 1.0, "constant before the first node"


# ---- kernel profiles
def test_a_launch_on_the_grid_is_the_sum_of_its_kernels(
    rtx4090: Path, plain: KernelProfileCost
) -> None:
    dense = pd.read_csv(rtx4090 / "dense.csv").set_index(["layer", "tokens"])["time_us"]
    heads = pd.read_csv(rtx4090 / "per_sequence.csv").set_index(["layer", "sequences"])["time_us"]
    axes = ["prefill_chunk", "kv_prefill", "n_decode", "kv_decode"]
    attention = pd.read_csv(rtx4090 / "attention.csv").set_index(axes)["time_us"]
    names = ("qkv_proj", "rotary_emb", "o_proj", "gate_up_proj", "act_fn", "down_proj")
    layer = sum(dense[name, 4] for name in names) + 2 * dense["layernorm", 4]
    layer += attention[0, 0, 4, 1024]
    ends = dense["embedding", 4] + dense["final_layernorm", 4]
    ends += heads["lm_head", 4] + heads["sampler", 4]
    expected = (32 * layer + ends) * 1e3
    assert plain.shape_ns([1] * 4, [1023] * 4, 4) == pytest.approx(expected, abs=1)


def test_one_kernel_serves_prompts_and_decodes(plain: KernelProfileCost) -> None:
    mixed = plain.attention_us([512, 1, 1], [256, 1023, 1023])
    assert mixed == plain.attention.value((512, 256, 2, 1024))
    assert mixed == plain.attention_us([256, 256, 1, 1], [128, 128, 1023, 1023])
    assert plain.attention_us([512], [256]) == plain.attention.value((512, 256, 0, 0))


def test_graphs_pad_tokens_to_the_next_size(plain: KernelProfileCost) -> None:
    padded = replace(plain, padded_to=GRAPH_SIZES)
    shape = [1] * 33, [100] * 33, 33
    extra = plain._dense[40] - plain._dense[33]
    assert padded.shape_ns(*shape) - plain.shape_ns(*shape) == pytest.approx(extra, abs=1)
    assert padded.shape_ns([600], [0], 1) == plain.shape_ns([600], [0], 1), "no graph is as large"


def test_step_time_adds_to_launches_and_host_time_to_plans(
    rtx4090: Path, plain: KernelProfileCost
) -> None:
    given = {"step_ns": 200_000, "host_ns_per_plan": 7}
    slower = KernelProfileCost.load(rtx4090, LLAMA31_8B, "none", **given)
    assert slower.shape_ns([1], [9], 1) - plain.shape_ns([1], [9], 1) == 200_000
    assert (plain.plan_ns(5), slower.plan_ns(5)) == (0, 7)


@pytest.mark.parametrize("contexts", [[700, 900, 4000], [15, 15], [1], [300] * 3 + [5000] * 40])
def test_many_steps_at_once_cost_as_much_as_one_by_one(
    padded: KernelProfileCost, contexts: list[int]
) -> None:
    jobs = [Job(i, 0, 1, context + 1, context) for i, context in enumerate(contexts)]
    op = Compute(tuple(Slice(job, 1) for job in jobs))
    launch = Launch(op, pieces=tuple(Piece(i, 1, c, True, ()) for i, c in enumerate(contexts)))
    together = list(padded.repeat_ns(launch, 200))
    assert together == list(ShapePriced.repeat_ns(padded, launch, 200))
    assert together[0] == padded.compute_ns(launch)


@pytest.mark.parametrize("tail", [[], [(1, 40)], [(300, 0)], [(1, 0), (17, 64)]])
@pytest.mark.parametrize("contexts", [[], [15], [700, 900, 4000]])
def test_a_decode_batch_costs_as_much_as_its_decodes(
    padded: KernelProfileCost, contexts: list[int], tail: list[tuple[int, int]]
) -> None:
    """By sums and ends of its columns, and slice by slice."""
    if not contexts and not tail:
        return
    batch, jobs = (
        DecodeBatch(PageSize(16, 1)),
        [Job(i, 0, 1, c + 1, c) for i, c in enumerate(contexts)],
    )
    pairs = [(job, kv_place(job.job_id)) for job in jobs]
    batch.join(pairs, {place: () for _, place in pairs}, lambda job: 9)
    tokens = [1] * len(jobs) + [n for n, _ in tail]
    samples, behind = [True] * len(tokens), batch.ahead(0, [context for _, context in tail])
    op = Compute(tuple(Slice(Job(i, 0), n) for i, n in enumerate(tokens)))
    by_column = Launch(op, pieces=Pieces(range(len(tokens)), tokens, behind, samples, ()))
    by_slice = Launch(op, pieces=Pieces(range(len(tokens)), tokens, list(behind), samples, ()))
    assert padded.compute_ns(by_column) == padded.compute_ns(by_slice)
    for count in (1, 7):
        found, expected = (list(padded.repeat_ns(x, count)) for x in (by_column, by_slice))
        assert found == expected == list(ShapePriced.repeat_ns(padded, by_slice, count))


def test_an_incomplete_profile_is_refused(rtx4090: Path, tmp_path: Path) -> None:
    for name in ("attention.csv", "per_sequence.csv"):
        (tmp_path / name).write_bytes((rtx4090 / name).read_bytes())
    dense = pd.read_csv(rtx4090 / "dense.csv")
    dense[dense["layer"] != "o_proj"].to_csv(tmp_path / "dense.csv", index=False)
    with pytest.raises(ValueError, match="o_proj"):
        KernelProfileCost.load(tmp_path, LLAMA31_8B, "none")
    with pytest.raises(ValueError, match="skew"):
        KernelProfileCost.load(rtx4090, LLAMA31_8B, "some")


# ---- skew
def skewed(alpha: float, rows: int, **axes: float) -> pd.DataFrame:
    """Batches of two lengths with an excess of `alpha` of the reach."""
    mean = np.linspace(100, 200, rows)
    base = {"pc": 0, "kp": 0, "n": 32, "nb": 8, "kv_big": 4096, **axes}
    times = {"t_mean_us": mean, "t_max_us": 3 * mean, "t_skew_us": mean * (1 + 2 * alpha)}
    return pd.DataFrame({**base, **times})


def test_skew_is_recovered_overall_and_by_bucket() -> None:
    rows = pd.concat([skewed(0.2, 5), skewed(0.05, 5, n=128, nb=32)])
    assert fit_skew(skewed(0.2, 5), per_bucket=False).default == pytest.approx(0.2)
    assert fit_skew(rows, per_bucket=False).default == pytest.approx(0.125)
    fitted = fit_skew(rows, per_bucket=True)
    assert fitted.alpha(Mix(0, 0, 30, 0.25, 3000)) == pytest.approx(0.2)
    assert fitted.alpha(Mix(0, 0, 100, 0.2, 3000)) == pytest.approx(0.05)
    assert fitted.alpha(Mix(512, 0, 100, 0.2, 3000)) == pytest.approx(0.125), "unseen: the default"


def test_skew_of_spoilt_rows_is_refused_and_of_equal_lengths_zero() -> None:
    equal = skewed(0.2, 5, n=128, nb=32).assign(t_max_us=100.0, t_mean_us=100.0)
    assert fit_skew(equal, per_bucket=False) == Skew(0.0)
    fitted = fit_skew(pd.concat([skewed(0.2, 5), equal]), per_bucket=True)
    assert fitted.alpha(Mix(0, 0, 30, 0.25, 3000)) == pytest.approx(0.2)
    assert fitted.alpha(Mix(0, 0, 100, 0.2, 3000)) == fitted.default
    for spoilt in (np.inf, np.nan, -1.0):
        with pytest.raises(ValueError, match=f"a cost is {spoilt}"):
            fit_skew(skewed(0.2, 5).assign(t_skew_us=spoilt), per_bucket=True)


def test_unequal_contexts_cost_between_their_mean_and_their_longest(
    plain: KernelProfileCost,
) -> None:
    half = replace(plain, skew=Skew(0.5))
    tokens, contexts = [1] * 4, [511, 511, 511, 2559]
    mean, longest = (plain.attention.value((0, 0, 4, x)) for x in (1024, 2560))
    assert half.attention_us(tokens, contexts) == pytest.approx((mean + longest) / 2)
    assert plain.attention_us(tokens, contexts) == pytest.approx(mean)
    assert half.attention_us(tokens, [1023] * 4) == pytest.approx(mean)


# ---- AIConfigurator
def test_cells_beyond_the_peak_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    flops = 989e12 / 1e3  # a millisecond at the peak
    rows = pd.DataFrame(
        {"latency": [2.0, 0.9, 0.0, np.nan, 1.1], "flops": flops, "nbytes": [1.0, 1, 1, 1, 5.4e9]}
    )
    with caplog.at_level(logging.WARNING):
        kept = keep_sane(rows, h200(), LLAMA31_8B, "test")
    assert kept["latency"].tolist() == [2.0], "5.4 GB in 1.1 ms is above 4.8 TB/s"
    assert "4 of 5" in caplog.text
    with pytest.raises(ValueError, match="all cells beat the peaks of h200"):
        keep_sane(rows[1:2], h200(), LLAMA31_8B, "test")


def test_products_off_the_grid_are_straight_between() -> None:
    grid = [(n, k) for n in (100, 200) for k in (10, 30)]
    rows = pd.DataFrame(
        [{"m": m, "n": n, "k": k, "latency": m * n * k / 1e6} for n, k in grid for m in (1, 8)]
    )
    table = product_table(rows, 150, 20)
    assert table.axes == ((1, 8),)
    assert table.values == pytest.approx((3000.0, 24000.0))


def test_h200_tables_price_an_8b_model_above_its_floor(shared: Path) -> None:
    device = h200()
    folder = shared / "data" / "peers" / "aiconfigurator_h200"
    cost = AiConfiguratorCost.load(folder, device, LLAMA31_8B)
    for n, context in ((1, 500), (32, 1000), (64, 4000)):
        streamed = LLAMA31_8B.weight_bytes - LLAMA31_8B.vocab_size * LLAMA31_8B.hidden_size * 2
        streamed += n * context * LLAMA31_8B.kv_token_bytes
        floor_ns = streamed / device.bandwidth_bytes_per_s * 1e9
        # A good engine reaches 60 % of the floor at these sizes, an idle one a third.
        assert 1.0 < cost.shape_ns([1] * n, [context] * n, n) / floor_ns < 2.0
    prompt_ns = cost.shape_ns([4096], [0], 1)
    floor_ns = 2 * 4096 * LLAMA31_8B.layer_matrix_parameters * 32 / 989e12 * 1e9
    assert 1.2 < prompt_ns / floor_ns < 2.0
    halves = cost.shape_ns([2048], [0], 0) + cost.shape_ns([2048], [2048], 1)
    assert halves == pytest.approx(prompt_ns, rel=0.1), "two halves cost as much as the whole"
    assert cost.transfer_ns("gpu->host", 52_000_000) == pytest.approx(
        1e6 + device.link_ns, rel=0.01
    )


# ---- memory
PAGE = PageSize.of(LLAMA31_8B, 16)


def test_memory_adds_up_and_a_plan_without_a_page_is_refused() -> None:
    plan = plan_memory(LLAMA31_8B, RTX4090_BYTES, 0.9, 2048, 256, 2**30, PAGE)
    assert plan.weights == 16_060_522_496  # 8.03 B parameters in bf16
    assert plan.activation == 256 * 128256 * 14, "sampling outweighs the forward pass here"
    used = plan.weights + plan.activation + plan.reserve + plan.pages * plan.page
    assert 0 <= plan.usable - used < plan.page
    forward = plan_memory(LLAMA31_8B, RTX4090_BYTES, 0.9, 8192, 1, 2**30, PAGE)
    assert forward.activation == LLAMA31_8B.workspace_bytes([8192])
    small = plan_memory(LLAMA31_8B, 16 * 2**30, 0.9, 2048, 256, 2**30, PAGE)
    with pytest.raises(ValueError, match="leave no page"):
        _ = small.pages


def test_heads_that_no_table_has_are_refused(shared: Path) -> None:
    folder = shared / "data" / "peers" / "aiconfigurator_h200"
    odd = ModelSpec("odd", "llama", 2, 4096, 31, 31, 128, 8192, 32000, 4096)
    with pytest.raises(ValueError, match="no attention of 31/31 heads"):
        AiConfiguratorCost.load(folder, h200(), odd)
