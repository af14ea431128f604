"""Shows that a checkout of Tandem is no slower than another one, by the CPU time of user commands.

`python -m benchmarks.same_speed BEFORE [AFTER] [--only NAME] [--pairs N] [--csv FILE]`

BEFORE and AFTER are folders of checkouts, or revisions of this one's history. Without AFTER it is
this checkout. Each case is a process that a user starts, in both checkouts: a simulation, in the
interpreted and the compiled form, the claim on planning a 20B training iteration, a sweep, and
`tandem --help`. A case is measured in pairs of one process of each checkout, in turns (ABBA), on
one thread, after one run that does not count. A sample is the CPU time of the process and its
children, or a time that the process prints. The ratio of a case is the median over its pairs:
other processes of a shared machine slow both halves of a pair alike. The value is the largest.

`make claims` leaves it out, since only the user can say what BEFORE is.
"""

from __future__ import annotations

import argparse
import csv
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tqdm import tqdm

from benchmarks.behaviour_runs import INPUTS, PEERS, SHARED, write_vidur
from benchmarks.same_behaviour import HERE, Checkout, checkout_of
from tandem.compiled import missing

BAR = 1.02
REQUESTS = "sharegpt_n4000_qps2_seed42.csv"
CPU = "cpu_s"
SIMULATION = (
    *("run", "model=llama2_7b", "device=a100", "policy=sarathi", "depth=1"),
    *(f"profile='{PEERS}/cost_tables/llama2-7b_a100_tp1.npz'", "budget.kv_pages=7424"),
    *("trace=recorded", f"trace.path='{INPUTS}/vidur.csv'"),
)
SWEEP = (
    *("sweep", "model=llama3_8b", "device=a100", "slo=chat", "limit=30", "arrival.rate=2,4,8"),
    *("policy=chunked_restart,continuous_swap", "seed=0,1", "--jobs", "1", "--out", "sweep"),
)
PLANNING = "training_planning_speed"  # a claim's script, wherever in benchmarks it lies
PRINTED = {
    "iteration_ms": r"patrickstar_20b_iteration_ms (\S+) ms",
    "asked_ms": r"asked for every iteration: (\S+) ms",
}


@dataclass(frozen=True)
class Case:
    """A process by its words behind `python -m`.

    Attributes:
        name: of the case.
        words: a module and its arguments.
        printed: patterns of the times that count, by name; without any it is the CPU time.
        needs_shared: whether it reads the research data that is not in the repository.
        is_compiled: whether it runs on the build of tandem.compiled.
    """

    name: str
    words: tuple[str, ...]
    printed: Mapping[str, str] = field(default_factory=dict)
    needs_shared: bool = False
    is_compiled: bool = False


CASES = (
    Case("help", ("tandem", "--help")),
    Case("sweep", ("tandem", *SWEEP)),
    Case("planning", (PLANNING, "--quick"), PRINTED),
    Case("simulator", ("tandem", *SIMULATION), needs_shared=True),
    Case(
        "simulator.compiled",
        ("tandem.compiled", "-m", "tandem", *SIMULATION),
        needs_shared=True,
        is_compiled=True,
    ),
)


def cpu_of(words: Sequence[str], side: Checkout, folder: Path) -> tuple[float, str]:
    """Carries a command out; returns CPU seconds of it and its children, and what it prints.

    SystemExit where it fails.
    """
    env = {**side.env, "OMP_NUM_THREADS": "1"}
    said_in = folder / "said.txt"
    with said_in.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", *words], cwd=folder, env=env, stdout=out, stderr=out
        )
        _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)  # it was waited for here
    said = said_in.read_text(encoding="utf-8", errors="replace")
    if process.returncode:
        sys.exit(f"{side.code}: {' '.join(words)} ended with {process.returncode}\n{said[-2000:]}")
    return used.ru_utime + used.ru_stime, said


def words_in(case: Case, side: Checkout, folders: Mapping[str, str]) -> list[str]:
    """The words of a case in a checkout."""
    words = list(case.words)
    if words[0] == PLANNING:
        (script,) = (side.code / "benchmarks").rglob(f"{PLANNING}.py")
        words[0] = ".".join(script.relative_to(side.code).with_suffix("").parts)
    for sign, folder in folders.items():
        words = [word.replace(sign, folder) for word in words]
    return words


def sample(case: Case, side: Checkout, folders: Mapping[str, str]) -> dict[str, float]:
    """The times of one process of a case."""
    with tempfile.TemporaryDirectory(dir=side.out) as folder:
        used_s, said = cpu_of(words_in(case, side, folders), side, Path(folder))
    if not case.printed:
        return {CPU: used_s}
    found = {name: re.search(pattern, said) for name, pattern in case.printed.items()}
    if lacking := [name for name, match in found.items() if match is None]:
        sys.exit(f"{side.code}: {case.name} does not print {', '.join(lacking)}\n{said[-2000:]}")
    return {name: float(match[1]) for name, match in found.items() if match is not None}


