"""Every list of our packages names the folders that there are."""

from __future__ import annotations

import tomllib
from pathlib import Path

from tandem import compiled
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
