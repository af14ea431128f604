"""Configurations, modules, runs and profiles of earlier versions keep working."""

from __future__ import annotations

import re
import sys
import tarfile
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

from tandem.cli.__main__ import main
from tandem.cli.collect import collect
from tandem.cli.compare import compare_folders
from tandem.config.build import Builder
from tandem.config.compose import composed
from tandem.config.composed_config import ComposedConfig
from tandem.config.renamed import GONE, NAMES, current, modules, with_current_targets
from tandem.wiring.experiment import run_experiment

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
OLD_NAMES = dict(
    line.split(": ") for line in (HERE / "old_names.txt").read_text(encoding="utf-8").splitlines()
)
SMALL = ["model=micro_llama", "trace=random", "trace.requests=3", "trace.input_tokens=20"]
SMALL += ["trace.output_tokens=5", "budget.kv_pages=400"]


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    """Two runs, `sim` and `lockstep`, and a profile, as an earlier version has written them."""
    with tarfile.open(HERE / "earlier.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Modules of this checkout alone: an installed one may still have the old names."""
    kept = [f for f in sys.meta_path if "__editable__" not in getattr(f, "__module__", "")]
    monkeypatch.setattr(sys, "meta_path", kept)
    monkeypatch.setattr(sys, "path", [*sys.path])
    known = set(sys.modules)
    yield
    for name in set(sys.modules) - known:
        if name in ("mine", "beside"):
            del sys.modules[name]


def test_every_new_module_exists() -> None:
    assert len(modules()) > 250
    assert [name for name in modules().values() if find_spec(name) is None] == []


def test_every_new_name_exists() -> None:
    assert [path for path in NAMES.values() if not _exists(path)] == []


def test_every_old_name_leads_to_something() -> None:
    olds = [f"{module}.{name}" for module, names in OLD_NAMES.items() for name in names.split()]
    assert [path for path in olds if path not in GONE and not _exists(current(path))] == []
    assert olds and not [path for path in GONE if path in NAMES]


def _exists(path: str) -> bool:
    module, _, name = path.rpartition(".")
    return hasattr(import_module(module), name)


def test_a_name_of_now_stays() -> None:
    assert current("engine.contract.plan.Slice") == "engine.contract.plan.Slice"
    assert current("mine.Policy") == "mine.Policy"
    for path in (ROOT / "conf").rglob("*.yaml"):
        for target in re.findall(r"_target_: ([\w.]+)", path.read_text(encoding="utf-8")):
            assert current(target) == target


def test_an_old_target_is_followed_at_any_depth() -> None:
    node = {
        "_target_": "policies.shortest_job.ShortestJob",
        "predictor": {"_target_": "policies.predictors.PromptShare"},
    }
    built = Builder().build(node, "scheduling")
    assert type(built).__module__ == "policies.scheduling.shortest_job"
    assert with_current_targets({"a": [node], "b": None, "_target_": None}) == {
        "a": [
            {
                "_target_": "policies.scheduling.shortest_job.ShortestJob",
                "predictor": {"_target_": "policies.scheduling.shortest_job.PromptShare"},
            }
        ],
        "b": None,
        "_target_": None,
    }


def test_a_yaml_with_old_targets_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "conf" / "scheduling").mkdir(parents=True)
    text = "_target_: policies.continuous_batching.ContinuousBatching\nmax_jobs: 4\n"
    (tmp_path / "conf" / "scheduling" / "mine.yaml").write_text(text, encoding="utf-8")
    words = ["--config-dir", str(tmp_path / "conf"), "scheduling=mine", *SMALL]
    assert main(["run", *words, f"hydra.run.dir={tmp_path / 'run'}"]) == 0
    assert capsys.readouterr().err == ""


IMPORTS = [
    (
        "from engine.plan import Slice",
        "from engine.plan import Slice in mine.py:3: engine.plan is engine.contract.plan now",
    ),
    (
        "import engine.view",
        "import engine.view in mine.py:3: engine.view is engine.contract.view now",
    ),
    (
        "from engine import plan",
        "from engine import plan in mine.py:3: engine.plan is engine.contract.plan now",
    ),
    (
        "from engine.plan import (\n    Slice,\n    Tier,\n)",
        "from engine.plan import Slice, Tier in mine.py:3: engine.plan is engine.contract.plan "
        "now, engine.plan.Tier is engine.contract.regions.Tier now",
    ),
    (
        "from engine.plan import GrowCycle\nfrom engine.draft import Draft",
        "from engine.plan import GrowCycle in mine.py:3: engine.plan.GrowCycle is gone: the engine "
        "repeats plans by itself, where a policy's Traits promise that it may; "
        "from engine.draft import Draft in mine.py:4: engine.draft.Draft is gone: write to the "
        "`plan` of fit(batch, view, plan)",
    ),
    (
        "from engine.contract import plan\nfrom engine.contract import ContractError",
        "from engine.contract import ContractError in mine.py:4: engine.contract is "
        "engine.contract.rules now",
    ),
    (
        "from engine.policy import Composed\nimport sim.device",
        "from engine.policy import Composed in mine.py:3: engine.policy.Composed is "
        "policies.composed.Composed now; import sim.device in mine.py:4: sim.device is "
        "sim.devices.device now",
    ),
]
MODULE = """from dataclasses import dataclass

{imports}


@dataclass(frozen=True)
class Policy:
    def batch(self, view):
        {late}
        return []
"""


