"""The training experiments of conf/experiment in a tiny form: what must hold of their figures."""

from __future__ import annotations

from dataclasses import replace
from math import isnan
from pathlib import Path

import pandas as pd
import pytest

from analysis.figures.experiments.coserving import BEST_SHARE, breathing_kv_data
from analysis.figures.experiments.drawn import FIGURES
from analysis.figures.experiments.estimator_error import estimator_error_data
from analysis.figures.experiments.link_bandwidth import crossover
from tandem.cli.__main__ import main
from tandem.cli.catalog import axes_of, options, with_axes
from tandem.cli.plan_command import plan_points
from tandem.cli.terminal import largest_model_by_rest
from tandem.config.compose import composed
from tandem.sweeps.grid import grid_of
from tandem.wiring.run_spec import run_spec_of

pytestmark = pytest.mark.usefixtures("short_probes")

SWEEPS = [name for name in options("experiment") if axes_of(name)]
# Half a million numbers in two layers, 16 bytes of states for each; 64 tokens in a microbatch.
TINY = ("model=micro_llama", "device=cpu", "training.sequence_tokens=32", "training.sequences=2")
TINY += ("model.hidden_size=128",)  # some experiments set it
LAYERS = "model.num_layers=2"
CHUNKS = "planner.chunk_elements=66000"  # more than any module has
STATE_BYTES = 16
WARMUP_SHARE = 0.1  # conf/memory/patrickstar.yaml


def swept(name: str, folder: Path, *words: str) -> pd.DataFrame:
    """The CSV behind an experiment's figure, of a tiny form of its sweep."""
    out = ["--engine", "serial", "--out", str(folder / "sweep")]
    assert main(["sweep", f"experiment={name}", *TINY, *words, *out]) == 0
    assert main(["report", str(folder / "sweep")]) == 0
    figures = folder / "sweep" / "report" / "figures"
    assert [path.stem for path in figures.glob("*.svg")] == [name]
    return pd.read_csv(figures / f"{name}.csv")


def test_every_sweep_has_its_figure_and_every_figure_its_sweep() -> None:
    assert set(SWEEPS) == set(FIGURES)


@pytest.mark.broad(3)
@pytest.mark.parametrize("name", SWEEPS)
def test_the_ends_of_each_axis_compose(name: str) -> None:
    grid = grid_of(with_axes([f"experiment={name}"]))
    assert grid.axes
    for end in (0, -1):
        axes = tuple(replace(axis, words=(axis.words[end],)) for axis in grid.axes)
        (point,) = replace(grid, axes=axes).points()
        assert point.config["training"]["_target_"]


def test_what_the_words_set_is_not_swept() -> None:
    words = ["experiment=eviction", "policy=train_lru", "+x=1"]
    added = with_axes(words)[len(words) :]
    assert [word.partition("=")[0] for word in added] == ["budget.device_bytes"]
    assert with_axes(["policy=train_lru"]) == ["policy=train_lru"]
    assert with_axes(["experiment=pressure"]) == ["experiment=pressure"]


