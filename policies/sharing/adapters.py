"""Adapters of requests: which of them lie on the device, beside keys and values.

A launch runs requests of several adapters at once (S-LoRA, MLSys 2024; Punica, MLSys 2024). Every
adapter has its home on the host; copies on the device come and go.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

from engine.contract.adapters import AdapterVersion, resident_adapters
from engine.contract.plan import Slice
from engine.contract.policy import Memory, PlanBuilder, Traits, traits_of
from engine.contract.regions import Kind, Place, Pool, Tier, kv_place
from engine.contract.view import View


@dataclass(frozen=True)
class AdapterMemory:
    """Brings the adapters of a batch to the device, and has a memory policy place the rest.

    An adapter is needed while a job with KV on the device runs through it, or a slice of the batch
    does. The others stay as long as nothing else takes their bytes: keys and values, or an adapter
    that is needed. The least recently used one goes first; no copy is made for that, as its home
    is on the host. Uses are those of `View.used`.

    A slice whose adapter and pages find no room beside what the slices before it take waits, and so
    do the waiting jobs behind it. Where the first running job of a batch would find no room beside
    the adapters of all others, those of the last jobs in service are needed no more.

    Args:
        serving: memory policy of keys and values.
        most: adapters on the device at once (vLLM: max_loras); a waiting job that would need one
            more lets others by. None: as many as fit.

    Raises:
        ValueError: `most` is below 1.
    """

    serving: Memory
    most: int | None = None

    def __post_init__(self) -> None:
        if self.most is not None and self.most < 1:
            raise ValueError(f"adapters: most is {self.most}, must be at least 1")

    @property
    def traits(self) -> Traits:
        """Those of the memory policy, but that KV grows as it is asked for."""
        serving = traits_of(self.serving)
        return replace(serving, kv_growth="asked", adapters=True, recurs=False)

    def fit(self, batch: tuple[Slice, ...], view: View, plan: PlanBuilder) -> None:
        if not view.adapters:
            self.serving.fit(batch, view, plan)
            return
        adapters = ResidentAdapters(view, plan, self.most)
        serving = traits_of(self.serving)
        spare_bytes = serving.spare_pages * view.page.nbytes
        slices = adapters.bring(batch, spare_bytes, serving.reserved_tokens)
        if slices:
            self.serving.fit(slices, *adapters.beside())


def idle_adapters(view: View, plan: PlanBuilder, served: Iterable[Slice]) -> list[Place]:
    """The adapters on a device that neither a running request needs nor the batch.

    Args:
        view: what the policy was shown.
        plan: the plan that is written.
        served: slices of requests in the batch, taken in or not.

    Returns:
        Places that the plan holds, the least recently used first.
    """
    if not view.adapters:
        return []
    device = view.device
    running = [j for j in view.serving if plan.holds(kv_place(j.job_id, Tier.GPU, device))]
    jobs = [*running, *[piece.job for piece in served]]
    needed = {job.adapter.place(device) for job in jobs if job.adapter is not None}
    resident = resident_adapters(view.held_bytes, (Tier.GPU, device))
    return _by_use([p for p in resident if plan.holds(p) and p not in needed], view)


def _by_use(places: Iterable[Place], view: View) -> list[Place]:
    """Adapters in the order of their last use, which is also that of eviction."""
    return sorted(places, key=lambda place: (view.used[place], place))


class ResidentAdapters:
    """The adapters on a device while a plan is written.

    Args:
        view: what the policy was shown.
        plan: the plan that is written.
        most: adapters on the device at once; None: as many as fit.
    """

    def __init__(self, view: View, plan: PlanBuilder, most: int | None) -> None:
        self._view, self._plan, self._most = view, plan, most
        self._pool: Pool = (Tier.GPU, view.device)
        found = resident_adapters(view.held_bytes, self._pool)
        self._resident = {place: n for place, n in found.items() if plan.holds(place)}
        self._shown = Without(view.held_bytes, frozenset(self._resident))
        for place in [place for place in self._resident if not plan.holds(_home(place))]:
            plan.free(place)  # of an older version, whose last request has ended
            del self._resident[place]
        self._needed = self._of_running()
        self._idle = self._not_needed()  # the next to go first

    def _of_running(self) -> set[Place]:
        """The adapters of jobs in service that have KV on the device."""
        device, held, found = self._view.device, self._view.held_bytes, set[Place]()
        for job in self._view.serving:
            if job.adapter is not None and kv_place(job.job_id, Tier.GPU, device) in held:
                found.add(job.adapter.place(device))
        return found.intersection(self._resident)

    def _not_needed(self) -> list[Place]:
        """The adapters that are not needed, the least recently used first."""
        return _by_use([p for p in self._resident if p not in self._needed], self._view)

    @property
    def _idle_bytes(self) -> int:
        return sum([self._resident[place] for place in self._idle])

    def bring(
        self, batch: Sequence[Slice], spare_bytes: int = 0, reserved_tokens: int = 0
    ) -> tuple[Slice, ...]:
        """Writes the copies that a batch needs.

        Args:
            batch: the slices of the scheduling, by falling priority.
            spare_bytes: pages that must be free for a decode to run.
            reserved_tokens: of which a job takes the pages when it is admitted; 0: those it needs.

        Returns:
            The slices whose adapters are on the device then.
        """
        plan, page, device = self._plan, self._view.page, self._view.device
        room = self._view.capacity_bytes[self._pool] - self._fixed_bytes()
        given_up = self._give_up(batch, room - spare_bytes)
        left = plan.room(self._pool) + self._idle_bytes
        slices, comes = list[Slice](), dict[Place, AdapterVersion]()
        is_closed = False  # a waiting job has found no room
        for piece in batch:
            job, version = piece.job, piece.job.adapter
            here = kv_place(job.job_id, Tier.GPU, device)
            held = self._view.held_bytes.get(here, 0)
            if is_closed and not held:
                continue
            takes_bytes = max(0, self._asked_bytes(piece, reserved_tokens) - held)
            if version is None:
                slices.append(piece)
                left -= takes_bytes
                continue
            most_tokens = max(job.known_tokens, reserved_tokens)
            if version.nbytes + page.bytes_for(most_tokens) + spare_bytes > room:
                plan.refuse(job)  # not even alone
                continue
            if (place := version.place(device)) in self._needed:
                slices.append(piece)
                left -= takes_bytes
                continue
            if place in given_up:
                continue
            if self._most is not None and len(self._needed) >= self._most:
                continue
            if version.nbytes + takes_bytes > left:
                is_closed = True
                continue
            left -= version.nbytes + takes_bytes
            self._needed.add(place)
            if place in self._resident:
                self._idle.remove(place)
            else:
                comes[place] = version
            slices.append(piece)
        for place, version in comes.items():
            self._copy(place, version)
        return tuple(slices)

    def _asked_bytes(self, piece: Slice, reserved_tokens: int) -> int:
        """Pages of a job behind a slice, but for those of other jobs on which it starts."""
        job, page = piece.job, self._view.page
        found = () if job.computed_tokens else self._plan.found(job)
        behind = len(found) * page.tokens or job.computed_tokens
        tokens = behind + min(piece.tokens, job.known_tokens - behind)
        shared = (len(found) - self._plan.idle(found)) * page.nbytes
        return page.bytes_for(max(tokens, reserved_tokens)) - shared

    def _give_up(self, batch: Sequence[Slice], room: int) -> set[Place]:
        """Adapters of running jobs beside which the first running job of a batch has no room.

        That job may preempt all others, and their adapters would stay.
        """
        held, device, found = self._view.held_bytes, self._view.device, set[Place]()
        at = {piece: kv_place(piece.job.job_id, Tier.GPU, device) for piece in batch}
        head = next((piece for piece in batch if at[piece] in held), None)
        if head is None:
            return found
        job = head.job
        own = None if job.adapter is None else job.adapter.place(device)
        left = room - self._view.page.bytes_for(job.computed_tokens + head.tokens)
        left -= sum([self._resident[place] for place in self._needed])
        if job.adapter is not None and own not in self._needed:
            left -= job.adapter.nbytes
        for other in reversed(self._view.serving):
            if left >= 0:
                break
            place = None if other.adapter is None else other.adapter.place(device)
            if place is not None and place in self._needed and place != own:
                self._needed.remove(place)
                found.add(place)
                left += self._resident[place]
        if found:
            self._idle = self._not_needed()
        return found

    def _copy(self, place: Place, version: AdapterVersion) -> None:
        """Brings an adapter to the device, where the least recently used ones make room."""
        while self._idle and self._most is not None and len(self._resident) >= self._most:
            self._evict()
        self._make_room(self._pool, version.nbytes)
        self._plan.copy(version.home(self._view.device), place)
        self._resident[place] = version.nbytes

    def _fixed_bytes(self) -> int:
        """Bytes of the device that are neither KV nor adapters."""
        held, comes_and_goes = self._view.held_bytes, (Kind.KV, Kind.ADAPTER)
        fixed = [place for place in held if place.region.kind not in comes_and_goes]
        return sum([held[place] for place in fixed if place.pool == self._pool])

    def beside(self) -> tuple[View, PlanBuilder]:
        """What the memory policy is shown and writes to: as if no adapter took bytes needlessly.

        Returns:
            A view without adapters, and a builder that has idle ones make room where it lacks.
        """
        share = {self._pool: self._plan.room(self._pool) + self._idle_bytes}
        view = replace(self._view, held_bytes=self._shown)
        return view, self._plan.within(share, self._make_room)

    def _make_room(self, pool: Pool, nbytes: int) -> None:
        while pool == self._pool and self._idle and self._plan.room(pool) < nbytes:
            self._evict()

    def _evict(self) -> None:
        place = self._idle.pop(0)
        self._plan.free(place)
        del self._resident[place]


def _home(place: Place) -> Place:
    return Place(place.region, Tier.HOST, place.device)


class Without(Mapping[Place, int]):
    """Bytes of all places but some.

    Args:
        whole: bytes by place.
        left_out: places that are not shown.
    """

    def __init__(self, whole: Mapping[Place, int], left_out: Set[Place]) -> None:
        self._whole, self._left_out = whole, left_out

    def __getitem__(self, place: Place) -> int:
        if place in self._left_out:
            raise KeyError(place)
        return self._whole[place]

    def get(self, place: Place, default: Any = None) -> Any:
        """Bytes of a place; the default where it holds none, or is not shown."""
        return default if place in self._left_out else self._whole.get(place, default)

    def __iter__(self) -> Iterator[Place]:
        return (place for place in self._whole if place not in self._left_out)

    def __len__(self) -> int:
        return sum([1 for _ in self])
