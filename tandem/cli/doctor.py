"""`tandem doctor`: this machine and installation, to paste into a bug report."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from tandem import __version__
from tandem.wiring.folder import ROOT, commit, host, versions

NEEDED = ("simpy", "torch", "transformers", "hydra", "omegaconf", "pandas", "pyarrow", "matplotlib")


def main(words: Sequence[str]) -> int:
    """Prints the report; 1 if something that every run needs is missing."""
    argparse.ArgumentParser(prog="tandem doctor", description=__doc__).parse_args(words)
    for name, value in lines():
        print(f"{name:<14}{value}")
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        print(f"{'missing':<14}{', '.join(missing)} (run `make setup`)")
    return 1 if missing else 0


def lines() -> Iterator[tuple[str, str]]:
    """Name and value of each line."""
    yield "version", version_line()
    yield "installed", str(ROOT)
    for name, value in {**versions(), **host()}.items():
        yield name, str(value if value is not None else "not installed")
    yield "gpu", _gpu()
    yield "shared data", _present(Path(os.environ.get("TANDEM_SHARED", "../shared")) / "data")
    yield "writable", "yes" if os.access(Path.cwd(), os.W_OK) else f"no: {Path.cwd()}"


def version_line() -> str:
    """The version, and of a checkout its commit."""
    found = commit()
    if not found["commit"]:
        return __version__
    return f"{__version__} (commit {found['commit']}{' + changes' if found['dirty'] else ''})"


def _present(path: Path) -> str:
    return f"{path.resolve()}" if path.is_dir() else f"absent ({path}; set TANDEM_SHARED)"


def _gpu() -> str:
    if find_spec("torch") is None:
        return "torch is not installed"
    try:
        return _seen_by_torch()
    except (ImportError, OSError, RuntimeError) as error:  # driver and libraries do not fit
        return f"broken: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _seen_by_torch() -> str:
    import torch

    if not torch.cuda.is_available():
        return "none that torch can use"
    free, total = torch.cuda.mem_get_info()
    name, gib = torch.cuda.get_device_name(), 2**30
    return f"{name}, {free / gib:.1f} of {total / gib:.1f} GiB free, CUDA {torch.version.cuda}"
