"""The compiled form: the same tables, byte for byte; never of other sources than those here."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from engine.contract.rules import ContractError, Rule
from engine.loop import engine
from models.spec import ModelSpec
from policies.composed import Composed
from policies.kv.paged_restart import PagedRestart
from policies.routing.least_outstanding import LeastOutstanding
from policies.scheduling.vllm_v1 import VllmV1
from sim.cost.piecewise import Ragged, Table
from sim.foreign.kernel_profile import KernelProfileCost, Skew
from sim.foreign.vidur import BY_SHAPE, NORMS, ONCE, VidurCost
from tandem import compiled
from tandem.sweeps.point import code_version
from tests.support.fault_cases import lie, random_case
from tests.support.faults import FAULTS
from tests.support.jumps import Shaped, simulated
from tests.support.replays import MEMORY, SCHEDULING, random_requests

TOY = ModelSpec("toy", "llama", 2, 64, 4, 2, 16, 128, 211, 4096, dtype="float32")
OPEN = "from tests.laws.test_compiled import tell; tell()"


def tell() -> None:
    """Prints the form of this process, what sweeps know its code by, and hashes of its runs."""
    print(compiled.form(), code_version(), *refusals(), *digests(), sep="\n")


def refusals() -> Iterator[str]:
    """Each lie about a count of tokens, told in serving, and how often it was refused."""
    case = random_case(7, "serving")
    for name, fault in FAULTS.items():
        if Rule.TOKENS in fault.rules:
            told = [lie(case, fault, at, at) for at in range(0, 40, 2)]
            lies = [one for one in told if one.lies]
            yield f"{name}: {sum(isinstance(one.error, ContractError) for one in lies)}/{len(lies)}"


def digests() -> Iterator[str]:
    """Of all tables of runs with little memory: every policy, run-ahead, prefix caching; costs as
    the claims of speed have them; replicas."""
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

    def digest(names: tuple[str, str], cost: Any, pages: int, depth: int, **fleet: Any) -> str:
        policy = Composed(schedulings[names[0]], memories[names[1]])
        run = simulated(policy, requests, True, cost, pages, 2 * pages // 3, depth, **fleet)
        tables = {name: table.to_pylist() for name, table in run.recorder.tables().items()}
        told = hashlib.sha256(repr(tables).encode()).hexdigest()
        return f"{' '.join(names)} {depth} {run.asked} {told}"

    for names in product(schedulings, memories):
        yield from (digest(names, Shaped(700), 60, depth) for depth in (1, 2))
        yield digest(names, Shaped(700), 33, 2, devices=3, router=LeastOutstanding())
    for names in product(schedulings, ("restart", "kept")):
        yield from (digest(names, cost, 60, 2) for cost in by_hand())


def by_hand() -> tuple[VidurCost, KernelProfileCost]:
    """Costs in tables, which are compiled."""
    line = [0.01 + 0.002 * n**0.5 for n in range(200)]
    tables: dict[str, Any] = {f"{name}_ms": line for name in (*ONCE, *NORMS, *BY_SHAPE)}
    for name in ("attn_prefill_ms", "attn_decode_ms"):
        tables[name] = [[ms * (1 + 0.3 * row) for ms in line] for row in range(30)]
    axes = ((0, 16, 128), (0, 64), (0, 4, 16), (0, 32, 256))
    kernels = KernelProfileCost(
        dense=Table(((1, 64, 512),), (9e3, 2e4, 1e5)),
        head=Table(((1, 16),), (5e3, 7e3)),
        attention=Ragged.of((*at, 3.0 + sum(x**0.7 for x in at)) for at in product(*axes)),
        skew=Skew(0.3, {(0, 0, 2, 2, 0): 0.5}),
        model=TOY,
        source="by hand",
        padded_to=(1, 2, 4, 8, 16, 32, 64, 128),
        step_ns=2_000,
        host_ns_per_plan=700,
    )
    return VidurCost(tables, TOY, "by hand"), kernels


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
    refused = [line.split(": ")[1].split("/") for line in told[0] if ": " in line]
    assert sum(int(lies) for _, lies in refused) > 100
    assert all(count == lies for count, lies in refused), told[0]
    hashes = {line.split()[-1] for line in told[0][2 + len(refused) :]}
    assert len(hashes) > 20, "the runs are not all alike"


def test_without_a_compiler_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CC", "no-such-compiler -O2")
    assert compiled.main([]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_two_builds_at_once_are_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "BUILD", tmp_path / "build" / "compiled")
    compiling = list[int]()

    def compile_it(words: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        compiling.append(1)
        time.sleep(0.3)  # the other one meets this build half done
        assert (compiled.BUILD / "setup.py").is_file(), "the other build cleared it"
        return subprocess.CompletedProcess(words, 0, "", "")

    monkeypatch.setattr(compiled.subprocess, "run", compile_it)
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda _: compiled.build(), range(2)))
    assert len(compiling) == 1
    assert (compiled.BUILD / compiled.STAMP).read_text() == compiled.sources()


def test_a_build_of_other_sources_does_not_pass_for_the_compiled_form(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "engine" / "loop").mkdir(parents=True)
    monkeypatch.setattr(engine, "__file__", str(tmp_path / "engine" / "loop" / "engine.so"))
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


def test_abstract_classes_are_made_anew_in_the_copy() -> None:
    source = "class Contexts(Sequence[int]):\n    pass\n\n\nclass Plain:\n    pass\n"
    assert compiled.with_abc(source).endswith("_abc_init(Contexts)\n")
    assert compiled.with_abc("class Plain:\n    pass\n") == "class Plain:\n    pass\n"


def test_all_that_is_compiled_is_there() -> None:
    for package, names in compiled.MODULES.items():
        for name in names.split():
            text = (compiled.ROOT / package / f"{name}.py").read_text(encoding="utf-8")
            assert "cached_property" not in text, f"{name}: compiled, it is reckoned at every look"
    assert all((compiled.ROOT / name).is_file() for name in compiled.MARKS)
