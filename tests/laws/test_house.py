"""The bars of the house: sizes, circles and names of the tree. Each is shown to see a fault."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import yaml

from tests.laws.house import (
    COINED,
    EVERYWHERE,
    PRODUCTION,
    RETIRED,
    ROOT,
    Tree,
    imported_modules,
    imports,
    module_of,
    parsed,
    parts_of,
    retired_in,
    tree,
)

FILES_IN_A_FOLDER = 20
FILES_IN_A_TESTS_FOLDER = 30
FILES_IN_A_PACKAGE = {
    "engine": 51,  # tenants, adapters; progress of training, records; shares of a plan's room
    "runtime": 50,  # finetuning beside requests, requests through adapters, checkpoints
    "tandem": 42,  # the protocol of fidelity; the choice of a planner that searches
    "traces": 32,  # samples, and feedback as samples; checkpoints, which simulations read, too
    "policies": 51,  # co-serving and its rivals, adapters of requests, records, ProTrain
    "sim": 24,  # windows, adapters of requests, and the shape of a launch apart from its price
}
LINES_IN_A_FILE = 600
FILES_THAT_KNOW_OF_FAST_FORWARD = 7  # traits have a file of their own beside the plan builder
ABILITIES = {"repeats", "later"}  # of a plan: only fast-forward reads or sets them
REUSED = {"GrowCycle", "Decodes", "RunningDecodes", "PlanReuse"}  # what only a repeated plan needs
SEAMS = ("engine/loop/", "engine/fast_forward/", "sim/executor.py", "tandem/wiring/")
SEAMS += ("runtime/executors/",)
FOREIGN = {"__index__", "_cuda_clearCublasWorkspaces", "as_sessions", "tokenizer"}  # or of traces
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def _is_package(path: str) -> bool:
    return path.endswith("__init__.py")


def full_folders(files: Tree) -> list[str]:
    """Folders with more files than a reader looks through."""
    counts = Counter(str(PurePosixPath(path).parent) for path in files if not _is_package(path))
    bars = {
        folder: FILES_IN_A_TESTS_FOLDER if folder.startswith("tests") else FILES_IN_A_FOLDER
        for folder in counts
    }
    return [f"{folder}: {n} files" for folder, n in counts.items() if n > bars[folder]]


def full_packages(files: Tree) -> list[str]:
    """Packages with more files than their bar."""
    counts = Counter(path.split("/")[0] for path in files if not _is_package(path))
    bars = FILES_IN_A_PACKAGE
    return [f"{name}: {counts[name]} files" for name in bars if counts[name] > bars[name]]


def long_files(files: Tree) -> list[str]:
    lines = {path: len(text.splitlines()) for path, text in files.items()}
    return [f"{path}: {n} lines" for path, n in lines.items() if n > LINES_IN_A_FILE]


def circles(files: Tree) -> list[str]:
    """Modules that reach themselves through imports of any kind."""
    modules = {module_of(path): text for path, text in files.items()}
    targets = {name: imported_modules(text, modules) - {name} for name, text in modules.items()}
    reached: dict[str, set[str]] = {}
    for name in targets:
        seen: set[str] = set()
        waiting = list(targets[name])
        while waiting:
            target = waiting.pop()
            if target not in seen:
                seen.add(target)
                waiting.extend(targets[target])
        reached[name] = seen
    return [
        f"{name} -> {target}"
        for name in sorted(targets)
        for target in sorted(targets[name])
        if name in reached[target]
    ]


def doubled_classes(files: Tree) -> list[str]:
    """Public classes of one name in two files."""
    found = defaultdict(list)
    for path, text in files.items():
        for node in ast.walk(parsed(text)):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(path)
    return [f"{name}: {', '.join(paths)}" for name, paths in found.items() if len(paths) > 1]


def _names(path: str, text: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Every name that a file gives, with the names that it must not bear."""
    for folder in PurePosixPath(path).with_suffix("").parts:
        yield folder, RETIRED
    for node in ast.walk(parsed(text)):
        if isinstance(node, DEFINITIONS):
            yield node.name, COINED if node.name.startswith("test_") else RETIRED


