"""Blocks of README and of guides run as they stand; their examples are those of examples/."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from types import ModuleType

import pandas as pd
import pytest

from engine.contract.job import Job
from engine.contract.policy import Traits, traits_of
from engine.contract.regions import Tier
from engine.contract.rules import BrokenLaw, ContractError
from engine.laws.check_policy import check_policy
from engine.loop.asking import MAKERS
from engine.results.schema import TABLES
from policies.composed import Composed
from policies.kv.paged_restart import PagedRestart
from policies.kv.paged_swap import PagedSwap
from policies.scheduling.chunked_prefill import ChunkedPrefill
from policies.sharing.coserve import CoMemory
from tandem.cli.__main__ import main
from tandem.cli.collect import COLUMNS
from tests.policies.finetuning_jobs import PAGE, layout_of_jobs, random_job
from tests.support.blocks import (
    KINDS,
    NOT_RUN,
    PAGES,
    ROOT,
    Block,
    blocks_of,
    page,
    run_shell,
    script_of,
    shell,
)
from tests.support.replays import random_requests, replay

MEMORY, SCHEDULING = "docs/guide/memory-policy.md", "docs/guide/scheduling-policy.md"
SHARING = "docs/guide/finetune-while-you-serve.md"
KEEPS_ROOM, FEEDBACK_QUEUE = ROOT / "examples/keeps_room", ROOT / "examples/feedback_queue"
WHEN_NONE_WAITS = ROOT / "examples/when_none_waits"
PYTHON = [name for name in PAGES if any(b.kind == "python" for b in blocks_of(page(name)))]
LISTED = {  # blocks that are not run, by their page and first line
    ("README.md", "make demo"): "they set up the machine, and run the tests",
    ("docs/index.md", "make demo"): "they set up the machine",
    (
        "docs/guide/fidelity.md",
        "tandem fidelity",
    ): "it measures for half an hour and more, on a machine at rest",
    ("docs/guide/gpu.md", "make gpu"): "it goes through all parts, for minutes",
    ("docs/guide/replay.md", "make demo TORCH_SPEC=torch"): "it sets up the machine",
    ("docs/guide/replay.md", "tandem run backend=openai"): "it needs a server",
    (
        "docs/guide/replay.md",
        "python -m tandem.compiled",
    ): "it builds C extensions for some minutes",
    ("docs/guide/train-under-a-budget.md", "tandem calibrate"): "it calibrates for several minutes",
    ("docs/guide/finetune-while-you-serve.md", "tandem trace import"): "it needs a text",
    (
        "docs/guide/finetune-while-you-serve.md",
        "tandem calibrate",
    ): "it calibrates for several minutes",
}


def test_every_block_has_a_kind_and_a_known_mark() -> None:
    for name in PAGES:
        text = page(name)
        found = blocks_of(text)
        assert 2 * len(found) == len(re.findall(r"^\s*(?:```|~~~)", text, re.M)), name
        for block in found:
            assert block.kind in KINDS, f"{name}: {block}"
            assert block.mark in ("", "slow") or block.mark.startswith(NOT_RUN), f"{name}: {block}"
            assert block.kind == "shell" or not block.mark, f"{name}: only commands are marked"


def test_blocks_that_are_not_run_are_listed() -> None:
    left_out = [
        (name, block.text, block.mark.removeprefix(NOT_RUN))
        for name in PAGES
        for block in blocks_of(page(name))
        if block.mark.startswith(NOT_RUN)
    ]
    assert len(left_out) == len(LISTED)
    for (name, begin), reason in LISTED.items():
        assert any(
            page_of == name and text.startswith(begin) and why == reason
            for page_of, text, why in left_out
        ), begin


def test_a_block_without_a_kind_and_a_mark_are_seen() -> None:
    text = "a\n<!-- slow -->\n```shell\nls\n```\n\n```\nx\n```\n"
    assert blocks_of(text) == [Block("slow", "shell", "ls\n"), Block("", "", "x\n")]


@pytest.mark.parametrize("name", PYTHON)
def test_python_of_a_document_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    examples = sorted(path for path in (ROOT / "examples").iterdir() if path.is_dir())
    for folder in examples:
        monkeypatch.syspath_prepend(str(folder))
    for number, block in enumerate(b for b in blocks_of(page(name)) if b.kind == "python"):
        module = ModuleType(f"block_{number}")
        monkeypatch.setitem(sys.modules, module.__name__, module)  # where dataclasses look
        exec(compile(block.text, name, "exec"), vars(module))
    for module_name in [path.stem for folder in examples for path in folder.glob("*.py")]:
        sys.modules.pop(module_name, None)


def test_commands_of_readme_run(tmp_path: Path) -> None:
    run_shell(shell("README.md", ""), tmp_path, timeout_s=300)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in PAGES[1:] if shell(name, "")])
def test_commands_of_a_guide_run(name: str, tmp_path: Path) -> None:
    run_shell(shell(name, ""), tmp_path, timeout_s=300)


@pytest.mark.slow
@pytest.mark.timeout(1800)  # a page calibrates up to three times, a minute each on a quiet machine
@pytest.mark.parametrize("name", [name for name in PAGES if shell(name, "slow")])
def test_slow_commands_of_a_document_run(name: str, tmp_path: Path) -> None:
    run_shell(shell(name, "slow"), tmp_path, timeout_s=1700)


def test_a_command_that_fails_is_told(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="no such thing"):
        run_shell(["echo no such thing >&2; false", "true"], tmp_path, timeout_s=60)


@pytest.mark.parametrize(
    ("folder", "module", "name"),
    [
        (KEEPS_ROOM, "keeps_room", MEMORY),
        (ROOT / "examples/shortest_prompt_first", "shortest", ""),
        (FEEDBACK_QUEUE, "feedback_queue", SCHEDULING),
        (WHEN_NONE_WAITS, "when_none_waits", SHARING),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_guides_policy_is_the_example(folder: Path, module: str, name: str) -> None:
    if not name:  # README's is compared without its docstrings, see tests/cli/test_cli_measured.py
        shown = [blocks_of(page(at))[i].text for at, i in (("README.md", 2), (SCHEDULING, 0))]
        assert shown[0] == shown[1]
        return
    text, source = page(name), (folder / f"{module}.py").read_text("utf-8")
    assert f"# {module}.py\n{source[source.index('from dataclasses') :]}```" in text
    [path] = folder.rglob("*.yaml")
    title = path.relative_to(folder).as_posix()
    assert f"# {title}\n{path.read_text('utf-8').partition(chr(10))[2]}```" in text


def test_the_guides_policy_restarts_less(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the guide says, by the restarts that it names."""
    monkeypatch.chdir(tmp_path)
    text = page(MEMORY)
    commands = re.findall(r"^tandem (run .*)$", text, re.MULTILINE)
    told = []
    for command in commands:
        assert main(command.replace("examples/", f"{ROOT}/examples/").split()) == 0
        told += re.findall(r"(\d+) restarts", capsys.readouterr().out)
    assert f"The first run restarts {told[0]} jobs, the second {told[1]}" in text


