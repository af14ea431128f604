"""The border between yaml and objects: what may be built, and from which values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Literal

import pytest

from tandem.config.build import Builder
from tandem.config.check import arguments, conform
from traces.serving.arrivals import Gamma


class Colour(StrEnum):
    RED = "red"


@dataclass(frozen=True)
class Sample:
    number: int
    rate: float = 1.0
    times: tuple[float, ...] = ()
    name: str | None = None


def test_a_target_of_ours_is_built_with_checked_values() -> None:
    node = {"_target_": "traces.serving.arrivals.Gamma", "rate": 3, "burstiness": 0.5}
    assert Builder().build(node, "arrival") == Gamma(rate=3.0, burstiness=0.5)


def test_a_target_beside_the_users_config_is_built(tmp_path: Path) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "beside_it.py").write_text(
        "class Mine:\n    def __init__(self, n: int): self.n = n"
    )
    builder = Builder(folders=[tmp_path / "conf"])
    assert builder.build({"_target_": "beside_it.Mine", "n": 3}, "policy").n == 3


@pytest.mark.parametrize("path", ["os.system", "builtins.eval", "subprocess.run", "numpy.load"])
def test_a_foreign_target_is_refused(path: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="neither ours nor beside"):
        Builder(folders=[tmp_path]).build({"_target_": path}, "policy")


@pytest.mark.parametrize(
    ("path", "near"),
    [
        ("mypolcies.Mine", "; did you mean mypolicies or policies?"),
        ("mypackge.inner.Mine", "; did you mean mypackage?"),
        ("polices.composed.Composed", "; did you mean policies or mypolicies?"),
        ("qqqqqqqqq.Mine", ""),
    ],
)
def test_a_module_that_is_nowhere_is_told_with_where_was_looked(
    path: str, near: str, tmp_path: Path
) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "mypackage").mkdir()
    (tmp_path / "mypackage" / "__init__.py").touch()
    (tmp_path / "mypolicies.py").touch()
    with pytest.raises(ValueError) as caught:
        Builder(folders=[tmp_path / "conf"]).build({"_target_": path}, "policy")
    module = path.partition(".")[0]
    assert str(caught.value) == (
        f"policy: no module {module} for target {path}: looked in {tmp_path / 'conf'}, {tmp_path}, "
        f"our packages, the installed packages{near}"
    )


@pytest.mark.parametrize("path", ["Mine", "mine.", ".Mine"])
def test_a_target_without_a_module_is_told(path: str) -> None:
    with pytest.raises(ValueError, match=f"target {path} is no MODULE.CLASS"):
        Builder().build({"_target_": path}, "policy")


def test_a_named_package_is_trusted() -> None:
    built = Builder(trusted=["fractions"]).build({"_target_": "fractions.Fraction"}, "x")
    assert built == 0


@pytest.mark.parametrize(
    ("value", "hint", "wanted"),
    [
        (3, float, 3.0),
        (3.0, int, 3),
        ([1, 2.5], tuple[float, ...], (1.0, 2.5)),
        ([1], list[int], [1]),
        ([[1, 2]], Sequence[Sequence[int]], ((1, 2),)),
        (None, int | None, None),
        ("red", Colour, Colour.RED),
        ({"a": 1}, Mapping[str, int], {"a": 1}),
        (True, bool, True),
    ],
)
def test_values_take_the_wanted_form(value: object, hint: object, wanted: object) -> None:
    got = conform(value, hint, "x")
    assert got == wanted
    assert type(got) is type(wanted)


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        ("3", int),
        (True, int),
        (1, bool),
        (2.5, int),
        ("a", float),
        (None, int),
        ("blue", Colour),
        ("12", tuple[str, ...]),
        (["a"], tuple[int, ...]),
        ("a", int | None),
        ([1], Mapping[str, int]),
    ],
)
def test_values_of_another_kind_are_refused(value: object, hint: object) -> None:
    with pytest.raises(ValueError, match="x"):
        conform(value, hint, "x")


Choices = Colour | tuple[Colour, ...]
Depths = Mapping[str, Sequence[int]] | int


@pytest.mark.parametrize(
    ("value", "hint", "told"),
    [
        (3, Colour, "that is a number; give red"),
        (3, Literal["host", "disk", "gpu"], "that is a number; give host, disk or gpu"),
        (None, Literal["host", "disk"], "x=null: that is nothing; give host or disk"),
        ("blue", Choices, "there is no such choice; give red, or a list of these"),
        (["red", "blue"], Choices, r"x\[1\]=blue: there is no such choice; give red$"),
        (["red", True], Choices, r"x\[1\]=true: that is a truth value; give red$"),
        ({"a": None}, int, "x={a: null}: that is a group of settings; give a whole number$"),
        ([1, "b"], float | None, r"x=\[1, b\]: that is a list; give a number or null$"),
        (
            True,
            Sequence[str] | None,
            "x=true: that is a truth value; give a list of words or null$",
        ),
        ("3", Depths, "that is text; give a group of settings or a whole number$"),
        (1, bool, "that is a number; give true or false$"),
        (1, Sample, "that is a number; give a group of settings whose _target_ makes a Sample$"),
        ({"number": 1}, Sample, "give a group of settings whose _target_ makes a Sample$"),
        (Sample(1), Colour, "that is a Sample; give red$"),
        ([1.5], tuple[float, float], r"x=\[1.5\]: that is a list of 1; give one of 2"),
    ],
)
def test_a_refusal_is_told_in_plain_words(value: object, hint: object, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        conform(value, hint, "x")


def test_keys_are_checked() -> None:
    with pytest.raises(ValueError, match="did you mean number"):
        arguments(Sample, {"numbr": 1}, "x")
    with pytest.raises(ValueError, match=r"x\.number.*needs a value"):
        arguments(Sample, {"rate": 1}, "x")
    assert arguments(Sample, {"number": 1, "times": [1]}, "x") == {"number": 1, "times": (1.0,)}


def test_a_foreign_module_that_is_called_nearly_like_ours_is_asked_after(tmp_path: Path) -> None:
    """`trace` is a module of Python: what was meant comes before the way to trust it."""
    with pytest.raises(
        ValueError, match=r"did you mean traces\? Else add it with 'trusted=\[trace"
    ):
        Builder(folders=[tmp_path]).build({"_target_": "trace.serving.arrivals.Gamma"}, "arrival")


def test_what_a_users_constructor_refuses_is_told_with_key_and_name(tmp_path: Path) -> None:
    (tmp_path / "conf").mkdir()
    text = "class Even:\n    def __init__(self, n: int = 1): raise ValueError('n must be even')"
    (tmp_path / "refusing.py").write_text(text)
    builder = Builder(folders=[tmp_path / "conf"])
    with pytest.raises(ValueError, match=r"^x.y: refusing\.Even: n must be even$"):
        builder.build({"_target_": "refusing.Even", "n": 1}, "x.y")
