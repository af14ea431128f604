"""The kernels as NVIDIA's assembler makes them: they compile, spill nothing and leave room."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
SHARED_BYTES = 99 * 1024  # what a program may have on the smallest of these GPUs (8.6, 8.9)


def told(tmp_path: Path, *words: str) -> str:
    """What a module prints in a process of its own: where the interpreter was chosen, nothing
    compiles."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", *words]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_compile_for_a_gpu_that_is_not_here(capability: int, tmp_path: Path) -> None:
    rows = [
        line.split()
        for line in told(tmp_path, "tests.kernels.compiled", str(capability)).splitlines()
    ]
    kernels = {row[3].rstrip(":") for row in rows}
    assert kernels == {
        "paged_attention._split", "paged_attention._join", "paged_attention._tile", "norm._rows",
        "norm._block", "rotate._row",
    }  # fmt: skip
    for row in rows:
        stack, shared = int(row[6]), int(row[9])
        assert stack == 0, " ".join(row)
        assert shared <= SHARED_BYTES, " ".join(row)


def test_no_launch_compiles_and_construction_few(tmp_path: Path) -> None:
    """400 random ones met 40 variants, each inside a span: by the address of a part of the upload,
    and by the width of the page tables."""
    lines = told(tmp_path, "tests.kernels.variants").splitlines()
    counts = {line.split()[0]: int(line.split()[1]) for line in lines}
    assert counts["launches"] == 0 and 0 < counts["construction"] <= 16, lines
