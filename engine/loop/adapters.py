"""The versions of adapters: which is the newest, and which are held by requests in service."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from engine.contract.adapters import AdapterSpec, AdapterVersion
from engine.contract.job import Job
from traces.serving.request import Request


class PublishedAdapters:
    """The adapters of a run, each with the version that is newest.

    A request keeps the version that is newest when it is admitted, until it ends. An older version
    is given back when its last request has ended.

    Args:
        adapters: the adapters of the run, in the order of their numbers.

    Raises:
        ValueError: two adapters have one name.
    """

    def __init__(self, adapters: Sequence[AdapterSpec]) -> None:
        found = [AdapterVersion(spec, number, 0) for number, spec in enumerate(adapters)]
        self._newest = {version.name: version for version in found}
        if len(self._newest) < len(found):
            names = [spec.name for spec in adapters]
            raise ValueError(f"adapters {names}: two have one name; give each its own")
        self.newest: Mapping[str, AdapterVersion] = MappingProxyType(self._newest)
        self._held: dict[int, AdapterVersion] = {}  # by job, from its admission to its end
        self._holders = Counter[AdapterVersion]()

    def check(self, requests: Iterable[Request]) -> None:
        """Checks the adapters that requests name.

        Args:
            requests: those of a trace.

        Raises:
            ValueError: a request names an adapter that the run does not have.
        """
        for request in requests:
            if request.adapter:
                self.of(request)

    def of(self, request: Request) -> AdapterVersion | None:
        """The newest version of the adapter that a request names.

        Args:
            request: a request of the trace.

        Returns:
            None for a request that names none.

        Raises:
            ValueError: the run does not have the adapter.
        """
        if not request.adapter:
            return None
        version = self._newest.get(request.adapter)
        if version is None:
            known = ", ".join(self._newest) or "none"
            raise ValueError(
                f"request {request.request_id} names adapter {request.adapter!r}, and the run has "
                f"{known}: name it among the run's adapters, or leave it out of the trace"
            )
        return version

    def admit(self, job: Job) -> None:
        """A job begins, or begins again: it keeps its version to its end."""
        if job.adapter is not None and job.job_id not in self._held:
            self._held[job.job_id] = job.adapter
            self._holders[job.adapter] += 1

    def end(self, job_id: int) -> AdapterVersion | None:
        """A job has ended; returns its version where that is needed no more."""
        version = self._held.pop(job_id, None)
        if version is None:
            return None
        self._holders[version] -= 1
        return version if self._is_over(version) else None

    def publish(
        self, number: int, made: int, waiting: Iterable[Job]
    ) -> tuple[AdapterVersion | None, Sequence[Job]]:
        """A new version is the newest one from now on.

        Args:
            number: of the adapter.
            made: the number of the version.
            waiting: the jobs that wait.

        Returns:
            The version before, where it is needed no more, else None; and the jobs that wait for
            the first time, which take the new version.
        """
        (before,) = [version for version in self._newest.values() if version.number == number]
        after = before._replace(version=made)
        self._newest[after.name] = after
        moved = [job for job in waiting if job.adapter == before and job.job_id not in self._held]
        for job in moved:
            job._run_through(after)
        return before if self._is_over(before) else None, moved

    def _is_over(self, version: AdapterVersion) -> bool:
        return not self._holders[version] and self._newest[version.name] != version
