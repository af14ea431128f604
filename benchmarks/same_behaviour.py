"""Shows that two checkouts of Tandem behave the same: run by run, column by column.

`python -m benchmarks.same_behaviour BEFORE [AFTER] [--only NAME] [--jobs N] [--keep FOLDER]`

BEFORE and AFTER are folders of checkouts, or revisions of this one's history. Without AFTER it is
this checkout. Both carry out every run of benchmarks/behaviour_runs.py on this machine, by
its words behind `tandem run`, in folders beside the checkouts. Nothing of either is imported here:
what is compared is what their run folders hold. Each column of each table and each key of each JSON
file is decoded, and hashed with its type. Two columns are equal where their hashes are; else the
first row that differs is shown. RENAMED lists columns with another name in AFTER, LEFT_OUT columns
that are not compared, each with its reason. config.yaml is not compared: it names classes. A run
must also end with the exit status that is expected of it, and show what it is for (restarts, swaps,
shared pages, ...).

`make claims` leaves it out, since only the user can say what BEFORE is.
"""

from __future__ import annotations

import argparse
import io
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.behaviour_runs import INPUTS, PLAYED, SHARED, BehaviourRun, runs, write_inputs
from benchmarks.run_columns import ALL, Folder, LeftOut, differences, read_folder

HERE = Path(__file__).resolve().parent.parent
TIMEOUT_S = 600  # of one run

# (file, column of BEFORE) -> column of AFTER
RENAMED: dict[tuple[str, str], str] = {}


TOO_LITTLE = "the meter of a run that serves and trains did not read what training holds"
LEFT_OUT: tuple[LeftOut, ...] = (
    LeftOut("memory.parquet", "measured_bytes", TOO_LITTLE, run="time_shared/*"),
    LeftOut("metrics.json", "*_measured_bytes", TOO_LITTLE, run="time_shared/*"),
    LeftOut("hashes.json", ALL, "hashes of whole files, provenance included"),
    LeftOut("provenance.json", "commit", "the checkout itself"),
    LeftOut("provenance.json", "dirty", "the checkout itself"),
    LeftOut("provenance.json", "version", "stands where there is no commit"),
    LeftOut("provenance.json", "overrides", "holds the folder of the run that is played back"),
    LeftOut("status.json", "traceback", "names files and lines of the code"),
    LeftOut("memory.parquet", "process_bytes", "the process, as the operating system counts it"),
    LeftOut("metrics.json", "*_process_bytes", "of memory.parquet's process_bytes"),
    *(
        LeftOut(file, column, reason, is_timed=True)
        for file, column, reason in (
            ("requests.parquet", "scheduled_ns", "a clock's reading"),
            ("requests.parquet", "first_token_ns", "a clock's reading"),
            ("requests.parquet", "finish_ns", "a clock's reading"),
            ("requests.parquet", "token_ns", "a clock's readings"),
            ("steps.parquet", "issue_ns", "a clock's reading"),
            ("steps.parquet", "start_ns", "a clock's reading"),
            ("steps.parquet", "end_ns", "a clock's reading"),
            ("steps.parquet", "host_ns", "a clock's reading"),
            ("plans.parquet", "at_ns", "a clock's reading"),
            ("training.parquet", "start_ns", "a clock's reading"),
            ("training.parquet", "end_ns", "a clock's reading"),
            ("memory.parquet", ALL, "a row is what is held when an operation happens to end"),
            ("metrics.json", "*_s", "of times"),
            ("metrics.json", "*_throughput", "of times"),
            ("metrics.json", "*_share", "of times"),
            ("metrics.json", "busy_share_*", "of times"),
            ("metrics.json", "mean_*", "over time"),
            ("metrics.json", "fullest_*", "of memory.parquet"),
            ("metrics.json", "peak_*", "of memory.parquet"),
        )
    ),
)


def _column(folder: Folder, file: str, column: str) -> list[Any]:
    """The values of a column that are there."""
    return [value for value in folder[f"{file}.parquet"][column].values if value is not None]


def _unasked(folder: Folder) -> int:
    plans, questions = (folder["provenance.json"][key].values[0] for key in ("plans", "questions"))
    return int(plans - questions)


# What a run may have to show, counted in its folder (of BEFORE).
SHOWS: dict[str, Callable[[Folder], int]] = {
    "restarts": lambda folder: sum(_column(folder, "requests", "restarts")),
    "swaps": lambda folder: sum(_column(folder, "requests", "swaps")),
    "cached tokens": lambda folder: sum(_column(folder, "requests", "cached_tokens")),
    "refusals": lambda folder: _column(folder, "requests", "status").count("refused"),
    "tokens": lambda folder: sum(map(len, _column(folder, "requests", "output_ids"))),
    "losses": lambda folder: len(_column(folder, "training", "loss")),
    "copies": lambda folder: sum("->" in lane for lane in _column(folder, "steps", "lane")),
    "collectives": lambda folder: _column(folder, "steps", "lane").count("net"),
    "plans unasked": _unasked,
}