def test_the_feedback_queue_keeps_its_contract_and_its_levels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(FEEDBACK_QUEUE))
    from feedback_queue import FeedbackQueue  # type: ignore[import-not-found]

    queue = FeedbackQueue(batch_jobs=2, quantum_tokens=40)
    for memory in (PagedRestart(), PagedSwap()):
        assert check_policy(Composed(queue, memory)) > 0
    waiting, begun = Job(0, 0, 100, known_tokens=100), Job(1, 0, 100, 100, computed_tokens=60)
    decode, restarted = Job(2, 0, 30, 31, computed_tokens=30), Job(3, 0, 100, 165)
    assert [queue.level(job) for job in (waiting, decode, begun, restarted)] == [0, 0, 1, 3]
    sys.modules.pop("feedback_queue")


def test_the_sharing_policy_keeps_its_contract_and_finetunes_when_none_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(WHEN_NONE_WAITS))
    from when_none_waits import WhenNoneWaits  # type: ignore[import-not-found]

    policy = Composed(WhenNoneWaits(ChunkedPrefill(64, 8), 32), CoMemory(PagedRestart()))
    job, requests = random_job(random.Random(1), 1000), random_requests(2, 20, rate=300)
    pools = {(Tier.GPU, 0): 180 * PAGE.nbytes, (Tier.HOST, 0): 30 * PAGE.nbytes}
    layout = layout_of_jobs([job], 180)
    work = [*requests, job]
    assert check_policy(policy, work, capacity_bytes=pools, layout=layout, page=PAGE) > 0

    class Watched(WhenNoneWaits):  # type: ignore[misc]
        def batch(self, view):  # type: ignore[no-untyped-def]
            slices = super().batch(view)
            trains = any([piece.job.training is not None for piece in slices])
            seen.add((trains, any([job.training is None for job in view.waiting])))
            return slices

    seen = set[tuple[bool, bool]]()  # it finetunes, a request waits
    watched = Composed(Watched(ChunkedPrefill(64, 8), 32), CoMemory(PagedRestart()))
    replay(watched, work, pages=180, page=PAGE, layout=layout).check()
    assert seen >= {(True, False), (False, True)} and (True, True) not in seen
    sys.modules.pop("when_none_waits")


