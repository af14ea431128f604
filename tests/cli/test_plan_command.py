"""`tandem plan`: what fits, what does not and why, and the largest model that would."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from analysis.training import training_steps
from engine.contract.regions import Tier
from policies.training.out_of_memory import DoesNotFit, OutOfMemory
from tandem.cli import plan_command
from tandem.cli.__main__ import main
from tandem.cli.plan_command import (
    PRECISION,
    Need,
    PlannedPoint,
    _longest_first,
    max_layers,
    min_memory,
    plan_points,
    plan_run,
    told_min_budget,
)
from tandem.cli.terminal import largest_model_by_rest
from tandem.config.compose import composed
from tandem.config.composed_config import ComposedConfig
from tandem.sweeps.grid import grid_of
from traces.serving.request import Sample

SMALL = ("trace=none", "training=random", "model=micro_llama", "training.sequence_tokens=32")
ZERO3 = (*SMALL, "policy=zero3_offload", "budget.device_bytes=4000000")


def test_it_tells_step_peaks_and_the_largest_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *ZERO3, "budget.host_bytes=20000000"]) == 0
    told = capsys.readouterr().out
    heads = [line.partition(":")[0] for line in told.splitlines()]
    assert heads == ["fits", "step", "time", "device peak", "host peak", "largest of this width"]


def test_a_model_of_the_users_own_is_planned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shipped = Path(str(files("conf"))) / "model/micro_llama.yaml"
    (tmp_path / "model").mkdir()
    text = shipped.read_text(encoding="utf-8").replace("micro_llama", "mine")
    (tmp_path / "model/mine.yaml").write_text(text, encoding="utf-8")
    words = [word.replace("micro_llama", "mine") for word in ZERO3]
    words += ["budget.host_bytes=20000000", "--no-largest"]
    assert main(["plan", "--config-dir", str(tmp_path), *words]) == 0
    assert capsys.readouterr().out.startswith("fits: mine, ")
    several = [*words[:-2], "budget.host_bytes=1000000,20000000"]
    assert main(["plan", *several, "--config-dir", str(tmp_path)]) == 0


@pytest.mark.parametrize("policy", ["patrickstar", "train_lru", "zero_offload"])
def test_the_step_that_is_told_is_that_of_a_long_run(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PatrickStar's second step still moves what its warm-up left on the host."""
    words = ["trace=none", "training=random", "model=tiny_llama", "training.sequence_tokens=64"]
    words += [f"policy={policy}", "budget.device_bytes=60000000", "budget.host_bytes=1000000000"]
    point = composed([*words, "training.num_steps=8", "backend=sim"])
    found = plan_run(point)
    monkeypatch.setattr(plan_command, "STEPS", 8)
    steps_s = training_steps(plan_run(point).run)["step_s"]
    assert found.step_s == steps_s.iloc[-1]
    assert found.tokens_per_s == 64 / steps_s.iloc[-1]


def test_what_does_not_fit_is_told_with_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *ZERO3, "budget.host_bytes=1000000"]) == 1
    told = capsys.readouterr().out
    assert "does not fit: host:0 is" in told and "bytes short" in told
    assert "fits from: budget.host_bytes=" in told and "device_bytes" not in told
    assert "not even one layer" in told


def test_the_min_budget_fits_and_a_byte_less_does_not() -> None:
    words = (*SMALL, "policy=train_on_device", "backend=sim", "training.num_steps=1")
    with pytest.raises(DoesNotFit) as short:
        plan_run(composed([*words, "budget.device_bytes=2000000"]))
    told = told_min_budget(composed([*words, "budget.device_bytes=2000000"]), short.value)
    least = int(told.partition("device_bytes=")[2].split()[0])
    plan_run(composed([*words, f"budget.device_bytes={least}"]))
    with pytest.raises(DoesNotFit):
        plan_run(composed([*words, f"budget.device_bytes={least - 1}"]))


