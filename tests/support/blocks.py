"""The code blocks of README and of the guides, and how a reader would run them.

A comment before a block marks it: `<!-- slow -->` runs it in the slow set alone, and
`<!-- not run: REASON -->` leaves it out.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PAGES = (
    "README.md",
    "docs/index.md",
    *sorted(f"docs/guide/{p.name}" for p in (ROOT / "docs/guide").glob("*.md")),
)
KINDS = ("shell", "python", "yaml", "text")
NOT_RUN = "not run: "
BLOCK = re.compile(
    r"^(?:<!-- (?P<mark>[^\n]*) -->\n)?```(?P<kind>[^\n]*)\n(?P<text>.*?)^```$", re.M | re.S
)


class Block(NamedTuple):
    """A block of a page; `mark` is the comment before it, or empty."""

    mark: str
    kind: str
    text: str


def blocks_of(text: str) -> list[Block]:
    """The blocks of a page, in their order."""
    return [
        Block(found["mark"] or "", found["kind"], found["text"]) for found in BLOCK.finditer(text)
    ]


def page(name: str) -> str:
    """The text of a page of the repository."""
    return (ROOT / name).read_text("utf-8")


def shell(name: str, *marks: str) -> list[str]:
    """The shell blocks of a page that have one of these marks."""
    found = blocks_of(page(name))
    return [block.text for block in found if block.kind == "shell" and block.mark in marks]


def run_shell(texts: Iterable[str], folder: Path, timeout_s: float) -> str:
    """Runs shell blocks one after the other in a folder that has the examples and sample traces.

    Returns:
        What they print.

    Raises:
        AssertionError: a command fails; with the errors that it told.
    """
    shims = folder / "bin"
    shims.mkdir()
    for command, words in {"tandem": "-m tandem.cli ", "python": ""}.items():
        shim = shims / command
        shim.write_text(f'#!/bin/sh\nexec "{sys.executable}" {words}"$@"\n')
        shim.chmod(0o755)
    for name in ("examples", "traces"):
        (folder / name).symlink_to(ROOT / name)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": f"{shims}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", "\n".join(texts)],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def script_of(notebook: Path) -> str:
    """The code cells of a notebook, in their order, as one script for a plain Python.

    A cell that begins with `%%writefile PATH` becomes the writing of that file.
    """
    cells = [cell for cell in json.loads(notebook.read_text("utf-8"))["cells"]]
    parts = []
    for cell in cells:
        text = "".join(cell["source"])
        if cell["cell_type"] != "code":
            continue
        if text.startswith("%%writefile "):
            first, _, rest = text.partition("\n")
            path = first.removeprefix("%%writefile ")
            text = f"from pathlib import Path\nPath({path!r}).write_text({rest!r} + chr(10))"
        parts.append(text)
    return "\n\n".join(parts) + "\n"
