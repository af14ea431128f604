"""Runs every claim's script, and writes the table that README cites and the output of each script.

A claim is a script in a folder beside this one whose last line is `name value unit bar verdict` and
whose exit status is the verdict. Its whole output goes to results/SCRIPT.txt; a dry run shows it
instead. A script that says in which form it ran is run in both: as it is, and on the build of
tandem.compiled (a row SCRIPT.compiled), where this machine can make one.
`python -m benchmarks.claims [--quick] [--dry-run] [name ...] [--only CASE ...]`.
"""

from __future__ import annotations

import argparse
import csv
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path

from tandem.compiled import missing
from tandem.wiring.folder import commit, host

HERE = Path(__file__).resolve().parent
TABLE = HERE / "CLAIMS.csv"
PAGE = HERE / "CLAIMS.md"
VERDICTS = ("pass", "fail")
IN_PARTS = "return measured_in_parts("  # of cases.py: takes --quick, --keep and --only
COMPILED = ".compiled"  # suffix of a script's name: judged on the build
TIMEOUT_S = 14_400  # claims of fidelity discard runs while the machine drifts
HEAD = """# Claims

Each row is the last line of a script of benchmarks/; `make claims` runs them all and puts the
whole output of each into results/SCRIPT.txt, under its commit and machine. A claim that could not
run says so instead of a verdict; one that has no row was not run yet. SCRIPT.compiled is the
compiled form. A commit with + had changes that were not committed.

"""


@dataclass(frozen=True)
class Claim:
    """One row of the table."""

    script: str
    name: str
    value: str
    unit: str
    bar: str
    verdict: str
    took_s: str
    commit: str


def main(words: Sequence[str] | None = None) -> int:
    """Runs the claims; 1 if any failed or could not run."""
    parser = argparse.ArgumentParser(prog="make claims", description=__doc__)
    parser.add_argument("names", nargs="*", help="scripts to run; default: all")
    parser.add_argument("--quick", action="store_true", help="pass --quick to those that take it")
    parser.add_argument("--dry-run", action="store_true", help="write nothing, show all output")
    parser.add_argument("--gpu", action="store_true", help="those that need a GPU, and no others")
    parser.add_argument("--keep", type=Path, help="folder of runs, for a stopped claim")
    parser.add_argument("--only", nargs="+", default=(), help="cases of a claim in parts")
    chosen = parser.parse_args(words)
    known = scripts(chosen.gpu)
    if unknown := set(chosen.names) - {script.stem for script in known}:
        names = ", ".join(script.stem for script in known)
        parser.error(f"no claim {', '.join(sorted(unknown))} here; there are {names}")
    parts = {script.stem for script in known if takes(read(script), "--only")}
    if chosen.only and not (chosen.names and parts.issuperset(chosen.names)):
        parser.error(f"--only: name a claim of several cases: {', '.join(sorted(parts))}")
    claims, where = [], origin()
    for script, form in forms(known):
        if not chosen.names or script.stem in chosen.names:
            claim, output = carried_out(script, chosen.quick, chosen.keep, form, chosen.only)
            claims.append(claim)
            if chosen.dry_run:
                print(f"---- {claim.script}", output, sep="\n", flush=True)
            else:
                publish(claim, output, where)
            print(" ".join(astuple(claim)[:6]), flush=True)
    if not chosen.dry_run:
        write([*kept(claims), *claims])
    return int(any(claim.verdict != "pass" for claim in claims))


def scripts(needs_gpu: bool = False) -> list[Path]:
    """The claims' scripts: the modules in folders here that can be run; gpu_* need a GPU."""
    found = sorted(HERE.glob("*/*.py"), key=lambda path: path.stem)
    return [path for path in found if _is_claim(path) and path.stem.startswith("gpu_") == needs_gpu]


def read(script: Path) -> str:
    """The text of a script."""
    return script.read_text(encoding="utf-8")


def _is_claim(path: Path) -> bool:
    return '__name__ == "__main__"' in read(path)


def forms(found: Iterable[Path]) -> Iterator[tuple[Path, str]]:
    """Each script as it is, and again on the build if it prints its form and there can be one."""
    for script in found:
        yield script, ""
        if "form()" in read(script) and missing() is None:
            yield script, COMPILED