@dataclass(frozen=True)
class Checkout:
    """Code that carries runs out, and the folder that they go into."""

    code: Path
    out: Path

    def check(self) -> None:
        """SystemExit where the command line would run other code."""
        words = [sys.executable, "-c", "import tandem; print(tandem.__file__)"]
        done = subprocess.run(words, cwd=self.out, env=self.env, capture_output=True, text=True)
        found = Path(done.stdout.strip() or os.devnull)
        if not found.is_relative_to(self.code):
            sys.exit(f"{self.code}: no Tandem can be run there ({found} was found)")

    @property
    def env(self) -> dict[str, str]:
        """Of its processes: bytecode is kept, and beside the checkouts."""
        left_out = ("PYTHONDONTWRITEBYTECODE", "HYDRA_FULL_ERROR", "PYTHONHASHSEED")
        env = {name: value for name, value in os.environ.items() if name not in left_out}
        env["PYTHONPATH"] = os.pathsep.join((str(self.code), str(self.code / "src")))
        env["PYTHONPYCACHEPREFIX"] = str(self.out.parent / "bytecode")
        return env

    def carry_out(self, run: BehaviourRun, words: Sequence[str]) -> RunResult:
        """One run, in a folder of its own."""
        folder = self.out / run.name.replace("/", "-")
        folder.mkdir()
        command = [sys.executable, "-m", "tandem", "run", *words]
        began = time.perf_counter()
        try:
            done = subprocess.run(
                command, cwd=folder, env=self.env, capture_output=True, text=True, timeout=TIMEOUT_S
            )
            code, said = done.returncode, done.stderr.strip()
        except subprocess.TimeoutExpired:
            code, said = 124, f"took longer than {TIMEOUT_S} s"
        took_s = time.perf_counter() - began
        found = [path.parent for path in folder.glob("outputs/*/*/status.json")]
        return RunResult(code, said, took_s, found[0] if len(found) == 1 else None)


@dataclass(frozen=True)
class RunResult:
    """How a run of a checkout ended, and where its folder is; None where there is not one."""

    code: int
    said: str
    took_s: float
    folder: Path | None

    def wrong(self, run: BehaviourRun) -> str:
        """Why it cannot be compared; empty where it can."""
        if self.code != run.code:
            return f"exit status {self.code}, not {run.code}: {self.said[-300:] or 'nothing said'}"
        return "" if self.folder else "it left no folder of a run"


@dataclass(frozen=True)
class Verdict:
    """What became of one run in both checkouts."""

    run: BehaviourRun
    took_s: tuple[float, float]
    compared: int
    shown: Mapping[str, int]
    wrong: tuple[str, ...]

    def __str__(self) -> str:
        before, after = (f"{took:6.1f}" for took in self.took_s)
        shown = "".join(f", {count} {name}" for name, count in self.shown.items())
        state = f"{len(self.wrong)} differ" if self.wrong else "equal"
        head = f"{self.run.name:34}{before}{after} s {self.compared:4} columns {state}{shown}"
        return "\n    ".join((head, *self.wrong))


def judged(run: BehaviourRun, before: RunResult, after: RunResult) -> Verdict:
    """Compares both ends of a run."""
    took_s = (before.took_s, after.took_s)
    ends = {"before": before, "after": after}
    if broken := [f"{name}: {why}" for name, end in ends.items() if (why := end.wrong(run))]:
        return Verdict(run, took_s, 0, {}, tuple(broken))
    assert before.folder is not None and after.folder is not None
    one, other = read_folder(before.folder), read_folder(after.folder)
    left_out = [out for out in LEFT_OUT if fnmatch(run.name, out.run)]
    compared, found = differences(one, other, RENAMED, left_out, run.is_timed)
    shown = {name: SHOWS[name](one) for name in run.shows}
    missing = [
        f"no {name}: the run does not show what it is for" for name in shown if not shown[name]
    ]
    return Verdict(run, took_s, compared, shown, (*map(str, found), *missing))


