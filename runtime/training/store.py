"""The real memory of training jobs: storages per region and tier, and which of them are newest."""

from __future__ import annotations

import mmap
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from threading import Lock, RLock

import torch
from torch import Tensor, UntypedStorage

from engine.contract.executor import Store
from engine.contract.regions import Kind, Place, Pool, Region, Tier

MOST_SPARE_BYTES = 4 << 30  # of pinned memory that waits for a next use


class HostAllocator:
    """Gives out host storages and takes them back.

    Pinned memory is mapped and registered here: torch's own allocator rounds it up to powers of
    two. Registering is slow, so a returned storage is kept for the next request of its size, and
    counts as `spare_bytes`. Of more than MOST_SPARE_BYTES the sizes that were not asked for longest
    go back to the system, as all do with `close`: windows and records have many sizes. Memory that
    is not pinned goes back at once. Safe to call from several threads.
    """

    def __init__(self, pinned: bool | None = None) -> None:
        """`pinned` None: pinned where torch sees a CUDA device."""
        self.pinned = torch.cuda.is_available() if pinned is None else pinned
        self._lock = Lock()
        # By size, that which was asked for last behind the others; pinned only.
        self._spare: dict[int, list[UntypedStorage]] = {}
        self._registered: dict[int, UntypedStorage] = {}  # by address: pinned, in use or not

    @property
    def spare_bytes(self) -> int:
        """Bytes of pinned memory that wait for a next use."""
        return sum(nbytes * len(storages) for nbytes, storages in self._spare.items())

    def take(self, nbytes: int) -> UntypedStorage:
        """A host storage of `nbytes`, contents undefined. RuntimeError if pinning fails."""
        if not self.pinned or not nbytes:
            return UntypedStorage(nbytes)
        with self._lock:
            spare = self._spare[nbytes] = self._spare.pop(nbytes, [])
            if spare:
                return spare.pop()
            made = _pinned(nbytes)
            self._registered[made.data_ptr()] = made
            return made

    def give(self, storage: UntypedStorage) -> None:
        """Takes a storage back; no copy may use it any more."""
        if not self.pinned or not storage.nbytes():
            return
        with self._lock:
            self._spare.setdefault(storage.nbytes(), []).append(storage)
            left = self.spare_bytes - MOST_SPARE_BYTES
            for nbytes in [*self._spare] if left > 0 else ():
                while left > 0 and self._spare[nbytes]:
                    _unpin(self._registered.pop(self._spare[nbytes].pop().data_ptr()))
                    left -= nbytes
                if not self._spare[nbytes]:
                    del self._spare[nbytes]

    def close(self) -> None:
        """Gives all spare memory back to the system and unpins the rest.

        No copy from or to any of it may be in flight.
        """
        for storage in self._registered.values():
            _unpin(storage)
        self._registered.clear()
        self._spare.clear()
        self.pinned = False