def takes(text: str, option: str) -> bool:
    """Whether a script takes an option: it names it, or leaves its command line to IN_PARTS."""
    return f'"{option}"' in text or IN_PARTS in text


def carried_out(
    script: Path,
    is_quick: bool,
    keep: Path | None = None,
    form: str = "",
    only: Sequence[str] = (),
) -> tuple[Claim, str]:
    """Runs one script; returns its claim, and its output under its command line."""
    text, name = read(script), f"{script.stem}{form}"
    words = [sys.executable, *(["-m", "tandem.compiled"] if form else [])]
    words += ["-m", f"benchmarks.{script.parent.name}.{script.stem}"]
    words += ["--quick"] if is_quick and takes(text, "--quick") else []
    words += ["--keep", str(keep / script.stem)] if keep and takes(text, "--keep") else []
    words += ["--only", *only] if only and takes(text, "--only") else []
    began = time.perf_counter()
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, cwd=HERE.parent, timeout=TIMEOUT_S
        )
        said, code, errors = done.stdout, done.returncode, done.stderr
    except subprocess.TimeoutExpired as error:
        said = (error.stdout or b"").decode(errors="replace")  # bytes, in spite of text=True
        code, errors = 124, f"took longer than {TIMEOUT_S} s"
    line, took = last_line(said), f"{time.perf_counter() - began:.0f}"
    output = f"$ python {' '.join(words[1:])}\n{said}"
    if line is None or (line[-1] == "pass") != (code == 0):
        print(f"{name}: {last_error(errors)}", file=sys.stderr)
        row = Claim(name, name, "-", "-", "-", f"broken({code})", took, _commit())
        return row, f"{output}{errors}"
    return Claim(name, *line, took, _commit()), output


def origin() -> str:
    """Commit and machine, for the heads of published outputs; read before a claim writes files."""
    made, machine = commit(), host()
    state = " with changes" if made["dirty"] else ""
    cores = f"{machine['processor']}, {machine['cores']} cores, {machine['system']}"
    return f"commit {made['commit']}{state}\n{cores}"


def publish(claim: Claim, output: str, where: str) -> None:
    """Writes the output of a claim to results/SCRIPT.txt."""
    folder = HERE / "results"
    folder.mkdir(exist_ok=True)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    head = f"{where}\n{now}, took {claim.took_s} s\n\n"
    (folder / f"{claim.script}.txt").write_text(head + output, encoding="utf-8")


def last_line(text: str) -> list[str] | None:
    """The words `name value unit bar verdict` of the last line; None for any other line."""
    lines = text.strip().splitlines()
    words = lines[-1].split() if lines else []
    return words if len(words) == 5 and words[-1] in VERDICTS else None


def last_error(errors: str) -> str:
    """The last line that is not empty."""
    lines = [line for line in errors.splitlines() if line.strip()]
    return lines[-1] if lines else "its last line is no claim"


def kept(claims: Iterable[Claim]) -> list[Claim]:
    """Rows of the earlier table with an existing script that did not run now."""
    if not TABLE.is_file():
        return []
    ran, there = {claim.script for claim in claims}, {path.stem for path in HERE.glob("*/*.py")}
    with TABLE.open(newline="", encoding="utf-8") as file:
        rows = [Claim(**row) for row in csv.DictReader(file)]
    return [
        row for row in rows if row.script.removesuffix(COMPILED) in there and row.script not in ran
    ]


def write(claims: Iterable[Claim]) -> None:
    """Writes CLAIMS.csv, and CLAIMS.md for readers."""
    rows = sorted(claims, key=lambda claim: claim.script)
    names = [field.name for field in fields(Claim)]
    with TABLE.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows([names, *map(astuple, rows)])
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    lines += ["| " + " | ".join(astuple(row)) + " |" for row in rows]
    PAGE.write_text(HEAD + "\n".join(lines) + "\n", encoding="utf-8")


def _commit() -> str:
    """Of the checkout as the claims found it: 57fefd0, or 57fefd0+ where files differed from it."""
    made = commit()
    return f"{str(made['commit'])[:7]}{'+' if made['dirty'] else ''}" if made["commit"] else "-"


def end_on_sigterm() -> None:
    """Has SIGTERM end this process as an exception does: the script that runs ends with it."""

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, end)


if __name__ == "__main__":
    end_on_sigterm()
    sys.exit(main())
