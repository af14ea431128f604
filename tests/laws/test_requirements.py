"""What pyproject.toml asks for is what the tests ran with: no range reaches beyond."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tandem.wiring.folder import PACKAGES

ROOT = Path(__file__).resolve().parents[2]
COMES_WITH = {  # modules of what the libraries themselves ask for
    "omegaconf": "hydra-core",
    "tokenizers": "transformers",
    "triton": "torch",
    "yaml": "hydra-core",
}


def asked() -> list[Requirement]:
    """What the project itself needs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [Requirement(line) for line in project["dependencies"]]


def pinned() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = (line.partition("==") for line in lines if line and not line.startswith("#"))
    return {canonicalize_name(name): number for name, _, number in pairs}


def test_every_pin_lies_in_the_range_that_is_asked_for() -> None:
    pins = pinned()
    for wanted in asked():
        name = canonicalize_name(wanted.name)
        if name != "torch":  # the Makefile's TORCH_SPEC chooses it
            assert wanted.specifier.contains(pins[name]), f"{wanted} but {pins[name]} is pinned"


def test_what_is_installed_is_asked_for() -> None:
    for wanted in asked():
        found = version(wanted.name)
        assert wanted.specifier.contains(found, prereleases=True), f"{wanted}, found {found}"


def sets_up(venv: Path, *words: str) -> bool:
    """Whether `make test` would begin with a set-up; nothing is run."""
    outer = {"MAKEFLAGS", "MAKEOVERRIDES", "MFLAGS", "TORCH_SPEC", "VENV"}
    env = {name: value for name, value in os.environ.items() if name not in outer}
    command = ["make", "--dry-run", "test", f"VENV={venv}", *words]
    told = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    return ".ci/setup" in told.stdout


def test_another_torch_is_installed_when_it_is_named_and_then_stays(tmp_path: Path) -> None:
    stamp = tmp_path / ".ready"
    assert sets_up(tmp_path)
    for there in ("", "torch==2.13.0\n"):  # a stamp of before says nothing
        stamp.write_text(there)
        assert not sets_up(tmp_path)
        assert not sets_up(tmp_path, "TORCH_SPEC=torch==2.13.0")
        assert sets_up(tmp_path, "TORCH_SPEC=torch")
    stamp.write_text("torch>=2.6,<3\n")
    assert not sets_up(tmp_path)
    assert sets_up(tmp_path, "TORCH_SPEC=torch==2.13.0")


def test_no_transformers_is_allowed_that_was_never_tested() -> None:
    """The workspace formula and our attention count on the modules of 5.17 and later."""
    (wanted,) = (w for w in asked() if w.name == "transformers")
    assert not any(wanted.specifier.contains(old) for old in ("4.57.0", "5.0.0", "5.16.0"))
    assert wanted.specifier.contains("5.17.0") and not wanted.specifier.contains("6.0.0")


def test_what_is_imported_is_asked_for() -> None:
    """The wheel is tested beside our own libraries, where all of them are there."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [line for lines in project["optional-dependencies"].values() for line in lines]
    known = {canonicalize_name(Requirement(line).name) for line in extras}
    known |= {canonicalize_name(wanted.name) for wanted in asked()}
    homes = packages_distributions()
    lacking = {
        f"{path.relative_to(ROOT)}: {name}"
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        for name in imported(path)
        if name not in sys.stdlib_module_names and name not in PACKAGES
        if not known & {*map(canonicalize_name, [COMES_WITH.get(name, name), *homes.get(name, [])])}
    }
    assert not lacking


def imported(path: Path) -> set[str]:
    """The top names of all modules that a file imports, wherever it does."""
    found = set[str]()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return found
