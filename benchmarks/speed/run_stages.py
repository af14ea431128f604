"""Where the CPU time of a whole `tandem run` goes, by stage: a table, not a claim."""

from __future__ import annotations

import functools
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

SETTINGS, REST = "settings", "rest"


class Stages:
    """CPU seconds by stage: each counts for itself, without the stages that it calls."""

    def __init__(self) -> None:
        self.taken_s: dict[str, float] = defaultdict(float)
        self._open = ["start-up"]
        self._since_s = 0.0

    def enter(self, stage: str) -> None:
        """What follows is of this stage."""
        self._count()
        self._open.append(stage)

    def leave(self) -> None:
        """What follows is of the stage before."""
        self._count()
        self._open.pop()

    def _count(self) -> None:
        now_s = time.process_time()
        self.taken_s[self._open[-1]] += now_s - self._since_s
        self._since_s = now_s

    def of(self, owner: Any, name: str, stage: str) -> None:
        """Calls of this function are of a stage."""
        function = getattr(owner, name)

        @functools.wraps(function)
        def counted(*args: Any, **named: Any) -> Any:
            self.enter(stage)
            try:
                return function(*args, **named)
            finally:
                self.leave()

        setattr(owner, name, counted)


def main(words: Sequence[str]) -> int:
    """Runs `tandem` with these words in this process and prints its stages; returns its status."""
    stages = Stages()
    from tandem.cli.__main__ import main as tandem

    stages.enter(SETTINGS)
    from engine.loop.engine import Engine
    from engine.results import recorder, tables
    from engine.results.schema import TableFile
    from tandem.wiring import experiment

    stages.of(experiment, "run_experiment", REST)
    stages.of(experiment, "run_spec_of", "trace, cost and memory plan")
    stages.of(Engine, "replay", "engine")
    for name in ("steps_table", "memory_table", "plans_table"):
        stages.of(tables, name, f"table of {name.removesuffix('_table')}")
    stages.of(recorder, "requests_table", "table of requests")
    stages.of(TableFile, "add", "files")
    stages.of(TableFile, "close", "files")
    stages.of(experiment, "_write_metrics", "metrics")
    status = tandem([*words])
    stages.leave()
    total_s = sum(stages.taken_s.values())
    for stage, taken_s in stages.taken_s.items():
        print(f"  {taken_s:6.3f} s {taken_s / total_s:5.1%} {stage}")
    return status
