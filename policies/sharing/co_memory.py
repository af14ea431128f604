"""One memory for serving and finetuning: what a sample holds gives way to keys and values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from engine.contract.job import Job
from engine.contract.plan import Collective, Compute, Grow, Slice
from engine.contract.policy import Memory, PlanBuilder, Traits, traits_of
from engine.contract.regions import Place, Pool, Tier, Work
from engine.contract.rules import Remedy
from engine.contract.view import RunningDecodes, View
from engine.contract.windows import WindowFootprint, sample_bytes, sample_places, window_footprint
from policies.sharing.time_shared import side_of
from policies.training.cycle import training_jobs
from policies.training.out_of_memory import OutOfMemory, patient


@dataclass(frozen=True)
class CoMemory:
    """Serving has a memory policy of its own; finetuning takes pages and bytes of the same pools.

    Serving is planned as if a sample held nothing. Where it needs bytes that a sample holds, the
    sample gives all of them back and begins anew, the job that came last first. So finetuning never
    preempts a request, and never keeps one out.

    A window forward joins the launch that serves, or follows it as a launch of its own. A backward
    and an update have launches of their own.

    Args:
        serving: memory policy of the requests.
        buffers: `grown`: a sample takes bytes window by window, and gives each place back behind
            its last use. `static`: a job takes what its longest sample can hold when it begins, and
            keeps it to its end, as FlexLLM does; it never gives way.
        fused: whether a window joins the launch that serves, and weights are read once.
        headroom: share of the device that windows leave free, so that serving can grow.

    Raises:
        ValueError: `headroom` is not in [0, 1).
    """

    serving: Memory
    buffers: Literal["grown", "static"] = "grown"
    fused: bool = True
    headroom: float = 0.02

    def __post_init__(self) -> None:
        if not 0 <= self.headroom < 1:
            raise ValueError(f"co-serving: headroom is {self.headroom}, must be in [0, 1)")

    @property
    def traits(self) -> Traits:
        """What is told of KV as serving has it; states of training stay on the device."""
        serving = traits_of(self.serving)
        return Traits(
            spare_pages=serving.spare_pages,
            reserved_tokens=serving.reserved_tokens,
            prefix_caching=serving.prefix_caching,
            states_in=(Tier.GPU,),
        )

    @patient
    def fit(self, batch: tuple[Slice, ...], view: View, plan: PlanBuilder) -> None:
        served = tuple([piece for piece in batch if piece.job.training is None])
        trained = [piece for piece in batch if piece.job.training is not None]
        jobs = [job for job in training_jobs(view) if _finetunes(job)]
        holders = jobs if self.buffers == "grown" else []
        shared = GivesWay(plan, holders, view)
        for piece in trained:  # updates come first: a window behind one finds its weights
            if piece.work is Work.UPDATE:
                self._place(piece, view, shared)
        if served:
            self.serving.fit(served, shared.of_serving(view), shared)
        for piece in trained:
            if piece.work is not Work.UPDATE and piece.job.job_id not in shared.restarted:
                self._place(piece, view, shared)
        shared.flush()
        if not plan and trained and not view.serving and not view.in_flight:
            self._refuse_endless(trained[-1], view, plan)

    def _place(self, piece: Slice, view: View, plan: GivesWay) -> None:
        """Writes a launch that finetunes, if there is room for it."""
        footprint, grows = self._growth(piece, view, plan)
        pool: Pool = (Tier.GPU, view.device)
        need = sum([op.nbytes for op in grows])
        spare = 0 if piece.work is Work.UPDATE else self._headroom_bytes(view)
        if need and need > plan.own_room(pool) - spare:
            return
        plan.grow_all(grows)
        joins = self.fused and piece.work is Work.FORWARD
        plan.finetune(piece, footprint, joins)
        lasting = self._lasting(piece, view)
        for place in footprint.frees:
            if place not in lasting:
                plan.free(place)

    def _growth(
        self, piece: Slice, view: View, plan: PlanBuilder
    ) -> tuple[WindowFootprint, list[Grow]]:
        """The footprint of a launch, and what grows for it."""
        training = piece.job.training
        assert training is not None
        footprint = window_footprint(piece, training, view.page, view.device)
        sizes = dict(footprint.sizes)
        for place, nbytes in self._lasting(piece, view).items():
            sizes[place] = max(nbytes, sizes.get(place, 0))
        lacks = [(place, nbytes - plan.held(place)) for place, nbytes in sizes.items()]
        return footprint, [Grow(place, nbytes) for place, nbytes in lacks if nbytes > 0]

    def _lasting(self, piece: Slice, view: View) -> Mapping[Place, int]:
        """Bytes of the places that a job keeps to its end."""
        if self.buffers == "grown":
            return {}
        assert piece.job.training is not None
        return sample_bytes(piece.job.training, view.page, view.device)

    def _headroom_bytes(self, view: View) -> int:
        """Bytes that windows leave free."""
        if self.buffers == "static":
            return 0
        return int(self.headroom * view.capacity_bytes[Tier.GPU, view.device])

    def _refuse_endless(self, piece: Slice, view: View, plan: PlanBuilder) -> None:
        """OutOfMemory where a launch finds no room although nothing else holds any."""
        training = piece.job.training
        assert training is not None
        _, grows = self._growth(piece, view, plan)
        pool: Pool = (Tier.GPU, view.device)
        need = sum([op.nbytes for op in grows]) + self._headroom_bytes(view)
        remedies = (Remedy.SHORTER_SEQUENCES, Remedy.RECOMPUTE)
        if training.spec.recipe.lora_rank is None:
            remedies += (Remedy.TRAIN_ADAPTERS,)
        what = f"a window of training job {piece.job.job_id}"
        if (deficit_bytes := need - plan.room(pool)) > 0:
            raise OutOfMemory(pool, deficit_bytes, what, remedies)


class GivesWay(PlanBuilder):
    """A builder for serving and finetuning: bytes that samples hold are room for serving.

    Where an operation needs them, the sample of the last job gives all of its bytes back and begins
    anew, then that of the job before it. A launch that serves is held back until `flush`, so that a
    window can join it.

    Args:
        plan: the plan that is written.
        jobs: finetuning jobs whose samples give way, in the order of their arrival.
        view: what the policy was shown.

    Attributes:
        restarted: numbers of the jobs whose samples begin anew.
    """

    def __init__(self, plan: PlanBuilder, jobs: Sequence[Job], view: View) -> None:
        self._plan, self._device, self._page_nbytes = plan, view.device, view.page.nbytes
        self._pool: Pool = (Tier.GPU, view.device)
        found = [(job, _held_places(job, plan, view.device)) for job in jobs]
        self._holders = [(job, places) for job, places in found if places]
        self._begin()

    def _begin(self) -> None:
        self._jobs = [*self._holders]  # whose samples have not given way
        self._launch: Compute | None = None  # that serves, and waits for a window
        self.restarted: set[int] = set()

    def __bool__(self) -> bool:
        return self._launch is not None or bool(self._plan)

    # ---- room
    def of_serving(self, view: View) -> View:
        """A view of the requests in which samples hold nothing.

        Args:
            view: what the policy was shown; no sample has given way yet.

        Returns:
            The view of the side that serves, with bytes of samples as free ones.
        """
        side, own = side_of(view, trains=False), {p for _, places in self._holders for p in places}
        if not own:
            return side
        held = {place: nbytes for place, nbytes in view.held_bytes.items() if place not in own}
        free = dict(view.free_bytes)
        free[self._pool] += self._samples_bytes()
        return replace(side, held_bytes=held, free_bytes=free)

    def _samples_bytes(self) -> int:
        held = self._plan.held
        return sum([held(place) for _, places in self._jobs for place in places])

    def own_room(self, pool: Pool) -> int:
        """The room that finetuning may take: bytes of other samples are none."""
        return self._plan.room(pool)

    def room(self, pool: Pool) -> int:
        room = self._plan.room(pool)
        return room + self._samples_bytes() if self._jobs and pool == self._pool else room

    def _make_room(self, pool: Pool, nbytes: int) -> None:
        while self._jobs and pool == self._pool and self._plan.room(pool) < nbytes:
            job, places = self._jobs.pop()
            for place in places:
                self._plan.free(place)
            self._plan.restart(job)
            self.restarted.add(job.job_id)

    # ---- what is written
    def flush(self) -> None:
        """Writes the launch that serves, if none has joined it."""
        if self._launch is not None:
            self._plan.launch(self._launch)
            self._launch = None

    def finetune(self, piece: Slice, footprint: WindowFootprint, joins: bool) -> None:
        """Adds a launch that finetunes.

        Args:
            piece: its slice.
            footprint: its places, which are held.
            joins: whether it becomes a part of the launch that serves, where there is one.
        """
        reads, writes, slices = footprint.reads, footprint.writes, (piece,)
        if joins and self._launch is not None:
            served, self._launch = self._launch, None
            slices, writes = (*served.slices, piece), (*served.writes, *writes)
        self.flush()
        self._plan.launch(Compute(slices, reads, writes, self._device))

    def compute(self, slices: Sequence[Slice], writes: Sequence[Place]) -> None:
        self.flush()
        self._launch = Compute(tuple(slices), writes=tuple(writes), device=self._device)

    def launch(self, op: Compute) -> None:
        self.flush()
        self._plan.launch(op)

    def exchange(self, op: Collective) -> None:
        self._plan.exchange(op)

    def grow(self, place: Place, nbytes: int) -> None:
        self._make_room(place.pool, nbytes)
        self._plan.grow(place, nbytes)

    def grow_all(self, grows: Sequence[Grow]) -> None:
        for op in grows:
            self._make_room(op.place.pool, op.nbytes)
            self._plan.grow_all((op,))

    def grow_running(self, running: RunningDecodes) -> bool:
        if running.full and self._jobs:
            nbytes = sum([op.nbytes for op in running.full])
            if self.room(self._pool) < nbytes:
                return False
            self._make_room(self._pool, nbytes)
        return self._plan.grow_running(running)

    def share(self, place: Place, pages: tuple[int, ...]) -> None:
        self._make_room(place.pool, self._plan.idle(pages) * self._page_nbytes)
        self._plan.share(place, pages)

    def copy(self, src: Place, dst: Place) -> None:
        if not self._plan.holds(dst):
            self._make_room(dst.pool, self._plan.held(src))
        self._plan.copy(src, dst)

    def move(self, src: Place, dst: Place) -> None:
        self.copy(src, dst)
        self._plan.free(src)

    def free(self, place: Place) -> None:
        if self._launch is not None and place in self._launch.writes:
            self.flush()
        self._plan.free(place)

    def restart(self, job: Job) -> None:
        self._plan.restart(job)

    def refuse(self, job: Job) -> None:
        self._plan.refuse(job)

    def discard(self) -> None:
        self._plan.discard()
        self._begin()

    def within(self, room_bytes: Mapping[Pool, int]) -> PlanBuilder:
        return self._plan.within(room_bytes)

    # ---- what the plan holds
    def held(self, place: Place) -> int:
        return self._plan.held(place)

    def holds(self, place: Place) -> bool:
        return self._plan.holds(place)

    def found(self, job: Job) -> tuple[int, ...]:
        return self._plan.found(job)

    def idle(self, pages: Sequence[int]) -> int:
        return self._plan.idle(pages)


def _held_places(job: Job, plan: PlanBuilder, device: int) -> list[Place]:
    """What the sample under way of a job holds; nothing where its updates are due."""
    training = job.training
    if training is None or training.sample is None:
        return []
    return [place for place in sample_places(training, device) if plan.holds(place)]


def _finetunes(job: Job) -> bool:
    return job.training is not None and job.training.spec.finetunes
