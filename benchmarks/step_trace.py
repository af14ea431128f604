"""Counts the lines that steps of serving execute, in the checkout that is on the path.

`python -P step_trace.py CODE FIRST LAST WORDS...` carries out `tandem run WORDS...` by the code in
CODE, and prints its steps FIRST to LAST as JSON: line events by file and line. Only the
engine's module is named here (ENGINES), so that CODE may be an earlier checkout.

A step is what happens from one question to the policy to the next. Fast-forward is off, so that
every plan is asked for. Line events are those of the interpreter, in files of CODE alone: what
SimPy and the standard library execute does not count.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from runpy import run_module
from types import FrameType
from typing import Any

QUESTION = "Composed.plan"  # what a question to the policy calls
ENGINES = ("engine.loop.engine", "engine.engine")  # modules that hold Engine, the newest first
NOT_OURS = (".venv", "build")

Step = Counter[tuple[str, int]]  # line events by file and line


class StepTrace:
    """Line events of the steps `first` to `last`, counted from 0, in files below `code`."""

    def __init__(self, code: Path, first: int, last: int) -> None:
        self._code, self._first, self._last = f"{code.resolve()}{os.sep}", first, last
        self._files: dict[str, str] = {}
        self._asked = 0
        self.steps: list[Step] = []

    def during(self, replay: Callable[..., None]) -> Callable[..., None]:
        """A function that does what `replay` does, traced up to the last step."""

        def traced(*args: Any, **kwargs: Any) -> None:
            sys.settrace(self._call)
            try:
                replay(*args, **kwargs)
            finally:
                sys.settrace(None)

        return traced

    def _call(self, frame: FrameType, _event: str, _arg: object) -> Any:
        name = frame.f_code.co_filename
        if (file := self._files.get(name)) is None:
            file = self._files[name] = self._inside(name)
        if not file:
            return None
        if frame.f_code.co_qualname == QUESTION:
            self._question()
        return self._line

    def _inside(self, name: str) -> str:
        """The path of a file below the checkout; empty for other files."""
        file = name.removeprefix(self._code)
        is_ours = file != name and file.split(os.sep)[0] not in NOT_OURS
        return Path(file).as_posix() if is_ours else ""

    def _question(self) -> None:
        if self._asked > self._last:
            sys.settrace(None)
        elif self._asked >= self._first:
            self.steps.append(Counter())
        self._asked += 1

    def _line(self, frame: FrameType, event: str, _arg: object) -> Any:
        if event == "line" and self._first < self._asked <= self._last + 1:
            self.steps[-1][self._files[frame.f_code.co_filename], frame.f_lineno] += 1
        return self._line


def engine_module(code: Path) -> str:
    """The module of the checkout that holds Engine."""
    for name in ENGINES:
        if (code / f"{name.replace('.', '/')}.py").is_file():
            return name
    raise SystemExit(f"{code}: none of {', '.join(ENGINES)}")


def main() -> int:
    told, first, last, *words = sys.argv[1:]
    code = Path(told)
    trace, engine = (
        StepTrace(code, int(first), int(last)),
        import_module(engine_module(code)).Engine,
    )
    engine.__init__.__kwdefaults__["fast_forward"] = False
    engine.replay = trace.during(engine.replay)
    sys.argv = ["tandem", "run", *words]
    try:
        run_module("tandem", run_name="__main__")
    except SystemExit as end:
        if end.code:
            return int(end.code)
    rows = [[[*where, count] for where, count in step.items()] for step in trace.steps]
    print(json.dumps(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
