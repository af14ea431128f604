"""The import directions of DESIGN.md (Layers), read from the source with ast."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

import pytest

from tests.laws.house import PACKAGES, Tree, imports, parsed, tree

DEFINITIONS = (ast.FunctionDef, ast.ClassDef)
SCHEMA = "engine.results.schema"
SHARED = {"engine", "models", "traces"}
MAY_IMPORT = {
    "traces": set(),
    "models": {"traces"},
    "engine": {"models", "traces"},
    "policies": SHARED,
    "sim": SHARED,
    "runtime": SHARED,
    "analysis": {SCHEMA},
    "tandem": set(PACKAGES),
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
# Executors know no tables: of the runtime, only calibration writes its profile in them.
READERS_OF_THE_SCHEMA = ("engine/", "analysis/", "tandem/", "runtime/measure/calibrate.py")
# Inside engine: the folders from which each folder may import.
ROOMS: dict[str, set[str]] = {
    "contract": set(),
    "results": {"contract"},
    "memory": {"contract", "results"},
    "loop": {"contract", "results", "memory"},
    "fast_forward": {"contract", "results", "memory", "loop"},
    "laws": {"contract", "results", "memory", "loop"},
}
# One module of the loop builds fast_forward, a subclass of the loop's PlanReuse.
SEAM = ("loop", "fast_forward")


def named(text: str) -> Iterator[str]:
    """The modules that a file imports anywhere.

    `from a.b import c` counts as a.b, and as a.b.c as well where a.b is a folder of engine.
    """
    for module, names in imports(text):
        if module == "engine" or (module.startswith("engine.") and module.count(".") == 1):
            yield from (f"{module}.{name}" for name in names)
        if module != "engine" or not names:
            yield module


def room_of(module: str) -> str:
    """The folder of engine in which a module lies, or "" outside of engine's folders."""
    top, _, inner = module.partition(".")
    return inner.split(".")[0] if top == "engine" else ""


def wrong_packages(path: str, text: str) -> list[str]:
    """The imports of a file that leave its package in a wrong direction."""
    package, wrong = path.split("/")[0], []
    for name in named(text):
        top = name.split(".")[0]
        allowed = {package, *MAY_IMPORT[package]}
        if top in PACKAGES and not ({top, name} & allowed):
            wrong.append(name)
        if top in MUST_NOT_IMPORT.get(package, set()):
            wrong.append(name)
        if name.startswith(SCHEMA) and not path.startswith(READERS_OF_THE_SCHEMA):
            wrong.append(name)
    return wrong


def wrong_rooms(path: str, text: str) -> list[str]:
    """The imports of a file of engine that point against the directions of its folders."""
    room = room_of(path.replace("/", "."))
    if room not in ROOMS:
        return []
    return [
        name
        for name in dict.fromkeys(named(text))
        if (other := room_of(name)) in ROOMS
        and other not in {room, *ROOMS[room]}
        and (room, other) != SEAM
    ]


def seam(files: Tree) -> set[str]:
    """The modules of fast_forward that the loop imports."""
    room, other = SEAM
    return {
        name
        for path, text in files.items()
        if path.startswith(f"engine/{room}/")
        for name in named(text)
        if room_of(name) == other and name.count(".") > 1
    }


FILES = tree(*PACKAGES)


@pytest.mark.parametrize("path", FILES)
def test_imports_point_one_way(path: str) -> None:
    assert wrong_packages(path, FILES[path]) == []
    assert wrong_rooms(path, FILES[path]) == []


def test_the_loop_reaches_fast_forward_by_one_module() -> None:
    assert len(seam(FILES)) <= 1, seam(FILES)


def test_every_package_and_every_folder_of_engine_is_walked() -> None:
    assert {path.split("/")[0] for path in FILES} == set(PACKAGES)
    folders = {path.split("/")[1] for path in FILES if path.startswith("engine/")}
    assert folders - {"__init__.py"} == set(ROOMS)


