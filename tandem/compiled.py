"""The hot path compiled ahead of time: parts of engine, policies and sim as C extensions (mypyc).

`python -m tandem.compiled` builds, unless the build is of these sources; `python -m tandem.compiled
WORDS` does that and runs `python WORDS` on the build. Results are those of the interpreted form,
byte for byte (tests/laws/test_compiled.py). What is compiled is a copy in build/compiled: nothing
lies beside the sources that could shadow them, and a build of other sources is refused.
"""

from __future__ import annotations

import ast
import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "compiled"
STAMP = "sources.sha256"  # in a build that is whole: what it was made of
PACKAGES = ("models", "engine", "policies", "sim")

# Not what Hydra builds: its arguments are checked by annotations, of which mypyc keeps little. And
# not what adds floats up by sum(... for ...): mypyc adds plainly, Python 3.12 with compensation
# (sim/cost/tables.py). And not what has a cached_property: compiled, it is reckoned at every look
# (sim/cost/contract.py). Reads of a View or Job are noted only where these classes are interpreted
# (can_be_seen of engine/fast_forward/reads.py), which would cost every replay more than it saves.
MODULES = {
    "engine/contract": (
        "executor job kv_check plan plan_check policy progress regions training_progress view"
    ),
    "engine/memory": "dry_run ledger pool room_shares scoreboard",
    "engine/loop": "admission asking completions engine issuing state",
    "engine/fast_forward": "decode_batch fast_forward horizon jump repeated_plan standing_plan",
    "engine/results": "outcomes recorder",
    "policies": "composed",
    "policies/kv": "paged_allocation",
    "policies/scheduling": "order",
    "sim": "executor",
    "sim/cost": "piecewise",
    "sim/foreign": "kernel_profile vidur",
}

# What mypyc must be told about a source; written into the copy alone.
NOT_NATIVE = "native_class=False"  # of bases that mypyc cannot inherit, or read by __slots__
OPEN = "allow_interpreted_subclasses=True"
MARKS = {
    "engine/contract/executor.py": {"Executor": OPEN, "Repeater": OPEN},
    "engine/contract/training_progress.py": {"TrainingProgress": NOT_NATIVE},
    "engine/contract/regions.py": {"Shortage": NOT_NATIVE},
    "engine/loop/engine.py": {"Stalled": NOT_NATIVE},
    "engine/results/recorder.py": {"Recorder": OPEN},
    "policies/kv/paged_allocation.py": {"PagedRules": OPEN},
    "sim/foreign/kernel_profile.py": {"KernelProfileCost": NOT_NATIVE},
    "sim/cost/piecewise.py": {"Ragged": NOT_NATIVE, "Lookup": NOT_NATIVE},
    "sim/foreign/vidur.py": {"VidurCost": NOT_NATIVE},
}
RECORDS = {  # dataclasses made so often that the `__init__` which dataclass makes would tell
    "engine/contract/executor.py": ("Launch",),
    "engine/contract/plan.py": ("Compute", "Copy", "Free", "Plan"),
    "engine/memory/pool.py": ("Owed", "Returned"),
    "engine/fast_forward/repeated_plan.py": ("RunSegment", "RepeatedSteps"),
    "engine/contract/view.py": ("View",),
}

# What is not compiled is checked with numpy's types elsewhere (make check), and not here without.
CONFIG = """[mypy]
mypy_path = {root}
check_untyped_defs = True
ignore_missing_imports = True
ignore_errors = True
[mypy-{compiled}]
ignore_errors = False
[mypy-numpy.*,pandas.*,pyarrow.*]
follow_imports = skip
"""
SETUP = """from mypyc.build import mypycify
from setuptools import setup

modules = mypycify(["--config-file", "mypy.ini", *{paths!r}], debug_level="0", target_dir="c")
setup(name="tandem-compiled", packages=[], ext_modules=modules)
"""


def main(words: Sequence[str] | None = None) -> int:
    """Builds, and runs what the words say; 1 with one line where something is missing."""
    chosen = sys.argv[1:] if words is None else list(words)
    if lacking := missing():
        print(f"compiled: {lacking}", file=sys.stderr)
        return 1
    build()
    if not chosen:
        return 0
    return subprocess.run([sys.executable, *chosen], env=environment()).returncode


def missing() -> str | None:
    """What this machine lacks for a build, and what helps; None where it lacks nothing."""
    compiler = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()[0]
    if shutil.which(compiler) is None:
        return f"no C compiler ({compiler}); install one or go on with the interpreted form"
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        return "no Python.h; install Python's headers (python3-dev) or take another Python"
    try:
        version("mypy")
    except PackageNotFoundError:
        return "no mypyc; install mypy (pip install -e '.[dev]')"
    return None


