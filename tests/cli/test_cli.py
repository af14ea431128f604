"""The command line: what it says and how it ends."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from tandem import __version__
from tandem.cli.__main__ import VERBS, main, warnings_are_ours
from tandem.cli.run import options_first

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["model=micro_llama", "limit=4", "arrival=all_at_once"]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from tandem.cli.__main__ import main\n"
        "try: main(['--help'])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "heavy = {'torch', 'hydra', 'pandas', 'simpy', 'transformers', 'pyarrow', 'matplotlib'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert told.returncode == 0, told.stderr
    assert "calibrate" in told.stdout


def test_warnings_look_like_errors() -> None:
    code = (
        "import sys; from tandem.cli.__main__ import main\n"
        "from sim.cost.piecewise import Lookup, Table\n"
        "main(['list', 'policies'])\n"
        "from sim.cost.tables import UNITS\n"
        "Lookup('chunk', Table(((1, 64), (1, 2048)), (1.0,) * 4), UNITS['chunk'])[73, 3879]\n"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    [line] = told.stderr.splitlines()
    first = "first at 73 new tokens, 3879 tokens in KV (it was fitted to 1 to 64, 1 to 2048): "
    assert line.startswith(f"tandem: cost table chunk is extrapolated, {first}")


def test_flags_and_overrides_may_stand_in_any_order() -> None:
    words = ["a=1", "--config-dir", "mine", "b=2", "-m", "--cfg", "job", "--config-name=x", "c=3"]
    flags = ["--config-dir", "mine", "-m", "--cfg", "job", "--config-name=x"]
    assert options_first(words) == [*flags, "a=1", "b=2", "c=3"]
    assert options_first(["a=1", "-c", "job", "-m", "b=2"]) == ["-c", "job", "-m", "a=1", "b=2"]


def test_a_short_flag_may_come_last(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "limit=4", "-c", "job"]) == 0
    assert "limit: 4" in capsys.readouterr().out


def test_the_trace_back_is_there_on_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(ValueError, match="no such setting"):
        main(["run", "polic=x"])


def test_the_terminal_says_what_a_result_rests_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *SMALL]) == 0
    assert "sim (roofline): 4 of 4 requests finished" in capsys.readouterr().out


def test_list_shows_every_policy_with_a_line_on_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "policies"]) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    found = {path.stem for path in (ROOT / "conf" / "policy").glob("*.yaml")}
    assert {line.split()[0] for line in lines} == found
    assert all(len(line.split(maxsplit=1)) == 2 for line in lines)


def test_doctor_names_what_a_bug_report_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    told = capsys.readouterr().out
    for name in ("python", "torch", "gpu", "cores", "shared data"):
        assert name in told


def test_doctor_tells_of_a_broken_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> None:
        raise RuntimeError("CUDA error: unknown error\nCompile with TORCH_USE_CUDA_DSA ...")

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.mem_get_info", broken)
    assert main(["doctor"]) == 0
    told = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    assert ["gpu", "broken: RuntimeError: CUDA error: unknown error"] in told
    assert any(name == "writable" for name, *_ in told), "and of all that comes after it"


def test_python_runs_it_as_a_module() -> None:
    command = [sys.executable, "-m", "tandem", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "tandem" in done.stdout and "plan" in done.stdout


def test_a_warning_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    warnings_are_ours()
    handler = logging.lastResort
    assert handler is not None
    for text in ("one", "two", "one"):
        handler.handle(logging.makeLogRecord({"msg": text, "levelno": logging.WARNING}))
    assert capsys.readouterr().err == "tandem: one\ntandem: two\n"


def test_a_second_folder_of_options_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for verb in ("run", "sweep", "plan"):
        assert main([verb, "--config-dir", "a", "--config-dir=b"]) == 2
        assert "--config-dir is given twice" in capsys.readouterr().err


def test_bare_tandem_prints_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    told = capsys.readouterr().out
    assert "verbs:" in told and all(f"\n  {verb} " in told for verb in VERBS)
    assert 'eval "$(tandem --completion)"' in told


@pytest.mark.parametrize(
    ("word", "told"),
    [("rnu", "did you mean run?"), ("reprot", "did you mean report?"), ("zzz", "there are run, ")],
)
def test_a_mistyped_verb_gets_a_suggestion(
    word: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([word]) == 2
    assert capsys.readouterr().err.startswith(f"tandem: {word}: no such verb; {told}")


def test_the_version_is_told_with_the_commit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    told = capsys.readouterr().out
    words = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    head = subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    assert told.startswith(f"tandem {__version__} (commit {head}")


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("tandem re", {"report"}),
        ("tandem run polic", {"policy="}),
        ("tandem run policy=vllm_", {"vllm_v0", "vllm_v1"}),
        ("tandem sweep limit=4 policy=orca,vllm_", {"orca,vllm_v0", "orca,vllm_v1"}),
        ("tandem list pol", {"policies"}),
        ("tandem report outp", set()),
    ],
)
def test_bash_completes_verbs_groups_and_choices(line: str, wanted: set[str]) -> None:
    script = f"""
    tandem() {{ {sys.executable} -m tandem "$@"; }}
    compopt() {{ :; }}
    eval "$(tandem --completion)"
    COMP_LINE='{line}' COMP_POINT={len(line)}
    _tandem
    echo "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(
        ["bash", "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert set(done.stdout.split()) == wanted