def test_a_users_own_experiment_may_sweep(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    text = "# @package _global_\nhydra:\n  sweeper:\n    params:\n      seed: 1,2\n"
    (tmp_path / "experiment" / "mine.yaml").write_text(text)
    grid = grid_of(with_axes(["experiment=mine"], str(tmp_path)), str(tmp_path))
    assert [point.config["seed"] for point in grid.points()] == [1, 2]


@pytest.mark.slow
def test_hydra_sweeps_equal_axes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = [*TINY, LAYERS, CHUNKS, "budget.device_bytes=3000000", "hydra.sweep.dir=out"]
    assert main(["run", "-m", "experiment=memory_tide", *words]) == 0
    assert len([*(tmp_path / "out").glob("*/metrics.json")]) == 2


@pytest.mark.slow
def test_more_memory_never_trains_a_smaller_model(
    tmp_path: Path, unrendered: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """`tandem plan` finds these largest models too.

    A point that does not fit is an answer: the sweep ends well, and tries it no more.
    """
    words = ["policy=zero_offload,zero3_offload", "budget.device_bytes=2500000"]
    words += ["budget.host_bytes=10000000,30000000", "model.num_layers=2,4,8"]
    found = swept("max_scale", tmp_path, *words).set_index(["policy", "host_bytes"])
    out = ["--engine", "serial", "--out", str(tmp_path / "sweep")]
    assert main(["sweep", "experiment=max_scale", *TINY, *words, *out]) == 0
    told = capsys.readouterr()
    assert "0 to run" in told.err and ", 0 failed, " in told.out and "do not fit" in told.out
    by_policy = found["parameters"].unstack("policy")
    assert by_policy.diff().dropna().ge(0).all(axis=None) and by_policy.gt(0).all(axis=None)
    streamed, whole = by_policy["zero3_offload"], by_policy["zero_offload"]
    assert (streamed >= whole).all() and (streamed > whole).any(), "weights need not all be there"
    assert found["is_bound"].sum() == 1, "with the most memory all were trained by zero3"
    grid = grid_of([*with_axes(["experiment=max_scale", *TINY, *words])])
    for rest, best in largest_model_by_rest(plan_points(grid.points(), grid.fixed)).items():
        chosen = dict(word.split("=") for word in rest)
        at = (chosen["policy"], int(chosen["budget.host_bytes"]))
        assert best is not None and best.parameters == found["parameters"][at]


def test_throughput_is_told_in_operations_of_the_model(tmp_path: Path, unrendered: None) -> None:
    words = ["policy=zero3_offload,train_lru", "model.num_layers=2,4"]
    found = swept("model_size", tmp_path, *words, "budget.device_bytes=3000000")
    assert len(found) == 4
    passed = found["tokens_per_s"] * found["step_s"]
    assert passed.tolist() == pytest.approx([64] * 4), "a step's tokens"
    wanted = 8 * found["parameters"] * found["tokens_per_s"]
    assert found["flops_per_s"].tolist() == pytest.approx(wanted.tolist())
    for _, part in found.groupby("policy"):
        assert part.sort_values("parameters")["copied_bytes"].is_monotonic_increasing


@pytest.mark.slow
def test_the_memory_budget_rises_behind_warm_up_and_never_where_the_share_is_fixed(
    tmp_path: Path,
) -> None:
    words = (LAYERS, CHUNKS, "budget.device_bytes=3000000")
    found = swept("memory_tide", tmp_path, *words)
    runs = {"static" if "static" in name else "tide": part for name, part in found.groupby("run")}
    assert set(runs) == {"static", "tide"}
    share = WARMUP_SHARE * 3_000_000 + launch_bytes("experiment=memory_tide", *TINY, *words)
    most = {name: part.groupby("step")["states"].max()[:3] for name, part in runs.items()}
    assert most["static"].max() <= share and most["tide"][0] <= share
    assert most["tide"][1:].min() > share, "behind warm-up chunks have what activations leave"
    ends = {name: part["at_s"].max() for name, part in runs.items()}
    assert ends["tide"] < ends["static"], "and is faster"


def launch_bytes(*words: str) -> int:
    """Most that a launch needs of states: a unit's weights and gradients."""
    (layout,) = run_spec_of(composed(words)).room.layout.training.values()
    chunks = layout.chunks
    return max(
        sum(chunks[c].weight_bytes for c in unit.chunks)
        + sum(chunks[c].gradient_bytes for c in unit.trained)
        for unit in layout.units
    )


@pytest.mark.slow
def test_a_policy_that_knows_the_future_copies_least(tmp_path: Path, unrendered: None) -> None:
    words = ["model.num_layers=8", "budget.device_bytes=10000000,18000000"]
    found = swept("eviction", tmp_path, *words)
    moved = found.pivot_table(index="device_bytes", columns="order", values="copied_bytes")
    assert (moved["opt"] <= moved[["lru", "fifo"]].min(axis=1)).all()
    assert (moved["opt"] < moved["lru"]).any(), "the third sweep tells them apart"
    assert moved["opt"].is_monotonic_decreasing


@pytest.mark.slow
def test_larger_chunks_are_fewer_and_all_are_counted(tmp_path: Path, unrendered: None) -> None:
    words = ["planner.chunk_elements=66000,100000,200000", "budget.device_bytes=12000000", LAYERS]
    found = swept("chunk_size", tmp_path, *words)
    assert found["chunks"].is_monotonic_decreasing and found["chunk_elements"].is_unique
    whole = STATE_BYTES * found["chunks"] * found["chunk_elements"]
    assert (found["state_bytes"] == whole).all()
    assert (whole >= STATE_BYTES * found["parameters"]).all()


@pytest.mark.slow
def test_the_margin_lies_between_host_and_device(tmp_path: Path, unrendered: None) -> None:
    words = [LAYERS, CHUNKS, "budget.device_bytes=4000000,8000000,60000000"]
    found = swept("adam_placement", tmp_path, *words)
    share = found.pivot_table(index="device_bytes", columns="updates", values="device_share")
    assert share["host"].eq(0).all() and share["device"].eq(100).all()
    assert share["margin"].is_monotonic_increasing
    assert share["margin"].iloc[0] < share["margin"].iloc[-1] == 100


@pytest.mark.slow
def test_a_faster_link_never_makes_a_step_longer(tmp_path: Path, unrendered: None) -> None:
    words = ["device.to_device_bytes_per_s=1e8,1e9,1e11", "device.link_ns=0", LAYERS]
    found = swept("link_bandwidth", tmp_path, *words)
    times = found.pivot_table(index="link_bytes_per_s", columns="modes", values="step_s")
    assert times.diff().dropna().le(1e-9).all(axis=None)
    assert (times["keep"] <= times[["recompute", "offload"]].min(axis=1)).all()
    assert (times["keep"] < times["recompute"]).iloc[-1], "where the link does not decide"
    late = times["offload"] - times["recompute"]
    assert late.iloc[0] > 0 > late.iloc[-1], "they cross"
    at = float(found["crossover_bytes_per_s"].iloc[0])
    assert late[late.index > at].le(0).all() and late[late.index < at].iloc[-1] > 0


def test_a_crossing_is_where_the_last_disadvantage_ends() -> None:
    def frame(offload: list[float]) -> pd.DataFrame:
        rows = [("offload", 10.0**i, t) for i, t in enumerate(offload)]
        rows += [("recompute", 10.0**i, 2.0) for i in range(len(offload))]
        return pd.DataFrame(rows, columns=["modes", "link_bytes_per_s", "step_s"])

    assert crossover(frame([9, 3, 1, 1]), "offload", "recompute") == pytest.approx(10**1.5)
    assert crossover(frame([1, 3, 1]), "offload", "recompute") == pytest.approx(10**1.5)
    assert isnan(crossover(frame([9, 3]), "offload", "recompute")), "never faster"
    assert isnan(crossover(frame([1, 1]), "offload", "recompute")), "never slower"
    assert isnan(crossover(frame([1, 1]), "offload", "keep")), "not tried"


@pytest.mark.slow
def test_ways_to_share_have_their_bounds_beside_them(tmp_path: Path, unrendered: None) -> None:
    """Sweeps in one folder: what shares, what serves alone, and what finetunes alone."""

    def carry_out(name: str, *words: str) -> None:
        out = ["--engine", "serial", "--out", str(tmp_path / "table" / name)]
        assert main(["sweep", "experiment=coserve_table", *words, *out]) == 0

    carry_out("shares", *COSERVED, "policy=spatial,spatial_limited", "arrival.rate=4.0,8.0")
    serves = ("policy=coserve", "training=none", "planner=none", "arrival.rate=8.0,16.0")
    carry_out("serves", *COSERVED[:3], *serves)
    trains = ("policy=temporal", "trace=none", "training.num_steps=2", "arrival.rate=4.0")
    carry_out("finetunes", *COSERVED, *trains)
    assert main(["report", str(tmp_path / "table")]) == 0
    found = pd.read_csv(tmp_path / "table" / "report" / "figures" / "coserve_table.csv")
    by_policy = dict(iter(found.groupby("policy")))
    assert set(by_policy) == {
        *("spatial", "spatial_limited", "serving alone", "finetuning alone"),
        *[f"{m} of 4 devices serve" for m in (1, 2, 3)],
    }
    (alone,) = by_policy["finetuning alone"]["finetune_tokens_per_s"]
    half, serving = by_policy["2 of 4 devices serve"], by_policy["serving alone"]
    assert half["rate_per_s"].tolist() == [4.0, 8.0]
    assert half["mean_tpot_s"].tolist() == serving["mean_tpot_s"].tolist()
    assert half["finetune_tokens_per_s"].tolist() == pytest.approx([alone / 2] * 2)
    for name in ("spatial", "spatial_limited"):
        assert by_policy[name]["finetune_tokens_per_s"].between(0, alone).all()


COSERVED = ("model=micro_llama", "device=cpu", "limit=12", "training.sequence_tokens=64")
COSERVED += ("training.microbatches=2", "training.data.mean_tokens=32")
LEARNED = ("training.data.chance=1.0", "training.sequence_tokens=512")


@pytest.mark.ci
@pytest.mark.broad(4)
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("budget_sweep", ("scheduling.token_budget=24,64", "scheduling.backward_layers=1,2")),
        ("coserve_frontier", ("policy=coserve,temporal", "arrival.rate=4.0,8.0")),
        ("slo_sweep", ("scheduling.slo_s=0.01,0.04", "arrival.rate=4.0,8.0")),
        ("finetune_length", ("policy=coserve,coserve_slo", "training.data.mean_tokens=16,48")),
        ("burstiness", ("policy=coserve,temporal", "arrival.burstiness=0.25,1.0")),
        (
            "alchemist_staleness",
            (*LEARNED, "training.staleness=0,4", "training.data.delay_s=0.1,1"),
        ),
        (
            "alchemist_share",
            (*LEARNED, "training.data.chance=0.7,1.0", "scheduling.record=none,all"),
        ),
        (
            "alchemist_delay",
            (*LEARNED, "training.data.delay_s=0.1,1", "scheduling.record=none,all"),
        ),
        (
            "alchemist_link",
            (*LEARNED, "device.to_device_bytes_per_s=1e6,1e10", "scheduling.record=none,all"),
        ),
        ("alchemist_burst", (*LEARNED, "arrival.burstiness=0.5,1.0", "memory.records.hedge=0,0.2")),
    ],
)
def test_finetuning_is_drawn_beside_latency(
    name: str, words: tuple[str, ...], tmp_path: Path, unrendered: None
) -> None:
    out = ["--engine", "serial", "--out", str(tmp_path / "sweep")]
    common = COSERVED[:-1] if words[:2] == LEARNED else COSERVED
    assert main(["sweep", f"experiment={name}", *common, *words, *out]) == 0
    assert main(["report", str(tmp_path / "sweep")]) == 0
    found = pd.read_csv(tmp_path / "sweep" / "report" / "figures" / f"{name}.csv")
    assert len(found) == 4 and found["finetune_tokens_per_s"].gt(0).all()
    if name == "budget_sweep":
        mean = found.groupby("budget_tokens")["finetune_tokens_per_s"].mean()
        assert mean.is_monotonic_increasing, "a larger budget finetunes more"
    if name == "alchemist_link":
        rates = found.pivot_table(index="link_bytes_per_s", columns="recorded")
        rates = rates["finetune_trained_tokens_per_s"]
        assert rates["all recorded"].iloc[0] < rates["all recorded"].iloc[1], (
            "records come back over the link"
        )
    if name == "slo_sweep":
        mean = found.groupby("slo_s")["finetune_tokens_per_s"].mean()
        assert mean.is_monotonic_increasing, "a longer step finetunes more"


