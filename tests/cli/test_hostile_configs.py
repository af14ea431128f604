"""Folders of yaml from anywhere: nothing of them is run or written, one line each, at once."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from analysis.yaml_text import DEEPEST, MOST, check_size, yaml_value
from tandem.cli.__main__ import main
from tandem.cli.errors import Usage
from tandem.config.compose import composed
from traces.files import seal

SMALL = ["model=micro_llama", "limit=4", "arrival=all_at_once"]
LIMIT_S = 5.0
LAUGHS = "\n".join(
    ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
)
SECRET = "a-secret-of-the-environment"


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("A_SECRET", SECRET)
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)


def told(words: list[str], text: str, where: str, capsys: pytest.CaptureFixture[str]) -> str:
    """The only line that a command says of a folder with this yaml, which changes nothing."""
    path = Path("conf", where)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    before = {p: p.read_bytes() for p in Path().rglob("*") if p.is_file()}
    began = time.perf_counter()
    assert main([words[0], "--config-dir", "conf", *words[1:]]) == 2
    assert time.perf_counter() - began < LIMIT_S
    after = {p: p.read_bytes() for p in Path().rglob("*") if p.is_file()}
    assert after == before, "something was written"
    said = capsys.readouterr()
    assert SECRET not in said.out + said.err
    assert not said.out and len(said.err.strip().splitlines()) == 1, said.err
    return said.err


GLOBAL = "# @package _global_\n"
EXPERIMENT, SCHEDULING = "experiment/mine.yaml", "scheduling/mine.yaml"
CALLBACK = "hydra: {callbacks: {a: {_target_: os.mkdir, path: written}}}\n"
WRITER = "{_target_: traces.files.write_text, path: written, text: x}"
BATCH = "_target_: policies.scheduling.chunked_prefill.ChunkedPrefill\n"
FOLDERS = {
    "trust granted in yaml": [
        (EXPERIMENT, GLOBAL + "trusted: [os]\nscheduling: {_target_: os.mkdir, path: written}\n"),
        (EXPERIMENT, GLOBAL + "hydra: {sweeper: {params: {trusted: '[os]'}}}\n"),
        (EXPERIMENT, GLOBAL + "hydra: {sweeper: {params: {+hydra.job.chdir: 'true'}}}\n"),
        (EXPERIMENT, GLOBAL + CALLBACK),
        (EXPERIMENT, GLOBAL + "hydra: {run: {dir: elsewhere}}\n"),
        (EXPERIMENT, "# @package hydra.callbacks\na: {_target_: os.mkdir, path: written}\n"),
        (EXPERIMENT, GLOBAL + "defaults:\n  - /scheduling@hydra.callbacks.a: orca\n"),
        (EXPERIMENT, GLOBAL + "defaults:\n  - override /hydra/job_logging: stdout\n"),
    ],
    "write through our own functions": [
        (SCHEDULING, WRITER),
        (SCHEDULING, "_target_: tandem.wiring.folder.write_json\npath: written\nvalue: {}\n"),
        (SCHEDULING, f"{BATCH}token_budget: {WRITER}\n"),
        (
            SCHEDULING,
            "_target_: policies.scheduling.shortest_job.ShortestJob\n" f"predictor: {WRITER}\n",
        ),
        (SCHEDULING, "_target_: os.mkdir\npath: written\n"),
        (SCHEDULING, "_target_: builtins.eval\n"),
        (SCHEDULING, "_target_: sim.cost.tables.TableCost\n"),
        (EXPERIMENT, f"{GLOBAL}model: {WRITER}\n"),
        (EXPERIMENT, f"{GLOBAL}router: {WRITER}\n"),
        (EXPERIMENT, f"{GLOBAL}device: {{flops_per_s: {{float32: {WRITER}}}}}\n"),
        (EXPERIMENT, f"{GLOBAL}arrival: {WRITER}\n"),
        (EXPERIMENT, f"{GLOBAL}trace: {WRITER}\n"),
    ],
    "aliases": [(EXPERIMENT, LAUGHS), (SCHEDULING, f"{BATCH}x: &x [*y]\ny: &y [1]\n")],
    "recursion": [
        (EXPERIMENT, "a: &a\n  b: *a\n"),
        (SCHEDULING, f"{BATCH}max_jobs: &x [1, *x]\n"),
        (SCHEDULING, f"{BATCH}max_jobs: ${{scheduling.token_budget}}\n"
         "token_budget: ${scheduling.max_jobs}\n"),
    ],
    "environment": [
        (SCHEDULING, f"{BATCH}token_budget: ${{oc.env:A_SECRET}}\n"),
        (SCHEDULING, f'{BATCH}token_budget: "\\x24{{oc.env:A_SECRET}}"\n'),
        (SCHEDULING, f"{BATCH}token_budget: ${{oc.${{x}}:A_SECRET}}\nx: env\n"),
        (SCHEDULING, f"{BATCH}token_budget: ${{oc.decode:'${{oc.env:A_SECRET}}'}}\n"),
        (SCHEDULING, f"{BATCH}token_budget: ${{package:this}}\n"),
        (EXPERIMENT, GLOBAL + "hydra: {sweeper: {params: {seed: '${oc.env:A_SECRET}'}}}\n"),
    ],
    "nested lists": [
        (EXPERIMENT, "a: " + "[" * 10_000 + "]" * 10_000),
        (SCHEDULING, f"{BATCH}max_jobs: " + "{a: " * 5_000 + "}" * 5_000),
        (SCHEDULING, "- " * 3_000 + "a"),
        (SCHEDULING, f"{BATCH}max_jobs: [[1, 2], [3]]\n"),
    ],
}  # fmt: skip
CASES = [(kind, *case) for kind, cases in FOLDERS.items() for case in cases]


@pytest.mark.broad(4)
@pytest.mark.parametrize(("kind", "where", "text"), CASES)
def test_a_hostile_folder_is_refused_in_a_line(
    kind: str, where: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    told(["run", f"{Path(where).parent}=mine", *SMALL], text, where, capsys)


@pytest.mark.broad(2)
@pytest.mark.parametrize("verb", ["run", "sweep", "calibrate"])
def test_every_verb_that_composes_refuses_them(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for kind, cases in FOLDERS.items():
        if (verb, kind) != ("sweep", "write through our own functions"):  # each point has a folder
            where, text = cases[0]
            told([verb, f"{Path(where).parent}=mine"], text, where, capsys)
            Path("conf", where).unlink()


def test_a_sweep_of_an_experiment_adds_no_trust(capsys: pytest.CaptureFixture[str]) -> None:
    text = GLOBAL + "hydra: {sweeper: {params: {++trusted@x: '[os],[sys]'}}}\n"
    for words in (["sweep"], ["run", "-m"]):
        line = told([*words, "experiment=mine", *SMALL], text, EXPERIMENT, capsys)
        assert "adds no trust" in line


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("trusted: [os]\n", "a yaml adds no trust; take trusted out"),
        ("hydra: {callbacks: {}}\n", "a yaml configures nothing of Hydra itself; take hydra out"),
        ("a: ${oc.env:HOME}\n", "${oc.env:HOME}: a yaml reads no environment"),
        ("- 1\n", "that is a list; give settings by name, KEY: value"),
        ("text\n", "that is text; give settings by name"),
        ("a: &a [*a]\n", "*a holds itself"),
        (LAUGHS, f"more than {MOST:,} values, aliases written out"),
        ("[" * 99 + "]" * 99, f"more than {DEEPEST} levels deep"),
    ],
)
def test_the_line_names_the_file_and_what_is_wrong(
    text: str, wanted: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = told(["run", "experiment=mine"], text, EXPERIMENT, capsys)
    assert wanted in line and str(Path("conf", EXPERIMENT).resolve()) in line


def test_a_yaml_that_is_no_utf_8_is_told_with_its_path(capsys: pytest.CaptureFixture[str]) -> None:
    path = Path("conf", SCHEDULING)
    path.parent.mkdir(parents=True)
    path.write_bytes("# größer\n".encode("latin-1"))
    for verb in ("run", "sweep", "calibrate"):
        assert main([verb, "--config-dir", "conf", "scheduling=mine"]) == 2
        line = capsys.readouterr().err
        assert f"{path.resolve()}: no text in UTF-8 (byte 4)" in line
        assert len(line.strip().splitlines()) == 1


def test_words_add_trust_and_a_module_beside_the_yaml_needs_none() -> None:
    Path("conf/scheduling").mkdir(parents=True)
    Path("mine.py").write_text(
        "from dataclasses import dataclass\n\n\n@dataclass(frozen=True)\nclass Mine:\n"
        "    def batch(self, view):\n        return ()\n"
    )
    Path("conf", SCHEDULING).write_text("_target_: mine.Mine\n")
    assert composed(["trusted=[fractions]"]).config["trusted"] == ["fractions"]
    assert composed(["scheduling=mine"], "conf").config["scheduling"] == {"_target_": "mine.Mine"}
    with pytest.raises(Usage, match=r"trusted=fractions: only words on the command line"):
        composed(["seed=3", "trusted=${slo.classes}", "slo.classes=[fractions]"])


def test_small_aliases_and_references_are_no_harm() -> None:
    text = "a: &a {b: 1}\nc: [*a, *a]\nd: ${a.b}\n"
    assert yaml_value(text, "here") == {"a": {"b": 1}, "c": [{"b": 1}] * 2, "d": "${a.b}"}
    Path("conf/scheduling").mkdir(parents=True)
    Path("conf", SCHEDULING).write_text(
        f"{BATCH}token_budget: &n 64\nmax_jobs: ${{oc.select:scheduling.token_budget,8}}\n"
    )
    assert composed(["scheduling=mine"], "conf").config["scheduling"]["max_jobs"] == 64


def test_a_text_is_measured_without_writing_its_aliases_out() -> None:
    text = LAUGHS + "\ntail:\n" + "- 1\n" * 10_000
    began = time.process_time()
    with pytest.raises(ValueError, match="aliases written out"):
        check_size(text, "here")
    assert time.process_time() - began < 0.5
    assert os.environ["A_SECRET"] == SECRET


PLANS = ("model=micro_llama", "trace=none", "training=random", "training.sequence_tokens=32")


@pytest.mark.broad(3)
@pytest.mark.parametrize(
    ("planner", "wanted"),
    [
        (
            "trusted: [os]\nplanner: {_target_: os.mkdir, path: written}\n",
            "target os.mkdir is neither",
        ),
        (f"planner: {WRITER}\n", "planner: traces.files.write_text is a function of another kind"),
        ("planner: &a [*a]\n", "*a holds itself"),
        ("replayed: log\n", "the run plays back itself"),
    ],
)
def test_what_is_played_back_adds_no_trust(
    planner: str, wanted: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The planner of a replay is that of the run's folder, which may come from anywhere."""
    assert main(["run", *PLANS, "policy=zero_offload", "hydra.run.dir=log"]) == 0
    Path("log/config.yaml").write_text(planner.replace(": log", f": {Path('log').resolve()}"))
    seal(Path("log"), "config.yaml")
    capsys.readouterr()
    before = {*Path().rglob("*")}
    assert main(["run", *PLANS, "policy=recorded", "replayed=log"]) == 2
    told = capsys.readouterr().err
    assert wanted in told and len(told.strip().splitlines()) == 1
    assert {*Path().rglob("*")} == before, "something was written"
