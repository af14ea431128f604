"""Model, page and cost of a run are made in one place: what decision 39 says, counted."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Callable

import pytest

from tests.laws.house import PACKAGES, ROOT, Tree, parsed, tree

DECISION = ROOT / "docs/decisions/39-one-place-for-model-page-and-cost.md"
BYTES_OF_KV = {"engine/contract/regions.py", "models/spec.py"}  # PageSize.of, and the figure itself
WIRING = "tandem/wiring/"
MAKERS = {  # calls that make a part of a run for a model, and what else makes one
    "RunSpec": {},
    "PageSize.of": {"runtime/measure/reference.py": "reference works have pages of their own"},
    "Roofline": {"sim/foreign/aiconfigurator.py": "prices what the tables lack"},
    "TableCost.load": {},
    "VidurCost.load": {},
    "AiConfiguratorCost.load": {},
    "KernelProfileCost.load": {},
}
OF_ONE_MODEL = {"spec", "page", "cost", "room"}  # of a RunSpec
HELD_PAGE = {"view", "state", "ledger", "decodes", "books", "self"}  # what has an attribute `page`


def called(node: ast.AST) -> str:
    """The name of what a call calls, with the name before its dot; "" of anything else."""
    match node:
        case ast.Call(func=ast.Name(id=name)):
            return name
        case ast.Call(func=ast.Attribute(value=ast.Name(id=owner), attr=name)):
            return f"{owner}.{name}"
    return ""


def owner_of(node: ast.Attribute) -> str:
    """The last name before an attribute, without underscores at its start."""
    value = node.value
    name = value.id if isinstance(value, ast.Name) else getattr(value, "attr", "")
    return str(name).lstrip("_")


def attributes(text: str) -> list[ast.Attribute]:
    return [node for node in ast.walk(parsed(text)) if isinstance(node, ast.Attribute)]


def products_of_kv(files: Tree) -> list[str]:
    """Files that read the KV bytes of a token, with which a page's bytes are multiplied."""
    return [
        path
        for path, text in files.items()
        if path not in BYTES_OF_KV
        and any([node.attr == "kv_token_bytes" for node in attributes(text)])
    ]


def made_elsewhere(files: Tree) -> list[str]:
    """Files outside tandem/wiring that make a run, a page of a model or a cost."""
    made = defaultdict(list)
    for path, text in files.items():
        for node in ast.walk(parsed(text)):
            name = called(node)
            if name in MAKERS and path not in MAKERS[name] and not path.startswith(WIRING):
                made[path].append(name)
    return [f"{path}: {', '.join(names)}" for path, names in made.items()]


def read_of_one_model(files: Tree) -> list[str]:
    """Files that read a part of a RunSpec of which a second model would have another."""
    return [
        path
        for path, text in files.items()
        if any([n.attr in OF_ONE_MODEL and owner_of(n) == "run_spec" for n in attributes(text)])
        or any([called(node) == "RunSpec" for node in ast.walk(parsed(text))])
    ]


def read_a_page(files: Tree) -> list[str]:
    """Files of engine and policies that read the page of a view, of the ledger or of the state."""
    return [
        path
        for path, text in files.items()
        if path.startswith(("engine/", "policies/"))
        and any(
            [n.attr in ("page", "_page") and owner_of(n) in HELD_PAGE for n in attributes(text)]
        )
    ]


BARS: tuple[Callable[[Tree], list[str]], ...] = (products_of_kv, made_elsewhere)


@pytest.mark.parametrize("bar", BARS, ids=lambda bar: bar.__name__)
def test_a_part_of_a_run_is_made_in_its_place(bar: Callable[[Tree], list[str]]) -> None:
    assert bar(tree(*PACKAGES)) == []


def test_the_decision_names_the_files_that_read_one_model() -> None:
    text = DECISION.read_text("utf-8")
    found = read_of_one_model(tree(*PACKAGES))
    assert [path for path in found if path not in text] == []
    assert f"{len(found)} files of tandem" in " ".join(text.split())


def test_the_decision_counts_the_files_that_read_a_page() -> None:
    found = read_a_page(tree(*PACKAGES))
    assert f"{len(found)} files of engine and policies" in " ".join(
        DECISION.read_text("utf-8").split()
    )


@pytest.mark.parametrize(
    ("bar", "files", "told"),
    [
        (products_of_kv, {"sim/a.py": "x = tokens * model.kv_token_bytes"}, ["sim/a.py"]),
        (products_of_kv, {"runtime/a.py": "n = spec.kv_token_bytes"}, ["runtime/a.py"]),
        (products_of_kv, {"engine/contract/regions.py": "x = a * m.kv_token_bytes"}, []),
        (products_of_kv, {"models/spec.py": "x = self.kv_token_bytes"}, []),
        (made_elsewhere, {"runtime/a.py": "PageSize.of(m, 16)"}, ["runtime/a.py: PageSize.of"]),
        (made_elsewhere, {"tandem/cli/a.py": "RunSpec(1)"}, ["tandem/cli/a.py: RunSpec"]),
        (made_elsewhere, {"policies/a.py": "Roofline(d, m)"}, ["policies/a.py: Roofline"]),
        (made_elsewhere, {"sim/a.py": "VidurCost.load(p, m)"}, ["sim/a.py: VidurCost.load"]),
        (made_elsewhere, {"tandem/wiring/a.py": "RunSpec(PageSize.of(m, 1))"}, []),
        (made_elsewhere, {"sim/foreign/aiconfigurator.py": "Roofline(d, m)"}, []),
        (read_of_one_model, {"tandem/a.py": "f(self._run_spec.cost)"}, ["tandem/a.py"]),
        (read_of_one_model, {"tandem/a.py": "RunSpec(1)"}, ["tandem/a.py"]),
        (read_of_one_model, {"tandem/a.py": "run_spec.seed + room.page"}, []),
        (read_a_page, {"policies/a.py": "self._view.page.tokens"}, ["policies/a.py"]),
        (read_a_page, {"sim/a.py": "view.page", "engine/a.py": "tree.page"}, []),
    ],
)
def test_what_is_made_or_read_elsewhere_is_seen(
    bar: Callable[[Tree], list[str]], files: Tree, told: list[str]
) -> None:
    assert bar(files) == told
