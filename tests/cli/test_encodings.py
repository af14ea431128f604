"""Folders with umlauts, and locales that know none: files are UTF-8 wherever they are."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tandem.config.compose import composed
from tandem.wiring.folder import PACKAGES

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["model=micro_llama", "limit=3", "arrival=all_at_once"]
MODES = {"open": 1, "read_text": 0, "write_text": 1}  # where the mode or encoding may stand


def unnamed(path: Path) -> list[int]:
    """Lines of a module where a text file is opened in the encoding of the locale."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call):
            continue
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if name not in MODES or any(word.arg == "encoding" for word in node.keywords):
            continue
        given = [a.value for a in node.args if isinstance(a, ast.Constant)]
        is_method_of_ours = name == "open" and not node.keywords and not given
        is_function_of_ours = name != "open" and isinstance(node.func, ast.Name)
        if is_method_of_ours or is_function_of_ours or "utf-8" in given:
            continue
        modes = [mode for mode in given if isinstance(mode, str)]
        if not any("b" in mode or ":" in mode for mode in modes):  # w:gz is tarfile's
            found.append(node.lineno)
    return found


def test_every_text_file_of_ours_names_its_encoding() -> None:
    modules = [
        path for name in (*PACKAGES, "benchmarks") for path in sorted((ROOT / name).rglob("*.py"))
    ]
    assert len(modules) > 250
    assert {str(p.relative_to(ROOT)): found for p in modules if (found := unnamed(p))} == {}


def test_an_encoding_that_is_left_out_is_found(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text("p.read_text()\nopen('a', 'rb')\nopen('a')\np.open('w')\np.write_text(x)\n")
    assert unnamed(path) == [1, 3, 4, 5]


@pytest.mark.slow
def test_a_folder_with_umlauts_works_where_the_locale_has_none(tmp_path: Path) -> None:
    folder = tmp_path / "größe [1] it's"
    (folder / "mein/scheduling").mkdir(parents=True)
    (folder / "mein/scheduling/eigenes.yaml").write_text(
        "# für größere Mengen\n_target_: eigenes.Eigenes\n", encoding="utf-8"
    )
    (folder / "eigenes.py").write_text(
        "from policies.scheduling.chunked_prefill import ChunkedPrefill\n\n\n"
        "class Eigenes(ChunkedPrefill):\n    'Größe.'\n",
        encoding="utf-8",
    )
    asked = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C", "LANG": "C"}
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])

    def tandem(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "tandem.cli", *words],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": path, **asked},
            capture_output=True,
        )
        assert done.returncode == 0, done.stderr.decode("utf-8", "replace")
        return done.stdout.decode("utf-8")

    words = ["--config-dir", "mein", "scheduling=eigenes", *SMALL]
    run = tandem("run", *words).splitlines()[-1]
    assert json.loads((folder / run / "metrics.json").read_text("utf-8"))["num_finished"] == 3
    at = composed(["scheduling=eigenes"], str(folder / "mein")).config["scheduling"]
    assert at == {"_target_": "eigenes.Eigenes"}, "as sweeps compose it"
