"""Shows that a checkout of Tandem is no slower than another one, by the CPU time of user commands.

`python -m benchmarks.same_speed BEFORE [AFTER] [--only NAME] [--pairs N] [--csv FILE]`

BEFORE and AFTER are folders of checkouts, or revisions of this one's history. Without AFTER it is
this checkout. Each case is a process that a user starts, in both checkouts: `tandem --help`, a
sweep, a run and the claim on the speed of the simulator, both in the interpreted and the compiled
form, and the claim on planning a 20B training iteration. A case is measured in pairs of one process
of each checkout, in turns (ABBA), on one thread, after one pair that does not count. A sample is
the CPU time of the process and its children, or of a claim's script what it prints, up to that
line. The ratio of a case is the median over its pairs: other processes of a shared machine slow
both halves of a pair alike. The value is the largest ratio.

`make claims` leaves it out, since only the user can say what BEFORE is.
"""

from __future__ import annotations

import argparse
import csv
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields
from pathlib import Path

from benchmarks.behaviour_runs import INPUTS, PEERS, SHARED, write_vidur
from benchmarks.same_behaviour import HERE, Checkout, checkout_of
from tandem.compiled import missing

BAR = 1.02
REQUESTS = "sharegpt_n1000_qps2_seed42.csv"
CPU = "cpu_s"
RUN = (
    *("tandem", "run", "model=llama2_7b", "device=a100", "policy=sarathi", "depth=1"),
    *(f"profile='{PEERS}/cost_tables/llama2-7b_a100_tp1.npz'", "budget.kv_pages=7424"),
    *("trace=recorded", f"trace.path='{INPUTS}/vidur.csv'"),
)
SWEEP = (
    *("tandem", "sweep", "model=llama3_8b", "device=a100", "slo=chat", "limit=30"),
    *("arrival.rate=2,4,8", "--jobs", "1", "--out", "sweep"),
)
COMPILED = ("tandem.compiled", "-m")
# Scripts of claims, whose folder in benchmarks/ is another one in each checkout.
SIMULATOR, PLANNING = "simulator_speed", "training_planning_speed"
RATE = {"requests_per_s": r"requests per CPU second: (\d+) by fastest"}
ITERATION = {
    "asked_ms": r"asked for every iteration: (\S+) ms",
    "iteration_ms": r"patrickstar_20b_iteration_ms (\S+) ms",
}


@dataclass(frozen=True)
class SpeedCase:
    """A process by its words behind `python -m`.

    Attributes:
        name: of the case.
        words: a module and its arguments.
        printed: patterns of the figures that count, by name, in the order of their lines; without
            any it is the CPU time. A name that ends in `_per_s` is a rate.
        needs_shared: whether it reads the research data that is not in the repository.
    """

    name: str
    words: tuple[str, ...]
    printed: Mapping[str, str] = field(default_factory=dict)
    needs_shared: bool = False

    @property
    def is_compiled(self) -> bool:
        """Whether it runs on the build of tandem.compiled."""
        return self.words[: len(COMPILED)] == COMPILED


CASES = (
    SpeedCase("help", ("tandem", "--help")),
    SpeedCase("sweep", SWEEP),
    SpeedCase("run", RUN, needs_shared=True),
    SpeedCase("run.compiled", (*COMPILED, *RUN), needs_shared=True),
    SpeedCase("simulator", (SIMULATOR, "--quick"), RATE, needs_shared=True),
    SpeedCase("simulator.compiled", (*COMPILED, SIMULATOR, "--quick"), RATE, needs_shared=True),
    SpeedCase("planning", (PLANNING, "--quick"), ITERATION),
)


def cpu_s(words: Sequence[str], side: Checkout, folder: Path, env: Mapping[str, str]) -> float:
    """CPU seconds of a process and its children. SystemExit where it fails."""
    said = folder / "said.txt"
    with said.open("wb") as out:
        process = subprocess.Popen(words, cwd=folder, env=env, stdout=out, stderr=out)
        _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)  # Popen did not see its end
    if process.returncode:
        told = said.read_text(encoding="utf-8", errors="replace")[-2000:]
        sys.exit(f"{side.code}: {' '.join(words)}\n{told}")
    return used.ru_utime + used.ru_stime


