"""The import directions of DESIGN.md (Layers), read from the source with ast."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping

import pytest

from tests.laws.house import PACKAGES, Tree, imports, module_of, parsed, tree

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
BELOW = {"models", "traces"}
CONTRACT = "engine.contract"
# What the modules of a folder may import beside their own folder. An entry is a folder, whose inner
# folders have entries of their own, a module, or another package with all that it holds. The key of
# a package stands for the modules beside its folders. The `__init__` of each folder says this too.
ROOMS: dict[str, set[str]] = {
    "traces": {"traces.serving", "traces.training"},
    "traces.serving": {"traces", "traces.training.recipe"},
    "traces.training": {"traces", "traces.serving"},
    "models": {"traces"},
    "models.training": {"models", "traces"},
    "engine": set(),
    "engine.contract": BELOW,
    "engine.results": {"traces", CONTRACT},
    "engine.memory": {"traces", CONTRACT, "engine.results"},
    "engine.loop": {"traces", CONTRACT, "engine.results", "engine.memory"},
    "engine.fast_forward": {CONTRACT, "engine.results", "engine.memory", "engine.loop"},
    "engine.laws": {"traces", CONTRACT, "engine.results", "engine.memory"},
    "policies": set(),
    "policies.kv": {CONTRACT},
    "policies.planners": {CONTRACT, *BELOW, "policies.training"},
    "policies.routing": {CONTRACT},
    "policies.scheduling": {CONTRACT},
    "policies.sharing": {CONTRACT, "policies.training"},
    "policies.training": {CONTRACT, "traces"},
    "sim": {CONTRACT, "sim.cost", "sim.devices"},
    "sim.cost": {CONTRACT, *BELOW, "sim.devices"},
    "sim.devices": {CONTRACT, "models"},
    "sim.fit": {CONTRACT, *BELOW, "sim.cost", "engine.results.plan_log"},
    "sim.foreign": {CONTRACT, "models", "sim.cost", "sim.devices"},
    "runtime": set(),
    "runtime.client": {"traces"},
    "runtime.executors": {CONTRACT, "runtime.measure", "runtime.serving", "runtime.training"},
    "runtime.finetuning": {
        *(CONTRACT, *BELOW, "runtime.executors.machine"),
        *("runtime.serving", "runtime.training"),
    },
    "runtime.kernels": {"models", "runtime.serving"},
    "runtime.measure": {
        *(CONTRACT, *BELOW, "runtime.executors.machine"),
        *("runtime.serving", "runtime.training"),
    },
    "runtime.serving": {
        *(CONTRACT, "models", "runtime.executors.device", "runtime.executors.machine"),
        *("runtime.kernels", "runtime.training.store"),
    },
    "runtime.training": {
        *(CONTRACT, "models", "traces.training", "traces.files"),
        *("runtime.executors.machine", "runtime.serving.kv", "runtime.serving.model"),
    },
    "analysis": {SCHEMA},
    "analysis.ab": {"analysis", SCHEMA},
    "analysis.figures": {"analysis", "analysis.ab", SCHEMA},
    "analysis.figures.experiments": {"analysis", "analysis.figures", SCHEMA},
    "analysis.pages": {
        *("analysis", "analysis.ab", "analysis.figures", "analysis.figures.experiments", SCHEMA),
    },
    "tandem": {
        *PACKAGES,
        *("tandem.cli", "tandem.config", "tandem.fidelity", "tandem.sweeps", "tandem.wiring"),
    },
    "tandem.fidelity": {
        *("analysis", "tandem.config", "tandem.wiring"),
        *("tandem.sweeps.point", "tandem.cli.errors", "tandem.cli.compare"),
    },
    "tandem.cli": {
        *("traces", "engine", "policies", "sim", "analysis"),
        *("tandem", "tandem.config", "tandem.fidelity", "tandem.sweeps", "tandem.wiring"),
    },
    "tandem.config": {"models", "analysis", "conf", "tandem.cli.errors"},
    "tandem.sweeps": {
        *("traces", "analysis", "tandem.config", "tandem.wiring"),
        *("tandem.cli.errors", "tandem.cli.catalog", "tandem.cli.__main__"),
    },
    "tandem.wiring": {
        *({*PACKAGES} - {"tandem"}),
        *("tandem.config", "tandem.compiled", "tandem.cli.errors", "tandem.cli.terminal"),
        "tandem.__version__",
    },
    "conf": set(),
}
# Modules that may import more than the others of their folder.
BESIDE: dict[str, set[str]] = {
    "engine.laws.check_policy": {"engine.loop"},
    "policies.composed": {CONTRACT, "engine.memory.dry_run"},
    "policies.scheduling.recorded": {"engine.results.plan_log"},
    "runtime.measure.calibrate": {"engine.results"},  # writes its profile in the tables of a run
}
# One module of the loop builds fast_forward, a subclass of the loop's PlanReuse.
SEAM = ("engine.loop", "engine.fast_forward")


def named(text: str) -> Iterator[str]:
    """The modules that a file imports anywhere.

    `from a.b import c` counts as a.b, and as a.b.c where a.b is a folder.
    """
    for module, names in imports(text):
        if module in ROOMS and names:
            yield from (f"{module}.{name}" for name in names)
        else:
            yield module


def room_of(module: str) -> str:
    """The folder in which a module lies, or "" for a module that is not of this repository."""
    while module not in ROOMS and module:
        module = module.rpartition(".")[0]
    return module


def wrong_packages(path: str, text: str) -> list[str]:
    """The imports of a file that its package must not have, wherever in it the file lies."""
    package, wrong = path.split("/")[0], []
    for name in named(text):
        top = name.split(".")[0]
        allowed = {package, *MAY_IMPORT[package]}
        if top in PACKAGES and not ({top, name} & allowed):
            wrong.append(name)
        if top in MUST_NOT_IMPORT.get(package, set()):
            wrong.append(name)
    return wrong


def wrong_rooms(path: str, text: str) -> list[str]:
    """The imports of a file that its folder must not have."""
    module = module_of(path)
    room, package = room_of(module), module.split(".")[0]
    allowed = {room, *ROOMS[room], *BESIDE.get(module, set())}

    def is_wrong(name: str) -> bool:
        other, top = room_of(name), name.split(".")[0]
        stands_for = {name, other} if top == package else {name, other, top}
        return bool(other) and not stands_for & allowed and (room, other) != SEAM

    return [name for name in dict.fromkeys(named(text)) if is_wrong(name)]


def seam(files: Tree) -> set[str]:
    """The modules of fast_forward that the loop imports."""
    room, other = SEAM
    return {
        name
        for path, text in files.items()
        if room_of(module_of(path)) == room
        for name in named(text)
        if room_of(name) == other and name != other
    }


def rule_of(folder: str) -> set[str]:
    """What a folder may import; of a package, what all of its folders may import outside of it."""
    is_package = folder in PACKAGES
    rules = [
        allowed
        for name, allowed in (*ROOMS.items(), *BESIDE.items())
        if room_of(name) == folder or (is_package and name.startswith(f"{folder}."))
    ]
    found = set[str]().union(*rules)
    if is_package:  # without its own folders, and without parts of what is allowed whole
        tops = {folder, *found & {*PACKAGES}}
        found = {name for name in found if name in tops or name.split(".")[0] not in tops}
    return found - {folder}


def told_rule(folder: str, text: str) -> set[str]:
    """What the docstring of a folder says that it may import: the names after "may import".

    `of a.b only c.py` stands for a.b.c, `every package` for all others, and the bare name of a
    folder of the package for that folder.
    """
    package, of = folder.split(".")[0], ""
    doc = " ".join((ast.get_docstring(parsed(text)) or "").split())
    said = re.search(r"\b(?:[Mm]ay import|folder imports)\b(.*?)(?:[.;:] |$)", doc + " ")
    found = set[str]()
    for word in re.findall(r"every|[a-z_]+(?:\.[a-z_]+)*", said[1] if said else ""):
        if word == "every":
            found |= {*PACKAGES} - {package}
        elif word.endswith(".py"):
            found = (found - {of}) | {f"{of}.{word.removesuffix('.py')}"}
        elif f"{package}.{word}" in ROOMS and word not in PACKAGES:
            found.add(f"{package}.{word}")
        elif word.split(".")[0] in PACKAGES:
            found.add(of := word)
    return found


FILES = tree(*PACKAGES)


@pytest.mark.parametrize("path", FILES)
def test_imports_point_one_way(path: str) -> None:
    assert wrong_packages(path, FILES[path]) == []
    assert wrong_rooms(path, FILES[path]) == []


def test_the_loop_reaches_fast_forward_by_one_module() -> None:
    assert len(seam(FILES)) <= 1, seam(FILES)


def test_every_package_and_every_folder_has_a_rule() -> None:
    assert {path.split("/")[0] for path in FILES} == set(PACKAGES)
    assert {module_of(path) for path in FILES if path.endswith("/__init__.py")} == set(ROOMS)
    assert {module_of(path) for path in FILES} >= set(BESIDE)


@pytest.mark.parametrize("package", PACKAGES)
def test_no_folder_may_import_more_than_its_package(package: str) -> None:
    allowed = MAY_IMPORT[package]
    rule = {name for name in rule_of(package) if not {name, name.split(".")[0]} & allowed}
    assert rule == set()


@pytest.mark.parametrize("folder", ROOMS)
def test_a_folder_says_what_it_may_import(folder: str) -> None:
    text = FILES[f"{folder.replace('.', '/')}/__init__.py"]
    assert told_rule(folder, text) == rule_of(folder)


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
        ("tandem/cli/a.py", "from runtime.executors.cuda import CudaExecutor", []),
    ],
)
def test_a_wrong_direction_between_packages_is_seen(path: str, line: str, wrong: list[str]) -> None:
    assert wrong_packages(path, line) == wrong


@pytest.mark.parametrize(
    ("path", "line", "wrong"),
    [
        # inside engine
        ("engine/contract/a.py", "from engine.memory.ledger import A", "engine.memory.ledger"),
        ("engine/contract/a.py", "from engine.contract.plan import Plan", ""),
        ("engine/memory/a.py", "def f():\n    from engine.loop.a import A", "engine.loop.a"),
        ("engine/memory/a.py", "if TYPE_CHECKING:\n    import engine.loop.a", "engine.loop.a"),
        ("engine/results/a.py", "from engine.memory.ledger import A", "engine.memory.ledger"),
        ("engine/results/a.py", "from engine import loop", "engine.loop"),
        ("engine/loop/a.py", "from engine.laws.check_replay import A", "engine.laws.check_replay"),
        ("engine/loop/a.py", "from engine.memory.ledger import A", ""),
        ("engine/loop/a.py", "from engine.fast_forward.jump import A", ""),
        ("engine/fast_forward/a.py", "from engine.loop.state import A", ""),
        ("engine/fast_forward/a.py", "from engine.laws.a import A", "engine.laws.a"),
        ("engine/laws/a.py", "from engine.fast_forward import jump", "engine.fast_forward.jump"),
        ("engine/laws/a.py", "from engine.loop.engine import A", "engine.loop.engine"),
        ("engine/laws/check_policy.py", "from engine.loop.engine import A", ""),
        # policies
        ("policies/kv/a.py", "from engine.loop.engine import A", "engine.loop.engine"),
        ("policies/kv/a.py", "from engine.fast_forward.jump import A", "engine.fast_forward.jump"),
        ("policies/kv/a.py", "from policies.scheduling.orca import A", "policies.scheduling.orca"),
        (
            "policies/kv/a.py",
            "from engine.memory.dry_run import A",
            "engine.memory.dry_run",
        ),
        ("policies/composed.py", "from engine.memory.dry_run import A", ""),
        ("policies/composed.py", "from engine.memory.ledger import A", "engine.memory.ledger"),
        ("policies/scheduling/a.py", "from policies.kv import orca", "policies.kv.orca"),
        (
            "policies/scheduling/a.py",
            "from engine.results.plan_log import A",
            "engine.results.plan_log",
        ),
        ("policies/scheduling/recorded.py", "from engine.results.plan_log import A", ""),
        (
            "policies/scheduling/recorded.py",
            "import engine.results.recorder",
            "engine.results.recorder",
        ),
        ("policies/routing/a.py", "from models.spec import ModelSpec", "models.spec"),
        ("policies/planners/a.py", "from models.training.shape import TrainingShape", ""),
        ("policies/planners/a.py", "from policies.composed import Composed", "policies.composed"),
        (
            "policies/training/a.py",
            "from policies.planners.placement import A",
            "policies.planners.placement",
        ),
        ("policies/sharing/a.py", "from policies.kv.paged_swap import A", "policies.kv.paged_swap"),
        # sim
        ("sim/executor.py", "from engine.loop.engine import A", "engine.loop.engine"),
        ("sim/cost/a.py", "import engine.fast_forward.jump", "engine.fast_forward.jump"),
        ("sim/cost/a.py", f"from {SCHEMA} import TABLES", SCHEMA),
        ("sim/devices/a.py", "from sim.fit.solve import A", "sim.fit.solve"),
        ("sim/devices/a.py", "from traces.serving.request import A", "traces.serving.request"),
        ("sim/fit/a.py", "from sim.executor import SimExecutor", "sim.executor"),
        ("sim/foreign/a.py", "from sim.fit import solve", "sim.fit.solve"),
        ("sim/foreign/a.py", "from sim.cost.contract import A", ""),
        # runtime
        ("runtime/executors/a.py", "from engine.loop.engine import A", "engine.loop.engine"),
        ("runtime/serving/a.py", "import engine.fast_forward.jump", "engine.fast_forward.jump"),
        ("runtime/client/a.py", "from runtime.executors.wall import A", "runtime.executors.wall"),
        ("runtime/client/a.py", "from engine.contract.plan import Plan", "engine.contract.plan"),
        ("runtime/kernels/a.py", "from runtime.training.store import A", "runtime.training.store"),
        ("runtime/serving/a.py", "from runtime.training.store import A", ""),
        ("runtime/serving/a.py", "from runtime.training.saved import A", "runtime.training.saved"),
        ("runtime/training/a.py", "from traces.serving.request import A", "traces.serving.request"),
        (
            "runtime/training/a.py",
            "from runtime.kernels import available",
            "runtime.kernels.available",
        ),
        ("runtime/measure/meter.py", f"from {SCHEMA} import TABLES", SCHEMA),
        ("runtime/measure/calibrate.py", f"from {SCHEMA} import TABLES", ""),
        ("runtime/a.py", "from engine.results import schema", SCHEMA),
        # traces, models, analysis, tandem
        ("traces/serving/a.py", "from traces.training.texts import A", "traces.training.texts"),
        ("traces/serving/a.py", "from traces.training.recipe import Recipe", ""),
        ("traces/training/a.py", "from traces.store import A", ""),
        ("models/a.py", "from models.training.shape import A", "models.training.shape"),
        ("models/training/a.py", "from models.spec import A", ""),
        ("analysis/a.py", "from analysis.figures.style import RUNS", "analysis.figures.style"),
        ("analysis/figures/a.py", "from analysis.pages import cells", "analysis.pages.cells"),
        ("analysis/figures/a.py", "from analysis.run import Run", ""),
        ("analysis/pages/a.py", "from engine.results.recorder import A", "engine.results.recorder"),
        ("tandem/config/a.py", "from tandem.wiring.folder import A", "tandem.wiring.folder"),
        ("tandem/config/a.py", "from tandem.cli.errors import UserError", ""),
        ("tandem/config/a.py", "from sim.cost.tables import A", "sim.cost.tables"),
        ("tandem/sweeps/a.py", "from tandem.cli import run", "tandem.cli.run"),
        ("tandem/wiring/a.py", "from tandem.sweeps.grid import A", "tandem.sweeps.grid"),
        ("tandem/wiring/a.py", "from runtime.executors.cuda import A", ""),
        ("tandem/cli/a.py", "from runtime.executors.cuda import A", "runtime.executors.cuda"),
        ("conf/a.py", "import traces.store", "traces.store"),
    ],
)
def test_a_wrong_direction_between_folders_is_seen(path: str, line: str, wrong: str) -> None:
    assert wrong_rooms(path, line) == ([wrong] if wrong else [])


@pytest.mark.parametrize("folder", sorted({*ROOMS} - {"tandem"}))
def test_the_rule_of_each_folder_can_fail(folder: str) -> None:
    path = f"{folder.replace('.', '/')}/a.py"
    assert wrong_rooms(path, "from tandem.cli.run import main") == (
        [] if folder == "tandem.cli" else ["tandem.cli.run"]
    )


@pytest.mark.parametrize(
    ("folder", "doc", "told"),
    [
        (
            "sim.fit",
            "Fits. May import engine.contract and sim.cost; never torch.",
            "engine.contract sim.cost",
        ),
        (
            "engine.memory",
            "The folder imports contract and\nresults.",
            "engine.contract engine.results",
        ),
        (
            "tandem.a",
            "It may import `conf` and, of `tandem.cli`, only `run.py`.",
            "conf tandem.cli.run",
        ),
        ("models", "May import every other package.", " ".join(sorted({*PACKAGES} - {"models"}))),
        ("models", "Counts engine.contract.", ""),
    ],
)
def test_the_rule_in_a_docstring_is_read(folder: str, doc: str, told: str) -> None:
    assert told_rule(folder, f'"""{doc}"""') == {*told.split()}


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