def retired_names(files: Tree) -> list[str]:
    """Files, folders, classes and functions that bear a retired name as a whole part."""
    return [
        f"{path}: {name} bears {', '.join(found)}"
        for path, text in files.items()
        for name, retired in dict.fromkeys(_names(path, text))
        if (found := retired_in(name, retired))
    ]


def _declared(node: ast.ClassDef) -> set[str]:
    """The fields and methods of a class."""
    fields = {
        item.target.id
        for item in node.body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    }
    return fields | {item.name for item in node.body if isinstance(item, ast.FunctionDef)}


def _is_of_a_plan(node: ast.AST) -> bool:
    """Whether a node reads, sets or declares what belongs to the reuse of a plan.

    A plan is told by its name: other objects have `repeats`, too (an operator of a model).
    """
    match node:
        case ast.Attribute(value=ast.Name(id=owner) | ast.Attribute(attr=owner), attr=name):
            return name in REUSED or (name in ABILITIES and "plan" in parts_of(owner))
        case ast.Name(id=name) | ast.alias(name=name):
            return name in REUSED
        case ast.ClassDef(name=name):
            declared = _declared(node)
            is_plan_or_policy = name == "Plan" or declared & {"batch", "fit"}
            return name in REUSED or bool(is_plan_or_policy and declared & ABILITIES)
        case ast.Call(func=ast.Name(id="Plan" | "replace"), keywords=given):
            return bool(ABILITIES & {keyword.arg for keyword in given})
    return False


def knows_of_fast_forward(files: Tree) -> list[str]:
    """Files outside engine/fast_forward that import it or name what only it needs."""
    return [
        path
        for path, text in files.items()
        if not path.startswith("engine/fast_forward/")
        if any(map(_is_of_a_plan, ast.walk(parsed(text))))
        or any(
            f"{name}.{inner}.".replace("..", ".").startswith("engine.fast_forward.")
            for name, names in imports(text)
            for inner in ("", *names)
        )
    ]


def spread_fast_forward(files: Tree) -> list[str]:
    found = knows_of_fast_forward(files)
    return found if len(found) > FILES_THAT_KNOW_OF_FAST_FORWARD else []


def silent_packages(files: Tree) -> list[str]:
    """Folders of code whose `__init__` is missing or says nothing."""
    folders = dict.fromkeys(PurePosixPath(path).parent for path in files)
    inits = {folder: files.get(str(folder / "__init__.py"), "") for folder in folders}
    return [str(folder) for folder, text in inits.items() if not ast.get_docstring(parsed(text))]


def looked_up_by_name(files: Tree) -> list[str]:
    """Reads of an attribute by its name at the seams, whose contracts declare all abilities."""
    return [
        f"{path}: {name.value}"
        for path, text in files.items()
        if path.startswith(SEAMS)
        for node in ast.walk(parsed(text))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) > 1
        for name in node.args[1:2]
        if node.func.id in ("getattr", "hasattr") and isinstance(name, ast.Constant)
        if name.value not in FOREIGN
    ]


BARS: dict[Callable[[Tree], list[str]], tuple[str, ...]] = {
    full_folders: EVERYWHERE,
    full_packages: PRODUCTION,
    long_files: PRODUCTION,
    circles: PRODUCTION,
    doubled_classes: PRODUCTION,
    retired_names: EVERYWHERE,
    spread_fast_forward: PRODUCTION,
    silent_packages: EVERYWHERE,
    looked_up_by_name: PRODUCTION,
}


@pytest.mark.parametrize("bar", BARS, ids=lambda bar: bar.__name__)
def test_the_tree_keeps_its_bars(bar: Callable[[Tree], list[str]]) -> None:
    found = bar(tree(*BARS[bar]))
    assert not found, "\n".join([f"{len(found)} in all", *found])


def many(folder: str, count: int) -> Tree:
    return {f"{folder}/{i}.py": "" for i in range(count)}


