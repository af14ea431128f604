"""The compiled form: the same tables, byte for byte; never of other sources than those here."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from engine import engine
from engine.model import ModelSpec
from engine.policy import Composed
from policies.paged_restart import PagedRestart
from policies.vllm_v1 import VllmV1
from sim.kernel_profile import KernelProfileCost
from sim.ragged import Ragged
from sim.skew import Skew
from sim.table import Table
from tandem import compiled
from tests.jumps import Shaped, simulated
from tests.replays import MEMORY, SCHEDULING, random_requests

OPEN = "from tests.test_compiled import tell; tell()"


def tell() -> None:
    """Prints the form of this process and the hashes of its runs."""
    print(compiled.form(), *digests(), sep="\n")


def digests() -> Iterator[str]:
    """Of all tables of runs with little memory: every policy, run-ahead, prefix caching."""
    schedulings = {**SCHEDULING, "v1": VllmV1(token_budget=24, max_jobs=12)}
    memories = {**MEMORY, "kept": PagedRestart(0.0, prompts="must_fit", prefix_caching=True)}
    requests = [
        replace(
            r,
            prefix_ids=(r.request_id % 3, *range(1, -(-r.prompt_tokens // 8))),
            prefix_block_tokens=8,
        )
        for r in random_requests(7, 60, rate=400.0)
    ]
    for scheduling, memory, depth in product(schedulings, memories, (1, 2)):
        policy = Composed(schedulings[scheduling], memories[memory])
        for cost in (Shaped(700), kernels()) if memory == "kept" else (Shaped(700),):
            run = simulated(policy, requests, True, cost, 60, 40, depth)
            tables = {name: table.to_pylist() for name, table in run.recorder.tables().items()}
            told = hashlib.sha256(repr(tables).encode()).hexdigest()
            yield f"{scheduling} {memory} {cost.form} {depth} {run.asked} {told}"


def kernels() -> KernelProfileCost:
    """Made-up times of single layers: unequal between nodes and beyond them."""
    axes = product((0, 32), (0, 64), (0, 4, 9), (0, 16, 70))
    rows = [(p, k, n, c, 3.0 + p / 7 + k / 90 + (1 + n) * (1 + c * c / 900)) for p, k, n, c in axes]
    dense, head = Table(((1, 20, 90),), (9e3, 11e3, 4e4)), Table(((1, 8),), (2e3, 5e3))
    model = ModelSpec("tiny", "llama", 2, 64, 4, 2, 16, 128, 256, 256)
    return KernelProfileCost(dense, head, Ragged.of(rows), Skew(0.3), model, "a test")


@pytest.mark.slow
def test_both_forms_give_the_same_tables() -> None:
    if lacking := compiled.missing():
        pytest.skip(lacking)
    compiled.build()
    plain = {**os.environ, "PYTHONPATH": str(compiled.ROOT), "PYTHONSAFEPATH": "1"}
    told = [
        subprocess.run(
            [sys.executable, "-c", OPEN], env=env, capture_output=True, text=True, check=True
        ).stdout.splitlines()
        for env in (plain, compiled.environment())
    ]
    assert [lines[0] for lines in told] == ["interpreted", "compiled"]
    assert told[0][1:] == told[1][1:]
    assert len({line.split()[-1] for line in told[0][1:]}) > 20, "the runs are not all alike"


def test_without_a_compiler_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CC", "no-such-compiler -O2")
    assert compiled.main([]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_a_build_of_other_sources_does_not_pass_for_the_compiled_form(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "engine").mkdir()
    monkeypatch.setattr(engine, "__file__", str(tmp_path / "engine" / "engine.so"))
    with pytest.raises(ValueError, match="make compiled"):
        compiled.form()
    (tmp_path / compiled.STAMP).write_text(compiled.sources())
    assert compiled.form() == "compiled"
    (tmp_path / compiled.STAMP).write_text("older")
    with pytest.raises(ValueError, match="make compiled"):
        compiled.form()


def test_classes_are_marked_in_the_copy_alone() -> None:
    source = "from __future__ import annotations\n\n\nclass Shortage(MemoryError):\n    pass\n"
    assert compiled.marked(source, {}) == source
    marked = compiled.marked(source, {"Shortage": compiled.NOT_NATIVE})
    assert "@mypyc_attr(native_class=False)\nclass Shortage(" in marked
    assert marked.count("import mypyc_attr") == 1
    with pytest.raises(AssertionError, match="Gone"):
        compiled.marked(source, {"Gone": compiled.OPEN})


def test_all_that_is_compiled_is_there() -> None:
    for package, names in compiled.MODULES.items():
        for name in names.split():
            assert (compiled.ROOT / package / f"{name}.py").is_file()
    assert all((compiled.ROOT / name).is_file() for name in compiled.MARKS)
