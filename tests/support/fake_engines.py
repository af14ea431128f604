"""Stand-ins for Ray and submitit: they check options as those do, and keep count of their jobs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar


class FakeJob:
    """A submitit job that runs when its result is asked for; `hangs` is Ctrl-C while one waits."""

    def __init__(self, run: Callable[[], Any], hangs: bool) -> None:
        self._run, self._hangs = run, hangs
        self.ended = self.cancelled = False

    def result(self) -> Any:
        if self._hangs:
            raise KeyboardInterrupt
        self.ended = True
        return self._run()

    def done(self, force_check: bool = False) -> bool:
        return self.ended or self.cancelled

    def cancel(self, check: bool = True) -> None:
        self.cancelled = True


class FakeSubmitit:
    """The module: `jobs` are all that were sent, `options` what they were sent with."""

    TYPES: ClassVar = {"timeout_min": int, "mem_gb": (int, float), "slurm_time": (int, str)}

    def __init__(self, hangs: bool = False, refuses: bool = False) -> None:
        self.hangs, self.refuses = hangs, refuses
        self.jobs: list[FakeJob] = []
        self.options: dict[str, Any] = {}

    def AutoExecutor(self, folder: Any) -> FakeSubmitit:
        return self

    def update_parameters(self, **options: Any) -> None:
        for name, value in options.items():
            if name not in self.TYPES:
                raise NameError(
                    f"Parameter '{name}' need to be prefixed by an executor name.\nMore."
                )
            assert isinstance(value, self.TYPES[name]), f'Parameter "{name}" expected another type'
        self.options = options

    def map_array(self, run: Callable[[Any], Any], parts: list[Any]) -> list[FakeJob]:
        if self.refuses:
            raise RuntimeError("sbatch: error: invalid partition specified: no\nMore lines follow.")
        sent = [FakeJob(partial(run, part), self.hangs) for part in parts]
        self.jobs += sent
        return sent


@dataclass(frozen=True, eq=False)
class Ref:
    """What a Ray task gives back: a name for a result."""

    run: Callable[[], Any]


class FakeTaskError(OSError):
    """What Ray makes of an exception in a task."""

    def __init__(self, cause: Exception) -> None:
        super().__init__("ray::run_point() (pid=1)\nTraceback ...")
        self.cause = cause


class FakeRay:
    """The module: a task runs when it is waited for; `hangs` is Ctrl-C while one waits."""

    TYPES: ClassVar = {"max_retries": int, "num_cpus": (int, float)}
    exceptions = SimpleNamespace(RayError=OSError, RayTaskError=FakeTaskError)

    def __init__(
        self, hangs: bool = False, broken: str = "", fails: Exception | None = None
    ) -> None:
        self.hangs, self.broken, self.fails = hangs, broken, fails
        self.is_up = False
        self.chosen: dict[str, Any] = {}
        self.cancelled: list[Ref] = []

    def is_initialized(self) -> bool:
        return self.is_up

    def init(self, **options: Any) -> None:
        if self.broken:
            raise Exception(self.broken)
        self.is_up = True

    def shutdown(self) -> None:
        self.is_up = False

    def remote(self, run: Callable[[Any], Any]) -> Any:
        def options(**chosen: Any) -> Any:
            for name, value in chosen.items():
                if name not in self.TYPES:
                    raise ValueError(f"Invalid option keyword {name} for remote functions.\nMore.")
                if not isinstance(value, self.TYPES[name]):
                    raise TypeError(f"The type of keyword '{name}' must be another")
            self.chosen = chosen
            return SimpleNamespace(remote=lambda task: Ref(partial(run, task)))

        return SimpleNamespace(options=options)

    def wait(self, running: list[Ref], num_returns: int) -> tuple[list[Ref], list[Ref]]:
        if self.hangs:
            raise KeyboardInterrupt
        return running[:1], running[1:]

    def get(self, ready: Ref) -> Any:
        if self.fails:
            raise self.fails
        return ready.run()

    def cancel(self, ready: Ref, force: bool) -> None:
        assert force and self.is_up
        self.cancelled.append(ready)