FAULTS: list[tuple[Callable[[Tree], list[str]], Tree, list[str]]] = [
    (full_folders, many("sim/fit", 21), ["sim/fit: 21 files"]),
    (full_folders, many("tests/sim", 31), ["tests/sim: 31 files"]),
    (full_packages, {**many("sim/a", 24), "sim/b/c.py": ""}, ["sim: 25 files"]),
    (long_files, {"sim/a.py": "\n" * 601}, ["sim/a.py: 601 lines"]),
    (
        circles,
        {"a/b.py": "import a.c", "a/c.py": "def f():\n    from a import b"},
        ["a.b -> a.c", "a.c -> a.b"],
    ),
    (
        circles,
        {
            "a/b.py": "if TYPE_CHECKING:\n    from a.c import C",
            "a/c.py": "import a.d",
            "a/d.py": "from a.b import B",
            "a/e.py": "import a.b",
        },
        ["a.b -> a.c", "a.c -> a.d", "a.d -> a.b"],
    ),
    (doubled_classes, {"a.py": "class A: ...", "b.py": "class A: ..."}, ["A: a.py, b.py"]),
    (retired_names, {"engine/door.py": ""}, ["engine/door.py: door bears door"]),
    (retired_names, {"a.py": "class PlanDraft: ..."}, ["a.py: PlanDraft bears draft"]),
    (
        retired_names,
        {"a.py": "class A:\n    def _made_up(self): ..."},
        ["a.py: _made_up bears made_up"],
    ),
    (
        retired_names,
        {"a.py": "def least_outstanding_of_least(): ..."},
        ["a.py: least_outstanding_of_least bears least"],
    ),
    (
        retired_names,
        {"tests/a.py": "def test_the_roster_is_read(): ..."},
        ["tests/a.py: test_the_roster_is_read bears roster"],
    ),
    (
        spread_fast_forward,
        {
            "sim/a.py": "from engine.fast_forward.jump import Jump",
            "sim/b.py": "from engine.fast_forward import jump",
            "sim/c.py": "plan = Plan((), repeats=2)",
            "sim/d.py": "x = plan.later",
            "sim/e.py": "from engine.contract.plan import GrowCycle",
            "sim/f.py": "def f(view: Decodes): ...",
            "engine/contract/plan.py": "class Plan:\n    repeats: int = 1",
            "engine/fast_forward/jump.py": "x = plan.repeats",
            "sim/g.py": "def repeats(shape): return later(shape) + shape.repeats",
            "sim/h.py": "from engine import fast_forward",
            "policies/a.py": "class A:\n    def batch(self): ...\n    def repeats(self): ...",
            "policies/b.py": "class Shape:\n    repeats: int",
        },
        [
            *(f"sim/{letter}.py" for letter in "abcdef"),
            "engine/contract/plan.py",
            "sim/h.py",
            "policies/a.py",
        ],
    ),
    (silent_packages, {"a/b/c.py": "", "a/b/__init__.py": "# a comment"}, ["a/b"]),
    (
        looked_up_by_name,
        {
            "sim/executor.py": "traffic = getattr(cost, 'host_traffic', None)",
            "engine/loop/a.py": "if hasattr(executor, 'repeat'):\n    pass",
            "tandem/wiring/a.py": "value = getattr(config, name)",
            "models/a.py": "table = getattr(body, 'wpe', None)",
        },
        ["sim/executor.py: host_traffic", "engine/loop/a.py: repeat"],
    ),
    (silent_packages, {"a/b/c.py": ""}, ["a/b"]),
]


@pytest.mark.parametrize(("bar", "files", "told"), FAULTS)
def test_a_bar_sees_a_fault(bar: Callable[[Tree], list[str]], files: Tree, told: list[str]) -> None:
    assert bar(files) == told


def test_every_bar_has_a_fault() -> None:
    assert {bar for bar, _, _ in FAULTS} == set(BARS)


