"""The glossary of DESIGN.md, held against the code: a term is a name in the file of its entry."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.laws.house import ROOT, occurs, parsed, parts_of, retired_in

ENTRY = re.compile(r"\*\*(?P<term>[^*]+)\*\*: (?P<meaning>.+) \((?P<path>[\w/.]+)\)")


class Entry(NamedTuple):
    term: str
    path: str


def glossary(text: str) -> list[str]:
    """The list of the section Glossary, and whatever else begins like an entry."""
    section = re.search(r"^## Glossary\n(.*?)(?=^## |\Z)", text, re.M | re.S)
    lines = section[1].splitlines() if section else []
    return [line for line in lines if line.startswith(("-", "*"))]


def entries(text: str) -> list[Entry]:
    """Term and file of each line of the glossary that is an entry."""
    found = (ENTRY.fullmatch(line.removeprefix("- ")) for line in glossary(text))
    return [Entry(match["term"], match["path"]) for match in found if match]


def names_in(text: str) -> Iterator[str]:
    """Every name that a Python file uses or gives; neither comments nor strings."""
    for node in ast.walk(parsed(text)):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.Name(id=name):
                yield name
            case ast.Attribute(attr=name) | ast.arg(arg=name) | ast.keyword(arg=str(name)):
                yield name


def singular(words: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(word.removesuffix("s") for word in words)


def wrong(entry: Entry, root: Path = ROOT) -> str:
    """What is wrong with an entry, or ""."""
    path = root / entry.path
    if retired := retired_in(entry.term):
        return f"{entry.term}: bears the retired {', '.join(retired)}"
    if not path.is_file():
        return f"{entry.term}: {entry.path} does not exist"
    phrase = singular(parts_of(entry.term))
    names = set(names_in(path.read_text("utf-8")))
    if not any(occurs(phrase, singular(parts_of(name))) for name in names):
        return f"{entry.term}: no name in {entry.path}"
    return ""


DESIGN = (ROOT / "DESIGN.md").read_text("utf-8")


def test_every_line_of_the_glossary_is_an_entry() -> None:
    lines, found = glossary(DESIGN), entries(DESIGN)
    assert len(found) == len(lines) > 20
    assert len({entry.term for entry in found}) == len(found)


@pytest.mark.parametrize("entry", entries(DESIGN), ids=lambda entry: entry.term)
def test_a_term_is_a_name_in_the_file_of_its_entry(entry: Entry) -> None:
    assert wrong(entry) == ""


def test_a_line_that_is_no_entry_is_seen() -> None:
    text = "## Glossary\n\n- **page**: KV (a.py)\n- page: KV\n\n## Laws\n- **b**: c (d.py)\n"
    assert len(glossary(text)) == 2
    assert entries(text) == [Entry("page", "a.py")]


@pytest.mark.parametrize(
    ("term", "code", "told"),
    [
        ("decode batch", "class DecodeBatch: ...", ""),
        ("decode batch", "def f(decode_batches): ...", "decode batch: no name in a.py"),
        ("page", "x = pages.free", ""),
        ("page", '"""A page."""\n# page\nx = "page"', "page: no name in a.py"),
        ("launch", "launcher = 1", "launch: no name in a.py"),
        ("prompt roster", "prompt_roster = 1", "prompt roster: bears the retired roster"),
        ("standing plan", "class StandingPlan: ...", ""),
    ],
)
def test_a_wrong_entry_is_seen(term: str, code: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(code)
    assert wrong(Entry(term, "a.py"), tmp_path) == told


def test_a_missing_file_is_seen(tmp_path: Path) -> None:
    assert wrong(Entry("page", "a.py"), tmp_path) == "page: a.py does not exist"
