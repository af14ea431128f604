"""60 points on ShareGPT: a worker is killed, the sweep is interrupted, one point is impossible.

Every possible point finishes, no point runs twice, the report is drawn, and sweeps of these points
give equal bytes serially, on a two-worker Ray and through submitit, which `make claims` installs
into .venv-engines. The claim names those of the two that ran, and fails without either.
Its value is the CPU time of the sweep's own process per point, of a sweep without an impossible
point: composing, keys, distributing points, collecting, the table. The time of workers is printed
beside it: the runs, and a start of 1 to 2 s per worker and sweep.
`python -m benchmarks.speed.sweep [--quick] [--out DIR]`; --quick takes 24 points.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from tandem.cli import sweep
from tandem.sweeps.point import points_in
from tandem.wiring.folder import status_of

ROOT = Path(__file__).resolve().parents[2]
ENGINES = ROOT / ".venv-engines" / "bin" / "python"  # has Ray and submitit, see the Makefile
SHARED = Path(os.environ.get("TANDEM_SHARED", "../shared")).resolve()
BAR_MS = 20.0
FIXED = ("model=llama3_8b", "device=a100", "slo=chat", "limit=30")
POLICIES = "policy=chunked_restart,continuous_restart,continuous_swap,vllm_v1"
GRID = (POLICIES, "arrival.rate=2,4,6,8,12", "seed=0,1,2")
QUICK = ("policy=chunked_restart,continuous_swap", "arrival.rate=2,4,8", "seed=0,1,2,3")
# KV of three pages, which holds no request, for the one point that the environment names
IMPOSSIBLE = ("0", "8", "policies.kv.paged_swap.PagedSwap")
KV = "budget.kv_pages='${oc.decode:${oc.env:KV_${seed}_${arrival.rate}_${memory._target_},null}}'"
FILES = ("requests.parquet", "steps.parquet", "memory.parquet", "plans.parquet", "metrics.json")


def main(words: Sequence[str] | None = None) -> int:
    """Prints what was checked; the last line is the claim."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args(words)
    root = chosen.out or Path(tempfile.mkdtemp(prefix="tandem-sweep-"))
    whole = [*FIXED, *trace(root), *(QUICK if chosen.quick else GRID)]
    grid = [KV, *whole]
    os.environ["_".join(("KV", *IMPOSSIBLE))] = "3"
    total = hurt(grid, root / "hurt")
    finish(grid, root / "hurt", total)
    ran = [name for name in ("serial", "ray", "submitit") if repeated(grid, name, root)]
    value = overhead_ms(whole, root / "timed")
    verdict = "pass" if value <= BAR_MS and {"ray", "submitit"} <= set(ran) else "fail"
    print(f"results in {root}")
    print(
        f"sweep_own_cpu_per_point(processes,{','.join(ran)}) {value:.1f} ms <={BAR_MS:g} {verdict}"
    )
    return int(verdict == "fail")


def repeated(grid: list[str], engine: str, root: Path) -> bool:
    """Sweeps the grid through an engine and compares every file; False where it does not start."""
    python = sys.executable if engine == "serial" or not ENGINES.is_file() else str(ENGINES)
    if engine != "serial" and subprocess.run([python, "-c", f"import {engine}"]).returncode:
        print(f"{engine}: not installed, not tried; `make claims` installs it")
        return False
    began, out = time.perf_counter(), root / engine
    words = [python, "-m", "tandem.cli", "sweep", *grid, "--engine", engine, "--jobs", "2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [*words, "--out", str(out)]
    done = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL)
    assert done.returncode == 1, f"{engine}: one point is impossible, so the sweep says 1"
    if not finished(out):  # Ray gives its own processes half a minute to start
        print(f"{engine}: did not start, not tried")
        return False
    equal = same(root / "hurt", out)
    print(f"{engine}: {equal} files equal, {time.perf_counter() - began:.1f} s")
    return True


