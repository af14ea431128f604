"""The source tree as text, and the names in it: what the tests of the house read."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (
    "traces",
    "models",
    "engine",
    "policies",
    "sim",
    "runtime",
    "analysis",
    "tandem",
    "conf",
)
PRODUCTION = (*PACKAGES, "benchmarks")
EVERYWHERE = (*PRODUCTION, "tests")
Tree = Mapping[str, str]  # a path below the root, and the text of that file

# The left column of the table of words: names that no file, class, function or entry bears.
COINED = (  # no plain English sentence needs them
    *("seating", "flights", "roster", "tide", "worlds", "cohort", "leftovers"),
    *("launching", "foresight", "made_up"),
)
EVERYDAY = (  # the name of a test is a sentence, which may hold these
    *("door", "ends", "news", "balance", "trial", "draft", "setting", "words", "screen", "mixed"),
    *("standing", "course", "leg", "returns", "questions", "flow", "aside", "least", "family"),
    *("largest", "wanted", "keys", "quiet", "late", "pace"),
)
RETIRED = (*COINED, *EVERYDAY)
ANY_RETIRED = re.compile(rf"(?<![a-z0-9])(?:{'|'.join(RETIRED)})(?![a-z0-9])")
# Phrases that hold a retired word and stay, each with its reason.
ALLOWED = {
    "standing_plan": "the table's own word for what was standing",
    "request_ends": "the table's own word for what was ends",
    "clock_pace": "the table's own word for what was pace",
    "largest_model": "the table's own word for what was largest",
    "unused_keys": "the table's own word for what was keys",
    "least_outstanding": "router=least_outstanding, a public name of conf/router",
    "least_recent": "LRU spelled out",
    "memory_tide": "experiment=memory_tide, a public name of conf/experiment",
    "tide_under_kv": "experiment=tide_under_kv, a public name of conf/experiment",
}


@functools.cache
def tree(*packages: str) -> Tree:
    """All Python files of these packages of the repository."""
    paths = (path for package in packages for path in sorted((ROOT / package).rglob("*.py")))
    return {path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in paths}


@functools.cache
def parsed(text: str) -> ast.Module:
    return ast.parse(text)


def module_of(path: str) -> str:
    """The dotted name of a file; a package's own is that of its folder."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imports(text: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Every module that is named in an import at any depth, with the names taken from it."""
    for node in ast.walk(parsed(text)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, ()) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the directions"
            yield node.module or "", tuple(alias.name for alias in node.names)


def imported_modules(text: str, known: Iterable[str]) -> set[str]:
    """The modules among `known` that a text imports; `from a import b` may name a.b."""
    known, found = set(known), set()
    for module, names in imports(text):
        inner = {f"{module}.{name}" for name in names} & known
        found |= inner
        if module in known and (not names or len(inner) < len(names)):
            found.add(module)
    return found


def parts_of(name: str) -> tuple[str, ...]:
    """The lower-case words of a snake_case or CamelCase name, or of a term of several words."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name)
    return tuple(part for part in re.split(r"[^a-z0-9]+", spaced.lower()) if part)


def occurs(phrase: tuple[str, ...], parts: tuple[str, ...]) -> bool:
    """Whether the words of a phrase follow each other in a name."""
    size = len(phrase)
    return any(parts[i : i + size] == phrase for i in range(len(parts) - size + 1))


def retired_in(name: str, retired: Iterable[str] = RETIRED) -> list[str]:
    """The retired names that a name bears as whole parts, outside the allowed phrases."""
    parts = "_".join(parts_of(name))
    if not ANY_RETIRED.search(parts):
        return []
    for phrase in ALLOWED:
        parts = re.sub(rf"(?<![a-z0-9]){phrase}(?![a-z0-9])", "-", parts)
    runs = [tuple(run.strip("_").split("_")) for run in parts.split("-")]
    return [word for word in retired if any(occurs(parts_of(word), run) for run in runs)]
