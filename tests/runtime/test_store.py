"""The store: which copies are newest, which may be freed, and that freed memory goes back."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import pytest
import torch

import runtime.training.store
from engine.contract import regions
from engine.contract.layout import Mode
from engine.contract.regions import Kind, PageSize, Place, Region, Tier
from runtime.measure.meter import CudaMeter
from runtime.measure.tracker import StorageTracker
from runtime.serving.kv import Arena
from runtime.training.store import HostAllocator, LostContents, RegionStore, State, as_bytes, typed
from tests.support.hand_made import TINY
from tests.training.training_runs import GPU, HOST, Hand, Task, tiny
from traces.training.recipe import Recipe

REGION = Region(0, Kind.WEIGHT, 3)
HERE, THERE = Place(REGION, GPU), Place(REGION, HOST)


def refuse(_: torch.UntypedStorage) -> None:
    raise LostContents("needed")


def ones(storage: torch.UntypedStorage) -> None:
    as_bytes(storage).fill_(1)


def declared(**fields: object) -> RegionStore:
    store = RegionStore()
    store.declare(REGION, State(refuse, ones, **fields))  # type: ignore[arg-type]
    return store


def test_only_the_first_room_is_filled() -> None:
    store = declared()
    store.grow(THERE, 64)
    store.grow(HERE, 64)
    assert as_bytes(store.storage(REGION, HOST, "test")).tolist() == [1] * 64
    with pytest.raises(AssertionError, match=r"test needs weight 3 of job 0 on gpu, but it is on"):
        store.storage(REGION, GPU, "test")
    store.copy(THERE, HERE)
    assert as_bytes(store.storage(REGION, GPU, "test")).tolist() == [1] * 64
    assert store.held((GPU, 0)) == store.held((HOST, 0)) == 64


def test_a_stale_copy_is_neither_read_nor_copied_and_may_be_freed() -> None:
    store = declared()
    store.grow(THERE, 8)
    store.copy(THERE, HERE)
    store.wrote(REGION, GPU)
    with pytest.raises(AssertionError, match=r"gpu and host \(out of date\)"):
        store.find(REGION, HOST, "test")
    with pytest.raises(AssertionError, match="a copy needs"):
        store.copy(THERE, HERE)
    store.free(THERE)
    with pytest.raises(LostContents):
        store.free(HERE)
    store.copy(HERE, THERE)
    store.free(HERE)
    assert store.where(REGION) == "it is on host"


def test_a_home_is_empty_while_its_region_is_elsewhere() -> None:
    home = torch.zeros(4).untyped_storage()
    view = typed(home, torch.float32, (2, 2))
    home.resize_(0)
    store = declared(home=home)
    store.grow(THERE, 16)
    for _ in range(2):
        store.copy(THERE, HERE)
        assert view.view(torch.uint8).tolist() == [[1] * 8] * 2
        store.free(HERE)
        assert home.nbytes() == 0


def test_undeclared_regions_are_entered_only() -> None:
    store, place = RegionStore(), regions.saved(0, 1, 0)
    with pytest.raises(AssertionError, match="made no room for activation 1 of job 0"):
        store.put(place.region)
    store.grow(place, 10)
    store.grow(place, 5)
    assert store.held((GPU, 0)) == 0
    store.put(place.region, graph=object())
    assert store.held((GPU, 0)) == 15, "a graph is as large as it was booked"
    with pytest.raises(AssertionError, match="is a graph"):
        store.copy(place, place._replace(tier=HOST))
    store.free(place)
    assert store.where(place.region) == "it is nowhere"


def test_host_memory_is_pinned_only_with_cuda() -> None:
    host = HostAllocator()
    assert host.pinned is torch.cuda.is_available()
    storage = HostAllocator(pinned=False).take(100)
    assert storage.nbytes() == 100 and host.spare_bytes == 0


# ---- storages of a trainer
@pytest.fixture
def hand() -> Iterator[Hand]:
    hand = Hand(Task(tiny(), Recipe(dropout=0.1)), RegionStore(), (Mode.OFFLOAD,))
    for chunk in hand.chunks:
        hand.store.grow(hand.weight(chunk, GPU), hand.weight_bytes[chunk])
    yield hand


def forward(hand: Hand, unit: int, mode: Mode) -> int:
    """Bytes alive behind a forward beside its input and its output."""
    hand.store.grow(hand.hidden(unit + 1, 0), 1)
    hand.store.grow(hand.saved(unit, 0), 1)
    with StorageTracker() as tracker:
        hand.trainer.forward(unit, 0, mode)
    out = hand.store.storage(hand.hidden(unit + 1, 0).region, GPU, "test").nbytes()
    return tracker.live_bytes - out


def test_offloaded_activations_are_all_that_a_graph_keeps_and_leave_the_device(hand: Hand) -> None:
    hand.store.grow(hand.hidden(1, 0), 1)
    hand.trainer.forward(0, 0, Mode.RECOMPUTE)
    keeps = forward(hand, 1, Mode.KEEP)
    moves = forward(hand, 2, Mode.OFFLOAD)
    saved, away = hand.saved(2, 0), hand.saved(2, 0, HOST)
    stay = hand.store.find(saved.region, GPU, "test")
    assert stay.nbytes == moves
    assert 0 < moves <= keeps, "the positions are in the first layer's"
    alive = [weakref.ref(storage) for storage in stay.storages]
    hand.store.copy(saved, away)
    hand.store.free(saved)
    del stay
    assert not any(storage() for storage in alive)
    assert hand.store.held((HOST, 0)) == moves


def test_a_kept_graph_goes_with_its_place_and_can_be_made_again(hand: Hand) -> None:
    hand.store.grow(hand.hidden(1, 0), 1)
    hand.trainer.forward(0, 0, Mode.RECOMPUTE)
    hand.store.grow(hand.hidden(2, 0), 1)
    hand.store.grow(hand.saved(1, 0), 1)
    with StorageTracker() as tracker:
        hand.trainer.forward(1, 0, Mode.KEEP)
        kept = tracker.live_bytes
        hand.store.free(hand.saved(1, 0))
        out = hand.store.storage(hand.hidden(2, 0).region, GPU, "test").nbytes()
        assert tracker.live_bytes - out < 0.02 * kept
        hand.store.grow(hand.saved(1, 0), 1)
        hand.trainer.forward(1, 0, Mode.RECOMPUTE, again=True)
        assert tracker.live_bytes == kept


def test_freed_weights_give_their_memory_back(hand: Hand) -> None:
    storages = [p.untyped_storage() for p in hand.trainer.units._model.parameters()]
    assert all(storage.nbytes() for storage in storages)
    for chunk in hand.chunks:
        hand.move(hand.weight(chunk, GPU), HOST)
    assert not any(storage.nbytes() for storage in storages)


def test_the_last_copy_of_a_needed_region_is_not_freed(hand: Hand) -> None:
    hand.store.grow(hand.optimizer(0, HOST), hand.optimizer_bytes[0])
    for place in (hand.weight(0, GPU), hand.optimizer(0, HOST)):
        with pytest.raises(LostContents, match="has no other copy as new"):
            hand.store.free(place)


def test_tiers_are_two() -> None:
    with pytest.raises(AssertionError, match="no disk tier"):
        declared().grow(Place(REGION, Tier.DISK), 1)


class Runtime:
    """CUDA's runtime, as far as pinning needs it."""

    def __init__(self) -> None:
        self.registered = dict[int, int]()

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        assert address not in self.registered
        self.registered[address] = nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> None:
        del self.registered[address]