def trace(root: Path) -> list[str]:
    """ShareGPT's text with Llama 3's tokenizer, imported once into the folder of the benchmark."""
    path = SHARED / "data" / "sharegpt" / "sharegpt_v3_sample_dev.json.gz"
    tokenizer = SHARED / "data" / "tokenizers" / "llama3"
    words = ["trace=sharegpt", f"trace.path='{path}'", f"trace.tokenizer='{tokenizer}'"]
    return [*words, f"cache='{root / 'cache'}'"]


def hurt(grid: list[str], out: Path) -> int:
    """Starts the sweep, kills one worker, then interrupts the sweep; returns its points."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's `&` has it ignored
    words = [
        sys.executable,
        "-m",
        "tandem.cli",
        "sweep",
        *grid,
        "--jobs",
        "2",
        "--out",
        str(out),
    ]
    child = subprocess.Popen(words, stdout=subprocess.DEVNULL)
    await_points(child, out, 3)
    victim = next(p for p in psutil.Process(child.pid).children() if is_worker(p))
    victim.send_signal(signal.SIGKILL)
    await_points(child, out, 6)
    child.send_signal(signal.SIGINT)
    assert child.wait(timeout=60) == 130
    total, done = len(points_in(out)), len(finished(out))
    assert 6 <= done < total
    print(f"killed worker {victim.pid}; interrupted with {done} of {total} points finished")
    return total


def finish(grid: list[str], out: Path, total: int) -> None:
    """Resumes and draws; checks that no point ran again, and that one point alone is rejected."""
    before = {path: path.stat().st_mtime_ns for path in finished(out)}
    assert quietly([*grid, "--jobs", "2", "--out", str(out)]) == 1, "one point is rejected"
    assert all(path.stat().st_mtime_ns == at for path, at in before.items())
    states = [status_of(out / key) for key in points_in(out)]
    assert states.count("ok") == total - 1 and states.count("rejected") == 1
    from tandem.cli.report import main as report

    began = time.perf_counter()
    assert report([str(out)]) == 0
    print(f"{total} points: {total - 1} finished, 1 rejected, none run twice; ", end="")
    print(f"report drawn in {time.perf_counter() - began:.1f} s")


def same(one: Path, two: Path) -> int:
    """Checks that the points of two sweeps have equal files; returns the number of files."""
    count = 0
    assert points_in(one).keys() == points_in(two).keys()
    for key in (key for key in points_in(two) if status_of(one / key) == "ok"):
        for name in FILES:
            assert (one / key / name).read_bytes() == (two / key / name).read_bytes(), (key, name)
            count += 1
    return count


def overhead_ms(grid: list[str], out: Path) -> float:
    """CPU milliseconds per point of the sweep's own process: all of `tandem sweep` but the runs."""
    began, clock, workers = time.process_time(), time.perf_counter(), children_s()
    assert quietly([*grid, "--jobs", "2", "--out", str(out)]) == 0
    used, took = time.process_time() - began, time.perf_counter() - clock
    count = len(points_in(out))
    print(
        f"{count} points in 2 processes: {took:.1f} s; CPU: {used:.2f} s in the sweep itself, ",
        end="",
    )
    print(f"{children_s() - workers:.1f} s in the workers, for the runs and two starts")
    return 1e3 * used / count


def children_s() -> float:
    """CPU seconds of this process's children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def await_points(child: subprocess.Popen[bytes], out: Path, count: int) -> None:
    """Waits until `count` points have finished."""
    while len(finished(out)) < count:
        assert child.poll() is None, "the sweep ended before it could be hurt"
        time.sleep(0.02)


def finished(out: Path) -> list[Path]:
    """The metrics of finished points."""
    found = out.glob("*/metrics.json")
    return [path for path in found if path.parent.suffix != ".running"]


def is_worker(process: psutil.Process) -> bool:
    """Whether a process runs points; the resource tracker of multiprocessing does not."""
    return any("spawn_main" in word for word in process.cmdline())


def quietly(words: list[str]) -> int:
    """Runs a sweep in this process without showing its table; returns its exit code."""
    with contextlib.redirect_stdout(io.StringIO()):
        return sweep.main(words)


if __name__ == "__main__":
    sys.exit(main())
