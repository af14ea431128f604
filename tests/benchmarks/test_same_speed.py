"""Two checkouts are held against each other by CPU time: a slower one is seen, and shown."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import same_speed
from benchmarks.claims import scripts
from benchmarks.same_behaviour import HERE, checkout_of
from benchmarks.same_speed import CASES, PLANNING, SIMULATOR, SpeedCase, SpeedPair, command_in, main

# Counts up, and leaves a line in the file that the environment names.
WORKS = """
import os, sys
with open({log!r}, "a") as log:
    log.write({name!r} + os.environ["OMP_NUM_THREADS"] + chr(10))
with open({log!r} + ".shared", "a") as log:
    log.write(os.environ["TANDEM_SHARED"] + chr(10))
for _ in range({loops}):
    pass
print("served", {rate}, "a second", flush=True)
while "wait" in sys.argv:
    pass
sys.exit({code})
"""
SERVED = {"requests_per_s": r"served (\S+) a second"}
FAKE_CASES = (
    SpeedCase("count", ("tandem",)),
    SpeedCase("serve", ("tandem", "wait"), SERVED),
    SpeedCase("shared", ("tandem",), needs_shared=True),
)


def checkout(folder: Path, loops: int = 1, rate: float = 100, code: int = 0) -> str:
    """A checkout whose command line counts so far and says that rate."""
    (folder / "tandem").mkdir(parents=True)
    (folder / "tandem" / "__init__.py").touch()
    log = str(folder.parent / "log")
    text = WORKS.format(log=log, name=folder.name, loops=loops, rate=rate, code=code)
    (folder / "tandem" / "__main__.py").write_text(text, encoding="utf-8")
    return str(folder)


@pytest.fixture(autouse=True)
def fakes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(same_speed, "CASES", FAKE_CASES)
    monkeypatch.setenv("TANDEM_SHARED", str(tmp_path / "nowhere"))


@pytest.mark.slow
def test_a_slower_checkout_is_seen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    both = checkout(tmp_path / "a"), checkout(tmp_path / "b", loops=20_000_000)
    pairs = tmp_path / "pairs.csv"
    assert main([*both, "--only", "count", "--pairs", "2", "--csv", str(pairs)]) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[1].startswith("count cpu_s ") and said[1].endswith(" 2")
    assert said[-1].endswith(" ratio 1.02 fail")
    rows = list(csv.DictReader(pairs.read_text(encoding="utf-8").splitlines()))
    assert [row["number"] for row in rows] == ["0", "1"]
    assert all(float(row["after"]) > 2 * float(row["before"]) for row in rows)


def test_checkouts_take_turns_on_one_thread_behind_a_pair_that_does_not_count(
    tmp_path: Path,
) -> None:
    both = checkout(tmp_path / "a"), checkout(tmp_path / "b")
    main([*both, "--only", "count", "--pairs", "3"])
    order = (tmp_path / "log").read_text(encoding="utf-8").split()
    assert order == ["a1", "b1", "b1", "a1", "a1", "b1", "b1", "a1"]


def test_both_checkouts_read_one_folder_of_shared_data(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TANDEM_SHARED", "beside")
    both = checkout(tmp_path / "a"), checkout(tmp_path / "b")
    main([*both, "--only", "count", "--pairs", "1"])
    read = (tmp_path / "log.shared").read_text(encoding="utf-8").splitlines()
    assert read == [str(tmp_path / "beside")] * 4


def test_a_printed_rate_counts_and_ends_the_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    both = checkout(tmp_path / "a", rate=80), checkout(tmp_path / "b", rate=100)
    assert main([*both, "--only", "serve", "--pairs", "2"]) == 0
    assert capsys.readouterr().out.endswith("same_speed_worst_ratio 0.800 ratio 1.02 pass\n")
    assert main([*both[::-1], "--only", "serve", "--pairs", "2"]) == 1
    assert capsys.readouterr().out.endswith("same_speed_worst_ratio 1.250 ratio 1.02 fail\n")


def test_what_fails_or_cannot_run_does_not_pass(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = checkout(tmp_path / "a"), checkout(tmp_path / "b", code=3)
    with pytest.raises(SystemExit, match="served 100 a second"):
        main([good, bad, "--only", "count", "--pairs", "1"])
    with pytest.raises(SystemExit, match="no case begins with two"):
        main([good, "--only", "two"])
    assert main([good, good, "--only", "shared", "--pairs", "1"]) == 1
    said = capsys.readouterr().out
    assert "skipped shared: no shared data at" in said and said.endswith(" fail\n")


def test_a_pattern_that_is_not_printed_is_told(tmp_path: Path) -> None:
    words = [sys.executable, "-c", "print('nothing')"]
    with pytest.raises(SystemExit, match=r"does not print requests_per_s\nnothing"):
        same_speed.figures(words, tmp_path, {}, SERVED)


def test_the_scripts_of_claims_are_found_and_print_what_is_read(tmp_path: Path) -> None:
    side = checkout_of(str(HERE), tmp_path, "here")
    named = {word for case in CASES for word in case.words} & {SIMULATOR, PLANNING}
    assert named == {SIMULATOR, PLANNING}
    for case in CASES:
        script = command_in(case, side, {})[-2]
        if case.printed:
            text = (HERE / f"{script.replace('.', '/')}.py").read_text(encoding="utf-8")
            for pattern in case.printed.values():
                assert pattern.partition("(")[0] in text


def test_a_rate_counts_the_other_way() -> None:
    assert SpeedPair("simulator", "requests_per_s", 0, 200.0, 100.0).ratio == 2
    assert SpeedPair("help", "cpu_s", 0, 2.0, 1.0).ratio == 0.5


def test_it_is_no_claim() -> None:
    assert "same_speed" not in {path.stem for path in scripts()}


def test_it_names_its_words() -> None:
    words = [sys.executable, "-m", "benchmarks.same_speed", "--help"]
    done = subprocess.run(words, cwd=HERE, capture_output=True, text=True, check=True)
    assert "--pairs" in done.stdout
