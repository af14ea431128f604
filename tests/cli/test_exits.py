"""sys.exit in a policy is a failure, wherever it is called; and what tells a command to end."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from runtime.serving.machine import ServingMachine
from tandem.cli.__main__ import main
from tandem.wiring.folder import status_of

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["model=micro_llama", "limit=4", "arrival=all_at_once"]
OWN = ["--config-dir", "conf", "scheduling=quits"]
WORLDS = {
    "sim": ["backend=sim"],
    "lockstep": ["backend=lockstep"],
    "cpu": ["backend=cpu"],
    "wall": ["backend=cpu", "backend.clock=wall"],
}
BATCH = """
import sys
from policies.scheduling.chunked_prefill import ChunkedPrefill

class Quits(ChunkedPrefill):
    def batch(self, view):
        sys.exit({code})
"""
INIT = (
    "import sys\nclass Quits:\n    def __init__(self):\n        sys.exit({code})\n"
    "    def batch(self, view):\n        return ()\n"
)
IMPORT = "raise SystemExit({code})\n"


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)


def quits(code: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy of the user's in this folder."""
    monkeypatch.delitem(sys.modules, "quits", raising=False)
    monkeypatch.setattr(sys, "path", [*sys.path])
    Path("conf/scheduling").mkdir(parents=True)
    Path("conf/scheduling/quits.yaml").write_text("_target_: quits.Quits\n")
    Path("quits.py").write_text(text.format(code=code))
    # another test's module of this name would be found in its place
    monkeypatch.syspath_prepend(os.getcwd())


def statuses() -> list[str | None]:
    return [status_of(path.parent) for path in Path().rglob("status.json")]


@pytest.mark.broad(3)
@pytest.mark.parametrize(
    ("world", "code"), [(name, "0") for name in WORLDS] + [("sim", c) for c in ("3", "'bye'", "")]
)
def test_a_policy_that_exits_has_failed(
    world: str,
    code: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    short_probes: None,
) -> None:
    quits(code, BATCH, monkeypatch)
    assert main(["run", *OWN, *SMALL, *WORLDS[world]]) == 1
    [told] = capsys.readouterr().err.strip().splitlines()
    assert f"sys.exit({code or None}) was called in {Path('quits.py').resolve()}, line 7" in told
    assert statuses() == ["failed"]
    [path] = Path().rglob("status.json")
    assert "quits.py" in json.loads(path.read_text())["traceback"]


@pytest.mark.broad(3)
@pytest.mark.parametrize(("text", "line"), [(INIT, 4), (IMPORT, 1)])
@pytest.mark.parametrize("verb", ["run", "run -m"])
def test_so_has_one_that_exits_before_it_is_asked(
    verb: str,
    text: str,
    line: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    quits("0", text, monkeypatch)
    assert main([*verb.split(), *OWN, *SMALL]) == 1
    assert f"quits.py, line {line};" in capsys.readouterr().err
    assert set(statuses()) <= {"failed"}


@pytest.mark.broad(2)
@pytest.mark.parametrize("engine", ["processes", "serial"])
def test_in_a_sweep_it_is_one_points_failure_and_not_tried_again(
    engine: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = BATCH.replace("sys.exit", "if self.token_budget == 100: sys.exit")
    text = text.replace("{code})", "{code})\n        return super().batch(view)")
    quits("0", text, monkeypatch)
    Path("conf/scheduling/quits.yaml").write_text("_target_: quits.Quits\ntoken_budget: 100\n")
    words = [*OWN, *SMALL, "scheduling.token_budget=100,200", "--engine", engine, "--jobs", "1"]
    assert main(["sweep", *words]) == 1
    told = capsys.readouterr()
    assert "1 of 2 points finished, 1 failed" in told.out
    assert "sys.exit(0) was called" in told.err and "worker" not in told.err
    assert sorted(map(str, statuses())) == ["failed", "ok"]


def test_on_the_thread_of_a_lane_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], short_probes: None
) -> None:
    def start(*_: object) -> None:
        sys.exit(0)

    monkeypatch.setattr(ServingMachine, "start", start)
    assert main(["run", *SMALL, *WORLDS["wall"]]) == 1
    assert "sys.exit(0) was called in" in capsys.readouterr().err


# ---- signals
LONG = ["run", *OWN, *SMALL]
SLEEPS = """
import time
from pathlib import Path

class Quits:
    def batch(self, view):
        Path("asked").touch()
        time.sleep(600)
"""
SAID = """
import sys
from tandem.cli.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def _hangup() -> Iterator[None]:
    """A hang-up ends what is started here, also where the tests run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@contextmanager
def child(
    monkeypatch: pytest.MonkeyPatch, *before: str, **more: Any
) -> Iterator[subprocess.Popen[str]]:
    """A run whose policy, once asked, thinks for long."""
    quits("", SLEEPS, monkeypatch)
    words = [*before, sys.executable, "-c", SAID, *LONG]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(words, env=env, text=True, **more) as found:
        until = time.monotonic() + 60
        try:
            while not Path("asked").exists():
                assert found.poll() is None and time.monotonic() < until
                time.sleep(0.02)
            yield found
        finally:
            found.kill()


@pytest.mark.broad(2)
@pytest.mark.usefixtures("_hangup")
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGHUP], ids=str)
def test_a_run_that_is_told_to_end_says_so(
    how: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    with child(monkeypatch, stderr=subprocess.PIPE) as run:
        run.send_signal(how)
        _, err = run.communicate(timeout=60)
    assert run.returncode == 128 + how
    assert err.strip().splitlines()[-1] == "tandem: interrupted"
    assert statuses() == ["interrupted"]


@pytest.mark.slow
def test_a_run_under_nohup_goes_on_without_its_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    with child(monkeypatch, "sh", "-c", 'trap "" HUP; exec "$@"', "sh") as run:
        run.send_signal(signal.SIGHUP)
        time.sleep(0.5)
        assert run.poll() is None and statuses() == ["running"]
        run.terminate()
        assert run.wait(timeout=60) == 128 + signal.SIGTERM


@pytest.mark.usefixtures("_hangup")
@pytest.mark.slow
def test_a_terminal_that_is_closed_ends_its_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing can be told there any more, and what there is, is kept."""
    here, there = pty.openpty()
    screen = {"stdin": there, "stdout": there, "stderr": there}
    with child(monkeypatch, start_new_session=True, **screen) as run:
        os.close(there)
        os.close(here)
        os.killpg(run.pid, signal.SIGHUP)  # as the kernel does to what a terminal controls
        assert run.wait(timeout=60) == 128 + signal.SIGHUP
    assert statuses() == ["interrupted"]