@pytest.mark.parametrize(
    ("bar", "files"),
    [
        (full_folders, {**many("sim/fit", 20), "sim/fit/__init__.py": ""}),
        (full_folders, many("tests/sim", 30)),
        (full_packages, {**many("sim", 23), "sim/__init__.py": "", "sim/a/__init__.py": ""}),
        (long_files, {"sim/a.py": "\n" * 600}),
        (circles, {"a/b.py": "import a.c", "a/c.py": "import torch", "a/d.py": "import a.c"}),
        (doubled_classes, {"a.py": "class _A: ...", "b.py": "class _A: ..."}),
        (
            retired_names,
            {"a.py": "class Latest: ...\ndef endswith(): ...\ndef standing_plan(): ..."},
        ),
        (retired_names, {"tests/a.py": "def test_a_run_ends_late(): ..."}),
        (silent_packages, {"a/b/c.py": "", "a/b/__init__.py": '"""What lives here."""'}),
    ],
)
def test_a_bar_lets_pass_what_keeps_it(bar: Callable[[Tree], list[str]], files: Tree) -> None:
    assert bar(files) == []


GROUPS = ("scheduling", "memory")
Yamls = Mapping[str, Mapping[str, Any]]  # by name, of one group


def read_group(conf: Path, group: str) -> dict[str, dict[str, Any]]:
    paths = sorted((conf / group).glob("*.yaml"))
    return {path.stem: yaml.safe_load(path.read_text("utf-8")) or {} for path in paths}


def shared_files(group: Yamls, root: Path = ROOT) -> list[str]:
    """Policies of a group without a file of their own name: a file is one policy's.

    Several yamls may be presets of one class. Its file is then named after one of them.
    """
    classes, names = defaultdict(set), defaultdict(set)
    for name, settings in group.items():
        if target := settings.get("_target_"):
            module, _, cls = target.rpartition(".")
            classes[module].add(cls)
            names[module].add(name)
    wrong = []
    for module in classes:
        path = root / (module.replace(".", "/") + ".py")
        if not path.is_file():
            wrong.append(f"{module}: no such file")
        if len(classes[module]) > 1:
            wrong.append(f"{module}: {', '.join(sorted(classes[module]))}")
        if path.stem not in names[module]:
            wrong.append(f"{module}: named after none of {', '.join(sorted(names[module]))}")
    return wrong


def unknown_halves(policies: Yamls, halves: Mapping[str, Yamls]) -> list[str]:
    """Choices of conf/policy that name a scheduling or a memory that has no yaml."""
    chosen = [
        (name, group.lstrip("/"), choice)
        for name, settings in policies.items()
        for default in settings.get("defaults", ())
        if isinstance(default, dict)
        for group, choice in default.items()
    ]
    return [
        f"{name}: {group}={choice}"
        for name, group, choice in chosen
        if group in halves and choice not in halves[group]
    ]


@pytest.mark.parametrize("group", GROUPS)
def test_a_named_policy_has_a_file_of_its_own(group: str) -> None:
    assert shared_files(read_group(ROOT / "conf", group)) == []


def test_a_policy_names_halves_that_are_there() -> None:
    halves = {group: read_group(ROOT / "conf", group) for group in GROUPS}
    assert unknown_halves(read_group(ROOT / "conf", "policy"), halves) == []


def test_a_shared_file_and_an_unknown_half_are_seen(tmp_path: Path) -> None:
    for folder in ("conf/scheduling", "conf/memory", "conf/policy", "policies"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "policies/a.py").touch()
    written = {
        "conf/scheduling/a.yaml": "_target_: policies.a.A",
        "conf/scheduling/preset.yaml": "_target_: policies.a.A",
        "conf/scheduling/extended.yaml": "defaults: [a]",
        "conf/memory/b.yaml": "_target_: policies.a.B",
        "conf/memory/c.yaml": "_target_: policies.a.C",
        "conf/memory/d.yaml": "_target_: policies.d.D",
        "conf/policy/p.yaml": "defaults:\n  - /scheduling: a\n  - /memory: other\n  - _self_",
    }
    for path, text in written.items():
        (tmp_path / path).write_text(text)
    halves = {group: read_group(tmp_path / "conf", group) for group in GROUPS}
    assert shared_files(halves["scheduling"], tmp_path) == []
    assert shared_files(halves["memory"], tmp_path) == [
        "policies.a: B, C",
        "policies.a: named after none of b, c",
        "policies.d: no such file",
    ]
    policies = read_group(tmp_path / "conf", "policy")
    assert unknown_halves(policies, halves) == ["p: memory=other"]