def test_the_feedback_queue_pauses_jobs_and_is_as_the_guide_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    section = page(SCHEDULING).partition("## A policy that preempts")[2].partition("\n## ")[0]
    commands = re.findall(r"^tandem (run .*)$", section, re.MULTILINE)
    found = []
    for i, command in enumerate(commands):
        words = command.replace("examples/", f"{ROOT}/examples/").split()
        assert main([*words, f"hydra.run.dir=run{i}"]) == 0
        requests = pd.read_parquet(f"run{i}/requests.parquet")
        steps = pd.read_parquet(f"run{i}/steps.parquet", columns=["step", "jobs"])
        found.append((requests, steps.explode("jobs")))
    rows = re.findall(r"^\| (?:feedback queue|first come, first served) \| (.*) \|$", section, re.M)
    assert len(rows) == len(found) == 2
    for row, (requests, _) in zip(rows, found, strict=True):
        ttft = (requests["first_token_ns"] - requests["arrival_ns"]) / 1e9
        e2e = (requests["finish_ns"] - requests["arrival_ns"]) / 1e9
        told = [ttft.mean(), e2e.median(), e2e.mean(), e2e.quantile(0.99)]
        assert [float(cell.split()[0]) for cell in row.split(" | ")[:4]] == pytest.approx(
            told, abs=0.05
        )
    assert [paused(*outcome) for outcome in found] == [True, False]


def paused(requests: pd.DataFrame, slices: pd.DataFrame) -> bool:
    """Whether a job that was never restarted got no slice in steps between its first and last."""
    kept = requests.loc[requests["restarts"].eq(0) & requests["swaps"].eq(0), "request_id"]
    by_job = slices[slices["jobs"].isin(kept)].groupby("jobs")["step"]
    return bool((by_job.max() - by_job.min() + 1 > by_job.nunique()).any())


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_notebook_runs(tmp_path: Path) -> None:
    """Its code cells, in their order, by a plain Python."""
    for path in sorted((ROOT / "docs/notebooks").glob("*.ipynb")):
        script = tmp_path / f"{path.stem}.py"
        script.write_text(script_of(path), "utf-8")
        env = {**os.environ, "PYTHONPATH": str(ROOT), "MPLBACKEND": "Agg", "TMPDIR": str(tmp_path)}
        done = subprocess.run(
            [sys.executable, script], cwd=tmp_path, env=env, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr[-4000:]


def test_a_notebook_becomes_a_script(tmp_path: Path) -> None:
    cells = [
        {"cell_type": "markdown", "source": ["a *word*"]},
        {"cell_type": "code", "source": ["%%writefile a.py\n", "x = 1"]},
        {"cell_type": "code", "source": ["from a import x"]},
    ]
    (tmp_path / "a.ipynb").write_text(json.dumps({"cells": cells}))
    script = script_of(tmp_path / "a.ipynb")
    assert "word" not in script and script.endswith("\n\nfrom a import x\n")
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True)
    assert (tmp_path / "a.py").read_text() == "x = 1\n"