def config_of(folder: Path, imports: str, late: str = "pass") -> list[str]:
    """The words that choose a policy in a module of the user's own."""
    (folder / "conf" / "scheduling").mkdir(parents=True)
    text = MODULE.format(imports=imports, late=late)
    (folder / "mine.py").write_text(text, encoding="utf-8")
    node = folder / "conf" / "scheduling" / "mine.yaml"
    node.write_text("_target_: mine.Policy\n", encoding="utf-8")
    out = f"hydra.run.dir={folder / 'run'}"
    return ["run", "--config-dir", str(folder / "conf"), "scheduling=mine", *SMALL, out]


@pytest.mark.broad(3)
@pytest.mark.parametrize(("imports", "told"), IMPORTS)
@pytest.mark.usefixtures("alone")
def test_old_imports_of_a_users_module_are_told_with_the_new_names(
    imports: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(config_of(tmp_path, imports)) == 2
    assert capsys.readouterr().err == f"tandem: scheduling: {told}\n"


@pytest.mark.usefixtures("alone")
def test_an_old_import_inside_a_function_is_told_when_it_is_reached(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(config_of(tmp_path, "", "from engine.plan import Slice")) == 1
    told = "tandem: from engine.plan import Slice in mine.py:9: engine.plan is engine.contract.plan"
    assert capsys.readouterr().err.startswith(told)


BOUNDED = """from dataclasses import dataclass

from engine.contract.plan import Slice


@dataclass(frozen=True)
class Policy:
    token_budget: int = 512
    max_jobs: int = 64

    def batch(self, view):
        jobs = [*view.serving, *view.waiting][: self.max_jobs]
        return tuple(Slice(job, job.remaining_tokens) for job in jobs)
"""


@pytest.mark.usefixtures("alone")
def test_bounds_of_an_earlier_scheduling_are_told_before_memory_is_set_aside(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = config_of(tmp_path, "")
    (tmp_path / "mine.py").write_text(BOUNDED, encoding="utf-8")
    assert main(words) == 2
    assert capsys.readouterr().err == (
        f"tandem: {tmp_path / 'mine.py'}:6: Policy.token_budget and Policy.max_jobs are no "
        "traits; declare a property `traits` that returns `Traits(prompt_tokens=self.token_budget, "
        "max_jobs=self.max_jobs)`, with step_tokens for prompt_tokens where no batch has more "
        "tokens (engine.contract.policy)\n"
    )


@pytest.mark.usefixtures("alone")
def test_an_earlier_name_of_the_view_is_told_once_with_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(config_of(tmp_path, "", "view.decodes")) == 1
    told = (
        f"tandem: ContractError: policy Policy with PagedRestart ({tmp_path / 'mine.py'}:9), step"
    )
    told += (
        " 0, device 0: 'View' object has no attribute 'decodes'; take view.running (rule: answer)"
    )
    assert capsys.readouterr().err.startswith(f"{told} (traceback in ")


@pytest.mark.usefixtures("alone")
def test_a_module_for_both_versions_works(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    imports = "try:\n    from engine.plan import Slice\nexcept ImportError:\n    pass"
    main(config_of(tmp_path, imports))
    assert "engine.plan" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "guarded", ["", "try:\n    import engine.plan\nexcept ImportError: pass\n"]
)
@pytest.mark.usefixtures("alone")
def test_other_missing_modules_are_told_as_they_are(
    guarded: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(config_of(tmp_path, f"{guarded}import engine.nowhere")) == 1
    told = capsys.readouterr().err
    assert "No module named 'engine.nowhere'" in told and "engine.plan" not in told


@pytest.mark.usefixtures("alone")
def test_an_old_import_in_a_module_beside_is_told_with_its_own_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = config_of(tmp_path, "import beside")
    (tmp_path / "beside.py").write_text("import engine.view\n", encoding="utf-8")
    assert main(words) == 2
    assert "import engine.view in beside.py:1: engine.view is" in capsys.readouterr().err


@pytest.mark.ci
@pytest.mark.broad(2)
@pytest.mark.parametrize("backend", ["sim", "lockstep"])
def test_an_earlier_run_compares_with_one_of_now(backend: str, earlier: Path) -> None:
    run_experiment(composed([*SMALL, f"backend={backend}"]), earlier / "now")
    comparison, page = compare_folders(earlier / backend, earlier / "now")
    assert page.is_file()
    assert len(comparison.errors) > 9 and not comparison.errors["error"].any()


def test_the_configuration_of_an_earlier_run_runs(earlier: Path) -> None:
    config = yaml.safe_load((earlier / "sim" / "config.yaml").read_text(encoding="utf-8"))
    assert config["model"]["_target_"] == "engine.model.ModelSpec"
    again = run_experiment(ComposedConfig(config, ()), earlier / "again")
    assert again == run_experiment(composed([*SMALL]), earlier / "now")
    replay = composed([*SMALL, "policy=recorded", f"replayed={earlier / 'sim'}"])
    assert run_experiment(replay, earlier / "replay")["num_finished"] == 3


def test_earlier_and_new_runs_are_collected_under_one_name(earlier: Path) -> None:
    run_experiment(composed([*SMALL]), earlier / "now")
    table = collect(earlier)
    assert set(table["status"]) == {"ok"} and len(table) == 3
    assert table["config.model._target_"].unique().tolist() == ["models.spec.ModelSpec"]


def test_an_earlier_profile_prices_a_run(earlier: Path) -> None:
    metrics = run_experiment(composed([*SMALL, f"profile={earlier / 'profile'}"]), earlier / "now")
    assert metrics["cost_form"] == "table" and metrics["num_finished"] == 3