@pytest.mark.parametrize(
    ("path", "line", "wrong"),
    [
        ("policies/kv/a.py", "import random", ["random"]),
        ("policies/a.py", "from sim.devices.device import Device", ["sim.devices.device"]),
        ("sim/cost/a.py", "def f():\n    import torch.nn", ["torch.nn"]),
        ("engine/loop/a.py", "from policies.composed import A", ["policies.composed"]),
        ("models/a.py", "if TYPE_CHECKING:\n    import engine.loop", ["engine.loop"]),
        ("analysis/pages/a.py", "from engine.memory.ledger import A", ["engine.memory.ledger"]),
        ("analysis/a.py", f"from {SCHEMA} import TABLES", []),
        ("runtime/measure/meter.py", f"from {SCHEMA} import TABLES", [SCHEMA]),
        ("runtime/measure/calibrate.py", f"from {SCHEMA} import TABLES", []),
        ("runtime/a.py", "from engine.results import schema", [SCHEMA]),
        ("tandem/cli/a.py", "from runtime.executors.cuda import CudaExecutor", []),
    ],
)
def test_a_wrong_direction_between_packages_is_seen(path: str, line: str, wrong: list[str]) -> None:
    assert wrong_packages(path, line) == wrong


@pytest.mark.parametrize(
    ("room", "line", "wrong"),
    [
        ("contract", "from engine.memory.ledger import A", ["engine.memory.ledger"]),
        ("contract", "from engine.contract.plan import Plan", []),
        ("memory", "def f():\n    from engine.loop.engine import A", ["engine.loop.engine"]),
        ("memory", "if TYPE_CHECKING:\n    import engine.loop.engine", ["engine.loop.engine"]),
        ("results", "from engine.memory.ledger import A", ["engine.memory.ledger"]),
        ("results", "from engine import loop", ["engine.loop"]),
        ("loop", "from engine.laws.check_replay import A", ["engine.laws.check_replay"]),
        ("loop", "from engine.memory.ledger import A", []),
        ("loop", "from engine.fast_forward.jump import A", []),
        ("fast_forward", "from engine.loop.state import A", []),
        ("fast_forward", "from engine.laws.check_replay import A", ["engine.laws.check_replay"]),
        (
            "laws",
            "from engine.fast_forward import jump",
            ["engine.fast_forward.jump", "engine.fast_forward"],
        ),
    ],
)
def test_a_wrong_direction_inside_engine_is_seen(room: str, line: str, wrong: list[str]) -> None:
    assert wrong_rooms(f"engine/{room}/a.py", line) == wrong


def test_a_second_way_to_fast_forward_is_seen() -> None:
    files: Mapping[str, str] = {
        "engine/loop/a.py": "from engine.fast_forward.a import A",
        "engine/loop/b.py": "from engine.fast_forward import b",
        "engine/memory/c.py": "from engine.fast_forward.c import C",
    }
    assert seam(files) == {"engine.fast_forward.a", "engine.fast_forward.b"}


def test_triton_is_imported_by_the_kernels_only_and_those_where_they_were_chosen() -> None:
    """Other modules import the kernels inside functions; runtime.serving.fused is one of them."""
    kernels = {path for path in FILES if path.startswith("runtime/kernels/")}
    needing, found = set[str](), {"triton"}
    while found - needing:  # kernels that import triton, and those that import these
        needing |= found
        found = {_module(path) for path in kernels if needing & set(at_once(path))}
    needing.add("runtime.serving.fused")
    assert len(needing) > 3 and "runtime.kernels.shapes" not in needing
    for path in FILES:
        assert _module(path) in needing or not needing & set(at_once(path)), path


def _module(path: str) -> str:
    return path.removesuffix(".py").replace("/", ".")


def at_once(path: str) -> Iterator[str]:
    """What a file imports when it is imported itself."""
    body = [node for node in parsed(FILES[path]).body if not isinstance(node, DEFINITIONS)]
    return named(ast.unparse(ast.Module(body, [])))
