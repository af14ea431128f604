"""How much code one step of serving passes through: files, line events and distinct lines.

`python -m benchmarks.serving_step [BEFORE] [--csv FILE]`

A step is what happens from one question to the policy to the next, in a replay of synthetic
requests by continuous batching, paged restart and the roofline, with fast-forward off. Steps 50 to
60 have several decodes in flight, and some admit a request (benchmarks/step_trace.py). A line event
is a line that the interpreter begins; a distinct line counts once in a step. BEFORE is a folder of
another checkout or a revision, and is counted the same way by the code here.

Two counts of files: `files` are all of the project; `engine_files` are those of engine/ without the
cost model's (OF_THE_COST_MODEL), since a file of the engine is what a reader of the loop must open.
The median step and the worst one are told, the latter by line events.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.same_behaviour import HERE, Checkout, checkout_of

FIRST, LAST = 50, 60
WORDS = (
    *("policy=continuous_restart", "trace=random", "trace.requests=60", "backend=sim"),
    *("trace.input_tokens=64", "trace.output_tokens=32", "trace.range_ratio=0.5"),
)
# Files that lie in engine/ in some checkout, and are called by sim/ for durations.
OF_THE_COST_MODEL = {"engine/model.py", "engine/operators.py", "engine/model_shape.py"}
ENGINE_FILES = 16  # the bar


@dataclass(frozen=True)
class Step:
    """The lines of one step: events by file, and distinct lines by file."""

    events: Counter[str]
    distinct: Counter[str]

    @property
    def engine_files(self) -> list[str]:
        """Files of engine/ without the cost model's."""
        return [f for f in self.events if f.startswith("engine/") and f not in OF_THE_COST_MODEL]

    @property
    def counts(self) -> dict[str, int]:
        """The figures of the step by name."""
        return {
            "engine_files": len(self.engine_files),
            "files": len(self.events),
            "events": self.events.total(),
            "lines": self.distinct.total(),
        }


def steps_of(side: Checkout, words: Sequence[str] = WORDS) -> list[Step]:
    """The traced steps of a checkout, in a process of its own.

    Raises:
        RuntimeError: the run failed, or ended before the last step.
    """
    script = Path(__file__).with_name("step_trace.py")
    command = [sys.executable, "-P", str(script), str(side.code), str(FIRST), str(LAST), *words]
    env = side.env | {"PYTHONUTF8": "1"}
    done = subprocess.run(command, cwd=side.out, env=env, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{side.code}: {done.stderr.strip()[-1000:]}")
    found = []
    for rows in json.loads(done.stdout.splitlines()[-1]):
        events, distinct = Counter[str](), Counter[str]()
        for file, _, count in rows:
            events[file] += count
            distinct[file] += 1
        found.append(Step(events, distinct))
    if len(found) != LAST - FIRST + 1:
        raise RuntimeError(f"{side.code}: {len(found)} steps of {LAST - FIRST + 1} were traced")
    return found


def median_and_worst(steps: Sequence[Step]) -> dict[str, Step]:
    """The middle step and the largest one by line events."""
    ordered = sorted(steps, key=lambda step: step.events.total())
    return {"median": ordered[len(ordered) // 2], "worst": ordered[-1]}


def main(words: Sequence[str] | None = None) -> int:
    """Prints the counts; the last line says whether the bars hold."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("before", nargs="?", help="folder of a checkout, or a revision")
    parser.add_argument("--csv", type=Path, default=HERE / "benchmarks/results/serving_step.csv")
    told = parser.parse_args(words)
    named = {"before": told.before} if told.before else {}
    found: dict[str, dict[str, Step]] = {}
    with tempfile.TemporaryDirectory(prefix="tandem-step-") as root:
        for name, code in {**named, "now": str(HERE)}.items():
            side = checkout_of(code, Path(root), name)
            side.check()
            found[name] = median_and_worst(steps_of(side))
    with told.csv.open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(("checkout", "step", "file", "events", "lines"))
        for name, steps in found.items():
            for which, step in steps.items():
                for path in sorted(step.events):
                    table.writerow((name, which, path, step.events[path], step.distinct[path]))
    for path in sorted(found["now"]["worst"].events):
        print(f"{path:48}{found['now']['worst'].events[path]:6} events, worst step")
    for name, steps in found.items():
        for which, step in steps.items():
            print(name, which, *(f"{key} {count}" for key, count in step.counts.items()))
    return _judged(found)


def _judged(found: dict[str, dict[str, Step]]) -> int:
    """Prints the claim; 1 where a bar is missed."""
    now = {which: step.counts for which, step in found["now"].items()}
    passed = now["worst"]["engine_files"] <= ENGINE_FILES
    for which, step in found.get("before", {}).items():
        passed = passed and all(now[which][key] <= step.counts[key] for key in ("events", "lines"))
    count, state = now["worst"]["engine_files"], "pass" if passed else "fail"
    print(f"serving_step_engine_files {count} files {ENGINE_FILES} {state}")
    return int(not passed)


if __name__ == "__main__":
    sys.exit(main())
