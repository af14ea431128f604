"""The arrows of DESIGN.md (Layers), read from the source with ast."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OURS = ("traces", "models", "engine", "policies", "sim", "runtime", "analysis", "tandem", "conf")
DEFINITIONS = (ast.FunctionDef, ast.ClassDef)
MAY_IMPORT = {
    "traces": set(),
    "models": {"traces"},
    "engine": {"models", "traces"},
    "policies": {"engine", "models", "traces"},
    "sim": {"engine", "models", "traces"},
    "runtime": {"engine", "models", "traces"},
    "analysis": {"engine.results.schema"},
    "tandem": {"traces", "models", "engine", "policies", "sim", "runtime", "analysis", "conf"},
    "conf": set(),
}
MUST_NOT_IMPORT = {
    "traces": {"torch", "simpy", "hydra", "omegaconf"},
    "models": {"torch", "simpy", "hydra", "omegaconf", "transformers", "datasets"},
    "engine": {"torch", "hydra", "omegaconf", "transformers", "datasets"},
    "sim": {"torch", "hydra", "omegaconf", "datasets"},
    "policies": {"torch", "simpy", "time", "random", "os", "io", "pathlib", "hydra", "omegaconf"},
    "runtime": {"hydra", "omegaconf"},
    "analysis": {"torch", "simpy", "hydra", "omegaconf"},
}


def modules(tree: ast.AST) -> Iterator[str]:
    """The modules that a file imports anywhere; `from a.b import c` counts as a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the arrows"
            yield node.module or ""


def illegal(package: str, source: str) -> list[str]:
    """The imports of a file of `package` that point the wrong way."""
    wrong = []
    for name in modules(ast.parse(source)):
        top = name.split(".")[0]
        allowed = {package, *MAY_IMPORT[package]}
        if top in OURS and not ({top, name} & allowed):
            wrong.append(name)
        if top in MUST_NOT_IMPORT.get(package, set()):
            wrong.append(name)
    return wrong


def sources() -> list[Path]:
    return [path for package in OURS for path in sorted((ROOT / package).rglob("*.py"))]


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_one_way(path: Path) -> None:
    package = path.relative_to(ROOT).parts[0]
    assert illegal(package, path.read_text(encoding="utf-8")) == []


def test_every_package_is_walked() -> None:
    walked = {path.relative_to(ROOT).parts[0] for path in sources()}
    assert walked == set(OURS)


@pytest.mark.parametrize(
    ("package", "line", "wrong"),
    [
        ("policies", "import random", ["random"]),
        ("policies", "from sim.devices.device import Device", ["sim.devices.device"]),
        ("sim", "def f():\n    import torch.nn", ["torch.nn"]),
        ("engine", "from policies.paged import Paged", ["policies.paged"]),
        ("analysis", "from engine.memory.ledger import Ledger", ["engine.memory.ledger"]),
        ("analysis", "from engine.results.schema import TABLES", []),
        ("tandem", "from runtime.executors.cuda import CudaExecutor", []),
    ],
)
def test_the_walk_sees_a_wrong_arrow(package: str, line: str, wrong: list[str]) -> None:
    assert illegal(package, line) == wrong


def test_triton_is_imported_by_the_kernels_only_and_those_where_they_were_chosen() -> None:
    """Others import them inside functions; runtime.serving.fused is one of them."""
    kernels = {path for path in (ROOT / "runtime" / "kernels").glob("*.py")}
    needing = {path for path in kernels if "triton" in set(modules(ast.parse(path.read_text())))}
    needing |= {ROOT / "runtime" / "serving" / "fused.py"}
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts) for path in needing}
    assert len(names) == 4 and "runtime.kernels.shapes" not in names
    for path in set(sources()) - needing:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        at_once = ast.Module([node for node in tree.body if not isinstance(node, DEFINITIONS)], [])
        assert not {"triton", *names} & set(modules(at_once)), path
