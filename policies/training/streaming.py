"""What offloading in a known order has in common: prefetch, offload, update on the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.contract.footprint import gather, gathers, goes_out, launches_of
from engine.contract.layout import TrainingLayout
from engine.contract.plan import HOST_LANE, Slice
from engine.contract.policy import PlanBuilder
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
    Ahead,
    CycleLaunch,
    cycle_of,
    last_update,
    lookahead,
    number_of,
    trained_before,
)
from policies.training.eviction import LastIn
from policies.training.occupancy import STATES
from policies.training.out_of_memory import patient
from policies.training.residency import Residency

GRADIENTS_OUT = 2  # DeepSpeed's stage 3: two reduce events; FSDP2: a reduce beside a copy
Stays = Callable[[TrainingLayout, int, CycleLaunch], bool]  # of a chunk, behind a launch


@dataclass(frozen=True)
class Streaming:
    """How a policy streams states between host and device, unit by unit.

    Tiers are inclusive: the host has all weights and optimizer states.

    Args:
        prefetch: turns of units (a forward, or a backward) to fetch for while one runs.
        stays: whether the weights of a chunk stay on the device behind a launch.
        may_leave: weights that stay are evicted all the same where room is needed.
        overlaps_updates: the next forward may begin before the last chunk is updated.
        gradients_out: units whose gradients may still be copied out when another backward begins.
            Without a bound they would pile up where the link is slower than the computation.
    """

    prefetch: int
    stays: Stays
    may_leave: bool = True
    overlaps_updates: bool = False
    gradients_out: int = GRADIENTS_OUT

    @patient
    def fit(self, batch: tuple[Slice, ...], view: View, plan: PlanBuilder) -> None:
        """Writes a plan for all of the batch.

        Args:
            batch: tasks of training jobs, in their order.
            view: what the policy may know.
            plan: takes the operations.

        Raises:
            OutOfMemory: a launch can never fit.
        """
        stream = _Stream(self, view, self.resident(view, plan))
        for piece in batch:
            stream.run_task(piece)

    def resident(self, view: View, plan: PlanBuilder) -> Residency:
        """What lies on the device, for evictions.

        Args:
            view: what the policy may know.
            plan: takes the operations.

        Returns:
            The residency of a plan that begins.
        """
        kinds = STATES if self.may_leave else (Kind.GRADIENT,)
        return Residency(view, plan, LastIn(), kinds, keeps_gathered=True)


class _Stream:
    """A plan of a streaming policy while it is written."""

    def __init__(self, how: Streaming, view: View, device: Residency) -> None:
        self._how, self._view, self._device = how, view, device

    def run_task(self, piece: Slice) -> None:
        """One task: its places, the prefetch for later tasks, the launch, the offload behind it."""
        training, device = piece.job.training, self._device
        assert training is not None
        links, ahead = cycle_of(training), lookahead(training, max(1, self._how.prefetch))
        for launch in launches_of(piece, self._view.device, HOST_LANE):
            moment = number_of(launch, training)
            device.make_resident(launch)
            if self._how.prefetch:
                self._prefetch(training, ahead[moment])
            if piece.work is Work.UPDATE:
                device.run(launch, self._barrier(training, links[moment]))
                self._refresh(training, links[moment])
            else:
                device.run(launch, after=self._awaited(training, moment))
                self._offload(training, links[moment], ahead[moment])

    # ---- forward and backward
    def _prefetch(self, training: TrainingProgress, ahead: Ahead) -> None:
        """Fetches what the next turns use, in their order, as far as there is room."""
        layout, job_id, here = layout_of(training), training.spec.job_id, self._view.device
        first = training.step * training.spec.microbatches
        for work, u, k in ahead.turns:
            unit = layout.units[u]
            for c in unit.chunks:
                self._device.offer(weight(job_id, c, device=here), layout.chunks[c].weight_bytes)
            for exchange in gathers(layout, job_id, u, here):
                self._device.offer_gather(exchange)
            if work is Work.BACKWARD:
                for c in unit.trained:
                    place = gradient(job_id, c, device=here)
                    self._device.offer(place, layout.chunks[c].gradient_bytes)
                if goes_out(unit):
                    self._device.offer(saved(job_id, u, first + k, device=here), unit.saved_bytes)
                if unit.sends_input:
                    place = hidden(job_id, u, layout.num_units, first + k, device=here)
                    self._device.offer(place, unit.input_bytes)

    def _offload(self, training: TrainingProgress, link: CycleLaunch, ahead: Ahead) -> None:
        """Evicts weights and gradients that the next turns do not use, where the host has room."""
        layout, job_id, here = layout_of(training), training.spec.job_id, self._view.device
        unit = layout.units[link.part]
        for c in unit.chunks:
            if c not in ahead.chunks and not self._how.stays(layout, c, link):
                self._device.evict(weight(job_id, c, device=here))
                self._device.drop((gathered(job_id, c, here),))
        if link.work is Work.BACKWARD:
            for c in unit.trained:
                place = gradient(job_id, c, device=here)
                if c not in ahead.trained and self._device.holds(place):
                    self._device.evict(place)

    def _awaited(self, training: TrainingProgress, moment: int) -> tuple[Place, ...]:
        """Gradients on the host whose copies must have come before a backward may begin."""
        chunks = trained_before(training, self._how.gradients_out + 1)[moment]
        places = [gradient(training.spec.job_id, c, Tier.HOST) for c in chunks]
        return tuple([place for place in places if self._device.holds(place)])

    # ---- updates
    def _barrier(self, training: TrainingProgress, link: CycleLaunch) -> tuple[Place, ...]:
        """Places that an update also writes.

        The last update of a step writes all weights, so that the next fetch waits for it.
        """
        last = last_update(training)
        if self._how.overlaps_updates or link.part != last:
            return ()
        others = [c for c in training.trained_by if c != last]
        return tuple([weight(training.spec.job_id, c, Tier.HOST) for c in others])

    def _refresh(self, training: TrainingProgress, link: CycleLaunch) -> None:
        """Replaces weights on the device that an update made stale.

        Weights that stay are copied from the host; all other weights are freed.
        """
        chunks, last = [link.part], last_update(training)
        layout, job_id, here = layout_of(training), training.spec.job_id, self._view.device
        if not self._how.overlaps_updates:
            chunks = [*training.trained_by] if link.part == last else []
        for c in chunks:
            place, away = weight(job_id, c, device=here), gathered(job_id, c, here)
            if not (self._device.holds(place) and self._how.stays(layout, c, link)):
                self._device.drop((place, away))
                continue
            self._device.copy(self._device.elsewhere(place), place)
            if self._device.holds(away):
                self._device.exchange(gather(layout, job_id, c, here))