def test_a_memory_policy_that_takes_no_pages_is_told_as_in_the_guide() -> None:
    class NoPages:
        def fit(self, batch, view, plan):  # type: ignore[no-untyped-def]
            plan.compute(batch, ())

    with pytest.raises(ContractError) as caught:
        check_policy(Composed(ChunkedPrefill(), NoPages()))
    told = str(caught.value).replace(caught.value.at, "no_pages.py:2")
    for name in (SCHEDULING, MEMORY):
        assert f"ContractError: {told}\n" in page(name)


def test_check_policy_tells_a_policy_that_remembers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(KEEPS_ROOM))
    from keeps_room import KeepsRoom  # type: ignore[import-not-found]

    class Remembers(ChunkedPrefill):
        asked: list[int] = []  # noqa: RUF012 -- it is the fault

        def batch(self, view):  # type: ignore[no-untyped-def]
            self.asked.append(1)
            return super().batch(view)[: 1 + len(self.asked) % 2]

    assert str(traits_of(KeepsRoom())) == "kv_growth=page"
    with pytest.raises(BrokenLaw, match=r"^law 8: policy Remembers .* equal views, other plans"):
        check_policy(Composed(Remembers(), KeepsRoom()))
    sys.modules.pop("keeps_room")


def test_the_guide_has_every_fact_of_a_job() -> None:
    text = page(SCHEDULING)
    table = text.partition("## What `batch` gets and returns")[2].partition("\n## ")[0]
    told = [name for cell in re.findall(r"^\| (`.*?) \|", table, re.M) for name in cell.split(", ")]
    facts = {name for name in dir(Job) if not name.startswith("_")} - {*MAKERS}
    assert sorted(name.strip("`") for name in told) == sorted(facts)


@pytest.mark.parametrize("name", TABLES)
def test_the_guide_has_every_column_of_a_table(name: str) -> None:
    section = page("docs/guide/results.md").partition(f"\n## {name}.parquet\n")[2]
    told = re.findall(r"^\| `(\w+)` \|", section.partition("\n## ")[0], re.M)
    assert told == TABLES[name].names


def test_the_guide_has_every_column_that_is_collected() -> None:
    section = page("docs/guide/results.md").partition("\n## runs.parquet\n")[2]
    told = dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", section, re.M))
    plain = {name: about.replace("`", "") for name, about in told.items()}
    assert plain == {name: about for name, about in COLUMNS.items() if name.isidentifier()}


def test_the_guide_has_every_trait() -> None:
    text = page(MEMORY)
    section = text.partition("## Traits")[2].partition("\n## ")[0]
    promised = section.partition("A scheduling may promise")[2].partition("The docstring of")[0]
    traits = [trait.name for trait in fields(Traits)]
    assert sorted(re.findall(r"`(\w+)`", promised)) == sorted(traits)


@pytest.mark.parametrize("word", ["run-ahead", "watermark", "spare pages", "law"])
def test_the_guide_explains_a_word_where_it_first_stands(word: str) -> None:
    text = page(MEMORY).lower()
    assert text.index(f"*{word}*") + 1 == re.search(rf"\b{word}\b", text).start()  # type: ignore[union-attr]
