"""Claim: `make demo` and `make test` take at most 5 and 3 minutes of wall clock on a fresh clone.

The clone is of the last commit, in a temporary folder. The set-up (downloads) is timed too and has
no bar. Both targets must succeed, and the demo must leave a report. Run it alone: wall time depends
on all cores. `python -m benchmarks.correctness.fresh_clone [--quick]`; --quick takes CI's short
demo and no tests.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SHARED = Path(os.environ.get("TANDEM_SHARED", "../shared")).resolve()
BARS_S = {"demo": 300.0, "test": 180.0}
DROPPED = ("PYTHONPATH", "VIRTUAL_ENV", "OMP_NUM_THREADS", "MAKEFLAGS")  # unset for a new user


def main() -> int:
    """Prints the time of each target; the last line is the claim."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    is_quick = parser.parse_args().quick
    with tempfile.TemporaryDirectory(prefix="tandem-clone-") as folder:
        clone = Path(folder) / "tandem"
        subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
        print(f"make setup {timed('setup', clone):.0f} s (no bar)", flush=True)
        shares = []
        for target, bar_s in BARS_S.items():
            if is_quick and target != "demo":
                continue
            took_s = timed(target, clone, *(["ARGS=--short"] if is_quick else []))
            shares.append(took_s / bar_s)
            print(f"make {target} {took_s:.0f} s of {bar_s:.0f}", flush=True)
        reports = sorted(clone.glob("outputs/**/report.html"))
        print("report:", *(str(path.relative_to(clone)) for path in reports))
    worst = max(shares) if reports else float("inf")
    verdict = "pass" if worst <= 1 else "fail"
    print(f"fresh_clone_worst_share_of_bar {worst:.3f} 1 1 {verdict}")
    return int(verdict == "fail")


def timed(target: str, clone: Path, *words: str) -> float:
    """Seconds of `make TARGET WORDS`, inf if it fails; prints the end of its output."""
    known = {name: value for name, value in os.environ.items() if name not in DROPPED}
    known["TANDEM_SHARED"] = str(SHARED)
    began = time.perf_counter()
    done = subprocess.run(
        ["make", target, *words], cwd=clone, env=known, text=True, stdout=subprocess.PIPE
    )
    print("\n".join(done.stdout.splitlines()[-20:]))
    return time.perf_counter() - began if done.returncode == 0 else float("inf")


if __name__ == "__main__":
    sys.exit(main())
