"""Who waits, who is served and who trains."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from engine.job import Job


class Roster:
    """Three lists of jobs, in the order of their coming; each job is in one of them or has left."""

    def __init__(self) -> None:
        self.waiting: list[Job] = []
        self.serving: list[Job] = []
        self.training: list[Job] = []
        self._started: set[int] = set()  # jobs that are not waiting

    def __bool__(self) -> bool:
        """Whether anybody is left."""
        return bool(self.waiting or self.serving or self.training)

    def __iter__(self) -> Iterator[Job]:
        return chain(self.waiting, self.serving, self.training)

    def __str__(self) -> str:
        lists = (("waiting", self.waiting), ("serving", self.serving), ("training", self.training))
        return ", ".join(f"{name} {[j.job_id for j in jobs]}" for name, jobs in lists if jobs)

    def has_started(self, job: Job) -> bool:
        return job.job_id in self._started

    def start(self, job: Job) -> None:
        """From waiting into service or training."""
        self._started.add(job.job_id)
        self.waiting.remove(job)
        (self.serving if job.training is None else self.training).append(job)

    def wait_again(self, job: Job) -> None:
        """From service back to the head of the line."""
        if job in self.serving:
            self.serving.remove(job)
            self.waiting.insert(0, job)
            self._started.discard(job.job_id)

    def leave(self, job: Job) -> None:
        """Out of service or training."""
        (self.serving if job.training is None else self.training).remove(job)

    def refuse(self, job: Job) -> None:
        """Out of whichever list it is in."""
        for jobs in (self.waiting, self.serving, self.training):
            if job in jobs:
                jobs.remove(job)
