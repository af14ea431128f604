"""Where a result comes from: enough to make it again."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# What claims write about the code, as pathspecs; no run depends on it.
RESULTS = (":(top,exclude)benchmarks/results", ":(top,exclude)benchmarks/CLAIMS.*")
LIBRARIES = ("tandem", "simpy", "torch", "transformers", "hydra-core", "numpy", "pandas", "pyarrow")


@cache  # of the code that is loaded: it does not change under a process
def commit() -> dict[str, Any]:
    """The commit of the checkout, and whether tracked files differ from it, results aside."""
    head = _git("rev-parse", "HEAD")
    changed = _git("status", "--porcelain", "-uno", "--", ":/", *RESULTS)
    return {"commit": head, "dirty": bool(changed) if head else None}


@cache
def versions() -> dict[str, str | None]:
    """Versions of Python and of the libraries that a result may depend on."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


@cache
def host() -> dict[str, Any]:
    """The machine that the process ran on, without its name."""
    return {
        "system": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "executable": sys.executable,
    }


def _git(*words: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True, timeout=20
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())
