"""Costs of other simulators from the command line: equal runs on other tables."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tandem.config.compose import composed
from tandem.wiring.cost import KERNELS, foreign_cost, is_alike
from tandem.wiring.experiment import run_experiment
from tandem.wiring.run_spec import run_spec_of

FOLDER = "data/peers/kernel_profiles/RTX4090_Llama-3.1-8B"
FORMS = {
    "cost_tables/llama2-7b_a100_tp1.npz": ("llama2_7b", "a100", "Vidur's tables"),
    "kernel_profiles/RTX4090_Llama-3.1-8B": ("llama3_8b", "rtx4090", "kernel profile"),
    "aiconfigurator_h200": ("llama3_8b", "h200", "AIConfigurator's tables"),
}


@pytest.mark.broad(2)
@pytest.mark.parametrize("where", FORMS)
def test_a_run_rests_on_the_tables_that_it_names(where: str, shared: Path, tmp_path: Path) -> None:
    model, device, told = FORMS[where]
    words = [f"model={model}", f"device={device}", f"profile={shared / 'data/peers' / where}"]
    point = composed([*words, "limit=10", f"cache={tmp_path / 'cache'}", "budget.kv_pages=2000"])
    metrics = run_experiment(point, tmp_path / "run")
    assert metrics["num_finished"] == 10
    about = json.loads((tmp_path / "run" / "provenance.json").read_text())
    assert about["cost_form"] == "table" and told in about["cost_provenance"]


@pytest.mark.broad(2)
@pytest.mark.parametrize("where", FORMS)
def test_tables_of_another_device_need_profile_may_differ(where: str, shared: Path) -> None:
    path, (model, device, _) = shared / "data/peers" / where, FORMS[where]
    words = [f"model={model}", "device=h100", f"profile={path}", "limit=2", "budget.kv_pages=2000"]
    named = {"a100": "a100", "rtx4090": "RTX4090", "h200": "NVIDIA H200"}[device]
    told = rf"profile={path} was measured with device {named}, not h100; .*profile_may_differ=true"
    with pytest.raises(ValueError, match=told):
        run_spec_of(composed(words))
    assert run_spec_of(composed([*words, "profile_may_differ=true"])).cost.form == "table"


@pytest.mark.parametrize(
    ("where", "model", "named"),
    [(0, "llama3_8b", "llama2-7b"), (1, "llama2_7b", "Llama-3.1-8B")],
)
def test_tables_of_another_model_are_refused(
    where: int, model: str, named: str, shared: Path
) -> None:
    path = list(FORMS)[where]
    words = [f"model={model}", f"device={FORMS[path][1]}", "limit=2"]
    words.append(f"profile={shared / 'data/peers' / path}")
    with pytest.raises(ValueError, match=f"measured with model {named}, not {model}; choose that"):
        run_spec_of(composed(words))


def test_tables_without_names_are_accepted(shared: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine.npz"
    mine.write_bytes((shared / "data/peers" / next(iter(FORMS))).read_bytes())
    cost = run_spec_of(composed(["device=h200", f"profile={mine}", "limit=2"])).cost
    assert cost.provenance == f"Vidur's tables in {mine}, taken for tiny_llama"


def test_a_meta_yaml_that_is_no_utf_8_is_refused_with_its_path(tmp_path: Path) -> None:
    (tmp_path / "meta.yaml").write_bytes(b"model: \xff\n")
    with pytest.raises(ValueError, match=r"meta\.yaml: no text in UTF-8 \(byte 7\)"):
        run_spec_of(composed(["limit=2", f"profile={tmp_path}"]))


@pytest.mark.parametrize(
    ("named", "mine", "alike"),
    [
        ("Llama-3.1-8B", "llama3_8b", True),
        ("Qwen2.5-0.5B", "qwen2_5_0_5b", True),
        ("Mistral-7B-v0.1", "mistral_7b", True),
        ("NVIDIA GeForce GTX 1080 Ti", "gtx1080ti", True),
        ("NVIDIA A100-SXM4-80GB", "a100", True),
        ("A100", "a100_superpod", True),
        ("Llama-3.2-3B", "llama3_8b", False),
        ("llama2-70b", "llama2_7b", False),
        ("NVIDIA H200", "h20", False),
        ("micro_llama", "llama2-7b", False),
    ],
)
def test_one_name_in_two_writings(named: str, mine: str, alike: bool) -> None:
    assert is_alike(named, mine) is is_alike(mine, named) is alike


def test_products_in_other_dtypes_than_the_models_are_refused(shared: Path) -> None:
    words = ["device=h200", f"profile={shared / 'data/peers/aiconfigurator_h200'}", "limit=2"]
    with pytest.raises(ValueError, match=r"in bfloat16, fp8.*, none in float32 as of tiny_llama;"):
        run_spec_of(composed(words))


def test_a_pace_is_of_calibrated_profiles_only(shared: Path) -> None:
    tables = shared / "data/peers/cost_tables/llama2-7b_a100_tp1.npz"
    words = ["model=llama2_7b", "device=a100", f"profile={tables}", "limit=2", "pace=1.1"]
    with pytest.raises(ValueError, match=r"pace=1\.1: only a profile of `tandem calibrate`"):
        run_spec_of(composed(words))


def test_only_a_kernel_profile_takes_its_settings(shared: Path) -> None:
    tables = shared / "data/peers/cost_tables/llama2-7b_a100_tp1.npz"
    for profile in (f"profile={tables}", "profile=null"):
        words = ["limit=2", profile, "kernel_profile.graphs=true"]
        with pytest.raises(ValueError, match="none of LLMServingSim"):
            run_spec_of(composed(words))
    for wrong in ("skew=some", "step_ns=-1"):
        with pytest.raises(ValueError, match=f"kernel_profile.{wrong.replace('=', '.')}"):
            run_spec_of(composed(["limit=2", f"kernel_profile.{wrong}"]))


def test_a_profile_without_skew_says_so(shared: Path, tmp_path: Path) -> None:
    profile = shared / FOLDER
    for name in KERNELS:
        (tmp_path / name).write_bytes((profile / name).read_bytes())
    words = ["model=llama3_8b", "device=rtx4090", "limit=2", f"profile={tmp_path}"]
    run_spec_of(composed(words))
    with pytest.raises(ValueError, match=r"skew=default: .* has no skew\.csv\.gz"):
        run_spec_of(composed([*words, "kernel_profile.skew=default"]))


def test_an_incomplete_profile_is_refused_in_one_line(tmp_path: Path) -> None:
    setting = run_spec_of(composed(["limit=2"]))
    assert foreign_cost(tmp_path, setting.device, setting.spec) is None
    (tmp_path / "dense.csv").write_text("tokens\n1\n")  # a kernel profile has three
    with pytest.raises(ValueError, match=r"no cost\.json and no tables of another simulator"):
        run_spec_of(composed(["limit=2", f"profile={tmp_path}"]))


def test_torn_tables_are_refused_in_one_line(tmp_path: Path) -> None:
    torn = tmp_path / "torn.npz"
    torn.write_bytes(b"PK\x03\x04")
    with pytest.raises(ValueError, match=r"torn\.npz holds no Vidur tables"):
        run_spec_of(composed(["limit=2", f"profile={torn}"]))
