"""The progress of a training job: what is done, unit by unit. Only the engine changes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

from engine.contract.adapters import AdapterVersion
from engine.contract.layout import Stage, TrainingLayout, TrainingTask, one_stage
from engine.contract.regions import Work
from engine.contract.rules import ReadOnlyList, refuse_write
from traces.serving.request import Sample, TrainingJob


class Record(NamedTuple):
    """What is kept of a request.

    Attributes:
        request: the number of the request.
        job_id: the job that may learn from it.
        tenant: the request's tenant.
        adapter: the version that its tokens ran through.
        units: whose places it has.
        firsts: the first tokens of its windows.
        stop: the token behind the last one.
        made_ns: when its first window was issued.
        stash: of what a sample uses: the version through which the sample runs, where that is
            behind the weights of the job; else None.
    """

    request: int
    job_id: int
    tenant: str
    adapter: AdapterVersion
    units: tuple[int, ...]
    firsts: tuple[int, ...]
    stop: int
    made_ns: int
    stash: AdapterVersion | None = None

    @property
    def start(self) -> int:
        """The first token that is recorded."""
        return self.firsts[0]

    @property
    def tokens(self) -> int:
        """Tokens that are recorded."""
        return self.stop - self.firsts[0]

    def for_sample(self, prompt_tokens: int, is_behind: bool = False) -> Record | None:
        """The part of a record that a sample may use.

        The last token of a prompt is computed again: its label is the first one of the answer, and
        the head makes its loss from hidden states, which are not kept.

        Args:
            prompt_tokens: of the sample, which has those of the request or fewer.
            is_behind: whether the weights of the job have had updates since.

        Returns:
            None where no token is left.
        """
        stop = min(self.stop, prompt_tokens - 1)
        firsts = tuple([first for first in self.firsts if first < stop])
        stash = self.adapter if is_behind else None
        return self._replace(firsts=firsts, stop=stop, stash=stash) if firsts else None


NO_RECORDS: Mapping[int, Record] = MappingProxyType({})


class TrainingProgress:
    """Progress of a training job: a frontier per microbatch, and updates per chunk.

    A microbatch goes forward through all units and backward down to `first`. A step is complete
    when all its microbatches are, and all chunks that train are updated. Without a layout each unit
    is a chunk of its own, and all are one stage. Only the engine changes it.

    Args:
        spec: the training job.
        layout: its chunks and units.
        records: what serving has kept of requests, by request.

    Attributes:
        spec: the training job; of one that learns, with the samples that have come.
        records: by request, the records that the job may learn from.
        first: the unit at which a backward ends.
        released: samples of a finetuning job that are there.
        stages: its stages, with the orders of their tasks; () of a finetuning job.
        trained_by: by chunk that trains, the units that add to its gradients.
        step: steps that are issued whole.
        updated: by chunk that trains, updates that are issued.
    """

    __slots__ = (
        "_adopted",
        "_backward",
        "_cursors",
        "_forward",
        "_trained",
        "_updated",
        "_windows",
        "first",
        "layout",
        "records",
        "released",
        "spec",
        "stages",
        "step",
        "trained_by",
        "updated",
    )
    spec: TrainingJob
    layout: TrainingLayout | None
    first: int
    trained_by: Mapping[int, Sequence[int]]
    records: Mapping[int, Record]
    released: int
    stages: tuple[Stage, ...]
    step: int
    updated: Mapping[int, int]
    _updated: dict[int, int]  # behind `updated`, for the engine to count in
    _forward: dict[int, list[int]]  # microbatch -> tokens per unit
    _backward: dict[int, list[int]]
    _windows: dict[int, list[tuple[int, Sequence[int]]]]  # microbatch -> first token, units
    _adopted: dict[int, Record]  # microbatch -> what its sample uses of a record
    _cursors: list[int]  # by stage, tasks of its order that are behind it; found when read
    _trained: int  # all microbatches before it are trained

    def __init__(
        self,
        spec: TrainingJob,
        layout: TrainingLayout | None = None,
        records: Mapping[int, Record] = NO_RECORDS,
    ) -> None:
        if spec.learns:
            spec = replace(spec, samples=())
        first = 0 if layout is None else layout.first
        units = range(spec.num_units)
        trained_by = {u: (u,) for u in units} if layout is None else layout.trained_by
        updated = dict.fromkeys(trained_by, spec.begun_steps)
        object.__setattr__(self, "spec", spec)
        object.__setattr__(self, "layout", layout)
        object.__setattr__(self, "first", first)
        object.__setattr__(self, "trained_by", MappingProxyType(trained_by))
        object.__setattr__(self, "records", records)
        object.__setattr__(self, "_adopted", {})
        object.__setattr__(self, "released", sum([not s.release_ns for s in spec.samples]))
        object.__setattr__(self, "step", spec.begun_steps)
        object.__setattr__(self, "_updated", updated)
        object.__setattr__(self, "updated", MappingProxyType(updated))
        object.__setattr__(self, "_forward", {})
        object.__setattr__(self, "_backward", {})
        object.__setattr__(self, "_windows", {})
        stages = () if layout is None else layout.stages
        if not stages and not spec.finetunes:
            stages = (one_stage(spec, trained_by, first),)
        object.__setattr__(self, "stages", stages)
        begun = [spec.begun_steps * len(stage.period) for stage in stages]
        object.__setattr__(self, "_cursors", begun)
        object.__setattr__(self, "_trained", spec.begun_steps * spec.microbatches)

    def __setattr__(self, name: str, value: Any) -> None:
        refuse_write(f"{name} of training job {self.spec.job_id}")

    def __delattr__(self, name: str) -> None:
        refuse_write(f"{name} of training job {self.spec.job_id}")

    @property
    def first_microbatch(self) -> int:
        """The first microbatch of the step under way."""
        return self.step * self.spec.microbatches

    @property
    def microbatches(self) -> range:
        """The microbatches of the step under way, counted through the job."""
        first = self.first_microbatch
        return range(first, first + self.spec.microbatches)

    @property
    def begins_step(self) -> bool:
        """Whether no task of the next step is issued."""
        return not self._forward

    @property
    def is_complete(self) -> bool:
        """Whether all steps of the job are done."""
        return self.step >= self.spec.num_steps

    def frontier(self, microbatch: int) -> tuple[Sequence[int], Sequence[int]]:
        """The frontier of a microbatch.

        Args:
            microbatch: counted through the job.

        Returns:
            Tokens done per unit, forward and backward.
        """
        units = self.spec.num_units
        if microbatch < self.first_microbatch:
            total = self.spec.tokens_of(microbatch)
            return [total] * units, [total] * units
        none = [0] * units
        return self._forward.get(microbatch) or none, self._backward.get(microbatch) or none

    def _progress(self, microbatch: int) -> tuple[list[int], list[int]]:
        """The lists of a microbatch's frontier, for the engine to move on."""
        if microbatch not in self._forward:
            forward, backward = self.frontier(microbatch)
            self._forward[microbatch] = ReadOnlyList(forward)
            self._backward[microbatch] = ReadOnlyList(backward)
        return self._forward[microbatch], self._backward[microbatch]

    def copy(self) -> TrainingProgress:
        """A copy that a check can move on while this one stays.

        Returns:
            Progress of the same job with lists of its own.
        """
        other, updated = TrainingProgress.__new__(TrainingProgress), dict(self._updated)
        own = {
            "updated": MappingProxyType(updated),
            "_updated": updated,
            "_forward": self._own(self._forward),
            "_backward": self._own(self._backward),
            "_windows": {k: [*windows] for k, windows in self._windows.items()},
            "_adopted": dict(self._adopted),
            "_cursors": [*self._cursors],
        }
        for name in TrainingProgress.__slots__:
            object.__setattr__(other, name, own.get(name, getattr(self, name)))
        return other

    def _laid_out(self, layout: TrainingLayout) -> TrainingProgress:
        """This progress, between two steps, by another layout of its chunks.

        It is a new object, so that nothing that is known of the steps so far is taken for it.
        """
        assert self.begins_step, "a step has one layout"
        other = self.copy()
        object.__setattr__(other, "layout", layout)
        object.__setattr__(other, "stages", layout.stages or self.stages)
        return other

    def _own(self, tokens: Mapping[int, list[int]]) -> dict[int, list[int]]:
        """Tokens per unit in lists of their own, but for microbatches that move no more."""
        return {k: d if self.is_trained(k) else ReadOnlyList(d) for k, d in tokens.items()}

    def _count_update(self, chunk: int) -> None:
        self._updated[chunk] += 1

    def _release(self, sample: Sample | None = None) -> None:
        """The next sample is there, and `sample` is it where the job learns."""
        object.__setattr__(self, "released", self.released + 1)
        if sample is not None:
            object.__setattr__(self, "spec", self.spec.learned(sample))

    def _move(self, microbatch: int, is_forward: bool, units: Sequence[int], tokens: int) -> None:
        done = self._progress(microbatch)[0 if is_forward else 1]
        if is_forward and self.spec.finetunes:
            self._windows.setdefault(microbatch, []).append((done[units[0]], units))
        for unit in units:
            list.__setitem__(done, unit, done[unit] + tokens)
        if not is_forward:
            self._count_trained(self._trained)
        elif microbatch in self._adopted:
            self._pass_record(microbatch)

    def adopted(self, microbatch: int) -> Record | None:
        """What the sample of a microbatch uses of a record.

        Args:
            microbatch: of the finetuning job, in the step under way.

        Returns:
            None where its sample uses none.
        """
        return self._adopted.get(microbatch)

    def adoptable(self, microbatch: int) -> Record | None:
        """What the sample of a microbatch may use of a record, before its first window.

        Args:
            microbatch: of the job, whose sample has been released.

        Returns:
            None where there is no record of its request.
        """
        sample = self.spec.sample(microbatch)
        record = None if sample.request is None else self.records.get(sample.request)
        if record is None or record.job_id != self.spec.job_id:
            return None
        return record.for_sample(sample.prompt_tokens, self.updates_behind(record.adapter) > 0)

    def updates_behind(self, version: AdapterVersion) -> int:
        """How many updates a version that the job has published is behind its weights.

        Args:
            version: of the adapter that it trains.

        Returns:
            0 where they are equal.
        """
        return self.step - version.version * self.spec.publish_every

    def _adopt(self, microbatch: int, record: Record) -> None:
        """A sample, of which nothing is computed, uses this of a record."""
        self._progress(microbatch)
        for over in [k for k in self._adopted if k < self.first_microbatch]:
            del self._adopted[over]
        self._adopted[microbatch] = record
        self._pass_record(microbatch)

    def _pass_record(self, microbatch: int) -> None:
        """A forward that has come to the first recorded token goes on behind the last one.

        No recorded token has a label, so that the head has nothing of them to go back over.
        """
        record, done = self._adopted[microbatch], self._forward[microbatch]
        back, head = self._backward[microbatch], self.spec.num_units - 1
        for unit, tokens in enumerate(done):
            if tokens == record.start:
                list.__setitem__(done, unit, record.stop)
                if unit == head:
                    list.__setitem__(back, unit, back[unit] + record.tokens)

    def _count_trained(self, first: int) -> None:
        """Counts the microbatches of the step that are trained, from one on."""
        while first < self.microbatches.stop and self.is_trained(first):
            first += 1
        object.__setattr__(self, "_trained", first)

    def _forget(self) -> None:
        """Starts the microbatches under way anew, without what serving has recorded.

        Of a finetuning job that is its sample: those before it have added their gradients.
        """
        stays = {k for k in self._forward if self.spec.finetunes and self.is_trained(k)}
        progress: tuple[dict[int, Any], ...]
        progress = (self._forward, self._backward, self._windows, self._adopted)
        for done in progress:
            for microbatch in [k for k in done if k not in stays]:
                del done[microbatch]
        self._count_trained(self.first_microbatch)

    def version(self, unit: int) -> int:
        """The version of a unit's weights: the number of their updates that are issued.

        Args:
            unit: the number of the unit, from the embedding on.

        Returns:
            The version; of a frozen unit the steps that are complete.
        """
        own = [self.updated[c] for c, units in self.trained_by.items() if unit in units]
        return min(own, default=self.step)

    def windows(self, microbatch: int, unit: int) -> tuple[int, ...]:
        """The windows in which a unit has gone forward through a sample.

        Args:
            microbatch: of the finetuning job, in the step under way.
            unit: the number of the unit, from the embedding on.

        Returns:
            The first token of each window, in their order.
        """
        found = self._windows.get(microbatch, ())
        return tuple([first for first, units in found if unit in units])

    def is_trained(self, microbatch: int) -> bool:
        """Whether the backward of a microbatch is complete.

        Args:
            microbatch: counted through the job, from 0.

        Returns:
            True once every unit that trains has its backward.
        """
        if microbatch < self.first_microbatch:
            return True
        done = self._backward.get(microbatch)
        return done is not None and done[self.first] >= self.spec.tokens_of(microbatch)

    @property
    def sample(self) -> int | None:
        """The microbatch whose sample a finetuning job is at; None where updates are due."""
        return self._trained if self._trained < self.microbatches.stop else None

    @property
    def has_work(self) -> bool:
        """Whether a task may be issued: of a finetuning job an update or a sample."""
        if self.is_complete or not self.spec.finetunes:
            return not self.is_complete
        microbatch = self.sample
        return microbatch is None or self.is_released(microbatch)

    def is_released(self, microbatch: int) -> bool:
        """Whether the sample of a microbatch is there.

        Args:
            microbatch: counted through the finetuning job.

        Returns:
            True also behind the last sample, where the job goes through them again: one that learns
            does not.
        """
        is_again = not self.spec.learns and self.released == len(self.spec.samples)
        return microbatch < self.released or is_again

    def _complete_steps(self) -> bool:
        """Counts steps that are complete now; returns whether there is a new one."""
        before = self.step
        while not self.is_complete and self._is_done():
            for microbatch in self.microbatches:
                self._forward.pop(microbatch, None)
                self._backward.pop(microbatch, None)
                self._windows.pop(microbatch, None)
            object.__setattr__(self, "step", self.step + 1)
            self._count_trained(max(self._trained, self.first_microbatch))
        return self.step > before

    def _is_done(self) -> bool:
        if self.spec.has_update:
            return min(self.updated.values()) > self.step
        return all(self.is_trained(microbatch) for microbatch in self.microbatches)

    # ---- stages and versions
    @property
    def is_pipelined(self) -> bool:
        """Whether several stages share the work, so that microbatches overtake one another."""
        return len(self.stages) > 1

    @property
    def open_microbatches(self) -> range:
        """The microbatches that may be under way, counted through the job.

        Those of the step, and with several versions of weights those of the next one.
        """
        first, each = self.first_microbatch, self.spec.microbatches
        versions = 1 if self.layout is None else self.layout.versions
        return range(first, min(first + versions * each, self.spec.num_steps * each))

    def version_for(self, microbatch: int) -> int:
        """The version of the weights that a microbatch computes with, forward and backward.

        Args:
            microbatch: counted through the job.

        Returns:
            The number of their updates: those of all steps before it, or with two versions those
            of all but the step before it (PipeDream-2BW's rule of delay 1).
        """
        versions = 1 if self.layout is None else self.layout.versions
        return max(0, microbatch // self.spec.microbatches - versions + 1)

    def stage_of(self, unit: int) -> int:
        """The stage of a unit.

        Args:
            unit: the number of the unit, from the embedding on.

        Returns:
            The number of the stage.

        Raises:
            StopIteration: no stage has it.
        """
        return next(number for number, stage in enumerate(self.stages) if unit in stage.units)

    # ---- what comes
    def is_issued(self, task: TrainingTask) -> bool:
        """Whether a task is issued.

        Args:
            task: with its microbatch counted through the job.

        Returns:
            True also for tasks of steps that are complete.
        """
        work, part, microbatch = task
        if microbatch < self.first_microbatch:
            return True
        if work is Work.UPDATE:
            return self.updated[part] > microbatch // self.spec.microbatches
        done = (self._forward if work is Work.FORWARD else self._backward).get(microbatch)
        return done is not None and done[part] >= self.spec.tokens_of(microbatch)

    def _cursor(self, stage: int) -> int:
        """The number of the first task in the order of a stage that is not issued."""
        order, spec, at = self.stages[stage], self.spec, self._cursors[stage]
        while (task := order.task(at, spec)) is not None and self.is_issued(task):
            at += 1
        self._cursors[stage] = at
        return at

    def num_left(self, stage: int = 0) -> int:
        """How many tasks of a stage are left in the step under way, where it keeps to its order.

        Args:
            stage: the number of the stage.

        Returns:
            A number of tasks; 0 behind the last step.
        """
        return self.stages[stage].num_left(self._cursor(stage), self.spec)

    def ahead(self, n: int, stage: int = 0) -> Sequence[TrainingTask]:
        """The next tasks of a stage, in its order.

        Args:
            n: how many; behind the last task of the step those of later steps follow.
            stage: the number of the stage.

        Returns:
            `n` tasks that are not issued, with microbatches counted through the job; fewer at its
            end.
        """
        order, at, found = self.stages[stage], self._cursor(stage), list[TrainingTask]()
        while len(found) < n and (task := order.task(at, self.spec)) is not None:
            if not self.is_issued(task):
                found.append(task)
            at += 1
        return found

    @property
    def tasks(self) -> tuple[TrainingTask, ...]:
        """The tasks of one step of a job of one stage, with microbatches from 0."""
        (stage,) = self.stages
        return stage.period


def layout_of(training: TrainingProgress) -> TrainingLayout:
    """The layout of a training job.

    Args:
        training: the progress of the job.

    Returns:
        Its chunks and units.

    Raises:
        ValueError: no planner has laid it out.
    """
    if training.layout is None:
        raise ValueError(
            f"training job {training.spec.job_id}: nothing is laid out for it; "
            "choose a planner that cuts chunks at units"
        )
    return training.layout
