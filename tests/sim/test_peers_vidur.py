"""Vidur's tables give Vidur's batch times, and Tandem's policies its decisions."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from benchmarks.fidelity.vidur import LLAMA2_7B, POLICIES, latencies_s, read_requests, simulate
from models.spec import ModelSpec
from sim.foreign.vidur import VidurCost
from tandem.config.build import Builder
from tandem.config.compose import composed
from tandem.wiring.run_spec import policy_of


@pytest.fixture(scope="module")
def peers(shared: Path) -> Path:
    return shared / "data" / "peers"


@pytest.fixture(scope="module")
def cost(peers: Path) -> VidurCost:
    return VidurCost.load(peers / "cost_tables" / "llama2-7b_a100_tp1.npz", LLAMA2_7B)


@pytest.mark.parametrize(("name", "kind"), [("sarathi", "sarathi"), ("vllm_v0", "vllm")])
def test_a_named_policy_is_the_one_compared_with_vidur(name: str, kind: str) -> None:
    config = composed([f"policy={name}"]).config
    assert policy_of(config, Builder()) == POLICIES[kind]
    assert config["depth"] == 1


@pytest.mark.parametrize("kind", POLICIES)
def test_requests_that_end_before_the_cut_have_vidurs_latencies(
    peers: Path, cost: VidurCost, kind: str
) -> None:
    """Later requests cannot change them, so a tenth of the trace is enough."""
    requests = read_requests(peers / "inputs" / "sharegpt_n1000_qps2_seed42.csv")[:120]
    theirs = pd.read_csv(peers / f"vidur_results/c_llama2-7b_{kind}_1000_q2_requests.csv.gz")
    theirs = theirs.sort_values("Request Id").iloc[: len(requests)]
    arrivals_s = np.array([r.arrival_ns for r in requests]) / 1e9
    ends_s = arrivals_s + theirs["request_e2e_time"].to_numpy()
    whole = ends_s < arrivals_s[-1]
    assert whole.sum() > 50
    ours = latencies_s(simulate(POLICIES[kind], requests, cost)[1])
    # Vidur's clock is a float sum, Tandem's in whole ns: half a ns a step over 2,000 steps.
    for name, column in (("ttft", "prefill_e2e_time"), ("e2e", "request_e2e_time")):
        assert np.abs(ours[name] - theirs[column].to_numpy())[whole].max() < 2e-6


def test_batch_times_follow_the_tables(cost: VidurCost) -> None:
    """Three batches by hand: decodes at their mean, prompts by squares, dense padded to 8."""
    tables = {name: np.asarray(values) for name, values in cost.tables.items()}
    once = ("attn_pre_proj", "attn_post_proj", "attn_rope", "mlp_up_proj", "mlp_act")
    names = (*once, "mlp_down_proj", "input_layernorm", "post_attention_layernorm", "add")

    def dense(tokens: int) -> float:
        padded = -(-tokens // 8) * 8
        saved = tables["attn_kv_cache_save_ms"][tokens - 1]
        return float(sum(tables[f"{name}_ms"][padded - 1] for name in names) + saved)

    decodes = dense(2) + tables["attn_decode_ms"][1, 2]  # contexts 101 and 120: mean 110 -> 2 x 64
    assert cost.layer_ms([1, 1], [100, 119], [50, 50]) == pytest.approx(decodes, abs=1e-12)
    prompts = dense(500) + tables["attn_prefill_ms"][0, 361 - 1]  # sqrt(300^2 + 200^2) = 360.6
    assert cost.layer_ms([300, 200], [0, 0], [300, 200]) == pytest.approx(prompts, abs=1e-12)
    mixed = dense(101) + tables["attn_prefill_ms"][4, 100 - 1] + tables["attn_decode_ms"][0, 1]
    assert cost.layer_ms([100, 1], [200, 20], [300, 20]) == pytest.approx(mixed, abs=1e-12)
    assert cost.shape_ns([1, 1], [100, 119], 2) == round(decodes * 32 * 1e6)


def test_the_last_token_of_a_prompt_is_no_decode(cost: VidurCost) -> None:
    as_prompt = cost.layer_ms([1], [63], [64])
    assert as_prompt != cost.layer_ms([1], [63], [63])
    assert as_prompt == pytest.approx(
        cost.layer_ms([1], [0], [1])
        - cost.tables["attn_prefill_ms"][0][0]
        + cost.tables["attn_prefill_ms"][1][0]
    )


def test_grouped_heads_cost_more_together(cost: VidurCost) -> None:
    grouped = ModelSpec("g", "llama", 32, 4096, 32, 8, 128, 11008, 32000, 4096, dtype="float16")
    other = VidurCost(cost.tables, grouped, "test")
    alone, together = ([1], [100], [1]), ([1, 1], [100, 100], [1, 1])
    assert other.layer_ms(*alone) == cost.layer_ms(*alone)
    attention = cost.tables["attn_decode_ms"][1][2]
    assert other.layer_ms(*together) - cost.layer_ms(*together) == pytest.approx(0.1 * attention)


def test_outside_the_tables_it_scales_and_warns(
    cost: VidurCost, caplog: pytest.LogCaptureFixture
) -> None:
    fresh = VidurCost(cost.tables, cost.model, "test")
    with caplog.at_level(logging.WARNING):
        inside, outside = fresh.shape_ns([4096], [0], 1), fresh.shape_ns([8192], [0], 1)
        fresh.shape_ns([8192], [0], 1)
    assert outside > 1.9 * inside
    warned = [record.getMessage() for record in caplog.records]
    assert any("dense" in line for line in warned)
    assert len(warned) == len(set(warned)), "one warning per table"
    assert fresh.extrapolated["dense"] == 1  # launches of one size are priced once


def test_a_file_of_another_kind_is_refused(tmp_path: Path, cost: VidurCost) -> None:
    with pytest.raises(ValueError, match="holds no Vidur tables"):
        VidurCost.load(tmp_path / "none.npz", LLAMA2_7B)
    np.savez(tmp_path / "other.npz", a=np.zeros(3))
    with pytest.raises(ValueError, match="attn_decode_ms"):
        VidurCost.load(tmp_path / "other.npz", LLAMA2_7B)
    with pytest.raises(ValueError, match="no copies"):
        cost.transfer_ns("gpu->host", 1)
