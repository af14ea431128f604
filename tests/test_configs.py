"""Every experiment and every option composes, is built, and runs ten requests in simulation."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from engine.plan import Plan
from engine.policy import Policy
from engine.view import View
from tandem.build import Builder
from tandem.catalog import PLURALS, options
from tandem.compose import composed
from tandem.experiment import engine_of, run_experiment
from tandem.setting import policy_of, setting_of
from tandem.worlds import world_of

TEN = ["limit=10", "backend=sim"]
NEEDS_A_PATH = {"trace": {"file", "sharegpt", "lengths", "recorded"}, "arrival": {"recorded"}}
POLICIES = [name for name in options("policy") if name != "recorded"]


def ten(tmp_path: Path, *overrides: str) -> dict[str, object]:
    """The metrics of ten simulated requests."""
    cache = f"cache={tmp_path / 'cache'}"
    return run_experiment(composed([*overrides, *TEN, cache]), tmp_path / "run")


@pytest.mark.parametrize("name", options("experiment"))
def test_experiment(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    text = (Path(__file__).parent.parent / "conf" / "experiment" / f"{name}.yaml").read_text()
    if "TANDEM_SHARED" in text:
        shared = request.getfixturevalue("shared")
        request.getfixturevalue("monkeypatch").setenv("TANDEM_SHARED", str(shared.resolve()))
    assert ten(tmp_path, f"experiment={name}")["num_finished"] == 10


@pytest.mark.parametrize("name", POLICIES)
def test_policy(name: str, tmp_path: Path) -> None:
    assert ten(tmp_path, f"policy={name}")["num_finished"] == 10


def test_sessions_find_what_they_repeat(tmp_path: Path) -> None:
    metrics = ten(tmp_path, "policy=vllm_v1", "trace=sessions")
    assert 0 < metrics["prefix_hit_rate"] < 1  # type: ignore[operator]
    plain = ten(
        tmp_path / "plain", "policy=vllm_v1", "trace=sessions", "memory.prefix_caching=false"
    )
    assert (plain["cached_tokens"], "prefix_hit_rate" in plain) == (0, False)


@pytest.mark.parametrize("group", ["arrival", "trace", "backend", "slo", "planner", "router"])
def test_options_compose(group: str) -> None:
    for name in options(group).keys() - NEEDS_A_PATH.get(group, set()):
        assert composed([f"{group}={name}"]).config[group] is not None


def test_every_group_and_option_has_a_line_on_it() -> None:
    for group in PLURALS.values():
        found = options(group)
        assert found, f"conf/{group} is empty"
        assert all(found.values()), f"conf/{group}: an option says nothing of itself"


def test_any_scheduling_goes_with_any_memory() -> None:
    small = ["model=micro_llama", "limit=4", "backend=sim"]
    setting = setting_of(composed(small))
    halves = {
        group: {
            name: composed([f"{group}={name}", *small]).config[group] for name in options(group)
        }
        for group in ("scheduling", "memory")
    }
    for scheduling, memory in product(*(halves[group].items() for group in halves)):
        config = {"scheduling": scheduling[1], "memory": memory[1]}
        policy = policy_of(config, Builder())
        with world_of(setting, {"name": "sim", "clock": "virtual"}) as world:
            engine = engine_of(replace(setting, policy=policy), world)
            engine.replay(setting.requests)
        outcomes = engine.recorder.outcomes.values()
        assert [o.status for o in outcomes] == ["finished"] * 4, (scheduling[0], memory[0])


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
    setting = setting_of(composed(["model=micro_llama", "limit=2", "arrival=all_at_once"]))
    policy = Quoting(setting.policy)
    with world_of(setting, {"name": backend, "clock": "virtual"}) as world:
        engine = engine_of(replace(setting, policy=policy), world)
        engine.replay(setting.requests)
    first = engine.recorder.spans[0]
    assert policy.quotes[0] == first.end_ns - first.start_ns


def test_a_planner_is_refused_as_long_as_nothing_takes_one() -> None:
    with pytest.raises(ValueError, match="planner=none"):
        setting_of(composed(["limit=2", "planner._target_=policies.order.Planner"]))
