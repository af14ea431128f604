"""Where jobs come in and leave: whoever keeps count of them is told."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.job import Job
from engine.prefix import Chain
from engine.training import Training
from traces.request import Request, TrainingJob

if TYPE_CHECKING:
    from engine.engine import Engine


class Door:
    """Makes a job of what arrives; says goodbye to what is served or refused."""

    def __init__(self, engine: Engine, returns_memory: bool) -> None:
        self._engine, self._returns_memory = engine, returns_memory

    def admit(self, item: Request | TrainingJob, arrival_ns: int) -> None:
        """A request or training job has arrived: it waits."""
        engine = self._engine
        if isinstance(item, Request):
            job = self._serving(item, arrival_ns)
        else:
            recorded = engine.launcher.recorded_tokens(item.record_of)
            layout = engine.layout.training.get(item.job_id)
            job = Job.trains(Training(item, layout, recorded), arrival_ns)
            engine.training.admit(job)
        engine.standing.drop()
        engine.moments = 0
        engine.roster.wait(job)
        if min(engine.flights.level) < engine.depth:  # else an end will tell
            engine.news.tell()

    def _serving(self, item: Request, arrival_ns: int) -> Job:
        engine, job = self._engine, Job.serving(item, arrival_ns)
        if engine.fleet is not None:
            if item.prompt_ids is not None:
                job._name_prefix(Chain(item, engine.page.tokens).of_prompt())
            engine.fleet.assign(job)
        elif engine.devices == 1:
            job._route(0)
        engine.ends.expect(job, item.output_tokens)
        engine.recorder.arrived(item, arrival_ns, job.device)
        if engine.reuse is not None:
            engine.reuse.arrived(item)
        return job

    def refuse(self, job: Job) -> None:
        """It will never fit."""
        self._engine.roster.refuse(job)
        self._engine.give_all(job.job_id)
        self._leave(job, int(self._engine.env.now), "refused")

    def finish(self, job: Job, now_ns: int, device: int, number: int) -> None:
        """It is complete with the device's plan of that number."""
        if self._returns_memory:
            self._engine.leftovers.leave(device, number, job)
        else:
            self._engine.ledger.ended.add(job.job_id)
        self._leave(job, now_ns, "finished")

    def _leave(self, job: Job, now_ns: int, status: str) -> None:
        engine = self._engine
        if job.training is not None:
            engine.training.leave(job.job_id)
        else:
            engine.check.left(job)
            engine.recorder.ended(job.job_id, now_ns, status)
            if engine.fleet is not None:
                engine.fleet.left(job)
            if engine.reuse is not None:
                engine.reuse.left(job)
            engine.arrivals.release_turn(job)
