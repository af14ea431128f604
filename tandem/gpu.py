"""`make gpu`: all that needs a GPU, in one call of under ten minutes, from a bare checkout.

Tests marked gpu, those of the Triton kernels, the decode step against the memory's bandwidth, a
calibration, a replay on an 8B-shape Llama in bf16 with random weights, its simulation and their
comparison. Results go into $OUT (at most two folders deep).
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tandem.provenance import ROOT

CARRIED = ROOT / ".gpu-site" / "sharegpt.parquet"  # made by `make gpu-site` where data is at hand
STEP_S = 500


def main(words: Sequence[str] | None = None) -> int:
    """Runs the steps one by one; 1 if any failed. A later step runs if what it needs is there."""
    parser = argparse.ArgumentParser(prog="make gpu", description=__doc__)
    parser.add_argument("--model", default="llama3_8b")
    parser.add_argument("--device", default="h200")
    parser.add_argument("--rate", default="8.0", help="requests per second")
    parser.add_argument("--limit", default="200", help="requests")
    parser.add_argument("--graph-rows", default="128", help="decodes of the largest CUDA graph")
    parser.add_argument("--trace", type=Path, default=CARRIED if CARRIED.is_file() else None)
    chosen = parser.parse_args(words)
    out = Path(os.environ.get("OUT", "outputs/gpu")).resolve()
    failed = [name for name, command in _steps(chosen, out) if not _done(name, command, out)]
    _collect(out)
    print(f"gpu: {'failed: ' + ', '.join(failed) if failed else 'all steps done'}; see {out}")
    return int(bool(failed))


def _steps(chosen: argparse.Namespace, out: Path) -> list[tuple[str, list[str]]]:
    tandem = [sys.executable, "-m", "tandem.cli"]
    work, profile = out / "work", out / "work" / "profile"
    trace = ["trace=file", f"trace.path={chosen.trace}"] if chosen.trace else ["trace=sample"]
    shared = [*trace, f"model={chosen.model}", f"device={chosen.device}", f"limit={chosen.limit}"]
    shared += [f"arrival.rate={chosen.rate}", "budget.host_bytes=4294967296", f"cache={work}/cache"]
    shared += [f"budget.graph_rows={chosen.graph_rows}"]
    compare = ["compare", str(work / "sim"), str(work / "cuda"), "--out", str(work / "report")]

    def run(backend: str) -> list[str]:
        where = f"hydra.run.dir={work / backend}"
        return [*tandem, "run", f"backend={backend}", f"profile={profile}", *shared, where]

    return [
        ("tests", [sys.executable, "-m", "pytest", "-m", "gpu"]),
        ("kernels", [sys.executable, "-m", "pytest", "tests/kernels"]),
        ("decode floor", [sys.executable, "-m", "benchmarks.gpu_decode_floor"]),
        ("calibrate", [*tandem, "calibrate", "backend=cuda", *shared, "--out", str(profile)]),
        ("measure", run("cuda")),
        ("predict", run("sim")),
        ("compare", [*tandem, *compare]),
    ]


def _done(name: str, command: list[str], out: Path) -> bool:
    """Runs one step with its output on the screen and in a log; whether it succeeded."""
    out.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / '.gpu-site'}:{ROOT}"}
    with (out / "gpu.log").open("ab") as log:
        try:
            done = subprocess.run(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=ROOT,
                env=environment, timeout=STEP_S,
            )  # fmt: skip
            text, code = done.stdout, done.returncode
        except subprocess.TimeoutExpired as error:
            text, code = error.stdout or b"", 124
        log.write(text)
    sys.stdout.write(text.decode(errors="replace")[-6000:])
    # pytest ends with 5 where it collected nothing, which is no failure
    ok = code == 0 or (name == "tests" and code == 5)
    print(
        f"gpu: {name} {'done' if ok else f'failed ({code})'}, {time.perf_counter() - began:.0f} s"
    )
    return ok


def _collect(out: Path) -> None:
    """One archive: a machine that is lent gives few files back, those in its $OUT."""
    if (out / "work").is_dir():
        shutil.rmtree(out / "work" / "cache", ignore_errors=True)
        shutil.make_archive(str(out / "results"), "gztar", out / "work")
        page = out / "work" / "report" / "report.html"
        if page.is_file():
            shutil.copy(page, out / "report.html")
        if not out.is_relative_to(ROOT):
            shutil.rmtree(out / "work")  # only what is outside of the checkout goes back


if __name__ == "__main__":
    sys.exit(main())
