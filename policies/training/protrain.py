"""ProTrain's memory: some chunks stay on the device, the others pass through a few buffers."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar

from engine.contract.footprint import LaunchFootprint, gathers
from engine.contract.job import Job
from engine.contract.layout import TrainingLayout
from engine.contract.plan import COMPUTE_LANE, HOST_LANE, Slice
from engine.contract.policy import PlanBuilder, Traits
from engine.contract.regions import (
    Kind,
    Place,
    Tier,
    Work,
    gathered,
    gradient,
    hidden,
    saved,
    weight,
)
from engine.contract.training_progress import TrainingProgress, layout_of
from engine.contract.view import View
from policies.training.cycle import (
    CycleLaunch,
    coming_chunks,
    coming_swaps,
    cycle_of,
    leaving_gradients,
    leaving_swaps,
    lookahead,
    number_of,
    trained_before,
    training_jobs,
)
from policies.training.eviction import LastIn
from policies.training.occupancy import STATES
from policies.training.out_of_memory import patient
from policies.training.residency import Residency
from policies.training.streaming import GRADIENTS_OUT


@dataclass(frozen=True)
class ProTrain:
    """Moves memory as a layout of planner `protrain` says (Yang et al., ProTrain, MLSys'26).

    Chunks that persist have all their states on the device and are updated there. The weights of
    the others come from the host into a few buffers, in the order of use; what lies in a buffer
    when the forward turns is not fetched again. Their gradients go to the host, which updates them.
    Offloaded activations are fetched some units before their backward. Plans use coming bytes.

    Where there is less memory than the layout was made for, what was fetched last leaves for the
    host until there is room, also what persists.

    Where the planner has laid out several memories (`levels`), a job goes on from step to step by
    the fastest layout that fits in what is left beside keys and values.

    Args:
        gradients_out: units whose gradients may still be copied out when another backward begins.
        headroom: of the device, that a layout chosen between steps leaves free.

    Raises:
        ValueError: `gradients_out` is below 0, or `headroom` is not in [0, 1).
        OutOfMemory: from `fit`, a launch can never fit.
    """

    traits: ClassVar[Traits] = Traits(recurs=True, states_in=(Tier.HOST, Tier.GPU))
    gradients_out: int = GRADIENTS_OUT
    headroom: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.headroom < 1:
            raise ValueError(f"protrain: headroom is {self.headroom}, must be in [0, 1)")
        if self.gradients_out < 0:
            raise ValueError(f"protrain: gradients_out is {self.gradients_out}, not at least 0")

    @patient
    def fit(self, batch: tuple[Slice, ...], view: View, plan: PlanBuilder) -> None:
        for job in {piece.job.job_id: piece.job for piece in batch}.values():
            if (number := self._other_layout(job, view, plan)) is not None:
                if not view.is_in_flight(job):
                    plan.relay(job, number)
                return
        device = self.resident(view, plan)
        for piece in batch:
            self._run_task(piece, view, device)

    def _other_layout(self, job: Job, view: View, plan: PlanBuilder) -> int | None:
        """The number of the fastest layout that fits now, where the job is by another."""
        training, pool = job.training, (Tier.GPU, view.device)
        layouts = view.layout.alternatives.get(job.job_id, ())
        if training is None or not layouts or not training.begins_step:
            return None
        own = [
            n for p, n in view.held_bytes.items() if p.pool == pool and p.region[0] == job.job_id
        ]
        room = plan.room(pool) + sum(own) - int(self.headroom * view.capacity_bytes[pool])
        fitting = [i for i, layout in enumerate(layouts) if layout.peak_bytes <= room]
        best = fitting[0] if fitting else len(layouts) - 1  # that needs least
        return best if layouts[best] != training.layout else None

    def resident(self, view: View, plan: PlanBuilder) -> Residency:
        """See Resident."""
        return BufferedResidency(view, plan, LastIn(), STATES, keeps_gathered=True).begun(view)

    def _run_task(self, piece: Slice, view: View, device: Residency) -> None:
        training = piece.job.training
        assert training is not None and piece.layers is not None, "a task of a training job"
        persists = piece.layers.start in layout_of(training).persistent
        is_away = piece.work is Work.UPDATE and not persists
        for launch in device.launches(piece, HOST_LANE if is_away else COMPUTE_LANE):
            moment = number_of(launch, training)
            device.make_resident(launch)
            device.run(launch, after=self._awaited(training, moment, device), keeps_sent=True)
            step = _Step(piece.job, training, view.device, moment)
            step.give_back(device)
            step.fetch(device)

    def _awaited(
        self, training: TrainingProgress, moment: int, device: Residency
    ) -> tuple[Place, ...]:
        """Gradients on the host whose copies must have come before a backward may begin."""
        chunks = trained_before(training, self.gradients_out + 1)[moment]
        places = [gradient(training.spec.job_id, c, Tier.HOST) for c in chunks]
        return tuple([place for place in places if device.holds(place)])


class BufferedResidency(Residency):
    """A residency in which gradients that the host has used still lie on the device for a while."""

    def __init__(self, *how: Any, **more: Any) -> None:
        """See Residency."""
        super().__init__(*how, **more)
        self._used = set[Place]()  # gradients on the device that no update will read

    def evict(self, place: Place) -> bool:
        """See Occupancy; what no update will read any more is not copied."""
        if place.region.kind is Kind.GRADIENT and self._is_used(place):
            self.free(place)
            return True
        return super().evict(place)

    def run(
        self,
        launch: LaunchFootprint,
        also_writes: tuple[Place, ...] = (),
        after: tuple[Place, ...] = (),
        keeps_sent: bool = False,
    ) -> None:
        """See Residency."""
        super().run(launch, also_writes, after, keeps_sent)
        self._used.difference_update(launch.writes)
        if launch.piece.work is Work.UPDATE and launch.on == HOST_LANE:
            self._used |= {self.elsewhere(place) for place in launch.reads}

    def begun(self, view: View) -> BufferedResidency:
        """This residency, with what updates of earlier plans have used."""
        for job in training_jobs(view):
            training = job.training
            assert training is not None
            first = training.step * training.spec.microbatches
            for c, users in training.trained_by.items():
                backward = [training.frontier(first + k)[1][u] for u in users
                            for k in range(training.spec.microbatches)]  # fmt: skip
                if training.updated[c] > training.step or not any(backward):
                    self._used.add(gradient(job.job_id, c, device=view.device))
        return self

    def _is_used(self, place: Place) -> bool:
        return place in self._used and not self.holds(self.elsewhere(place))


@dataclass(frozen=True)
class _Step:
    """A step behind one of its launches: what leaves the device, and what is fetched."""

    job: Job
    training: TrainingProgress
    here: int
    moment: int

    @property
    def _layout(self) -> TrainingLayout:
        return layout_of(self.training)

    @property
    def _link(self) -> CycleLaunch:
        return cycle_of(self.training)[self.moment]

    @property
    def _coming(self) -> Collection[int]:
        """Chunks that are to have weights on the device, in the order of their use."""
        return coming_chunks(self.training)[self.moment]

    def give_back(self, device: Residency) -> None:
        """Gradients whose backwards are over go to the host, and weights leave their buffers."""
        layout, job_id, link = self._layout, self.job.job_id, self._link
        if link.work is Work.UPDATE:
            touched: Collection[int] = (link.part,)
        else:
            touched = layout.units[link.part].chunks
        for c in touched:
            if c in layout.persistent:
                continue
            if link.work is Work.BACKWARD and self._is_last_adder(c, link.part):
                place = gradient(job_id, c, device=self.here)
                if device.holds(place):
                    device.send(place)
            place = weight(job_id, c, device=self.here)
            if device.holds(place) and c not in self._coming:
                device.evict(place)
        self._end_gradients(device)
        self._end_swaps(device)
        self._drop_gathered(device)

    def _end_gradients(self, device: Residency) -> None:
        """Gradients that are on the host, or used there, leave the device."""
        persistent, job_id = self._layout.persistent, self.job.job_id
        for c in leaving_gradients(self.training)[self.moment]:
            place = gradient(job_id, c, device=self.here)
            if c not in persistent and device.holds(place):
                device.evict(place)

    def _end_swaps(self, device: Residency) -> None:
        """Activations leave the device once their copies are taken to be on the host."""
        layout, job_id = self._layout, self.job.job_id
        first = self.training.step * self.training.spec.microbatches
        for _, unit, k in leaving_swaps(self.training)[self.moment]:
            places = [saved(job_id, unit, first + k, device=self.here)]
            if layout.units[unit].sends_input:
                places.append(hidden(job_id, unit, layout.num_units, first + k, device=self.here))
            for place in places:
                if device.holds(place) and device.holds(device.elsewhere(place)):
                    device.evict(place)

    def _is_last_adder(self, chunk: int, unit: int) -> bool:
        """Whether a backward is the last of its microbatch that adds to a chunk's gradients."""
        users = self.training.trained_by.get(chunk, ())
        return bool(users) and min(users) == unit

    def _drop_gathered(self, device: Residency) -> None:
        """Parts of other devices leave behind the last of the next units that read them."""
        layout, job_id = self._layout, self.job.job_id
        if layout.ranks == 1 or self._link.work is Work.UPDATE:
            return
        near = {*self._coming, *lookahead(self.training, 1)[self.moment].chunks}
        away = [c for c in layout.units[self._link.part].chunks if c not in near]
        device.drop([gathered(job_id, c, self.here) for c in away])

    def fetch(self, device: Residency) -> None:
        """Weights and activations that come next, in the order of their use."""
        layout, job_id = self._layout, self.job.job_id
        for c in self._coming:
            place = weight(job_id, c, device=self.here)
            if device.holds(place) and not device.is_new(place):  # its update came behind it
                device.copy(device.elsewhere(place), place)
            device.offer(place, layout.chunks[c].weight_bytes)
        for work, unit, _ in lookahead(self.training, 1)[self.moment].turns:
            for exchange in gathers(layout, job_id, unit, self.here):
                device.offer_gather(exchange)
            for c in layout.units[unit].trained if work is Work.BACKWARD else ():
                place = gradient(job_id, c, device=self.here)  # where microbatches add up
                device.offer(place, layout.chunks[c].gradient_bytes)
        first = self.training.step * self.training.spec.microbatches
        for _, unit, k in coming_swaps(self.training)[self.moment]:
            place = saved(job_id, unit, first + k, device=self.here)
            device.offer(place, layout.units[unit].saved_bytes)
            if layout.units[unit].sends_input:
                place = hidden(job_id, unit, layout.num_units, first + k, device=self.here)
                device.offer(place, layout.units[unit].input_bytes)
