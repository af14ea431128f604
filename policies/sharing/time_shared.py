"""Time sharing of one device by serving and training: every n-th plan trains."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine.contract.plan import Slice
from engine.contract.policy import Memory, PlanBuilder, Scheduling, Traits, traits_of
from engine.contract.regions import SHARED_OWNER, Kind, Place, Pool, Tier, Work
from engine.contract.rules import Remedy
from engine.contract.view import LaunchKey, Moment, Profile, View
from policies.training.cycle import training_jobs
from policies.training.out_of_memory import OutOfMemory


@dataclass(frozen=True)
class TakeTurns:
    """Of `every` plans the last one trains, and the plans before it serve.

    Each side has a scheduling of its own. A batch holds the slices of both sides: those of the side
    whose turn it is come first, and those of the other side run where the first side has no work,
    or finds no room.

    Args:
        serving: scheduling of the requests.
        training: scheduling of the training jobs.
        every: plans in a round, of which one trains.

    Raises:
        ValueError: `every` is below 2.
    """

    serving: Scheduling
    training: Scheduling
    every: int = 4

    def __post_init__(self) -> None:
        if self.every < 2:
            raise ValueError(f"time shared: every is {self.every}, must be at least 2")

    @property
    def traits(self) -> Traits:
        """The bounds of serving: training slices are no tokens of requests."""
        serving = traits_of(self.serving)
        return Traits(
            step_tokens=serving.step_tokens,
            prompt_tokens=serving.prompt_tokens,
            max_jobs=serving.max_jobs,
            service=serving.service,
        )

    def batch(self, view: View) -> tuple[Slice, ...]:
        serves = self.serving.batch(side_of(view, trains=False))
        trains = self.training.batch(side_of(view, trains=True))
        is_training = view.issued % self.every == self.every - 1
        return (*trains, *serves) if is_training else (*serves, *trains)


def of_both_sides(serving: Traits, training: Traits) -> Traits:
    """Traits of a memory policy that has one for each side.

    Args:
        serving: what is told of the requests' memory.
        training: what is told of the training jobs' memory.

    Returns:
        Those of KV as serving has them, and of model states as training has them.
    """
    return Traits(
        spare_pages=serving.spare_pages,
        reserved_tokens=serving.reserved_tokens,
        prefix_caching=serving.prefix_caching,
        states_in=training.states_in,
        reuses_gradients=training.reuses_gradients,
    )


@dataclass(frozen=True)
class DividedMemory:
    """Each side has a share of memory and a memory policy of its own, which sees no other jobs.

    A plan is for the side whose slices come first, or for the other side if none of these fits.
    Shares are fixed: neither side takes what the other leaves free. Training that its share cannot
    hold raises OutOfMemory with LARGER_SHARE as the first remedy.

    Args:
        serving: memory policy of the requests.
        training: memory policy of the training jobs.
        device_share: of the device, for training.
        host_share: of the host, for training.

    Raises:
        ValueError: a share is not in [0, 1].
    """

    serving: Memory
    training: Memory
    device_share: float = 0.5
    host_share: float = 0.5

    def __post_init__(self) -> None:
        for name in ("device_share", "host_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"time shared: {name} is {getattr(self, name)}, not in [0, 1]")

    @property
    def traits(self) -> Traits:
        """What is told of KV as serving has it, and of model states as training has it."""
        return of_both_sides(traits_of(self.serving), traits_of(self.training))

    def fit(self, batch: tuple[Slice, ...], view: View, plan: PlanBuilder) -> None:
        for trains in dict.fromkeys([_trains(piece) for piece in batch]):
            own = tuple([piece for piece in batch if _trains(piece) is trains])
            side = self._divided(side_of(view, trains), view, trains)
            memory = self.training if trains else self.serving
            within = plan.within({pool: side.room(pool) for pool in side.free_bytes})
            try:
                memory.fit(own, side, within)
            except OutOfMemory as error:
                raise error.with_first(Remedy.LARGER_SHARE) from error
            if plan:
                return

    def _divided(self, side: View, view: View, trains: bool) -> View:
        """The view of one side with the memory that this side holds and may take."""
        shares = {Tier.GPU: self.device_share, Tier.HOST: self.host_share}
        divided = within_shares(side, view, trains, shares)
        return replace(divided, profile=WithoutKv(view.profile))


def within_shares(side: View, view: View, trains: bool, shares: Mapping[Tier, float]) -> View:
    """The view of one side with the memory that this side holds and may take.

    Args:
        side: the jobs of the side.
        view: the view of the device.
        trains: whether the side is training's.
        shares: of training, of the tiers that are divided; the sides share all others.

    Returns:
        The view of the side, whose pools of a divided tier are its share.
    """
    trained, held = Counter[Pool](), dict[Place, int]()
    served = {SHARED_OWNER, *(job.job_id for job in (*view.serving, *view.waiting))}
    served -= {job.job_id for job in training_jobs(view)}
    for place, nbytes in view.held_bytes.items():
        owner, kind, *_ = place.region
        is_trained = owner not in served and kind is not Kind.KV  # ended jobs too
        if is_trained:
            trained[place.pool] += nbytes
        if is_trained is trains:
            held[place] = nbytes
    free, coming = dict(view.free_bytes), dict(view.coming_bytes)
    capacity = dict(view.capacity_bytes)
    for pool, nbytes in view.capacity_bytes.items():
        if (share := shares.get(pool[0])) is None:
            continue
        own = int(nbytes * share)
        left = own - trained[pool]  # what training may still take
        room = max(0, min(left, view.room(pool)) if trains else view.room(pool) - left)
        capacity[pool] = own if trains else nbytes - own
        free[pool] = min(room, view.free_bytes[pool])
        coming[pool] = room - free[pool]
    return replace(
        side, free_bytes=free, coming_bytes=coming, held_bytes=held, capacity_bytes=capacity
    )


@dataclass(frozen=True)
class WithoutKv:
    """A profile whose moments leave KV out: KV lies in serving's share, not in training's.

    Args:
        whole: the profile of all jobs.
    """

    whole: Profile

    def moments(self, job_id: int) -> Sequence[Moment]:
        """See Profile."""
        return [
            moment._replace(other_bytes=moment.other_bytes - moment.kv_bytes, kv_bytes=0)
            for moment in self.whole.moments(job_id)
        ]

    def uses(self, job_id: int) -> Mapping[Place, Sequence[int]]:
        """See Profile."""
        return self.whole.uses(job_id)

    def moment(self, job_id: int) -> int:
        """See Profile."""
        return self.whole.moment(job_id)

    def quote_ratio(self, work: Work | None) -> float | None:
        """See Profile."""
        return self.whole.quote_ratio(work)

    def mean_ns(self, job_id: int, unit: LaunchKey) -> int | None:
        """See Profile."""
        return self.whole.mean_ns(job_id, unit)


def side_of(view: View, trains: bool, **changed: Any) -> View:
    """A view of the jobs that train, or of those that are served.

    Args:
        view: the view of the device.
        trains: whether the side is training's.
        changed: other facts of the view.

    Returns:
        The view with the jobs of that side alone; memory is that of both, unless it is changed.
    """
    return replace(
        view,
        serving=() if trains else view.serving,
        training=view.training if trains else (),
        waiting=[job for job in view.waiting if (job.training is not None) is trains],
        running=None if trains else view.running,
        **changed,
    )


def _trains(piece: Slice) -> bool:
    return piece.job.training is not None
