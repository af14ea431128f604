"""CPU time of each step of training, for the claims on its speed."""

from __future__ import annotations

import time

from engine.contract.job import Job
from engine.results.recorder import Recorder


class StepStampRecorder(Recorder):
    """A recorder that notes the CPU time at the end of each training step."""

    def __init__(self) -> None:
        super().__init__()
        self.stamps_s: list[float] = []

    def trained(self, job: Job, step: int, now_ns: int) -> None:
        super().trained(job, step, now_ns)
        self.stamps_s.append(time.process_time())
