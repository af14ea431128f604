"""What pyproject.toml asks for is what the tests ran with: no range reaches beyond."""

from __future__ import annotations

import os
import subprocess
import tomllib
from importlib.metadata import version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]


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
