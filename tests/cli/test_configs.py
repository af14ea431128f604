"""Every experiment and every option composes, is built, and runs ten requests in simulation."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product, zip_longest
from pathlib import Path
from typing import Any

import pytest

from engine.contract.plan import Plan
from engine.contract.policy import Policy, traits_of
from engine.contract.view import View
from engine.laws.check_policy import WatchedPolicy
from policies.training.out_of_memory import OutOfMemory
from tandem.cli.catalog import PLURALS, axes_of, options
from tandem.config.build import Builder
from tandem.config.compose import composed
from tandem.wiring.backends import backend_of
from tandem.wiring.experiment import engine_of, run_experiment
from tandem.wiring.run_spec import RunSpec, policy_of, run_spec_of
from tests.policies.test_offload_configs import TRAINING
from tests.support.short_trace import write_short

WITH_TRAITS = re.compile(r"[^\[\]]*\.(?: \[(?P<traits>[^\[\]]+)\])?")
TEN = ["limit=10", "backend=sim"]
SIM = {"name": "sim", "clock": "virtual"}
NEEDS_A_PATH = {"trace": {"file", "sharegpt", "lengths", "recorded"}, "arrival": {"recorded"}}
FINETUNING = ("coserve", "coserve_slo", "coserve_vtc", "llm_station", "temporal")
FINETUNING += ("temporal_limited", "spatial", "spatial_limited", "coserve_adapters", "alchemist")
OF_PROTRAIN = (
    "protrain",
    "time_shared_protrain",
    "elastic_protrain",
)  # in tests/planners and tests/policies
NOT_SERVING = ("recorded", "elastic", *TRAINING, *OF_PROTRAIN, *FINETUNING)  # elastic: as these
POLICIES = [name for name in options("policy") if name not in NOT_SERVING]
SERVING = [name for name in options("experiment") if not axes_of(name)]  # the rest trains
TRAINS = {"training_order", "training_together", "all_on_device", "demand_paging", "patrickstar"}
TRAINS |= {
    "zero_offload",
    "zero3_offload",
    "fsdp2_offload",
    "protrain",
}  # halves that serve no request


def ten(tmp_path: Path, *overrides: str) -> dict[str, object]:
    """The metrics of ten simulated requests; imported traces are kept for the next test."""
    cache = f"cache={tmp_path.parent / 'cache'}"
    return run_experiment(composed([*overrides, *TEN, cache]), tmp_path / "run")


def fates(setting: RunSpec) -> list[str]:
    """What became of each request in simulation; nothing is written."""
    with backend_of(setting, SIM) as opened:
        engine = engine_of(setting, opened)
        engine.replay(setting.requests)
    return [outcome.status for outcome in engine.recorder.outcomes.values()]


@pytest.mark.broad(4)
@pytest.mark.parametrize("name", SERVING)
def test_experiment(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    text = (Path(__file__).parents[2] / "conf" / "experiment" / f"{name}.yaml").read_text()
    if "TANDEM_SHARED" in text:
        shared = request.getfixturevalue("shared")
        request.getfixturevalue("monkeypatch").setenv("TANDEM_SHARED", str(shared.resolve()))
    assert ten(tmp_path, f"experiment={name}")["num_finished"] == 10


@pytest.mark.broad(4)
@pytest.mark.parametrize("name", POLICIES)
def test_policy(name: str, tmp_path: Path) -> None:
    """It serves ten requests, and law 8 is watched at every question."""
    short = ["trace=file", f"trace.path={write_short(tmp_path)}"]
    setting = run_spec_of(composed([f"policy={name}", *TEN, *short]))
    watched = WatchedPolicy(setting.policy)
    assert fates(replace(setting, policy=watched)) == ["finished"] * 10
    assert watched.asked > 0


@pytest.mark.broad(2)
@pytest.mark.parametrize("name", FINETUNING)
def test_policy_that_finetunes(name: str, tmp_path: Path) -> None:
    """It serves ten requests, and a job finetunes until the last has its answer."""
    words = ["training=finetune", "training.sequence_tokens=64", "training.data.mean_tokens=32"]
    metrics = ten(tmp_path, f"policy={name}", *words, "training.microbatches=2")
    assert metrics["num_finished"] == 10
    assert metrics["finetune_samples"] and metrics["train_steps"]


@pytest.mark.broad(2)
@pytest.mark.parametrize("name", FINETUNING)
def test_finetuning_alone(name: str, tmp_path: Path) -> None:
    """It shares the weights of a model that serves nothing, and a run tells its share of it."""
    words = ["training=finetune", "training.sequence_tokens=64", "training.data.mean_tokens=32"]
    words += [f"policy={name}", "training.microbatches=2", "training.num_steps=2"]
    config = composed([*words, "trace=none", "backend=sim"])
    alone = run_experiment(config, tmp_path / "alone")
    assert alone["finetune_samples"] == 4 and alone["train_steps"] == 2
    rate, weights = alone["finetune_tokens_per_s"], run_spec_of(config).spec.weight_bytes
    assert alone["peak_gpu0_weight_bytes"] >= weights
    beside = ten(tmp_path, *words, f"finetune_alone={rate}")
    assert beside["finetune_share"] == pytest.approx(beside["finetune_tokens_per_s"] / rate)  # type: ignore[operator]


def test_a_rate_of_finetuning_alone_that_cannot_be_is_told() -> None:
    with pytest.raises(ValueError, match=r"finetune_alone=0\S*: tokens per second, above 0"):
        run_spec_of(composed(["finetune_alone=0"]))


def test_weights_that_do_not_fit_are_told(tmp_path: Path) -> None:
    words = ["training=finetune", "policy=coserve", "trace=none", "budget.device_bytes=100000"]
    with pytest.raises(OutOfMemory, match="bytes short for the weights that jobs finetune over"):
        run_spec_of(composed([*words, "training.sequence_tokens=64"]))


def test_sessions_find_what_they_repeat(tmp_path: Path) -> None:
    metrics = ten(tmp_path, "policy=vllm_v1", "trace=sessions")
    assert 0 < metrics["prefix_hit_rate"] < 1  # type: ignore[operator]
    apart = tmp_path.with_name(f"{tmp_path.name}-plain")
    plain = ten(apart, "policy=vllm_v1", "trace=sessions", "memory.prefix_caching=false")
    assert (plain["cached_tokens"], "prefix_hit_rate" in plain) == (0, False)


def test_options_compose() -> None:
    """Each of every group at least once, an option of each group at a time."""
    groups = ["arrival", "trace", "backend", "slo", "planner", "router"]
    found = [sorted(options(group).keys() - NEEDS_A_PATH.get(group, set())) for group in groups]
    for number in range(max(map(len, found))):
        chosen = [names[number % len(names)] for names in found]
        words = [f"{group}={name}" for group, name in zip(groups, chosen, strict=True)]
        config = composed(words).config
        assert all(config[group] is not None for group in groups), words


def test_every_group_and_option_has_a_line_on_it() -> None:
    for group in PLURALS.values():
        found = options(group)
        assert found, f"conf/{group} is empty"
        told = {name: WITH_TRAITS.fullmatch(line) for name, line in found.items()}
        broken = [name for name, match in told.items() if match is None]
        assert not broken, f"conf/{group}: of these no sentence is told"
        promising = {name for name, match in told.items() if match and match["traits"]}
        assert bool(promising) == (group in ("scheduling", "memory")), group


@pytest.mark.ci
def test_the_line_of_a_policy_ends_with_its_traits() -> None:
    for group in ("scheduling", "memory"):
        for name, line in options(group).items():
            node = composed([f"{group}={name}"]).config[group]
            told = str(traits_of(Builder().build(node, group)))
            match = WITH_TRAITS.fullmatch(line)
            assert match and (match["traits"] or "") == told, name
    assert WITH_TRAITS.fullmatch("No sentence [swaps]") is None


def test_a_policy_that_cannot_be_built_is_listed(tmp_path: Path) -> None:
    (tmp_path / "memory").mkdir()
    for name, text in (("loop", "defaults: [loop]\n"), ("key", "nowhere: 1\n"), ("list", "- 1\n")):
        text = f"# A sentence.\n{text}_target_: policies.kv.paged_swap.PagedSwap\n"
        (tmp_path / "memory" / f"{name}.yaml").write_text(text)
    found = options("memory", str(tmp_path))
    assert {found[name] for name in ("loop", "key", "list")} == {"A sentence."}


@pytest.mark.slow
def test_any_scheduling_goes_with_any_memory(tmp_path: Path) -> None:
    small = ["trace=file", f"trace.path={write_short(tmp_path)}", "limit=4", "backend=sim"]
    setting = run_spec_of(composed(small))
    groups = ("scheduling", "memory")
    halves: dict[str, dict[str, Any]] = {group: {} for group in groups}
    serving = [[name for name in options(group) if name not in TRAINS] for group in groups]
    for names in zip_longest(*serving, fillvalue=""):
        chosen = {group: name for group, name in zip(groups, names, strict=True) if name}
        config = composed([f"{group}={name}" for group, name in chosen.items()]).config
        for group, name in chosen.items():
            halves[group][name] = config[group]
    for pair in product(*(halves[group].items() for group in groups)):
        nodes = {group: node for group, (_, node) in zip(groups, pair, strict=True)}
        found = fates(replace(setting, policy=policy_of(nodes, Builder())))
        assert found == ["finished"] * 4, [name for name, _ in pair]


class Quoting:
    """Asks what each of its launches will take."""

    def __init__(self, policy: Policy) -> None:
        self._policy, self.quotes = policy, list[int]()

    def plan(self, view: View) -> Plan:
        plan = self._policy.plan(view)
        if plan:
            assert view.cost is not None
            self.quotes.append(view.cost.op_ns(plan.ops[-1]))
        return plan


@pytest.mark.parametrize("backend", ["sim", "lockstep"])
def test_a_policy_is_quoted_what_its_launch_will_take(backend: str) -> None:
    setting = run_spec_of(composed(["model=micro_llama", "limit=2", "arrival=all_at_once"]))
    policy = Quoting(setting.policy)
    with backend_of(setting, {"name": backend, "clock": "virtual"}) as opened:
        engine = engine_of(replace(setting, policy=policy), opened)
        engine.replay(setting.requests)
    first = engine.recorder.spans[0]
    assert policy.quotes[0] == first.end_ns - first.start_ns


def test_a_planner_without_anything_to_train_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing to train: choose it, such as training=sample"):
        run_spec_of(composed(["limit=2", "planner=unit_chunks"]))


def test_training_without_a_planner_is_refused() -> None:
    with pytest.raises(ValueError, match="needs a policy that trains: choose one"):
        run_spec_of(composed(["trace=none", "training=random"]))


def test_nothing_to_do_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing to do"):
        run_spec_of(composed(["trace=none"]))
