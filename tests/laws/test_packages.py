"""Every list of our packages names the folders that there are; a wheel of them works elsewhere."""

from __future__ import annotations

import json
import os
import shutil
import site
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest

from tandem import __version__, compiled
from tandem.config.build import OWN
from tandem.config.renamed import MODULES
from tandem.sweeps.point import CODE, MEASURES
from tandem.wiring.folder import OURS, PACKAGES
from tests.laws import house

ROOT = Path(__file__).resolve().parents[2]
UNINSTALLED = {"benchmarks", "tests"}
FOLDERS = {path.parent.name for path in ROOT.glob("*/__init__.py")} - UNINSTALLED
UNTYPED = {"conf"}  # yaml files alone
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]


def test_all_lists_of_packages_agree_with_the_folders() -> None:
    assert len(FOLDERS) == 9 and {"models", "tandem"} <= FOLDERS
    assert {*PACKAGES} == {*house.PACKAGES} == FOLDERS
    assert {*OURS} == {ROOT / name for name in FOLDERS} | {ROOT / "build"}
    assert {*OWN} == FOLDERS - {"conf", "tandem"}
    assert {*CODE} == FOLDERS - {"analysis", "conf"}
    found = PROJECT["setuptools"]["packages"]["find"]["include"]
    assert {*found} == {f"{name}*" for name in FOLDERS}
    typed = {*PROJECT["mypy"]["packages"]}
    assert typed == FOLDERS - UNTYPED
    assert {new.partition(".")[0] for _, new in MODULES} <= FOLDERS


def test_every_folder_of_modules_is_a_package() -> None:
    found = {path.parent for name in FOLDERS for path in (ROOT / name).rglob("*.py")}
    assert [path for path in found if not (path / "__init__.py").is_file()] == []


def test_the_compiled_modules_and_what_is_measured_by_are_there() -> None:
    assert {*compiled.PACKAGES} <= FOLDERS
    modules = {f"{place}/{n}" for place, ns in compiled.MODULES.items() for n in ns.split()}
    named = {f"{name}.py" for name in modules}
    named |= {*compiled.MARKS, *compiled.RECORDS}
    named |= {f"analysis/{name}" for name in MEASURES}
    assert [name for name in named if not (ROOT / name).is_file()] == []
    assert {name.partition("/")[0] for name in modules} <= {*compiled.PACKAGES}


def test_the_data_of_packages_is_there() -> None:
    for package, patterns in PROJECT["setuptools"]["package-data"].items():
        for pattern in patterns:
            assert any((ROOT / package).glob(pattern)), f"{package}: {pattern}"


OWN_POLICY = """
from policies.scheduling.chunked_prefill import ChunkedPrefill

class Mine(ChunkedPrefill):
    def batch(self, view):
        return super().batch(view)
"""
SMALL = ["model=micro_llama", "limit=4"]
TRAINING = ["trace=none", "training=random", "model=micro_llama", "policy=zero_offload"]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of a new environment with a wheel of the tree, and the libraries of ours."""
    folder = tmp_path_factory.mktemp("wheel")
    words = ["git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard"]
    names = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split("\n")
    for name in filter(None, names):
        if (ROOT / name).is_file() and name.split("/")[0] not in UNINSTALLED:
            (folder / "src" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / "src" / name)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder)]
    subprocess.run([*pip, "wheel", *options, str(folder / "src")], check=True, timeout=300)
    [wheel] = folder.glob("*.whl")
    assert wheel.name.startswith(f"tandem_testbed-{__version__}-")
    shutil.rmtree(folder / "src")
    venv.create(folder / "venv", with_pip=False, symlinks=True)
    python = folder / "venv" / "bin" / "python"
    install = [*pip, "--python", str(python), "install", "--quiet", "--no-deps", "--no-compile"]
    subprocess.run([*install, str(wheel)], check=True, timeout=300)
    [packages] = (folder / "venv" / "lib").glob("python*/site-packages")
    (packages / "libraries.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    return python.parent


def outside(command: Path, folder: Path, *words: str) -> str:
    """What a command of the environment prints, run in another folder."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(command), *words], cwd=folder, env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_an_installed_wheel_works_outside_the_checkout(installed: Path, tmp_path: Path) -> None:
    tandem = installed / "tandem"
    place = outside(installed / "python", tmp_path, "-c", "import tandem; print(tandem.__file__)")
    assert Path(place.strip()).is_relative_to(installed.parent)
    assert outside(tandem, tmp_path, "--version") == f"tandem {__version__}\n"
    listed = outside(tandem, tmp_path, "list", "policies")
    assert {path.stem for path in (ROOT / "conf" / "policy").glob("*.yaml")} <= {*listed.split()}
    run = tmp_path / outside(tandem, tmp_path, "run", *SMALL).splitlines()[-1]
    made = json.loads((run / "provenance.json").read_text())
    assert (made["commit"], made["version"]) == (None, __version__)
    assert "report.html" in outside(tandem, tmp_path, "report", str(run))
    assert "fits" in outside(tandem, tmp_path, "plan", *TRAINING)
    (tmp_path / "conf" / "scheduling").mkdir(parents=True)
    (tmp_path / "conf" / "scheduling" / "mine.yaml").write_text("_target_: mine.Mine\n")
    (tmp_path / "mine.py").write_text(OWN_POLICY)
    own = ["--config-dir", "conf", "scheduling=mine"]
    assert "4 of 4 requests finished" in outside(tandem, tmp_path, "run", *own, *SMALL)
    swept = outside(tandem, tmp_path, "sweep", *own, *SMALL, "seed=0,1", "--out", "swept")
    assert "2 of 2 points finished" in swept


def test_the_version_is_one_and_the_licence_is_there() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["dynamic"] == ["version"] and project["license"] == "Apache-2.0"
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    licence = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in licence and "The Tandem authors" in licence


def test_a_repository_around_an_installation_is_not_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tandem.wiring import folder

    (tmp_path / "installed").mkdir()
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    monkeypatch.setattr(folder, "ROOT", tmp_path / "installed")
    found = folder.commit.__wrapped__()
    assert found == {"commit": None, "dirty": None, "version": __version__}