def _pinned(nbytes: int) -> UntypedStorage:
    """The registered pages of a new mapping; the storage keeps the mapping alive."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    storage = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    error = int(torch.cuda.cudart().cudaHostRegister(storage.data_ptr(), nbytes, 0))
    if error:
        raise RuntimeError(f"pinning {nbytes} bytes of host memory failed: CUDA error {error}")
    return storage


def _unpin(storage: UntypedStorage) -> None:
    torch.cuda.cudart().cudaHostUnregister(storage.data_ptr())


def as_bytes(storage: UntypedStorage) -> Tensor:
    """A whole storage as one flat tensor."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def typed(storage: UntypedStorage, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """The first elements of a storage as a contiguous tensor."""
    empty = torch.empty(0, dtype=dtype, device=storage.device)
    found: Tensor = empty.set_(storage, 0, shape)  # type: ignore[call-overload]  # needs no strides
    return found


def flat_parts(
    storage: UntypedStorage, dtype: torch.dtype, sizes: Sequence[int], start: int = 0
) -> Sequence[Tensor]:
    """Flat tensors of the given sizes, behind each other from element `start` of a storage."""
    empty, shape = torch.empty(0, dtype=dtype, device=storage.device), (sum(sizes),)
    flat: Tensor = empty.set_(storage, start, shape)  # type: ignore[call-overload]  # as above
    return torch.split_with_sizes(flat, sizes)


def present(storage: UntypedStorage | None) -> UntypedStorage:
    """The storage. AssertionError where it was used up."""
    assert storage is not None, "this storage was used up"
    return storage


OTHER = {Tier.GPU: Tier.HOST, Tier.HOST: Tier.GPU}  # training has no third tier yet
NOWHERE = frozenset[Tier]()
ONLY = {tier: frozenset({tier}) for tier in OTHER}  # made once: every launch reads some


class LostContents(RuntimeError):
    """The last copy of a region that is still needed was about to be freed."""


@dataclass(slots=True, eq=False)
class State:
    """A region with contents of its own: weights, gradients or optimizer states of a model.

    `fill` writes the first contents, once, into the first storage that the region gets.
    `before_loss` is called with the only newest copy before it is freed, and raises LostContents if
    the copy is needed. `home` is the one storage of the region on the device, if views of it
    outlive a stay there; it is empty while the region is elsewhere. `sizes` are the bytes of the
    region's storages, if it has several; one more storage takes the rest.
    """

    before_loss: Callable[[UntypedStorage], None]
    fill: Callable[[UntypedStorage], None] | None = None
    home: UntypedStorage | None = None
    sizes: Sequence[int] = ()

    def split(self, nbytes: int) -> list[int]:
        """Bytes of each storage, for a region of `nbytes`."""
        rest = nbytes - sum(self.sizes)
        assert rest >= 0, f"a region of {sum(self.sizes)} bytes is grown to {nbytes}"
        return [*self.sizes, rest] if rest or not self.sizes else [*self.sizes]


@dataclass(slots=True, eq=False)
class Stay:
    """The contents of a place: storages, or a graph whose memory only autograd sees."""

    place: Place
    booked_bytes: int = 0
    storages: list[UntypedStorage | None] = field(default_factory=list)  # None: used up
    graph: object = None

    @property
    def nbytes(self) -> int:
        """Real bytes of the storages; of a graph, its booked bytes."""
        if self.graph is not None:
            return self.booked_bytes
        return sum(storage.nbytes() for storage in self.storages_held())

    def storages_held(self) -> list[UntypedStorage]:
        """The storages that are not used up."""
        return [storage for storage in self.storages if storage is not None]


class RegionStore:
    """The two tiers of a device as a plan fills them: an engine.contract.executor.Store.

    A declared region (weights, gradients, optimizer states) gets storages of the size that it is
    grown to. Any other region (activations, buffers) is only entered: the launch that computes it
    puts its storages there. The store knows the newest copies of every region; a stale copy is
    never read or copied. Calls for one region come one after the other; calls for different regions
    may come from any threads.
    """

    def __init__(self, device: str = "cpu", host: HostAllocator | None = None) -> None:
        self.device = torch.device(device)
        self.host = host or HostAllocator(pinned=self.device.type == "cuda")
        self._states: dict[Region, State] = {}
        self._homes: dict[Region, UntypedStorage] = {}
        self._stays: dict[tuple[Region, Tier], Stay] = {}
        self._newest: dict[Region, frozenset[Tier]] = {}
        self._giving = RLock()

    @contextmanager
    def keeps_all(self) -> Iterator[None]:
        """Gives nothing back meanwhile: a lane's thread that would waits."""
        with self._giving:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            yield

    def declare(self, region: Region, state: State) -> None:
        """Registers a region of a job's model states, before it is grown anywhere."""
        assert region not in self._states, f"{named(region)} is declared twice"
        self._states[region] = state
        if state.home is not None:
            self._homes[region] = state.home

    def close(self) -> None:
        """Unpins the host's memory for a next run; contents stay."""
        self.host.close()

    # ---- called as a plan says
    def grow(self, place: Place, nbytes: int) -> None:
        """See Store. The first room of a declared region is filled with its first contents."""
        region, tier = place.region, place.tier
        state, stay = self._states.get(region), self._stays.get((region, tier))
        if state is None:
            stay = stay or self._enter(place)
            stay.booked_bytes += nbytes
            return
        assert stay is None, f"{named(region)} is on {tier} already"
        made = [self._make(region, tier, size) for size in state.split(nbytes)]
        stay = self._enter(place)
        stay.booked_bytes, stay.storages = nbytes, [*made]
        if state.fill is not None:
            state.fill(made[0])
            state.fill = None
            self.wrote(region, tier)

    def copy(self, src: Place, dst: Place) -> None:
        """Copies a whole region; makes the destination where it does not exist.

        With CUDA the copy is put on the current stream.
        """
        region = src.region
        assert region == dst.region, f"{named(region)} cannot become {named(dst.region)}"
        source = self.find(region, src.tier, "a copy")
        assert source.graph is None, f"{named(region)} is a graph; let its forward offload"
        target = self._stays.get((region, dst.tier)) or self._enter(dst)
        sizes = [present(storage).nbytes() for storage in source.storages]
        if not target.storages:
            target.booked_bytes = target.booked_bytes or source.booked_bytes
            target.storages = [self._make(region, dst.tier, nbytes) for nbytes in sizes]
        # On CUDA a copy counts as new once it is issued: a checkpoint must be behind it.
        with self._giving if self.device.type == "cuda" else nullcontext():
            for to, what in zip(target.storages, source.storages, strict=True):
                as_bytes(present(to)).copy_(as_bytes(present(what)), non_blocking=True)
            self._newest[region] = self._newest[region] | {dst.tier}

    def free(self, place: Place) -> None:
        """See Store. LostContents where the place holds the last copy and it is still needed."""
        with self._giving:
            self._free(place)

    def _free(self, place: Place) -> None:
        region, tier = place.region, place.tier
        stay = self._stays.get((region, tier))
        assert stay is not None, f"{named(region)} is not on {tier}"
        newest, state = self._newest.get(region, NOWHERE), self._states.get(region)
        if state is not None and newest == ONLY[tier]:
            state.before_loss(present(stay.storages[0]))
        del self._stays[region, tier]
        if stay.storages:
            self._give_back(region, tier, stay.storages)
        if (region, OTHER[tier]) in self._stays:
            self._newest[region] = newest - ONLY[tier]
            return
        self._newest.pop(region, None)
        if state is None:
            self._homes.pop(region, None)

    def held(self, pool: Pool, kinds: Collection[Kind] = tuple(Kind)) -> int:
        """Real bytes in a pool now; of graphs, their booked bytes."""
        stays = [stay for stay in self.stays(pool[0]) if stay.place.pool == pool]
        return sum(stay.nbytes for stay in stays if stay.place.region.kind in kinds)

    def stays(self, tier: Tier) -> list[Stay]:
        """All stays in a tier now, to be read only."""
        return [stay for stay in list(self._stays.values()) if stay.place.tier is tier]

    # ---- called by launches
    def put(
        self,
        region: Region,
        storages: Sequence[UntypedStorage | None] = (),
        graph: object = None,
        is_home: bool = False,
    ) -> None:
        """Puts computed storages, or a graph, where a plan has made room on the device."""
        stay = self._stays.get((region, Tier.GPU))
        assert stay is not None, f"the plan has made no room for {named(region)}"
        stay.storages, stay.graph = list(storages), graph
        if is_home:
            (home,) = storages
            self._homes[region] = present(home)
        self.wrote(region, Tier.GPU)

    def replace(self, region: Region, index: int, storage: UntypedStorage) -> None:
        """Replaces a storage of a region on the device by another of equal size."""
        storages = self._stays[region, Tier.GPU].storages
        old = present(storages[index])
        assert old.nbytes() == storage.nbytes(), f"another size in {named(region)}"
        storages[index] = storage

    def wrote(self, region: Region, tier: Tier) -> None:
        """Makes this copy the only newest one; any other copy is stale."""
        self._newest[region] = ONLY[tier]

    def find(self, region: Region, tier: Tier, launch: str, as_new: bool = True) -> Stay:
        """The stay of a region in a tier, which `launch` needs.

        AssertionError where the region is not there, or stale although `as_new`.
        """
        stay = self._stays.get((region, tier))
        if stay is None or (as_new and tier not in self._newest.get(region, ())):
            raise AssertionError(
                f"{launch} needs {named(region)} on {tier}, but {self.where(region)}"
            )
        return stay

    def storage(
        self, region: Region, tier: Tier, launch: str, as_new: bool = True
    ) -> UntypedStorage:
        """The one storage of a region in a tier; see find."""
        (storage,) = self.find(region, tier, launch, as_new).storages
        return present(storage)

    def newest(self, region: Region) -> UntypedStorage | None:
        """A newest copy of a declared region, in any tier; None where there is none."""
        tiers = self._newest.get(region)
        return self.storage(region, min(tiers), "a look") if tiers else None

    def where(self, region: Region) -> str:
        """The tiers where a region lies, for messages."""
        newest = self._newest.get(region, NOWHERE)
        tiers = [tier for tier in OTHER if (region, tier) in self._stays]
        notes = [str(tier) if tier in newest else f"{tier} (out of date)" for tier in tiers]
        return f"it is on {' and '.join(notes)}" if notes else "it is nowhere"

    # ---- storages
    def _enter(self, place: Place) -> Stay:
        stay = self._stays[place.region, place.tier] = Stay(place)
        return stay

    def _make(self, region: Region, tier: Tier, nbytes: int) -> UntypedStorage:
        if tier is Tier.HOST:
            return self.host.take(nbytes)
        assert tier is Tier.GPU, f"training has no {tier} tier yet"
        if (home := self._homes.get(region)) is None:
            return UntypedStorage(nbytes, device=self.device)
        home.resize_(nbytes)
        return home

    def _give_back(
        self, region: Region, tier: Tier, storages: Sequence[UntypedStorage | None]
    ) -> None:
        if tier is not Tier.HOST and region not in self._homes:
            return
        for storage in storages:
            if storage is None:
                continue
            if tier is Tier.HOST:
                self.host.give(storage)
            else:
                storage.resize_(0)  # views of it find their contents again after a copy