@pytest.mark.parametrize("step", [1, 1000, 10_000])
def test_the_min_budget_is_found_though_each_launch_tells_its_own_deficit(step: int) -> None:
    wanted, tries = {Tier.GPU: 1_000_000, Tier.HOST: 77_777}, list[Need]()

    def tried(need: Need) -> DoesNotFit | None:
        tries.append(need)
        for tier, most in wanted.items():
            if need[tier] < most:
                return OutOfMemory((tier, 0), min(step, most - need[tier]), "a launch")
        return None

    start = {Tier.GPU: 500_000, Tier.HOST: 70_000}
    found = min_memory(tried, start, DoesNotFit("of a planner"))
    assert found is not None and len(tries) < 100
    for tier, most in wanted.items():
        assert most <= found[tier] <= most + (most // PRECISION if step == 1 else 0)


@pytest.mark.parametrize("surplus", [1, 1000, 40_000])
def test_the_min_budget_is_found_though_a_launch_tells_more_than_its_deficit(
    surplus: int,
) -> None:
    most = 1_000_000

    def tried(need: Need) -> DoesNotFit | None:
        lacks = most - need[Tier.GPU]
        return OutOfMemory((Tier.GPU, 0), lacks + surplus, "a launch") if lacks > 0 else None

    start = {Tier.GPU: 500_000, Tier.HOST: 70_000}
    found = min_memory(tried, start, DoesNotFit("of a planner"))
    assert found is not None
    assert most <= found[Tier.GPU] <= most + most // PRECISION
    assert found[Tier.HOST] == start[Tier.HOST]


@pytest.mark.broad(2)
@pytest.mark.parametrize("policy", ["zero3_offload", "zero_offload", "train_on_device"])
def test_the_largest_model_fits_and_the_next_does_not(policy: str) -> None:
    words = (*SMALL, f"policy={policy}", "budget.device_bytes=12000000")
    point = composed([*words, "budget.host_bytes=20000000", "backend=sim"])
    count = max_layers(point)
    assert count > 0
    plan_run(point, count)
    with pytest.raises(DoesNotFit):
        plan_run(point, count + 1)


FROZEN3 = "training.recipe.frozen_units=3"  # embedding and two layers: one more trains
FROZEN9 = "training.recipe.frozen_units=9"
LORA2 = ("training.recipe.frozen_units=2", "training.recipe.lora_rank=4")


@pytest.mark.broad(2)
@pytest.mark.parametrize(
    "recipe", [(FROZEN3,), (FROZEN9,), LORA2], ids=["frozen 3", "frozen 9", "adapters"]
)
def test_the_largest_model_is_sought_among_depths_that_train(
    recipe: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*ZERO3, "budget.host_bytes=40000000", "model.num_layers=8", *recipe]
    assert main(["plan", *words]) == 0
    *_, told = capsys.readouterr().out.splitlines()
    assert told.startswith("largest of this width: ")
    count, point = int(told.split()[4]), composed([*words, "backend=sim"])
    assert count >= 8
    plan_run(point, count)
    with pytest.raises(DoesNotFit):
        plan_run(point, count + 1)
    least = plan_command.min_layers(point)
    with pytest.raises(ValueError, match="leaves nothing to train"):
        plan_run(point, least - 1)


def test_the_smallest_trained_model_may_be_too_large(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [*ZERO3, "budget.host_bytes=1000000", "model.num_layers=8", FROZEN3]
    assert main(["plan", *words]) == 1
    assert capsys.readouterr().out.endswith("largest: not even 2 layers of this width fit\n")


def test_no_other_depth_is_sought_where_modes_name_layers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [*ZERO3, "budget.host_bytes=20000000", "planner.modes=[keep,recompute]"]
    assert main(["plan", *words, "model.num_layers=2"]) == 0
    told = capsys.readouterr().out
    assert told.startswith("fits: ") and "largest: not sought, since planner.modes" in told


@pytest.mark.parametrize(
    ("fitting", "wanted", "words"),
    [
        (range(1, 1), 0, ()),
        (range(1, 2), 1, ()),
        (range(1, 38), 37, ()),
        ([*range(1, 20), 21, 23], 23, ()),  # chunks were rounded
        (range(1, 10_000), plan_command.MOST_LAYERS, ()),
        (range(8), 0, (FROZEN9,)),
        (range(8, 9), 8, (FROZEN9,)),
        (range(8, 38), 37, (FROZEN9,)),
    ],
)
def test_the_search(
    fitting: object, wanted: int, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def pretend(point: ComposedConfig, num_layers: int) -> None:
        asked.append(num_layers)
        if num_layers not in fitting:  # type: ignore[operator]
            raise DoesNotFit("no")

    monkeypatch.setattr(plan_command, "plan_run", pretend)
    assert max_layers(composed([*ZERO3, *words])) == wanted
    assert len(asked) == len(set(asked)) < 30, "each is simulated once, and few are"


def test_several_points_are_told_row_by_row(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", *SMALL, "budget.device_bytes=4000000", "budget.host_bytes=20000000"]
    assert main([*words, "policy=train_on_device,zero3_offload", "model.num_layers=2,4,16"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 8 and sum("does not fit: " in line for line in lines) == 4
    assert lines[-2] == "largest that fits with policy=train_on_device: none"
    assert lines[-1].startswith("largest that fits with policy=zero3_offload: ")
    assert lines[-1].endswith("(model.num_layers=4)")


def test_the_largest_model_is_found_in_any_order() -> None:
    fits: Any = object()
    rows = [
        PlannedPoint(("policy=a", f"model.num_layers={n}"), n, fits if n < 5 else None)
        for n in (4, 8, 2)
    ]
    assert largest_model_by_rest(rows) == {("policy=a",): rows[0]}


def test_a_search_ends_also_with_nonsense_deficits() -> None:
    """Whatever is tried is told to lack all that is missing to what has fitted last."""
    tried, fits = list[int](), {Tier.GPU: 1 << 20}

    def lacking(need: Need) -> DoesNotFit | None:
        tried.append(need[Tier.GPU])
        if need[Tier.GPU] >= 3000:
            fits[Tier.GPU] = need[Tier.GPU]
            return None
        return OutOfMemory((Tier.GPU, 0), fits[Tier.GPU] - need[Tier.GPU], "a launch")

    refused = lacking({Tier.GPU: 10})
    assert refused is not None
    assert min_memory(lacking, {Tier.GPU: 10}, refused) == {Tier.GPU: 3000}
    assert len(tried) < 64


def test_a_mistake_is_told_before_anything_is_planned() -> None:
    with pytest.raises(ValueError, match="did you mean"):
        [*plan_points(grid_of([*ZERO3, "model.num_layer=1,2"]).points())]


def test_where_warm_up_has_no_room_for_chunks_the_min_budget_is_of_the_device() -> None:
    words = (*SMALL, "policy=patrickstar", "backend=sim", "training.num_steps=1")
    point = composed([*words, "budget.device_bytes=100000", "budget.host_bytes=20000000"])
    with pytest.raises(OutOfMemory, match="two chunks of") as refused:
        plan_run(point)
    assert refused.value.pool == (Tier.GPU, 0)
    told = told_min_budget(point, refused.value)
    assert told.startswith("fits from: budget.device_bytes=") and told.count("budget.") == 1


def test_a_finetuning_job_is_planned_with_its_longest_sample_first() -> None:
    """Its memory decides, wherever it comes; times of release stay as they are."""
    samples = [Sample(5, 1, 10), Sample(9, 2, 20), Sample(7, 3, 30)]
    found = _longest_first(samples)
    assert found == (Sample(9, 2, 10), Sample(5, 1, 20), Sample(7, 3, 30))
    assert _longest_first(()) == ()


PROTRAIN = (*SMALL, "policy=protrain", "budget.device_bytes=8000000", "--no-largest")


def test_where_the_host_cannot_update_it_is_told_that_all_chunks_persist(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The device's yaml knows no rate of the host's memory."""
    words = [*SMALL, "policy=protrain", "device=rtx4090"]
    assert main(["plan", *words, "--no-largest"]) == 0
    told = capsys.readouterr().out
    assert told.count("planner: all chunks persist, since chunks that do not persist are") == 1
    with pytest.raises(OutOfMemory, match=r"set device\.host_bandwidth") as raised:
        plan_run(composed([*words, "budget.device_bytes=3000000"]))
    assert "\n" not in str(raised.value)
    rate = "+device.host_bandwidth_bytes_per_s=5e10"
    assert main(["plan", *words, rate, "--no-largest"]) == 0
    assert "all chunks persist" not in capsys.readouterr().out


def test_the_choice_of_protrain_is_told_with_what_bounds_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", *PROTRAIN]) == 0
    lines = capsys.readouterr().out.splitlines()
    heads = [line.partition(":")[0] for line in lines]
    assert heads[5:] == ["planner", "bound by", "next", "next", "next"]
    assert "; the fastest of " in lines[5] and "compute" in lines[6]
    assert main(["plan", *PROTRAIN, *[f"planner.{k}=1" for k in ("persistent", "buffers")],
                 "planner.swaps=0", "planner.checkpoints=0"]) == 0  # fmt: skip
    (told,) = [x for x in capsys.readouterr().out.splitlines() if x.startswith("planner")]
    assert told.endswith("the only one that the knobs allow")


def test_a_surface_is_a_file_with_the_fastest_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "surface.csv"
    assert main(["plan", *PROTRAIN, "--surface", str(path)]) == 0
    rows = [line.split(",") for line in path.read_text(encoding="utf-8").splitlines()]
    told = capsys.readouterr().out
    assert f"surface: {len(rows) - 1:,} configurations in {path}" in told
    assert rows[0][:5] == ["persistent", "buffers", "swaps", "checkpoints", "step_s"]
    times = [float(row[4]) for row in rows[1:]]
    assert times == sorted(times) and {row[-1] for row in rows[1:]} <= {"True", "False"}
    fitting = next(row for row in rows[1:] if row[-1] == "True")
    chosen = " ".join([f"{k}={v}" for k, v in zip(rows[0][:4], fitting, strict=False)])
    assert f"planner: {chosen}:" in told


def test_a_surface_is_written_where_nothing_fits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "surface.csv"
    words = [*PROTRAIN[:-2], "budget.device_bytes=3000000", "--no-largest"]
    assert main(["plan", *words, "--surface", str(path)]) == 1
    rows = [line.split(",") for line in path.read_text(encoding="utf-8").splitlines()]
    assert f"surface: {len(rows) - 1:,} configurations in" in capsys.readouterr().out
    assert len(rows) > 20 and {row[-1] for row in rows[1:]} == {"False"}


@pytest.mark.ci
def test_the_largest_model_is_found_beside_a_search(capsys: pytest.CaptureFixture[str]) -> None:
    """The planner searches for each depth that is tried."""
    assert main(["plan", *PROTRAIN[:-1]]) == 0
    (told,) = [x for x in capsys.readouterr().out.splitlines() if x.startswith("largest")]
    assert int(told.partition(": ")[2].split()[0]) > 2


def test_a_share_that_holds_no_layout_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["policy=elastic_protrain", "trace=sample", "limit=4", "model=micro_llama"]
    words += ["training=random", "training.sequence_tokens=32", "training.num_steps=4"]
    words += ["device=cpu", "device.memory_bytes=28000000", "planner.device_share=0.1"]
    assert main(["plan", *words, "--no-largest"]) == 0
    told = capsys.readouterr().out
    assert "planner: begins with the layout that needs least, " in told and "given" not in told


def test_a_surface_needs_a_planner_that_searches_and_one_point(tmp_path: Path) -> None:
    path = ("--surface", str(tmp_path / "surface.csv"), "--no-largest")
    assert main(["plan", *ZERO3, "budget.host_bytes=20000000", *path]) != 0
    assert main(["plan", *PROTRAIN, "training.sequences=1,2", *path]) != 0
    assert not (tmp_path / "surface.csv").exists()