def figures(
    words: Sequence[str], folder: Path, env: Mapping[str, str], printed: Mapping[str, str]
) -> dict[str, float]:
    """What a process prints, which ends with the last of the patterns. SystemExit without them."""
    found, said = dict[str, float](), list[str]()
    with subprocess.Popen(
        words, cwd=folder, env=env, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            said.append(line)
            for name, pattern in printed.items():
                if match := re.search(pattern, line):
                    found[name] = float(match[1])
            if len(found) == len(printed):
                os.killpg(process.pid, signal.SIGKILL)  # tandem.compiled has a child
                return found
    sys.exit(f"{' '.join(words)} does not print {', '.join(printed)}\n{''.join(said)[-2000:]}")


def command_in(case: SpeedCase, side: Checkout, folders: Mapping[str, str]) -> list[str]:
    """The words of a case in a checkout."""
    words = [sys.executable, "-m"]
    for word in case.words:
        if word in (SIMULATOR, PLANNING):
            (script,) = (side.code / "benchmarks").rglob(f"{word}.py")
            word = ".".join(script.relative_to(side.code).with_suffix("").parts)
        for sign, folder in folders.items():
            word = word.replace(sign, folder)
        words.append(word)
    return words


def sample(case: SpeedCase, side: Checkout, folders: Mapping[str, str]) -> dict[str, float]:
    """The figures of one process of a case."""
    words = command_in(case, side, folders)
    env = {**side.env, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    env["TANDEM_SHARED"] = folders[SHARED]  # claims look beside their own checkout otherwise
    with tempfile.TemporaryDirectory(dir=side.out) as folder:
        if case.printed:
            return figures(words, Path(folder), env, case.printed)
        return {CPU: cpu_s(words, side, Path(folder), env)}


@dataclass(frozen=True)
class SpeedPair:
    """A figure of one process of each checkout, one behind the other."""

    case: str
    figure: str
    number: int
    before: float
    after: float

    @property
    def ratio(self) -> float:
        """What AFTER takes of BEFORE's time."""
        is_rate = self.figure.endswith("_per_s")
        return self.before / self.after if is_rate else self.after / self.before


def measured(
    cases: Sequence[SpeedCase], sides: Sequence[Checkout], folders: Mapping[str, str], pairs: int
) -> Iterator[SpeedPair]:
    """Pairs of all cases, round by round; the checkout that goes first takes turns."""
    for number in range(-1, pairs):
        for case in cases:
            turn = sides if number % 2 else sides[::-1]
            taken = {side.out.name: sample(case, side, folders) for side in turn}
            if number < 0:
                continue  # bytecode and caches were written
            before, after = (taken[side.out.name] for side in sides)
            for name in before:
                yield SpeedPair(case.name, name, number, before[name], after[name])


def table(found: Sequence[SpeedPair]) -> tuple[list[str], float]:
    """A line for each figure of each case, and the largest ratio."""
    lines = [f"{'case':32}{'before':>10}{'after':>10}{'ratio':>8}{'quartiles':>16}{'pairs':>7}"]
    worst = 0.0
    for case, figure in dict.fromkeys((pair.case, pair.figure) for pair in found):
        own = [pair for pair in found if (pair.case, pair.figure) == (case, figure)]
        ratios = [pair.ratio for pair in own]
        before = statistics.median(pair.before for pair in own)
        after = statistics.median(pair.after for pair in own)
        ratio = statistics.median(ratios)
        low, _, high = statistics.quantiles(ratios, n=4) if len(own) > 1 else ratios * 3
        spread = f"{low:.3f} to {high:.3f}"
        values = f"{before:10.4g}{after:10.4g}{ratio:8.3f}{spread:>16}{len(own):7}"
        lines.append(f"{f'{case} {figure}':32}{values}")
        worst = max(worst, ratio)
    return lines, worst


def chosen_of(only: Sequence[str], shared: Path) -> tuple[list[SpeedCase], list[str]]:
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
    found = list[SpeedPair]()
    with words.csv.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow((*(name.name for name in fields(SpeedPair)), "ratio"))
        for pair in measured(cases, sides, folders, words.pairs):
            found.append(pair)
            rows.writerow((*astuple(pair), pair.ratio))
            file.flush()
    lines, worst = table(found)
    print(*lines, *(f"skipped {reason}" for reason in skipped), sep="\n")
    has_passed = bool(found) and not skipped and worst <= BAR
    print(f"same_speed_worst_ratio {worst:.3f} ratio {BAR:g} {'pass' if has_passed else 'fail'}")
    return int(not has_passed)


def main(words: Sequence[str] | None = None) -> int:
    """Prints a line for each figure; the last line is the largest ratio."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("before", help="folder of a checkout, or a revision")
    parser.add_argument("after", nargs="?", default=str(HERE), help="the same; this checkout")
    about = "cases whose names begin so; may be given again"
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help=about)
    parser.add_argument("--pairs", type=int, default=15, help="of each case [%(default)s]")
    about = "a file for all pairs, written as they are measured"
    parser.add_argument("--csv", type=Path, default=os.devnull, help=about)
    told = parser.parse_args(words)
    with tempfile.TemporaryDirectory(prefix="tandem-speed-") as folder:
        return compared(told, Path(folder))


if __name__ == "__main__":
    sys.exit(main())
