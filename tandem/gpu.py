"""`make gpu`: all that needs a GPU, from a bare checkout, in calls of under ten minutes.

Steps, each in what time is left: the tests marked gpu, those of the Triton kernels, fidelity at two
loads (with its calibration, on an 8B-shape Llama in bf16 with random weights), the report of one of
its runs, the decode step against the memory's bandwidth, hybrid steps, training beyond the device's
memory, the report of one such run with its plans replayed. ARGS names some of them: one call may go
on where another had no time, with what lies in WORK (training wants a call of its own). Results are
in $OUT after every step, in few files: a machine that is lent gives no more back.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path

from tandem.provenance import ROOT

CARRIED = ROOT / ".gpu-site" / "sharegpt.parquet"  # made by `make gpu-site` where data is at hand
WORK = ROOT / "outputs" / "gpu-work"
MINUTES = 9.2  # of a call: it is cut at ten
LEAST_S = 10.0  # less is not worth a step's start
NO_TESTS = 5  # pytest's exit status where it collected nothing, which is no failure


def main(words: Sequence[str] | None = None) -> int:
    """Runs the steps one by one; 1 if any failed or had no time left."""
    parser = argparse.ArgumentParser(prog="make gpu", description=__doc__)
    parser.add_argument("steps", nargs="*", metavar="step", help="which; default: all")
    parser.add_argument("--model", default="llama3_8b")
    parser.add_argument("--device", default="h200")
    parser.add_argument("--limit", default="200", help="requests")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="for all [%(default)s]")
    chosen = parser.parse_args(words)
    until_s, commands = time.monotonic() + 60 * chosen.minutes, _steps(chosen)
    if unknown := set(chosen.steps) - commands.keys():
        parser.error(f"no step {', '.join(sorted(unknown))}; there are {', '.join(commands)}")
    out, failed = Path(os.environ.get("OUT", "outputs/gpu")).resolve(), []
    out.mkdir(parents=True, exist_ok=True)
    for name in chosen.steps or commands:
        if not _done(name, commands[name], out, until_s - time.monotonic()):
            failed.append(name)
        _collect(out)
    print(f"gpu: {'failed: ' + ', '.join(failed) if failed else 'all steps done'}; see {out}")
    return int(bool(failed))


def _steps(chosen: argparse.Namespace) -> dict[str, list[str]]:
    python, fidelity, load = [sys.executable, "-m"], WORK / "fidelity", "80%"
    training = WORK / "training"
    compared, trained = (
        [str(root / name) for name in ("predicted", "measured")]
        for root in (fidelity / load, training / "patrickstar")
    )
    shape = ["--model", chosen.model, "--device", chosen.device, "--requests", chosen.limit]
    kept = ["--keep", str(fidelity), "--out", str(WORK / "gpu_fidelity.csv")]
    return {
        "tests": [*python, "pytest", "-m", "gpu"],
        "kernels": [*python, "pytest", "tests/kernels"],
        "fidelity": [*python, "benchmarks.gpu_fidelity", *shape, *kept],
        "report": [*python, "tandem.cli", "compare", *compared, "--out", str(WORK / "report")],
        "decode_floor": [*python, "benchmarks.gpu_decode_floor"],
        "hybrid": [*python, "benchmarks.gpu_hybrid"],
        "training": [
            *[*python, "benchmarks.gpu_training", "--device", chosen.device],
            *["--keep", str(training), "--out", str(WORK / "gpu_training.csv")],
        ],
        "training_report": [
            *[*python, "tandem.cli", "compare", *trained],
            *["--out", str(WORK / "training_report")],
        ],
    }


def _done(name: str, command: list[str], out: Path, limit_s: float) -> bool:
    """Runs one step with its output on the screen and in a log; whether it succeeded."""
    if limit_s < LEAST_S:
        print(f"gpu: {name} left out, no time is left; ARGS={name} in another call")
        return False
    began = time.monotonic()
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / '.gpu-site'}:{ROOT}"}
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=ROOT,
            env=environment, timeout=limit_s,
        )  # fmt: skip
        text, code = done.stdout, done.returncode
    except subprocess.TimeoutExpired as error:
        text, code = error.stdout or b"", 124
    with (out / "gpu.log").open("ab") as log:
        log.write(text)
    sys.stdout.write(text.decode(errors="replace")[-6000:])
    ok = code == 0 or (name == "tests" and code == NO_TESTS)
    print(f"gpu: {name} {'done' if ok else f'failed ({code})'}, {time.monotonic() - began:.0f} s")
    return ok


def _collect(out: Path) -> None:
    """What there is so far as one archive, without the cache, and the page of the report."""
    if WORK.is_dir():
        aside = out / ".results.tar.gz"
        with tarfile.open(aside, "w:gz") as archive:
            archive.add(WORK, arcname="gpu", filter=_wanted)
        aside.rename(out / "results.tar.gz")
    page = WORK / "report" / "report.html"
    if page.is_file():
        shutil.copy(page, out / "report.html")


def _wanted(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if "cache" in Path(member.name).parts else member


if __name__ == "__main__":
    sys.exit(main())
