"""The storage tracker against torch's own MemTracker and against glibc's malloc."""

from __future__ import annotations

import ctypes
import threading

import pytest
import torch
from torch import nn

from runtime.measure.tracker import StorageTracker, census, storage_bytes

pytestmark = pytest.mark.usefixtures("one_thread")

FIELDS = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks")
FIELDS += ("fordblks", "keepcost")


class Block(nn.Module):
    """Attention, a gated MLP, views, in-place writes and a concatenation."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(x).view(1, x.shape[0], 3, 4, -1).permute(2, 0, 3, 1, 4)
        out = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + out.transpose(1, 2).reshape(x.shape)
        y = self.down(nn.functional.silu(self.up(x)))
        y.mul_(0.5)
        return torch.cat([x[:1], (x + y)[1:]])


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(128) for _ in range(3)))


@pytest.mark.parametrize("rows", [1, 37, 400])
def test_peak_equals_torchs_own_memory_tracker(rows: int) -> None:
    from torch.distributed._tools.mem_tracker import MemTracker

    net, x = model(), torch.randn(rows, 128)
    with torch.no_grad():
        oracle = MemTracker()
        oracle.track_external(net, x)
        with oracle:
            net(x)
        peak = oracle.get_tracker_snapshot("peak")[torch.device("cpu")]
        external = storage_bytes(net.parameters()) + x.untyped_storage().nbytes()
        with StorageTracker() as tracker:
            net(x)
    assert tracker.peak_bytes > 0
    assert tracker.peak_bytes == pytest.approx(peak["Total"] - external, rel=0.01)


def test_live_bytes_equal_what_malloc_holds() -> None:
    """glibc counts what it gave out: arena and mapped bytes, over outputs that stay alive."""

    class MallInfo(ctypes.Structure):
        _fields_ = tuple((name, ctypes.c_size_t) for name in FIELDS)

    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        pytest.skip("no mallinfo2 in this C library")
    libc.mallinfo2.restype = MallInfo

    def malloced_bytes() -> int:
        info = libc.mallinfo2()
        return info.uordblks + info.hblkhd

    net, x = model(), torch.randn(300, 128)
    with torch.no_grad():
        net(x)  # what torch allocates once
        before = malloced_bytes()
        with StorageTracker() as tracker:
            kept = [net(x) for _ in range(40)]
        held = malloced_bytes() - before
    assert tracker.live_bytes == sum(y.untyped_storage().nbytes() for y in kept)
    assert tracker.live_bytes == pytest.approx(held, rel=0.01)


def test_views_and_inputs_do_not_count_and_storages_count_once() -> None:
    x = torch.zeros(1000)
    with StorageTracker() as tracker:
        y = x.view(10, 100)[2:].t()
        x.add_(1)
        z = (x + 1).view(500, 2)
        w = z[3]
    assert tracker.live_bytes == tracker.peak_bytes == 4000
    del z
    assert tracker.live_bytes == 4000  # w still holds it
    del w, y
    assert tracker.live_bytes == 0 and tracker.peak_bytes == 4000


def test_it_counts_its_own_thread_only() -> None:
    with StorageTracker() as tracker:
        thread = threading.Thread(target=lambda: torch.zeros(1000))
        thread.start()
        thread.join()
    assert tracker.peak_bytes == 0


def test_the_census_finds_storages_that_no_counter_reported(small_heap: None) -> None:
    before = census()
    hidden = {"deep": [torch.zeros(123_457, dtype=torch.uint8)]}
    found = {address: n for address, n in census().items() if address not in before}
    assert 123_457 in found.values()
    del hidden
    assert 123_457 not in census().values()


def test_shared_storages_count_once() -> None:
    weight = torch.zeros(10, 10)
    assert storage_bytes([weight, weight.t(), weight[:2]]) == 400