@pytest.mark.broad(2)
def test_a_memory_that_breathes_is_drawn_beside_a_divided_one(
    tmp_path: Path, unrendered: None
) -> None:
    words = ["limit=8", "training.num_steps=4", "arrival.rate=4.0,16.0"]
    words += ["--engine", "serial", "--out", str(tmp_path / "sweep")]
    assert main(["sweep", "experiment=tide_under_kv", *words]) == 0
    assert main(["report", str(tmp_path / "sweep")]) == 0
    found = pd.read_csv(tmp_path / "sweep" / "report" / "figures" / "tide_under_kv.csv")
    trained = found.pivot_table(index="rate_per_s", columns="policy", values="train_tokens_per_s")
    assert trained.shape == (2, 2)
    assert (trained["elastic"] > trained["time_shared"]).all(), "one policy, in more memory"


@pytest.mark.slow
def test_more_that_persists_takes_more_and_checkpoints_take_time(
    tmp_path: Path, unrendered: None
) -> None:
    words = ["planner.persistent=0,4", "planner.checkpoints=0,4", "model.num_layers=4"]
    found = swept("knob_surface", tmp_path, *words)
    peaks = found.pivot_table(index="persistent", columns="checkpoints", values="peak_bytes")
    steps = found.pivot_table(index="persistent", columns="checkpoints", values="step_s")
    assert (peaks.loc[4] > peaks.loc[0]).all() and (peaks[0] > peaks[4]).all()
    assert (steps[4] > steps[0]).all()


