"""`make gpu`: everything that needs a GPU, from a bare checkout, in parts of under ten minutes.

The most important parts come first: the tests marked gpu and those of the Triton kernels; fidelity
of an 8B-shape Llama in bf16 with random weights at two loads, with its calibration and the report
of one of its runs; the decode step against the memory's bandwidth; hybrid steps; training beyond
the device's memory, and the report of one such run with its plans replayed; serving and finetuning
at once. Each part has --minutes
of its own. ARGS names parts (ARGS=fidelity) or steps, so that a machine with ten minutes a call
can run them one by one: a later call resumes from WORK. Measurements survive the end of the time:
the log is written as it is printed, tables row by row, and $OUT gets all of it in few files, twice
a minute and after every step.

--dry-run runs these steps on a CPU, with small models.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tandem.wiring.folder import ROOT

SITE = ROOT / ".gpu-site"  # made by `make gpu-site` on a machine with a network
CARRIED = SITE / "sharegpt.parquet"  # made if the data is available there
WORK = ROOT / "outputs" / "gpu-work"
MINUTES = 9.2  # of a part: a call may be cut at ten
MIN_STEP_S = 10.0  # less time is not worth a step's start
COLLECTED_S = 30.0  # interval at which WORK is collected into $OUT
NO_TESTS = 5  # pytest's exit status without any collected test, which is no failure here
TESTS = (
    "tests/runtime/test_cuda.py",
    "tests/training/test_cuda_training.py",
    "tests/runtime/test_replicas_runtime.py",
    "tests/finetuning/test_cuda_windows.py",
)
NEEDED = ("torch", "transformers", "numpy", "pandas", "pyarrow", "matplotlib", "yaml", "jinja2")
PACKED = ("simpy", "hydra", "omegaconf", "antlr4", "pytest", "pytest_timeout")
DRAWN_PER_S = 184e6  # bf16 numbers that one thread of a CPU draws: models to be trained
TRAINED = 2.1e9  # parameters of the model that is trained
POOLED = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}  # training: a pool per stream


@dataclass(frozen=True)
class GpuStep:
    """A command, its expected minutes on an H200, and additions to its environment."""

    command: list[str]
    minutes: float
    environment: Mapping[str, str] = field(default_factory=dict)


Parts = Mapping[str, Mapping[str, GpuStep]]


def main(words: Sequence[str] | None = None) -> int:
    """Runs the parts one by one; 1 if any step failed or had no time left."""
    parser = argparse.ArgumentParser(prog="make gpu", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="part", help="or step of one; default: all")
    parser.add_argument("--model", default="llama3_8b")
    parser.add_argument("--device", default="h200")
    parser.add_argument("--limit", default="200", help="requests")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="of a part [%(default)s]")
    parser.add_argument("--dry-run", action="store_true", help="on a CPU, with stand-ins")
    chosen = parser.parse_args(words)
    if missing := [name for name in (*NEEDED, *PACKED) if find_spec(name) is None]:
        print(
            f"gpu: no {', '.join(missing)} here; run `make gpu-site` where there is a network, and "
            f"bring {SITE.name} along",
            file=sys.stderr,
        )
        return 1
    parts = parts_of(chosen)
    if unknown := set(chosen.names) - parts.keys() - {s for steps in parts.values() for s in steps}:
        known = ", ".join(f"{part} ({', '.join(steps)})" for part, steps in parts.items())
        parser.error(f"no part or step {', '.join(sorted(unknown))}; there are {known}")
    selected = {part: _selected(part, steps, chosen.names) for part, steps in parts.items()}
    out = Path(os.environ.get("OUT", "outputs/gpu")).resolve()
    out = out.with_name(f"{out.name}-dry") if chosen.dry_run else out
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # collects before the end
    try:
        return _run({part: steps for part, steps in selected.items() if steps}, chosen, out)
    finally:
        signal.signal(signal.SIGTERM, before)


def _selected(
    part: str, steps: Mapping[str, GpuStep], names: Sequence[str]
) -> Mapping[str, GpuStep]:
    """The steps of a part that the command line names; all without names."""
    if not names or part in names:
        return steps
    return {name: step for name, step in steps.items() if name in names}


def _run(parts: Parts, chosen: argparse.Namespace, out: Path) -> int:
    out.mkdir(parents=True, exist_ok=True)
    print("gpu: minutes on an H200, as expected" + ("; stand-ins here" if chosen.dry_run else ""))
    for part, steps in parts.items():
        each = ", ".join(f"{name} {step.minutes:.1f}" for name, step in steps.items())
        print(f"gpu: {part} {sum(step.minutes for step in steps.values()):.1f} ({each})")
    failed = []
    for steps in parts.values():
        until_s = time.monotonic() + 60 * chosen.minutes
        for name, step in steps.items():
            if not _done(name, step, work_of(chosen), out, until_s):
                failed.append(name)
    print(f"gpu: {'failed: ' + ', '.join(failed) if failed else 'all steps done'}; see {out}")
    return int(bool(failed))


def work_of(chosen: argparse.Namespace) -> Path:
    """The folder of runs, profile and tables between calls."""
    return WORK.with_name(f"{WORK.name}-dry") if chosen.dry_run else WORK


def parts_of(chosen: argparse.Namespace) -> Parts:
    """All parts in order, with their steps."""
    work = work_of(chosen)
    return dict(_dry_parts(work) if chosen.dry_run else _parts(chosen, work))


def _parts(chosen: argparse.Namespace, work: Path) -> Iterator[tuple[str, Mapping[str, GpuStep]]]:
    pytest = ["pytest", "-v", "--timeout=150", "-W", "default"]  # installed versions may warn
    shape = ["--model", chosen.model, "--device", chosen.device]
    drawn_min = 10 * TRAINED / DRAWN_PER_S / 60  # eight that fit, and two plain loops
    kernels = [*pytest, "tests/kernels", "--ignore=tests/kernels/test_compile.py"]
    yield (
        "tests",
        {
            "tests": GpuStep(_python(*pytest, "-m", "gpu", *TESTS), 3.5),
            "kernels": GpuStep(_python(*kernels), 1.5),
        },
    )
    yield (
        "fidelity",
        {
            "fidelity": GpuStep(_fidelity(work, *shape, "--requests", chosen.limit), 6.5),
            "report": GpuStep(_compared(work / "fidelity" / "80%", work / "report"), 0.5),
        },
    )
    yield "decode_floor", {"decode_floor": GpuStep(_steps_of("decode_floor", work), 2.0)}
    yield "hybrid", {"hybrid": GpuStep(_steps_of("hybrid", work), 1.0)}
    yield (
        "training",
        {
            "training": GpuStep(_training(work, "--device", chosen.device), drawn_min + 6, POOLED),
            "training_report": GpuStep(
                _compared(work / "training" / "patrickstar", work / "training_report"), 0.5
            ),
        },
    )
    yield "sharing", {"sharing": GpuStep(_sharing(work, *shape), 7.0)}


def _dry_parts(work: Path) -> Iterator[tuple[str, Mapping[str, GpuStep]]]:
    """The parts on a CPU: tests are collected and skip themselves, models are small."""
    real = dict(_parts(argparse.Namespace(model="", device="", limit=""), work))
    small = ["--backend", "cpu", "--device", "cpu", "--model", "micro_llama"]
    steps = {
        "fidelity": _fidelity(work, *small, "--requests", "12"),
        "decode_floor": _steps_of("decode_floor", work, "--device", "cpu"),
        "hybrid": _steps_of("hybrid", work, "--device", "cpu"),
        "sharing": _sharing(
            work, *small, "--requests", "12", "--tokens", "48", "--rates", "5", "20",
            "--kv-bytes", "60000000", "--host-bytes", "200000000", "--delay-s", "2",
        ),
        "training": _training(
            work, *small, "--budget", "6000000", "--host", "400000000", "--sequences", "2",
            "--tokens", "16", "--steps", "3",
        ),
    }  # fmt: skip
    for part, expected in real.items():
        yield (
            part,
            {
                name: GpuStep(steps.get(name, step.command), step.minutes, step.environment)
                for name, step in expected.items()
            },
        )


def _python(*words: str) -> list[str]:
    return [sys.executable, "-m", *words]


def _fidelity(work: Path, *words: str) -> list[str]:
    kept = ["--keep", str(work / "fidelity"), "--out", str(work / "gpu_fidelity.csv")]
    return _python("benchmarks.gpu.gpu_fidelity", *words, *kept)


def _steps_of(name: str, work: Path, *words: str) -> list[str]:
    return _python(f"benchmarks.gpu.gpu_{name}", *words, "--out", str(work / f"gpu_{name}.csv"))


def _training(work: Path, *words: str) -> list[str]:
    kept = ["--keep", str(work / "training"), "--out", str(work / "gpu_training.csv")]
    return _python("benchmarks.gpu.gpu_training", *words, *kept)


def _sharing(work: Path, *words: str) -> list[str]:
    kept = ["--keep", str(work / "sharing"), "--out", str(work / "gpu_sharing.csv")]
    return _python("benchmarks.gpu.gpu_sharing", *words, *kept)


def _compared(root: Path, out: Path) -> list[str]:
    """The report of two runs, a prediction and its measurement."""
    runs = [str(root / name) for name in ("predicted", "measured")]
    return _python("tandem.cli", "compare", *runs, "--out", str(out))


def _done(name: str, step: GpuStep, work: Path, out: Path, until_s: float) -> bool:
    """Runs one step, logging its output as it is printed; returns whether it succeeded."""
    began_s = time.monotonic()
    if until_s - began_s < MIN_STEP_S:
        print(f"gpu: {name} left out, no time is left; ARGS={name} in another call")
        return False
    print(f"gpu: {name}", flush=True)
    with (out / "gpu.log").open("ab+") as log:
        start = log.seek(0, os.SEEK_END)
        process = subprocess.Popen(
            step.command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT,
            env=_environment(step), start_new_session=True,
        )  # fmt: skip
        try:
            code = _ended(process, work, out, until_s)
        finally:
            _end(process)
            _collect(work, out)
        log.seek(start)
        sys.stdout.write(log.read().decode(errors="replace")[-6000:])
    ok = code == 0 or (name == "tests" and code == NO_TESTS)
    took_s = time.monotonic() - began_s
    print(f"gpu: {name} {'done' if ok else f'failed ({code})'}, {took_s:.0f} s", flush=True)
    return ok


def _environment(step: GpuStep) -> dict[str, str]:
    path = os.pathsep.join([str(SITE), str(ROOT)])
    printed = {"PYTHONUNBUFFERED": "1"}  # else the output of a killed step is lost
    return {**os.environ, **step.environment, **printed, "PYTHONPATH": path}


def _ended(process: Any, work: Path, out: Path, until_s: float) -> int:
    """The exit status of a step; 124 if its time ends first."""
    while (left_s := until_s - time.monotonic()) > 0:
        with suppress(subprocess.TimeoutExpired):
            return int(process.wait(min(left_s, COLLECTED_S)))
        _collect(work, out)
    return 124


def _end(process: Any) -> None:
    """Kills a step and its children."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _collect(work: Path, out: Path) -> None:
    """Writes WORK as one archive, without the cache, and the page of the report."""
    if work.is_dir():
        aside = out / ".results.tar.gz"
        with tarfile.open(aside, "w:gz") as archive, suppress(OSError):
            archive.add(work, arcname="gpu", filter=_kept)  # fails for a file that is being written
        aside.rename(out / "results.tar.gz")
    page = work / "report" / "report.html"
    if page.is_file():
        shutil.copy(page, out / "report.html")


def _kept(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if "cache" in Path(member.name).parts else member


if __name__ == "__main__":
    sys.exit(main())
