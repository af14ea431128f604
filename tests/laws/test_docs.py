"""DESIGN.md and the decisions: short, numbered, and naming files that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.laws.house import EVERYWHERE, ROOT, tree

LINES_OF_DESIGN = 200
LINES_OF_A_DECISION = 40
DECISIONS = sorted((ROOT / "docs/decisions").glob("[0-9][0-9]-*.md"))
TOP = "|".join((*EVERYWHERE, "docs", "examples"))
NAMED = re.compile(rf"(?<![\w/.-])(?:{TOP})/[\w./-]*\.(?:py|md|csv|txt|yaml)\b")
TITLE = re.compile(r"# (\d+)\. .+\n")


def number_of(path: Path) -> int:
    return int(path.name[:2])


def missing_files(text: str, root: Path = ROOT) -> list[str]:
    """The files of this repository that a text names and that are not there."""
    return [name for name in NAMED.findall(text) if not (root / name).is_file()]


def wrong_form(text: str, number: int) -> list[str]:
    """What a decision's page lacks."""
    wrong = [f"no {part}" for part in ("Context", "Choice") if f"\n**{part}.** " not in text]
    title = TITLE.match(text)
    if title is None or int(title[1]) != number:
        wrong.append("another title")
    if len(text.splitlines()) > LINES_OF_A_DECISION:
        wrong.append("too long")
    return wrong


def cited(text: str) -> set[int]:
    """The numbers of decisions that a text names, also over the end of a line."""
    return {int(n) for n in re.findall(r"\bdecision[\s#]+(\d+)\b", text)}


def test_design_is_short() -> None:
    assert len((ROOT / "DESIGN.md").read_text("utf-8").splitlines()) <= LINES_OF_DESIGN


@pytest.mark.parametrize("path", DECISIONS, ids=lambda path: path.stem)
def test_a_decision_has_its_form(path: Path) -> None:
    assert wrong_form(path.read_text("utf-8"), number_of(path)) == []


def test_decisions_are_numbered_and_listed_in_order() -> None:
    assert [number_of(path) for path in DECISIONS] == list(range(1, len(DECISIONS) + 1))
    index = (ROOT / "docs/decisions/README.md").read_text("utf-8")
    assert re.findall(r"\((\d\d-[\w-]+\.md)\)", index) == [path.name for path in DECISIONS]


def test_every_decision_that_is_cited_is_there() -> None:
    found = {number_of(path) for path in DECISIONS}
    texts = {**tree(*EVERYWHERE), "DESIGN.md": (ROOT / "DESIGN.md").read_text("utf-8")}
    texts |= {str(path): path.read_text("utf-8") for path in DECISIONS}
    own = "tests/laws/test_docs.py"
    assert {path: cited(text) - found for path, text in texts.items() if path != own} == {
        path: set() for path in texts if path != own
    }


@pytest.mark.parametrize(
    "path", [ROOT / "DESIGN.md", ROOT / "docs/guide/gpu.md", *DECISIONS], ids=lambda path: path.stem
)
def test_files_that_are_named_are_there(path: Path) -> None:
    assert missing_files(path.read_text("utf-8")) == []


def test_a_missing_file_is_seen(tmp_path: Path) -> None:
    (tmp_path / "sim").mkdir()
    (tmp_path / "sim/a.py").touch()
    text = "See sim/a.py, `sim/b.py` (tests/sim/test_c.py), http://x/sim/d.py and other/e.py."
    assert missing_files(text, tmp_path) == ["sim/b.py", "tests/sim/test_c.py"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("# 3. A title\n\n**Context.** a\n\n**Choice.** b\n", []),
        ("# 3. A title\n\n**Context.** a\n", ["no Choice"]),
        ("# 4. A title\n\n**Context.** a\n\n**Choice.** b\n", ["another title"]),
        ("# 3. A title\n\n**Context.** a\n\n**Choice.** b\n" + "\n" * 36, ["too long"]),
    ],
)
def test_a_page_of_another_form_is_seen(text: str, told: list[str]) -> None:
    assert wrong_form(text, 3) == told


def test_a_citation_is_found_over_the_end_of_a_line() -> None:
    assert cited("see decision 25, and decision\n7; decisions 3") == {7, 25}