def carried_out(
    chosen: Sequence[BehaviourRun], sides: Sequence[Checkout], folders: Mapping[str, str], jobs: int
) -> Iterator[Verdict]:
    """Every run in both checkouts, as many processes at once as `jobs`."""
    begun: dict[tuple[str, Checkout], Future[RunResult]] = {}

    def arguments_of(run: BehaviourRun, side: Checkout) -> list[str]:
        places = dict(folders)
        if run.plays:  # begun before this one, so that no thread waits for one behind it
            places[PLAYED] = str(begun[run.plays, side].result().folder)
        words = run.words
        for sign, folder in places.items():
            words = tuple(word.replace(sign, folder) for word in words)
        return list(words)

    with ThreadPoolExecutor(jobs) as pool:
        for run in chosen:
            for side in sides:
                begun[run.name, side] = pool.submit(
                    lambda run, side: side.carry_out(run, arguments_of(run, side)), run, side
                )
        try:
            for run in chosen:
                yield judged(run, *(begun[run.name, side].result() for side in sides))
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def chosen_of(only: Sequence[str], shared: Path) -> tuple[list[BehaviourRun], list[str]]:
    """The runs whose names begin with one of `only`, with what they play back, and the names of
    those whose data is absent."""
    every = {run.name: run for run in runs()}
    named = [run for run in every.values() if not only or run.name.startswith(tuple(only))]
    if not named:
        sys.exit(f"no run begins with {' or '.join(only)}; there are {', '.join(every)}")
    wanted = {run.name for run in named} | {run.plays for run in named}
    found = [run for run in every.values() if run.name in wanted]
    if (shared / "data" / "README.md").is_file():
        return found, []
    absent = [run.name for run in found if run.needs_shared]
    if absent and os.environ.get("TANDEM_REQUIRE_SHARED") == "1":
        sys.exit(f"no shared data at {shared} (set TANDEM_SHARED)")
    return [run for run in found if not run.needs_shared], absent


def checkout_of(named: str, root: Path, name: str) -> Checkout:
    """A folder as it is, or a revision of this checkout, unpacked below `root`."""
    code, out = Path(named).resolve(), root / name
    out.mkdir()
    if not Path(named).is_dir():
        code = root / f"{name}-code"
        packed = subprocess.run(["git", "-C", str(HERE), "archive", named], capture_output=True)
        if packed.returncode:
            why = packed.stderr.decode(errors="replace").strip()
            sys.exit(f"{named}: neither a folder nor a revision ({why})")
        with tarfile.open(None, "r:", io.BytesIO(packed.stdout)) as archive:
            archive.extractall(code, filter="data")
    return Checkout(code, out)


def main(words: Sequence[str] | None = None) -> int:
    """Prints a row for each run; the last line says how many differ."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("before", help="folder of a checkout, or a revision")
    parser.add_argument("after", nargs="?", default=str(HERE), help="the same; this checkout")
    about = "runs whose names begin so; may be given again"
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help=about)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="[%(default)s]")
    parser.add_argument("--keep", type=Path, help="a new folder for all runs, which stays")
    told = parser.parse_args(words)
    if told.keep:
        told.keep.mkdir(parents=True)
        return compared(told.before, told.after, told.keep.resolve(), told.only, told.jobs)
    with tempfile.TemporaryDirectory(prefix="tandem-same-") as folder:
        return compared(told.before, told.after, Path(folder), told.only, told.jobs)


def compared(before: str, after: str, root: Path, only: Sequence[str], jobs: int) -> int:
    """Carries out and compares below `root`; returns the exit status."""
    shared = Path(os.environ.get("TANDEM_SHARED", HERE.parent / "shared")).resolve()
    chosen, absent = chosen_of(only, shared)
    sides = (checkout_of(before, root, "before"), checkout_of(after, root, "after"))
    for side in sides:
        side.check()
    if any(run.needs_shared for run in chosen):
        write_inputs(shared, root / "inputs")
    folders = {SHARED: str(shared), INPUTS: str(root / "inputs")}
    wrong, shown = 0, Counter[str]()
    with tqdm(total=len(chosen), unit="run", leave=False, disable=None) as bar:
        for verdict in carried_out(chosen, sides, folders, jobs):
            bar.update()
            with tqdm.external_write_mode():
                print(verdict, flush=True)
            wrong += bool(verdict.wrong)
            shown.update(name for name, count in verdict.shown.items() if count)
    print("shown: " + ", ".join(f"{name} in {n} runs" for name, n in sorted(shown.items())))
    for (file, old), new in RENAMED.items():
        print(f"renamed: {file} {old} is {new}")
    for out in LEFT_OUT:
        where = " (timed runs)" if out.is_timed else f" ({out.run})" if out.run != "*" else ""
        print(f"left out{where}: {out.file} {out.column}: {out.reason}")
    if absent:
        print(f"skipped, no shared data at {shared}: {', '.join(absent)}")
    state = "fail" if wrong else "pass"
    print(f"same_behaviour_different_of_{len(chosen)} {wrong} runs 0 {state}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
