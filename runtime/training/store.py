"""Where the memory of training jobs really lies: storages per region and tier, the newest known."""

from __future__ import annotations

import mmap
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from threading import RLock

import torch
from torch import Tensor, UntypedStorage

from engine.contract.executor import Store
from engine.contract.regions import Kind, Place, Pool, Region, Tier


class HostAllocator:
    """Gives out host storages and takes them back.

    Pinned memory is mapped and registered here: torch's own allocator for it rounds up to powers of
    two. Registering is slow, so what comes back is kept for the next taker of the same size, and
    counts as `spare_bytes` until `close`. Memory that is not pinned goes back to the system.
    """

    def __init__(self, pinned: bool | None = None) -> None:
        """`pinned` None: where CUDA is there."""
        self.pinned = torch.cuda.is_available() if pinned is None else pinned
        self._spare: dict[int, list[UntypedStorage]] = defaultdict(list)  # by size, pinned only
        self._registered: list[UntypedStorage] = []  # all that is pinned, in use or not

    @property
    def spare_bytes(self) -> int:
        """Pinned memory that nobody uses now."""
        return sum(nbytes * len(storages) for nbytes, storages in self._spare.items())

    def take(self, nbytes: int) -> UntypedStorage:
        """A host storage of so many bytes, contents undefined. RuntimeError if pinning fails."""
        if not self.pinned or not nbytes:
            return UntypedStorage(nbytes)
        if self._spare[nbytes]:
            return self._spare[nbytes].pop()
        self._registered.append(_pinned(nbytes))
        return self._registered[-1]

    def give(self, storage: UntypedStorage) -> None:
        """Takes a storage back; nobody may use it any more."""
        if self.pinned and storage.nbytes():
            self._spare[storage.nbytes()].append(storage)

    def close(self) -> None:
        """Gives all spare memory back to the system; what is in use is pinned no more. Nothing may
        be on its way from or to it."""
        for storage in self._registered:
            torch.cuda.cudart().cudaHostUnregister(storage.data_ptr())
        self._registered.clear()
        self._spare.clear()
        self.pinned = False


