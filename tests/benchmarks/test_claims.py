"""The table of claims: read from last lines, never better than the exit status."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path

import pytest

from benchmarks import claims


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A benchmarks folder of the test."""
    folder = tmp_path / "benchmarks"
    (folder / "kind").mkdir(parents=True)
    (folder / "__init__.py").touch()  # or the package of this checkout is found
    monkeypatch.setattr(claims, "HERE", folder)
    monkeypatch.setattr(claims, "TABLE", folder / "CLAIMS.csv")
    monkeypatch.setattr(claims, "PAGE", folder / "CLAIMS.md")
    return folder


def script(folder: Path, name: str, line: str, code: int) -> None:
    body = f"    print('first')\n    print({line!r})\n    raise SystemExit({code})\n"
    (folder / "kind" / f"{name}.py").write_text(f'if __name__ == "__main__":\n{body}')


def test_a_table_is_written_from_last_lines(here: Path) -> None:
    script(here, "good", "error 0.5 % 2 pass", 0)
    script(here, "bad", "error 3.5 % 2 fail", 1)
    assert claims.main([]) == 1
    rows = (here / "CLAIMS.csv").read_text().splitlines()[1:]
    assert [row.split(",")[:6] for row in rows] == [
        ["bad", "error", "3.5", "%", "2", "fail"],
        ["good", "error", "0.5", "%", "2", "pass"],
    ]
    assert "| good | error | 0.5 | % | 2 | pass |" in (here / "CLAIMS.md").read_text()


def test_the_output_of_a_claim_is_kept_with_its_origin(here: Path) -> None:
    script(here, "good", "error 0.5 % 2 pass", 0)
    (here / "kind" / "odd.py").write_text(
        'if __name__ == "__main__":\n    raise SystemExit("no data")\n'
    )
    assert claims.main([]) == 1
    head, _, output = (here / "results" / "good.txt").read_text().partition("\n\n")
    assert output == "$ python -m benchmarks.kind.good\nfirst\nerror 0.5 % 2 pass\n"
    assert head.startswith("commit ") and "cores" in head and "took" in head
    assert "no data" in (here / "results" / "odd.txt").read_text(), "and why one could not run"


