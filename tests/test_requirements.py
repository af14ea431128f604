"""What pyproject.toml asks for is what the tests ran with: no range reaches beyond."""

from __future__ import annotations

import tomllib
from importlib.metadata import version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent


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


def test_no_transformers_is_allowed_that_was_never_tested() -> None:
    """The workspace formula and our attention count on the modules of 5.17 and later."""
    (wanted,) = (w for w in asked() if w.name == "transformers")
    assert not any(wanted.specifier.contains(old) for old in ("4.57.0", "5.0.0", "5.16.0"))
    assert wanted.specifier.contains("5.17.0") and not wanted.specifier.contains("6.0.0")
