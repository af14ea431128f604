"""60 points on ShareGPT: a worker is killed, the sweep is interrupted, one point is impossible.

Everything that can finish does, nothing is run twice, the report is drawn, and a second sweep of
the same points gives the same bytes: serially, and on Ray and submitit where they are installed.
The claim is the CPU time of the sweep's own process per point: composing, keys, giving out points,
collecting, the table. What workers do is the run, and their start (1 to 2 s each) once a sweep.
`python -m benchmarks.sweep [--quick] [--out DIR]`; --quick takes 24 points.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import psutil

from tandem import sweep
from tandem.folder import status_of
from tandem.manifest import points_in

SHARED = Path(os.environ.get("TANDEM_SHARED", "../shared")).resolve()
BAR_MS = 20.0
FIXED = ("model=llama3_8b", "device=a100", "slo=chat", "limit=30")
POLICIES = "policy=chunked_restart,continuous_restart,continuous_swap,vllm_v1"
GRID = (POLICIES, "arrival.rate=2,4,6,8,12", "seed=0,1,2")
QUICK = ("policy=chunked_restart,continuous_swap", "arrival.rate=2,4,8", "seed=0,1,2,3")
IMPOSSIBLE = "budget.kv_pages=3"  # pages: the longest request never fits
FILES = ("requests.parquet", "steps.parquet", "memory.parquet", "plans.parquet", "metrics.json")


def main(words: Sequence[str] | None = None) -> int:
    """Prints what was checked; the last line is the claim."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args(words)
    root = chosen.out or Path(tempfile.mkdtemp(prefix="tandem-sweep-"))
    grid = [*FIXED, *trace(root), *(QUICK if chosen.quick else GRID)]
    total = hurt(grid, root / "hurt")
    finish(grid, root / "hurt", total)
    for engine in ("serial", "ray", "submitit"):
        if engine != "serial" and not find_spec(engine):
            print(f"{engine}: not installed, not tried")
            continue
        began = time.perf_counter()
        quietly([*grid, "--engine", engine, "--jobs", "2", "--out", str(root / engine)])
        equal = same(root / "hurt", root / engine)
        print(f"{engine}: {equal} files equal, {time.perf_counter() - began:.1f} s")
    value = overhead_ms(grid, root / "timed")
    verdict = "pass" if value <= BAR_MS else "fail"
    print(f"results in {root}")
    print(f"sweep_overhead_per_point {value:.1f} ms <={BAR_MS:g} {verdict}")
    return int(verdict == "fail")


def trace(root: Path) -> list[str]:
    """ShareGPT's text with Llama 3's tokenizer, imported once into the folder of the benchmark."""
    path = SHARED / "data" / "sharegpt" / "sharegpt_v3_sample_dev.json.gz"
    tokenizer = SHARED / "data" / "tokenizers" / "llama3"
    words = ["trace=sharegpt", f"trace.path='{path}'", f"trace.tokenizer='{tokenizer}'"]
    return [*words, f"cache='{root / 'cache'}'"]


def hurt(grid: list[str], out: Path) -> int:
    """Starts the sweep, kills one worker, then interrupts the sweep; returns its points."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's `&` has it ignored
    words = [sys.executable, "-m", "tandem.cli", "sweep", *grid, "--jobs", "2", "--out", str(out)]
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
    """Goes on, adds a point that cannot be, draws; checks that nothing was run again."""
    before = {path: path.stat().st_mtime_ns for path in finished(out)}
    quietly([*grid, "--jobs", "2", "--out", str(out)])
    assert all(path.stat().st_mtime_ns == at for path, at in before.items())
    assert len(finished(out)) == total
    one = [word.partition(",")[0] for word in grid]
    code = sweep.main([*one, IMPOSSIBLE, "--jobs", "1", "--out", str(out)])
    states = [status_of(out / key) for key in points_in(out)]
    assert code == 1 and states.count("ok") == total and states.count("rejected") == 1
    from tandem.report import main as report

    began = time.perf_counter()
    assert report([str(out)]) == 0
    print(f"{total} points finished, 1 rejected, none run twice; ", end="")
    print(f"report drawn in {time.perf_counter() - began:.1f} s")


def same(one: Path, two: Path) -> int:
    """How many files of the points of the second are byte for byte those of the first."""
    count = 0
    for key in points_in(two):
        for name in FILES:
            assert (one / key / name).read_bytes() == (two / key / name).read_bytes(), (key, name)
            count += 1
    return count


def overhead_ms(grid: list[str], out: Path) -> float:
    """CPU time per point of the sweep's own process: all of `tandem sweep` but the runs."""
    began, clock = time.process_time(), time.perf_counter()
    quietly([*grid, "--jobs", "2", "--out", str(out)])
    used, took = time.process_time() - began, time.perf_counter() - clock
    count = len(finished(out))
    print(f"{count} points in 2 processes: {took:.1f} s, {used:.2f} s of CPU in the sweep itself")
    return 1e3 * used / count


def await_points(child: subprocess.Popen[bytes], out: Path, count: int) -> None:
    """Waits until so many points have finished."""
    while len(finished(out)) < count:
        assert child.poll() is None, "the sweep ended before it could be hurt"
        time.sleep(0.02)


def finished(out: Path) -> list[Path]:
    """The metrics of finished points."""
    found = out.glob("*/metrics.json")
    return [path for path in found if path.parent.suffix != ".running"]


def is_worker(process: psutil.Process) -> bool:
    """Whether it runs points; multiprocessing has a resource tracker beside them."""
    return any("spawn_main" in word for word in process.cmdline())


def quietly(words: list[str]) -> None:
    """A sweep that must succeed, its table not shown."""
    with contextlib.redirect_stdout(io.StringIO()):
        assert sweep.main(words) == 0


if __name__ == "__main__":
    sys.exit(main())
