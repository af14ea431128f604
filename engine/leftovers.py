"""What finished jobs held, until it is given back."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from engine.job import Job
from engine.recorder import Recorder


class Leftovers:
    """Per device, jobs that have finished and the plan they finished with, oldest first.

    When their memory is shown again depends on plans alone, never on how soon the engine noticed
    an end (law 11): whoever asks names the plan up to which it comes back.
    """

    def __init__(self, give_all: Callable[[int], None], recorder: Recorder, devices: int) -> None:
        self._give_all, self._recorder = give_all, recorder
        self._queues: list[deque[tuple[int, Job]]] = [deque() for _ in range(devices)]

    def oldest(self, device: int) -> int | None:
        """The plan whose jobs' memory comes back next, None where nothing is left over."""
        return self._queues[device][0][0] if self._queues[device] else None

    def leave(self, device: int, number: int, job: Job) -> None:
        """A job has finished with the device's plan of that number."""
        self._queues[device].append((number, job))

    def give_back(self, device: int, number: int) -> bool:
        """Returns what was held up to the device's plan of that number; whether that was any."""
        queue, is_any = self._queues[device], False
        while queue and queue[0][0] <= number:
            _, job = queue.popleft()
            self._give_all(job.job_id)
            self._recorder.returned(job.job_id, device)
            is_any = True
        return is_any