def test_an_arena_on_the_host_pins_what_it_needs_and_as_long_as_it_lives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch's own pinned memory comes in powers of two: 5 GiB took 8."""
    cuda = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    arena = Arena(TINY, PageSize.of(TINY, 16), num_pages=5, tier=Tier.HOST, device="cuda")
    nbytes = 5 * arena.page_nbytes
    assert [*cuda.registered.values()] == [nbytes] == [arena.pages.untyped_storage().nbytes()]
    meter = CudaMeter(0, [arena.pages])
    stats = {"requested_bytes": {"all": {"current": 9}}}
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda device: stats)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1, 2))
    readings = meter.read()
    assert readings[Tier.HOST, 0].persistent_bytes == nbytes, "whatever the kernel has mapped yet"
    assert readings[Tier.GPU, 0].persistent_bytes == 9
    arena.pages.fill_(1.0)
    del arena
    assert not cuda.registered


def test_sizes_that_are_not_asked_for_again_are_unpinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as windows of all lengths have."""
    cuda = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    monkeypatch.setattr(runtime.training.store, "MOST_SPARE_BYTES", 2500)
    host = HostAllocator(pinned=True)
    wanted = host.take(1000)
    for nbytes in range(500, 600):
        host.give(host.take(nbytes))
        host.give(wanted)
        assert host.take(1000) is wanted, "asked for again and again"
        assert host.spare_bytes <= 2500
    assert sorted(cuda.registered.values()) == [598, 599, 1000]
    host.close()
    assert not cuda.registered


def test_pinned_memory_is_registered_once_and_all_of_it_unpinned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = Runtime()
    registered = cuda.registered
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    host = HostAllocator(pinned=True)
    first, second = host.take(5000), host.take(700)
    host.give(first)
    assert host.spare_bytes == 5000 and host.take(5000) is first
    assert sorted(registered.values()) == [700, 5000]
    host.close()
    assert not registered and not host.spare_bytes
    second.fill_(1)  # contents stay
    host.give(second)
    assert not host.spare_bytes and host.take(10).nbytes() == 10 and not registered