def test_a_name_that_is_no_claim_runs_nothing(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script(here, "good", "error 0.5 % 2 pass", 0)
    with pytest.raises(SystemExit) as end:
        claims.main(["good", "god"])
    assert end.value.code == 2 and not (here / "CLAIMS.csv").exists()
    assert "no claim god here; there are good" in capsys.readouterr().err


def test_a_dry_run_shows_all_output_and_writes_nothing(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script(here, "good", "error 0.5 % 2 pass", 0)
    assert claims.main(["--dry-run"]) == 0
    assert "$ python -m benchmarks.kind.good\nfirst\n" in capsys.readouterr().out
    assert {path.name for path in here.iterdir()} <= {"kind", "__init__.py", "__pycache__"}


@pytest.mark.parametrize(("dirty", "told"), [(True, "57fefd0+"), (False, "57fefd0")])
def test_a_row_says_whether_the_checkout_was_that_of_its_commit(
    here: Path, monkeypatch: pytest.MonkeyPatch, dirty: bool, told: str
) -> None:
    monkeypatch.setattr(claims, "commit", lambda: {"commit": "57fefd058c155bad", "dirty": dirty})
    script(here, "good", "error 0.5 % 2 pass", 0)
    assert claims.main([]) == 0
    assert (here / "CLAIMS.csv").read_text().splitlines()[1].split(",")[-1] == told


@pytest.mark.parametrize(
    ("line", "code"),
    [("error 1 % 2 pass", 1), ("error 1 % 2 fail", 0), ("no claim", 0), ("", 1)],
)
def test_a_line_that_contradicts_its_exit_status_is_broken(
    here: Path, line: str, code: int
) -> None:
    script(here, "odd", line, code)
    assert claims.main(["--dry-run"]) == 1
    assert claims.carried_out(here / "kind" / "odd.py", False)[0].verdict == f"broken({code})"
    assert not (here / "CLAIMS.csv").exists()


def test_rows_that_were_not_run_again_stay_and_vanished_ones_go(here: Path) -> None:
    for name in ("one", "two"):
        script(here, name, f"{name} 1 s 2 pass", 0)
    assert claims.main([]) == 0
    (here / "kind" / "two.py").unlink()
    script(here, "three", "three 1 s 2 pass", 0)
    assert claims.main(["three"]) == 0
    rows = (here / "CLAIMS.csv").read_text().splitlines()[1:]
    assert [row.split(",")[0] for row in rows] == ["one", "three"]


@pytest.mark.parametrize("name", ["coserving_fidelity", "fidelity_command", "feedback_fidelity"])
def test_a_claim_in_parts_is_given_its_options(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = next(path for path in claims.scripts() if path.stem == name)
    module = import_module(f"benchmarks.{path.parent.name}.{name}")
    monkeypatch.setattr("sys.argv", [name, "--help"])
    with pytest.raises(SystemExit):
        module.main()
    told = capsys.readouterr().out
    for option in ("--quick", "--keep", "--only"):
        assert option in told and claims.takes(claims.read(path), option)


def test_one_case_of_a_claim_that_has_none_is_refused(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script(here, "good", "error 0.5 % 2 pass", 0)
    body = 'def main():\n    return measured_in_parts(1)\nif __name__ == "__main__":\n    main()\n'
    (here / "kind" / "parts.py").write_text(body)
    for words in (["good"], ["good", "parts"], []):
        with pytest.raises(SystemExit):
            claims.main([*words, "--only", "a"])
        assert "name a claim of several cases: parts" in capsys.readouterr().err


def test_gpu_claims_are_left_to_a_gpu(here: Path) -> None:
    script(here, "gpu_speed", "x 1 s 2 pass", 0)
    script(here, "speed", "x 1 s 2 pass", 0)
    assert [path.stem for path in claims.scripts()] == ["speed"]
    assert [path.stem for path in claims.scripts(needs_gpu=True)] == ["gpu_speed"]


def test_a_script_that_says_its_form_is_judged_in_both_forms(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(here, "fidelity", "x 1 s 2 pass", 0)
    (here / "kind" / "speed.py").write_text('if __name__ == "__main__":\n    print(form())\n')
    monkeypatch.setattr(claims, "missing", lambda: None)
    found = [(path.stem, form) for path, form in claims.forms(claims.scripts())]
    assert found == [("fidelity", ""), ("speed", ""), ("speed", claims.COMPILED)]
    monkeypatch.setattr(claims, "missing", lambda: "no C compiler")
    assert not any(form for _, form in claims.forms(claims.scripts()))


def test_the_row_of_the_compiled_form_stays_where_there_is_no_compiler(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "missing", lambda: "no C compiler")
    script(here, "speed", "x 1 s 2 pass", 0)
    claims.write([claims.Claim("speed.compiled", "x", "2", "s", "2", "pass", "1", "57fefd0")])
    assert claims.main([]) == 0
    rows = (here / "CLAIMS.csv").read_text().splitlines()[1:]
    assert [row.split(",")[0] for row in rows] == ["speed", "speed.compiled"]


def test_a_claim_that_is_told_to_end_takes_its_script_along(here: Path) -> None:
    """A script that went on would measure beside the next one."""
    body = "    import os, pathlib, time\n    pathlib.Path('pid').write_text(str(os.getpid()))\n"
    path = here / "kind" / "slow.py"
    path.write_text(f'if __name__ == "__main__":\n{body}    time.sleep(600)\n')
    told = f"import benchmarks.claims as c, pathlib; c.HERE = pathlib.Path({str(here)!r})\n"
    told += "c.end_on_sigterm(); c.main(['slow', '--dry-run'])"
    running = subprocess.Popen([sys.executable, "-c", told], cwd=Path(__file__).parents[2])
    kept = here.parent / "pid"
    while not kept.is_file() or not kept.read_text():
        assert running.poll() is None
        time.sleep(0.05)
    running.terminate()
    assert running.wait(30) == 143
    with pytest.raises(ProcessLookupError):
        os.kill(int(kept.read_text()), 0)
