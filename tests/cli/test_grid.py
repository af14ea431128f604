"""Points of a grid: composed once per choice of groups, and yet what Hydra composes for each."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tandem.config.compose import composed, config_of
from tandem.sweeps.grid import grid_of
from tests.support.strategies import cases

# What points of these grids take: two of each make a sweep. Some refer to others, or seem to.
CHOICES = (
    ("policy", "chunked_restart", "static_swap", "vllm_v1"),
    ("slo", "none", "chat", "interactive"),
    ("trace", "sample", "sessions", "random"),
    ("experiment", "pressure", "sessions", "fidelity_chunked"),
    ("seed", "0", "7"),
    ("limit", "null", "10", "1e3"),
    ("depth", "1", "2"),
    ("lengths", "forced", "'sampled'", "'\\${seed}'"),
    ("budget.fraction", "0.5", "0.25", "1"),
    ("budget.kv_pages", "null", "12", "${limit}"),
    ("budget", "{kv_pages:5}", "{kv_bytes:9,fraction:0.5}"),
    ("cache", "a", "'b c'", "${profile}", "x${seed}y"),
    ("profile", "null", "'???x'", "/p"),
    ("trusted", "[a]", "[b,c]", "[]"),
    ("eos_ids", "[1]", "[2,3]", "[${seed}]"),
    ("+slo.mine_s", "1", "2"),
)
REFERRING = """
ttft_s: ${seed}
tpot_s: ${oc.select:budget.fraction}
e2e_s: ${.ttft_s}
"""


def axes() -> st.SearchStrategy[list[str]]:
    """Words of a sweep with one to three axes of two values each."""
    two = st.sampled_from(CHOICES).flatmap(
        lambda row: st.permutations(row[1:]).map(lambda taken: f"{row[0]}={','.join(taken[:2])}")
    )
    return st.lists(two, min_size=1, max_size=3, unique_by=lambda word: word.partition("=")[0])


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A user's folder: an SLO made of other settings."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "slo").mkdir()
    (folder / "slo" / "mine.yaml").write_text(REFERRING)
    return str(folder)


def check(words: Sequence[str], config_dir: str | None = None) -> int:
    """Every point is byte for byte what `tandem run` would compose of its words; their number."""
    points = list(grid_of(words, config_dir).points())
    for point in points:
        whole = composed(point.overrides, config_dir)
        assert json.dumps(point.config) == json.dumps(whole.config), point.overrides
    return len(points)


@pytest.mark.slow
@given(words=axes())
@example(["budget.kv_pages=12,null", "limit=10,20", "budget.fraction=0.5,1"])
@example(["budget={kv_pages:5},{kv_bytes:9}", "seed=1,2"])
@example(["trusted=[a],[]", "cache=${profile},b", "profile=null,/p"])
@cases(60)
def test_a_point_is_what_tandem_run_would_compose(words: list[str]) -> None:
    assert check(words) == 2 ** len(words)


@pytest.mark.slow
def test_what_refers_to_a_swept_setting_follows_it(own: str) -> None:
    words = ["slo=mine,chat", "seed=1,2", "budget.fraction=0.5,0.25"]
    assert check(words, own) == 8
    found = [point.config["slo"] for point in grid_of(words, own).points()]
    assert [(slo["ttft_s"], slo["tpot_s"], slo["e2e_s"]) for slo in found[:4]] == [
        (1, 0.5, 1),
        (1, 0.25, 1),
        (2, 0.5, 2),
        (2, 0.25, 2),
    ]


def test_the_first_axis_is_the_slowest() -> None:
    words = ["policy=chunked_restart,static_swap", "arrival.rate=2,4.5", "trusted=[a]", "seed=3"]
    points = list(grid_of(words).points())
    assert [point.overrides for point in points[:2]] == [
        ("trusted=[a]", "seed=3", "policy=chunked_restart", "arrival.rate=2"),
        ("trusted=[a]", "seed=3", "policy=chunked_restart", "arrival.rate=4.5"),
    ]
    assert len(points) == 4


def test_many_points_are_composed_and_resolved_once_per_choice_of_groups(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from tandem.sweeps import grid
    from tandem.sweeps import grid as base

    counts = {"config_of": 0, "plain": 0}

    def counted(name: str, original: Any) -> Any:
        def call(*given: Any) -> Any:
            counts[name] += 1
            return original(*given)

        return call

    monkeypatch.setattr(grid, "config_of", counted("config_of", config_of))
    monkeypatch.setattr(base, "plain", counted("plain", base.plain))
    points = list(grid_of(["arrival=poisson,gamma", "seed=range(100)"]).points())
    assert len(points) == 200
    assert {point.config["seed"] for point in points} == set(range(100))
    assert counts == {"config_of": 2, "plain": 2}, "arrival=poisson and arrival=gamma"
