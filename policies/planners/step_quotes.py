"""Quotes of a step of training: durations and bytes of each launch, in every mode of a unit."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil
from typing import NamedTuple

from engine.contract.footprint import LaunchFootprint, gather, launches_of, reduction
from engine.contract.job import Job
from engine.contract.layout import Mode, TrainingLayout
from engine.contract.plan import COMPUTE_LANE, HOST_LANE, Compute, Slice
from engine.contract.regions import Tier, Work, saved, workspace
from engine.contract.training_progress import TrainingProgress
from engine.contract.view import Cost
from traces.serving.request import TrainingJob

DEVICE, HOST = (Tier.GPU, 0), (Tier.HOST, 0)


class QuotedCopy(NamedTuple):
    """A copy between device and host.

    Attributes:
        alone_ns: while the other direction of the link is idle.
        contended_ns: while it is busy.
    """

    alone_ns: int
    contended_ns: int


class QuotedUnit(NamedTuple):
    """One unit in one mode.

    Attributes:
        forward_ns: of its forward.
        again_ns: of the forward that is repeated for its backward; 0 of another mode.
        backward_ns: of its backward; 0 where nothing trains below or in it.
        kept_bytes: what its forward keeps on the device behind its launch, beside its output.
        saved_bytes: what the backward needs beside its input.
        output_bytes: the input of the next unit.
        forward_bytes: workspace of the forward, with saved activations that leave behind it.
        again_bytes: workspace of the repeated forward.
        backward_bytes: workspace of the backward, with the gradient of its input.
    """

    forward_ns: int
    again_ns: int
    backward_ns: int
    kept_bytes: int
    saved_bytes: int
    output_bytes: int
    forward_bytes: int
    again_bytes: int
    backward_bytes: int


class QuotedChunk(NamedTuple):
    """One chunk.

    Attributes:
        load: of its weights to the device.
        out: of its gradients to the host; of 0 ns where it does not train.
        back: of these to the device, where another microbatch adds to them.
        gather_ns: of the collective that brings the parts of other devices; 0 without a group.
        reduce_ns: of the collective that adds its gradients up; 0 without a group.
        host_ns: of its update on the host; None where the host cannot.
        device_ns: of its update on the device.
    """

    load: QuotedCopy
    out: QuotedCopy
    back: QuotedCopy
    gather_ns: int
    reduce_ns: int
    host_ns: int | None
    device_ns: int


@dataclass(frozen=True)
class QuotedStep:
    """Quotes for a layout, whatever the modes of its units are.

    Args:
        layout: chunks and units of the job; its modes are not read.
        job: the training job.
        cost: predicted durations.
    """

    layout: TrainingLayout
    job: TrainingJob
    cost: Cost

    @cached_property
    def units(self) -> dict[Mode, tuple[QuotedUnit, ...]]:
        """Each unit in each mode."""
        return {mode: self._units(mode) for mode in Mode}

    @cached_property
    def chunks(self) -> tuple[QuotedChunk, ...]:
        """Each chunk."""
        known, found = dict[tuple[int, ...], QuotedChunk](), list[QuotedChunk]()
        for c, chunk in enumerate(self.layout.chunks):
            sizes = (chunk.weight_bytes, chunk.gradient_bytes, chunk.optimizer_bytes)
            key = (*sizes, len(chunk.parameters))
            if key not in known:
                known[key] = self._chunk(c)
            found.append(known[key])
        return tuple(found)

    def swap(self, unit: int, is_out: bool) -> QuotedCopy:
        """The copy of a unit's saved activations.

        Args:
            unit: the number of the unit.
            is_out: to the host; else to the device.

        Returns:
            Its durations.
        """
        return self._copy(self.layout.units[unit].saved_bytes, is_out)

    def swap_interval(self, blocks: Iterable[int]) -> int:
        """How many blocks go forward while the activations of one are copied (patent, interval I).

        Args:
            blocks: numbers of these units.

        Returns:
            1 or more.
        """
        keeps = self.units[Mode.KEEP]
        ratios = [
            ceil(self.swap(u, is_out=True).alone_ns / max(1, keeps[u].forward_ns)) for u in blocks
        ]
        return max(1, *ratios) if ratios else 1

    def _copy(self, nbytes: int, is_out: bool) -> QuotedCopy:
        if not nbytes:
            return QuotedCopy(0, 0)
        source, target = (DEVICE, HOST) if is_out else (HOST, DEVICE)
        copy_ns = self.cost.copy_ns
        alone_ns = copy_ns(source, target, nbytes)
        return QuotedCopy(alone_ns, copy_ns(source, target, nbytes, contended=True))

    # ---- launches
    def _units(self, mode: Mode) -> tuple[QuotedUnit, ...]:
        units = tuple([replace(unit, mode=mode) for unit in self.layout.units])
        last = len(units) - 1
        own = replace(self.layout, units=(*units[:-1], replace(units[-1], mode=Mode.KEEP)))
        job = Job.trains(TrainingProgress(self.job, own), 0)
        known, found = dict[object, QuotedUnit](), list[QuotedUnit]()
        for u, unit in enumerate(own.units):
            sizes = tuple([own.chunks[c].weight_bytes for c in unit.chunks])
            alike = (replace(unit, chunks=(), trained=()), sizes, len(unit.trained), u >= own.first)
            key = (alike, u == own.first, u == last)
            if key not in known:
                known[key] = self._unit(job, own, u)
            found.append(known[key])
        return tuple(found)

    def _unit(self, job: Job, layout: TrainingLayout, u: int) -> QuotedUnit:
        mode, tokens = layout.units[u].mode, self.job.microbatch_tokens
        (forward,) = launches_of(Slice(job, tokens, Work.FORWARD, range(u, u + 1)), 0)
        own = saved(job.job_id, u, 0)
        kept = _grown(forward, own) if mode is Mode.KEEP else 0
        sent = _grown(forward, own) - kept
        output = sum([op.nbytes for op in forward.grows]) - kept - sent - _worked(forward)
        again_ns = backward_ns = again_bytes = backward_bytes = 0
        if u >= layout.first:
            launches = [*launches_of(Slice(job, tokens, Work.BACKWARD, range(u, u + 1)), 0)]
            backward_ns = self._op_ns(launches[-1])
            backward_bytes = sum([op.nbytes for op in launches[-1].grows])
            for again in launches[:-1]:
                again_ns, again_bytes = self._op_ns(again), _worked(again)
        return QuotedUnit(
            self._op_ns(forward),
            again_ns,
            backward_ns,
            kept,
            layout.units[u].saved_bytes if u >= layout.first else 0,
            output,
            _worked(forward) + sent,
            again_bytes,
            backward_bytes,
        )

    def _chunk(self, c: int) -> QuotedChunk:
        chunk = self.layout.chunks[c]
        load, none = self._copy(chunk.weight_bytes, is_out=False), QuotedCopy(0, 0)
        gather_ns = reduce_ns = 0
        if chunk.remote_bytes:
            exchange = gather(self.layout, self.job.job_id, c, 0)
            gather_ns = self.cost.op_ns(exchange.op(0))
        if not chunk.trains or not self.job.has_update:
            return QuotedChunk(load, none, none, gather_ns, 0, 0, 0)
        if self.layout.ranks > 1:
            training = TrainingProgress(self.job, self.layout)
            reduce_ns = self.cost.op_ns(reduction(training, c, 0, reuses=False).op(0))
        job = Job.trains(TrainingProgress(self.job, self.layout), 0)
        piece = Slice(job, 1, Work.UPDATE, range(c, c + 1))
        (on_host,), (here,) = launches_of(piece, 0, HOST_LANE), launches_of(piece, 0, COMPUTE_LANE)
        try:
            host_ns: int | None = self._op_ns(on_host)
        except ValueError:  # the cost has no price: nothing is known of this host's memory
            host_ns = None
        out = self._copy(chunk.gradient_bytes, is_out=True)
        back = self._copy(chunk.gradient_bytes, is_out=False)
        return QuotedChunk(load, out, back, gather_ns, reduce_ns, host_ns, self._op_ns(here))

    def _op_ns(self, launch: LaunchFootprint) -> int:
        op = Compute((launch.piece,), launch.reads, launch.writes, 0, launch.on, launch.again)
        return self.cost.op_ns(op)


def _grown(launch: LaunchFootprint, place: object) -> int:
    return sum([op.nbytes for op in launch.grows if op.place == place])


def _worked(launch: LaunchFootprint) -> int:
    own = workspace(launch.piece.job.job_id)
    return _grown(launch, own)