def environment() -> dict[str, str]:
    """The environment in which the build's modules are found before the sources."""
    path = os.pathsep.join([str(BUILD), str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}


def form() -> str:
    """`compiled` or `interpreted`: what this process runs.

    ValueError for a build of other sources than the present ones.
    """
    from engine.loop import engine

    if engine.__file__.endswith(".py"):
        return "interpreted"
    stamp = Path(engine.__file__).resolve().parents[2] / STAMP
    if not stamp.is_file() or stamp.read_text(encoding="utf-8") != sources():
        raise ValueError(f"{stamp.parent} was built of other sources; run make compiled")
    return "compiled"


def sources() -> str:
    """The hash of all that a build depends on."""
    found = hashlib.sha256(f"{sys.version} {version('mypy')}".encode())
    for path in [Path(__file__).resolve(), ROOT / "traces" / "serving" / "request.py", *copied()]:
        found.update(f"{path.relative_to(ROOT)}\n".encode() + path.read_bytes())
    return found.hexdigest()


def copied() -> list[Path]:
    """All sources of the packages, compiled or not."""
    return [path for name in PACKAGES for path in sorted((ROOT / name).rglob("*.py"))]


def build() -> None:
    """Copies the packages and compiles the copy, unless that was done. SystemExit if it fails.

    Waits for another process that builds there now: that may be this very build.
    """
    import fcntl

    BUILD.parent.mkdir(parents=True, exist_ok=True)
    with BUILD.with_suffix(".lock").open("w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        stamp, made_of = BUILD / STAMP, sources()
        if not stamp.is_file() or stamp.read_text(encoding="utf-8") != made_of:
            _build()
            stamp.write_text(made_of, encoding="utf-8")


def _build() -> None:
    shutil.rmtree(BUILD, ignore_errors=True)
    for path in copied():
        name = path.relative_to(ROOT).as_posix()
        (BUILD / name).parent.mkdir(parents=True, exist_ok=True)
        (BUILD / name).write_text(prepared(name, path.read_text(encoding="utf-8")), "utf-8")
    paths = [f"{package}/{name}.py" for package, names in MODULES.items() for name in names.split()]
    compiled = ",".join(path.removesuffix(".py").replace("/", ".") for path in paths)
    config = CONFIG.format(root=ROOT, compiled=compiled)
    (BUILD / "mypy.ini").write_text(config, encoding="utf-8")
    (BUILD / "setup.py").write_text(SETUP.format(paths=paths), encoding="utf-8")
    print(f"compiled: {len(paths)} modules into {BUILD}; some minutes", file=sys.stderr, flush=True)
    words = [sys.executable, "setup.py", "build_ext", "--inplace", "--build-temp", "c"]
    done = subprocess.run(words, cwd=BUILD, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{done.stdout[-4000:]}{done.stderr[-4000:]}\ncompiled: mypyc failed")


def prepared(name: str, text: str) -> str:
    """A source as mypyc takes it."""
    for record in RECORDS.get(name, ()):
        text = with_init(text, record)
    return with_abc(marked(text, MARKS.get(name, {})))


def with_abc(text: str) -> str:
    """A source whose abstract classes know their instances: mypyc leaves them the register of their
    base, so that any tuple would be one of a class that is a Sequence."""
    names = re.findall(r"(?m)^class (\w+)\((?:Sequence|Mapping)\[", text)
    if not names:
        return text
    lines = [f"_abc_init({name})\n" for name in names]
    return "".join([text, "\nfrom abc import _abc_init  # type: ignore\n\n", *lines])


def with_init(text: str, name: str) -> str:
    """A dataclass with its `__init__` written out: it stays the same, and frozen if it was."""
    node = next(n for n in ast.parse(text).body if isinstance(n, ast.ClassDef) and n.name == name)
    fields = [n for n in node.body if isinstance(n, ast.AnnAssign)]
    arguments = ", ".join(["self", *map(ast.unparse, fields)])
    names = [ast.unparse(field.target) for field in fields]
    body = [f"        self.{field} = {field}  # type: ignore" for field in names]
    lines, end = text.split("\n"), fields[-1].end_lineno
    return "\n".join([*lines[:end], f"    def __init__({arguments}) -> None:", *body, *lines[end:]])


def marked(text: str, marks: Mapping[str, str]) -> str:
    """A source with what mypyc must know of its classes."""
    for name, mark in marks.items():
        text, count = re.subn(rf"(?m)^class {name}\b", rf"@mypyc_attr({mark})\n\g<0>", text)
        assert count == 1, f"no class {name} to be marked"
    future = "from __future__ import annotations\n"
    return (
        text.replace(future, f"{future}from mypy_extensions import mypyc_attr\n") if marks else text
    )


if __name__ == "__main__":
    sys.exit(main())