def named(region: Region) -> str:
    """The name of a region, for messages."""
    slot = f" slot {region.slot}" if region.slot else ""
    return f"{region.kind} {region.part}{slot} of job {region.owner}"


@dataclass(slots=True, eq=False)
class LaneStay:
    """The use of a place from the plan that grows it to the plan that frees it."""

    place: Place
    open: int = 0  # launches on it that have not ended
    is_freed: bool = False
    grown_bytes: int | None = None  # asked for, while the store has not grown it


class LaneStore:
    """A Store before another one: delays grow and free until launches on the place have ended.

    The engine's thread calls it in issue order; the threads of lanes report the ends of launches.
    A place that one plan frees and a later plan grows again has two stays: the later one begins
    when the earlier one is over. The ledger makes the later launch wait for that, so no launch
    finds its place missing. A stay in a tier of `on_open` begins when a launch opens it: a plan is
    issued long before its launches run, and other launches use the bytes until then.
    """

    def __init__(self, store: Store, on_open: Collection[Tier] = ()) -> None:
        self._store, self._on_open, self._lock = store, on_open, RLock()
        self._stays: dict[Place, deque[LaneStay]] = defaultdict(deque)

    def grow(self, place: Place, nbytes: int) -> None:
        """See Store."""
        with self._lock:
            stay = self._newest(place)
            stay.grown_bytes = (stay.grown_bytes or 0) + nbytes
            if place.tier not in self._on_open:
                self._grow_stay(stay)

    def free(self, place: Place) -> None:
        """See Store."""
        with self._lock:
            self._newest(place).is_freed = True
            self._advance(place)

    def begin(self, places: Iterable[Place]) -> tuple[LaneStay, ...]:
        """Notes that a launch on these places is issued; returns the stays to `end` with it."""
        with self._lock:
            stays = tuple(self._newest(place) for place in places)
            for stay in stays:
                stay.open += 1
        return stays

    def open(self, stays: Sequence[LaneStay]) -> bool:
        """Begins the stays of a launch; returns whether they have begun.

        While one of them waits for an earlier stay of its place, none of them begins.
        """
        with self._lock:
            if not all(stay is self._stays[stay.place][0] for stay in stays):
                return False
            for stay in stays:
                self._grow_stay(stay)
        return True

    def end(self, stays: Sequence[LaneStay]) -> None:
        """Notes that the launch on these stays has ended."""
        with self._lock:
            for stay in stays:
                stay.open -= 1
                self._advance(stay.place)

    def _newest(self, place: Place) -> LaneStay:
        stays = self._stays[place]
        if not stays or stays[-1].is_freed:
            stays.append(LaneStay(place))
        return stays[-1]

    def _grow_stay(self, stay: LaneStay) -> None:
        """Grows the place by the bytes asked for, if no earlier stay of the place goes on."""
        if stay.grown_bytes is not None and stay is self._stays[stay.place][0]:
            self._store.grow(stay.place, stay.grown_bytes)
            stay.grown_bytes = None

    def _advance(self, place: Place) -> None:
        stays = self._stays[place]
        while stays and stays[0].is_freed and not stays[0].open:
            self._grow_stay(stays[0])  # a stay that no launch has opened begins and ends at once
            self._store.free(place)
            stays.popleft()
            if stays and place.tier not in self._on_open:
                self._grow_stay(stays[0])
        if not stays:
            del self._stays[place]