@pytest.mark.slow
def test_swaps_are_chosen_where_the_link_is_fast(tmp_path: Path, unrendered: None) -> None:
    """What is searched is not slower than what may not swap, and swaps where the link is fast."""
    words = ["model.num_layers=8", "training.sequences=8", "device.link_ns=0"]
    words += ["device.to_device_bytes_per_s=1e8,1e9,1e10", "budget.device_bytes=8000000"]
    found = swept("link_bandwidth_swaps", tmp_path, *words)
    steps = found.pivot_table(index="link_bytes_per_s", columns="swaps", values="step_s")
    copied = found.pivot_table(index="link_bytes_per_s", columns="swaps", values="copied_bytes")
    # Choices go by the planner's model of a step, which is some tenths of a percent off.
    assert (steps["searched"] <= 1.01 * steps["0"]).all()
    assert (copied["searched"] > copied["0"]).iloc[-1], "activations cross a fast link"


@pytest.mark.slow
def test_configurations_are_predicted_and_measured(tmp_path: Path, unrendered: None) -> None:
    words = ["model.num_layers=4", "planner.persistent=0,4", "planner.checkpoints=0,4"]
    found = swept("estimator_error", tmp_path, *words, "training.sequence_tokens=128")
    assert len(found) == 4
    assert found[["predicted_s", "measured_s"]].gt(0).all(axis=None)
    # The bar of protrain_surface. Both go by the roofline. The planner knows no host time between
    # launches, 0.5 ms of a step: with 32 tokens a step takes 6 to 11 ms, and they are 13 % apart.
    assert (found["foretold_s"] / found["predicted_s"] - 1).abs().max() < 0.05
    assert found["peak_error"].abs().max() < 0.15, "what runs ahead depends on time, little"


