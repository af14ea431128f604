"""Who waits, who is served and who trains."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from engine.contract.job import Job
from engine.contract.rules import ReadOnlyList

NAMED = 8  # jobs of a list that a message names


class JobLists:
    """Three lists of jobs, in the order of their coming; each job is in one of them or has left.

    Policies are shown these very lists, so they are read-only to all but this class.
    """

    def __init__(self) -> None:
        self.waiting: list[Job] = ReadOnlyList()
        self.serving: list[Job] = ReadOnlyList()
        self.training: list[Job] = ReadOnlyList()
        self.jobs: dict[int, Job] = {}  # all of them by number
        self._started: set[int] = set()  # jobs that are not waiting

    def __bool__(self) -> bool:
        """Whether anybody is left."""
        return bool(self.jobs)

    def __iter__(self) -> Iterator[Job]:
        return chain(self.waiting, self.serving, self.training)

    def __str__(self) -> str:
        lists = (("waiting", self.waiting), ("serving", self.serving), ("training", self.training))
        return ", ".join(f"{name} {_some(jobs)}" for name, jobs in lists if jobs)

    @property
    def is_whole(self) -> bool:
        """Whether each job is in one of the lists: C code writes to a list past its class."""
        return len(self.waiting) + len(self.serving) + len(self.training) == len(self.jobs)

    def has_started(self, job: Job) -> bool:
        return job.job_id in self._started

    def wait(self, job: Job) -> None:
        """A job has come: it waits behind all others."""
        self.jobs[job.job_id] = job
        list.append(self.waiting, job)

    def start(self, job: Job) -> None:
        """From waiting into service or training."""
        self._started.add(job.job_id)
        list.remove(self.waiting, job)
        list.append(self.serving if job.training is None else self.training, job)

    def wait_again(self, job: Job) -> None:
        """From service back to the head of the line."""
        if job in self.serving:
            list.remove(self.serving, job)
            list.insert(self.waiting, 0, job)
            self._started.discard(job.job_id)

    def leave(self, job: Job) -> None:
        """Out of service or training."""
        del self.jobs[job.job_id]
        list.remove(self.serving if job.training is None else self.training, job)

    def refuse(self, job: Job) -> None:
        """Out of whichever list it is in."""
        del self.jobs[job.job_id]
        for jobs in (self.waiting, self.serving, self.training):
            if job in jobs:
                list.remove(jobs, job)


def _some(jobs: list[Job]) -> str:
    """The first of them, for messages."""
    more = len(jobs) - NAMED
    named = str([job.job_id for job in jobs[:NAMED]])
    return f"{named} and {more} more" if more > 0 else named