@dataclass(frozen=True)
class Pair:
    """A time of one process of each checkout, one behind the other."""

    case: str
    time: str
    number: int
    before: float
    after: float

    @property
    def ratio(self) -> float:
        return self.after / self.before


def measured(
    cases: Sequence[Case], sides: Sequence[Checkout], folders: Mapping[str, str], pairs: int
) -> Iterator[Pair]:
    """Pairs of all cases, round by round; the checkout that goes first takes turns."""
    for number in range(-1, pairs):
        for case in cases:
            turn = sides if number % 2 else sides[::-1]
            taken = {side.out.name: sample(case, side, folders) for side in turn}
            if number < 0:
                continue  # bytecode and caches were written
            before, after = (taken[side.out.name] for side in sides)
            for time in before:
                yield Pair(case.name, time, number, before[time], after[time])


def table(found: Sequence[Pair]) -> tuple[list[str], float]:
    """A line for each time of each case, and the largest ratio."""
    lines = [f"{'case':32}{'before':>10}{'after':>10}{'ratio':>8}{'quartiles':>16}{'pairs':>7}"]
    worst = 0.0
    for case, time in dict.fromkeys((pair.case, pair.time) for pair in found):
        own = [pair for pair in found if (pair.case, pair.time) == (case, time)]
        ratios = [pair.ratio for pair in own]
        before = statistics.median(pair.before for pair in own)
        after = statistics.median(pair.after for pair in own)
        ratio = statistics.median(ratios)
        low, _, high = statistics.quantiles(ratios, n=4) if len(own) > 1 else ratios * 3
        spread = f"{low:.3f} to {high:.3f}"
        lines.append(
            f"{case + ' ' + time:32}{before:10.3f}{after:10.3f}{ratio:8.3f}{spread:>16}{len(own):7}"
        )
        worst = max(worst, ratio)
    return lines, worst


def chosen_of(only: Sequence[str], shared: Path) -> tuple[list[Case], list[str]]:
    """The cases whose names begin with one of `only`, and why others of them cannot run here."""
    named = [case for case in CASES if not only or case.name.startswith(tuple(only))]
    if not named:
        sys.exit(f"no case begins with {' or '.join(only)}; there are {[c.name for c in CASES]}")
    found, skipped = [], []
    for case in named:
        if case.needs_shared and not (shared / "data" / "README.md").is_file():
            skipped.append(f"{case.name}: no shared data at {shared} (set TANDEM_SHARED)")
        elif case.is_compiled and (lacking := missing()):
            skipped.append(f"{case.name}: {lacking}")
        else:
            found.append(case)
    return found, skipped


def compared(words: argparse.Namespace, root: Path) -> int:
    """Measures below `root` and prints; returns the exit status."""
    shared = Path(os.environ.get("TANDEM_SHARED", HERE.parent / "shared")).resolve()
    cases, skipped = chosen_of(words.only, shared)
    sides = (checkout_of(words.before, root, "before"), checkout_of(words.after, root, "after"))
    for side in sides:
        side.check()
    folders = {SHARED: str(shared), INPUTS: str(root)}
    if any(case.needs_shared for case in cases):
        write_vidur(shared / "data" / "peers" / "inputs" / REQUESTS, root / "vidur.csv")
    found = list[Pair]()
    rounds = len(cases) * words.pairs
    with (
        tqdm(total=rounds, unit="pair", leave=False, disable=None) as bar,
        suppress(
            KeyboardInterrupt  # what is measured is shown
        ),
    ):
        for pair in measured(cases, sides, folders, words.pairs):
            found.append(pair)
            bar.update()
    if words.csv:
        with words.csv.open("w", newline="", encoding="utf-8") as file:
            rows = csv.writer(file)
            rows.writerow(("case", "time", "pair", "before", "after", "ratio"))
            rows.writerows((p.case, p.time, p.number, p.before, p.after, p.ratio) for p in found)
    lines, worst = table(found)
    print(*lines, *(f"skipped {reason}" for reason in skipped), sep="\n")
    has_passed = bool(found) and not skipped and worst <= BAR
    print(f"same_speed_worst_ratio {worst:.3f} ratio {BAR:g} {'pass' if has_passed else 'fail'}")
    return int(not has_passed)


def main(words: Sequence[str] | None = None) -> int:
    """Prints a line for each time; the last line is the largest ratio."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("before", help="folder of a checkout, or a revision")
    parser.add_argument("after", nargs="?", default=str(HERE), help="the same; this checkout")
    about = "cases whose names begin so; may be given again"
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help=about)
    parser.add_argument("--pairs", type=int, default=15, help="of each case [%(default)s]")
    parser.add_argument("--csv", type=Path, help="a file for all pairs")
    told = parser.parse_args(words)
    with tempfile.TemporaryDirectory(prefix="tandem-speed-") as folder:
        return compared(told, Path(folder))


if __name__ == "__main__":
    sys.exit(main())