@pytest.mark.slow
def test_the_best_share_of_each_load_is_found_in_hindsight(
    tmp_path: Path, unrendered: None
) -> None:
    """Two sweeps in one folder: what breathes beside plans for several shares."""
    common = ["model=micro_llama", "training.sequence_tokens=32", "limit=12"]
    common += ["arrival.rate=4.0,8.0"]
    for name, *words in (
        ("both", "policy=elastic,time_shared"),
        ("shares", "policy=time_shared_protrain", "memory.device_share=0.2,0.3,0.5"),
    ):
        out = ["--engine", "serial", "--out", str(tmp_path / "all" / name)]
        assert main(["sweep", "experiment=breathing_kv", *common, *words, *out]) == 0
    assert main(["report", str(tmp_path / "all")]) == 0
    found = pd.read_csv(tmp_path / "all" / "report" / "figures" / "breathing_kv.csv")
    policies = {"elastic", "time_shared", "time_shared_protrain", BEST_SHARE}
    assert set(found["policy"]) == policies and len(found) == 8
    assert found["train_tokens_per_s"].gt(0).all() and found["mean_tpot_s"].gt(0).all()


def test_a_share_that_delays_requests_is_not_the_best() -> None:
    """At 1 request per second the share of 0.7 trains fastest and delays; at 2 none delays."""
    rows = [  # rate, share, tokens per second, TPOT
        *((1.0, 0.3, 10.0, 1.0), (1.0, 0.5, 20.0, 1.04), (1.0, 0.7, 30.0, 1.2)),
        *((2.0, 0.3, 10.0, 1.0), (2.0, 0.5, 20.0, 1.0), (2.0, 0.7, 15.0, 1.0)),
    ]
    names = ["config.arrival.rate", "config.memory.device_share"]
    runs = pd.DataFrame(rows, columns=[*names, "train_tokens_per_s", "mean_tpot_s"])
    runs = runs.assign(policy="time_shared_protrain", status="ok", train_steps=3)
    found = breathing_kv_data(runs)
    best = found[found["policy"].eq(BEST_SHARE)].set_index("rate_per_s")["device_share"]
    assert best.to_dict() == {1.0: 0.5, 2.0: 0.5}
    fixed = found[found["policy"].eq("time_shared_protrain")]
    assert set(fixed["device_share"]) == {0.5}
    alone = breathing_kv_data(runs[runs["config.memory.device_share"].eq(0.3)])
    assert not alone["policy"].eq(BEST_SHARE).any(), "one share is no choice"


def test_a_prediction_that_is_too_high_has_an_error_above_zero() -> None:
    rows = [("sim", 0, 0, 1.1, 90.0), ("cpu", 0, 0, 1.0, 100.0), ("cpu", 4, 0, 1.0, 100.0)]
    knobs = ["config.planner.checkpoints", "config.planner.persistent"]
    columns = ["backend", *knobs, "mean_train_step_s", "peak_gpu0_used_bytes"]
    found = estimator_error_data(pd.DataFrame(rows, columns=columns).assign(
        status="ok", train_steps=3, **{"made.foretold_step_s": 1.3}))  # fmt: skip
    (row,) = found.to_dict("records")
    assert row["planner_step_error"] == pytest.approx(0.3)
    assert row["step_error"] == pytest.approx(0.1) and row["peak_error"] == pytest.approx(-0.1)