def _pinned(nbytes: int) -> UntypedStorage:
    """Registered pages of a mapping of its own; the storage keeps the mapping alive."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    storage = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    error = int(torch.cuda.cudart().cudaHostRegister(storage.data_ptr(), nbytes, 0))
    if error:
        raise RuntimeError(f"pinning {nbytes} bytes of host memory failed: CUDA error {error}")
    return storage


def as_bytes(storage: UntypedStorage) -> Tensor:
    """A whole storage as one flat tensor."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def typed(storage: UntypedStorage, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """The first numbers of a storage as a contiguous tensor."""
    empty = torch.empty(0, dtype=dtype, device=storage.device)
    found: Tensor = empty.set_(storage, 0, shape)  # type: ignore[call-overload]  # needs no strides
    return found


def flat_parts(
    storage: UntypedStorage, dtype: torch.dtype, sizes: Sequence[int], start: int = 0
) -> Sequence[Tensor]:
    """Flat tensors of so many numbers each, behind each other from number `start` on."""
    empty, shape = torch.empty(0, dtype=dtype, device=storage.device), (sum(sizes),)
    flat: Tensor = empty.set_(storage, start, shape)  # type: ignore[call-overload]  # as above
    return torch.split_with_sizes(flat, sizes)


def present(storage: UntypedStorage | None) -> UntypedStorage:
    """A storage that must not be used up."""
    assert storage is not None, "this storage was used up"
    return storage


OTHER = {Tier.GPU: Tier.HOST, Tier.HOST: Tier.GPU}  # training has no third tier yet
NOWHERE = frozenset[Tier]()
ONLY = {tier: frozenset({tier}) for tier in OTHER}  # made once: every launch asks for some


class LostContents(RuntimeError):
    """The last copy of something that is still needed was about to be given back."""


@dataclass(slots=True, eq=False)
class State:
    """A region with contents of its own, wherever it lies: states of a model.

    `fill` writes its first contents, once, into the first storage that it gets. `farewell` is
    called with its only newest copy before that goes, and raises LostContents if it is needed.
    `home`: its storage on the device for good, if views of it outlive a stay there; empty while
    the region is elsewhere. `sizes`: bytes of its storages, if it is several; one more fills it up.
    """

    farewell: Callable[[UntypedStorage], None]
    fill: Callable[[UntypedStorage], None] | None = None
    home: UntypedStorage | None = None
    sizes: Sequence[int] = ()

    def split(self, nbytes: int) -> list[int]:
        """Bytes of each of its storages where the region has so many."""
        rest = nbytes - sum(self.sizes)
        assert rest >= 0, f"a region of {sum(self.sizes)} bytes is grown to {nbytes}"
        return [*self.sizes, rest] if rest or not self.sizes else [*self.sizes]


@dataclass(slots=True, eq=False)
class Stay:
    """What lies at a place: storages, or a graph whose memory only autograd sees."""

    place: Place
    booked_bytes: int = 0
    storages: list[UntypedStorage | None] = field(default_factory=list)  # None: used up
    graph: object = None

    @property
    def nbytes(self) -> int:
        """Real bytes of storages; what was booked for a graph."""
        if self.graph is not None:
            return self.booked_bytes
        return sum(storage.nbytes() for storage in self.storages_held())

    def storages_held(self) -> list[UntypedStorage]:
        """Those that are not used up."""
        return [storage for storage in self.storages if storage is not None]


class RegionStore:
    """The two tiers of a device as a plan fills them: grow, copy and free, in its order.

    Regions that were declared (weights, gradients, optimizer states) get storages of the size they
    are grown to; others (activations, buffers) are only entered, their storages are put there by
    whoever computes them. Every region knows which of its copies are newest; a stale copy is never
    read or copied. Calls for one region come one after the other; for different ones, from any
    threads.
    """

    def __init__(self, device: str = "cpu", host: HostAllocator | None = None) -> None:
        self.device = torch.device(device)
        self.host = host or HostAllocator(pinned=self.device.type == "cuda")
        self._states: dict[Region, State] = {}
        self._homes: dict[Region, UntypedStorage] = {}
        self._stays: dict[tuple[Region, Tier], Stay] = {}
        self._newest: dict[Region, frozenset[Tier]] = {}

    def declare(self, region: Region, state: State) -> None:
        """A job's model states, before they are grown anywhere."""
        assert region not in self._states, f"{named(region)} is declared twice"
        self._states[region] = state
        if state.home is not None:
            self._homes[region] = state.home

    def close(self) -> None:
        """Pins the host's memory no more, so that another may; contents stay."""
        self.host.close()

    # ---- what a plan says
    def grow(self, place: Place, nbytes: int) -> None:
        """Makes room; the first room that a declared region gets is filled with its contents."""
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
        """Copies a region whole; its destination is made where it is not there.

        With CUDA it is put on the current stream.
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
        for to, what in zip(target.storages, source.storages, strict=True):
            as_bytes(present(to)).copy_(as_bytes(present(what)), non_blocking=True)
        self._newest[region] = self._newest[region] | {dst.tier}

    def free(self, place: Place) -> None:
        """Gives the memory of a place back. LostContents if it was the last copy and is needed."""
        region, tier = place.region, place.tier
        stay = self._stays.get((region, tier))
        assert stay is not None, f"{named(region)} is not on {tier}"
        newest, state = self._newest.get(region, NOWHERE), self._states.get(region)
        if state is not None and newest == ONLY[tier]:
            state.farewell(present(stay.storages[0]))
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
        """Bytes that really lie in a pool now; of graphs, what was booked for them."""
        stays = [stay for stay in self.stays(pool[0]) if stay.place.pool == pool]
        return sum(stay.nbytes for stay in stays if stay.place.region.kind in kinds)

    def stays(self, tier: Tier) -> list[Stay]:
        """All that lies in a tier now, to look at."""
        return [stay for stay in list(self._stays.values()) if stay.place.tier is tier]

    # ---- what computes
    def put(
        self,
        region: Region,
        storages: Sequence[UntypedStorage | None] = (),
        graph: object = None,
        is_home: bool = False,
    ) -> None:
        """Puts what was computed on the device where a plan has made room for it."""
        stay = self._stays.get((region, Tier.GPU))
        assert stay is not None, f"the plan has made no room for {named(region)}"
        stay.storages, stay.graph = list(storages), graph
        if is_home:
            (home,) = storages
            self._homes[region] = present(home)
        self.wrote(region, Tier.GPU)

    def replace(self, region: Region, index: int, storage: UntypedStorage) -> None:
        """Puts a storage in the place of another of a region on the device, of the same size."""
        storages = self._stays[region, Tier.GPU].storages
        old = present(storages[index])
        assert old.nbytes() == storage.nbytes(), f"another size in {named(region)}"
        storages[index] = storage

    def wrote(self, region: Region, tier: Tier) -> None:
        """This copy is the newest now, any other is stale."""
        self._newest[region] = ONLY[tier]

    def find(self, region: Region, tier: Tier, who: str, as_new: bool = True) -> Stay:
        """What lies there, for `who` needs it. AssertionError if it does not, or is out of date."""
        stay = self._stays.get((region, tier))
        if stay is None or (as_new and tier not in self._newest.get(region, ())):
            raise AssertionError(f"{who} needs {named(region)} on {tier}, but {self.where(region)}")
        return stay

    def storage(self, region: Region, tier: Tier, who: str, as_new: bool = True) -> UntypedStorage:
        """The same of a region that is one storage."""
        (storage,) = self.find(region, tier, who, as_new).storages
        return present(storage)

    def newest(self, region: Region) -> UntypedStorage | None:
        """A newest copy of a declared region, in whatever tier; None where there is none."""
        tiers = self._newest.get(region)
        return self.storage(region, min(tiers), "a look") if tiers else None

    def where(self, region: Region) -> str:
        """For messages: in which tiers a region lies."""
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
                storage.resize_(0)  # whoever holds a view finds its contents again after a copy


def named(region: Region) -> str:
    """For messages: a region in words."""
    slot = f" slot {region.slot}" if region.slot else ""
    return f"{region.kind} {region.part}{slot} of job {region.owner}"


@dataclass(slots=True, eq=False)
class LaneStay:
    """A place from the plan that takes it to the plan that gives it back."""

    place: Place
    open: int = 0  # launches on it that have not ended
    is_freed: bool = False
    grown_bytes: int | None = None  # asked for, and the store has not been told


class LaneStore:
    """Told by the engine's thread in issue order; told of ends by the threads of lanes.

    What a plan frees and a later one takes again is another stay: it begins when the one before is
    over. Whoever takes it waits for that (the ledger says so), so nobody ever finds it missing.
    What is taken in a tier of `late` begins when a launch opens it: a plan says long before what
    it will take, of bytes that others use till then.
    """

    def __init__(self, store: Store, late: Collection[Tier] = ()) -> None:
        self._store, self._late, self._lock = store, late, RLock()
        self._stays: dict[Place, deque[LaneStay]] = defaultdict(deque)

    def grow(self, place: Place, nbytes: int) -> None:
        """See Store."""
        with self._lock:
            stay = self._newest(place)
            stay.grown_bytes = (stay.grown_bytes or 0) + nbytes
            if place.tier not in self._late:
                self._tell(stay)

    def free(self, place: Place) -> None:
        """See Store."""
        with self._lock:
            self._newest(place).is_freed = True
            self._advance(place)

    def begin(self, places: Iterable[Place]) -> tuple[LaneStay, ...]:
        """A launch on these places is issued; what to `end` with it."""
        with self._lock:
            stays = tuple(self._newest(place) for place in places)
            for stay in stays:
                stay.open += 1
        return stays

    def open(self, stays: Sequence[LaneStay]) -> bool:
        """Begins what a launch's places took late; whether they all are there. If one still waits
        for the stay before to be over, nothing begins."""
        with self._lock:
            if not all(stay is self._stays[stay.place][0] for stay in stays):
                return False
            for stay in stays:
                self._tell(stay)
        return True

    def end(self, stays: Sequence[LaneStay]) -> None:
        """It has ended."""
        with self._lock:
            for stay in stays:
                stay.open -= 1
                self._advance(stay.place)

    def _newest(self, place: Place) -> LaneStay:
        stays = self._stays[place]
        if not stays or stays[-1].is_freed:
            stays.append(LaneStay(place))
        return stays[-1]

    def _tell(self, stay: LaneStay) -> None:
        """Grows what was asked for, if its time has come."""
        if stay.grown_bytes is not None and stay is self._stays[stay.place][0]:
            self._store.grow(stay.place, stay.grown_bytes)
            stay.grown_bytes = None

    def _advance(self, place: Place) -> None:
        stays = self._stays[place]
        while stays and stays[0].is_freed and not stays[0].open:
            self._tell(stays[0])  # it has never been opened: it comes and goes
            self._store.free(place)
            stays.popleft()
            if stays and place.tier not in self._late:
                self._tell(stays[0])
        if not stays:
            del self._stays[place]
