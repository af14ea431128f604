"""The prose of the house: comments, docstrings, messages, names of tests, and documents.

The subject of a sentence is a noun of the code, and no file tells how the project is worked on.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.laws.house import EVERYWHERE, ROOT, Tree, parsed, tree

PHRASES = {
    "a person": r"\b(?:whoever|whomever|(?:some|any|every|no)body|(?:some|any|every)one)\b",
    "a pronoun": r"\b(?:he|him|his|she|her|hers)\b",
    "who": r"(?<!user )\bwhom?\b",
    "the same as a subject": r"^# the same\b|(?:^|(?<=[.!?] ))(?-i:The) same\b",
    "a date": r"\b2026(?:-\d\d|\b)",
    "how it is worked on": (
        r"\b(?:issue|issues|ticket|pr|milestone|sprint) #?\d+\b"
        r"|\bsee #\d+|\b(?:our|the|a|an|by) (?:reviewers?|maintainers?|assistant)\b"
        r"|\bcode review\b|\bthe helper\b|\bthe lead\b|\b(?:to-?do|fixme|xxx)\b"
    ),
}
# Files whose business these words are, each with its reason.
EXEMPT = {
    "tests/laws/test_prose.py": "it holds the words themselves, and the faults",
}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def _texts(node: ast.AST) -> Iterator[str]:
    """The constant strings below a node that are prose: a word without a space is data."""
    for child in ast.walk(node):
        match child:
            case ast.Constant(value=str(text)) if re.search(r"\s", text.strip()):
                yield text


def prose(text: str) -> Iterator[str]:
    """Comments, docstrings and other sentences of a Python file, and the names of its tests."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.string
    module = parsed(text)
    yield from _texts(module)
    for node in ast.walk(module):
        if isinstance(node, FUNCTIONS) and node.name.startswith("test_"):
            yield node.name.replace("_", " ")


def found_in(texts: Iterator[str]) -> list[str]:
    """The phrases that a text holds, each with its kind."""
    return [
        f"{kind}: {match[0]}"
        for text in texts
        for kind, phrase in PHRASES.items()
        for match in re.finditer(phrase, " ".join(text.split()), re.IGNORECASE)
    ]


def spoken(files: Tree) -> dict[str, list[str]]:
    """Per file, what its prose must not hold."""
    found = {path: found_in(prose(text)) for path, text in files.items() if path not in EXEMPT}
    return {path: phrases for path, phrases in found.items() if phrases}


def yamls() -> Tree:
    """The yaml of conf, all of which is read as prose but for a word without a space."""
    paths = sorted((ROOT / "conf").rglob("*.yaml"))
    return {path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in paths}


def documents() -> Tree:
    """The pages for readers: all of their text is prose."""
    tops = [ROOT / name for name in ("README.md", "DESIGN.md", "CHANGELOG.md")]
    paths = [*tops, *sorted((ROOT / "docs").rglob("*.md"))]
    return {path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in paths}


def comments(text: str) -> Iterator[str]:
    """The comments of a yaml."""
    yield from re.findall(r"(?:^|\s)#.*", text)


@pytest.mark.parametrize("package", EVERYWHERE)
def test_prose_speaks_of_the_code(package: str) -> None:
    found = spoken(tree(package))
    if package == "conf":
        found |= {
            path: told for path, text in yamls().items() if (told := found_in(comments(text)))
        }
    counts = Counter(phrase for phrases in found.values() for phrase in phrases)
    lines = [f"{path}: {', '.join(phrases)}" for path, phrases in found.items()]
    assert not found, "\n".join([f"{counts.total()} in {package}", *lines])


def test_documents_speak_of_the_code() -> None:
    pages = documents()
    known = {"README.md", "DESIGN.md", "docs/guide/memory-policy.md", "docs/decisions/README.md"}
    assert known <= {*pages}
    found = {path: told for path, text in pages.items() if (told := found_in(iter([text])))}
    assert not found, "\n".join(f"{path}: {', '.join(told)}" for path, told in found.items())


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("# whoever finds a page", ["a person: whoever"]),
        ('"""Pages that\nSomebody holds."""', ["a person: Somebody"]),
        ('raise ValueError(f"job {job} waits for nobody")', ["a person: nobody"]),
        ("def test_everybody_is_served(): ...", ["a person: everybody"]),
        ("x = 1  # with the tokens that he held", ["a pronoun: he"]),
        ('"""A job that waits, and who comes in."""', ["who: who"]),
        ('"""Who leaves first."""', ["who: Who"]),
        ("# pages are given back by who serves with them", ["who: who"]),
        ("def test_whom_the_engine_asks(): ...", ["who: whom"]),
        ('"""The same on the host."""', ["the same as a subject: The same"]),
        ("x = 1  # the same with pages", ["the same as a subject: # the same"]),
        ('"""Runs a policy. The same is run again."""', ["the same as a subject: The same"]),
        ("# measured on 2026-11-21, best of 5", ["a date: 2026-11"]),
        ("# as in vLLM of 2026", ["a date: 2026"]),
        ("# issue 21 asks for it", ["how it is worked on: issue 21"]),
        ("# fixed in PR #7", ["how it is worked on: PR #7"]),
        ("# TODO: measure it", ["how it is worked on: TODO"]),
    ],
)
def test_a_phrase_is_seen(text: str, told: list[str]) -> None:
    assert list(spoken({"engine/a.py": text}).values()) == [told]


@pytest.mark.parametrize(
    "text",
    [
        "somebody = 1",
        'path = "outputs/2026-11-21"',
        "# the ledger books at issue, three operations at once",
        "# he5, there and others",
        "# PatrickStar's pull request 269 has the figures",
        '"""Requests of a session, in issue order."""',
        '"""Refused, so that a user who sets it is told why."""',
        '"""Whose pages they are; a launch of the same job has the same ones."""',
    ],
)
def test_code_data_and_terms_are_let_pass(text: str) -> None:
    assert spoken({"engine/a.py": text}) == {}


def test_comments_of_a_yaml_are_seen() -> None:
    assert found_in(comments("a: 1 # whoever\n# nobody\nb: nobody#1")) == [
        "a person: whoever",
        "a person: nobody",
    ]
