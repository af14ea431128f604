"""Paged KV memory: one budgeted arena per tier, whose pages can be given back to the system."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterable, Iterator, Sequence
from weakref import finalize

import torch

from engine.contract.regions import PageSize, Tier
from models.spec import ModelSpec
from runtime.training.store import HostAllocator, typed

POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14; the mmap module has no name for it


class DeviceOOM(RuntimeError):
    """A launch names memory beyond the budget of its pool."""


class WrongTier(RuntimeError):
    """A compute was about to read memory that a GPU cannot reach."""


class Arena:
    """All KV pages of one pool: [pages, layers, page_tokens, 2, kv_heads, head_dim].

    A page is contiguous over all layers: a swap moves it in one stretch, and the system gets it
    back in one call. On the CPU the memory is an anonymous mapping without huge pages, so that the
    kernel counts exactly the held pages as resident. On a GPU the GPU tier is one tensor there, and
    the HOST tier is pinned, to the byte, as long as the arena lives.
    """

    def __init__(
        self,
        spec: ModelSpec,
        page: PageSize,
        num_pages: int,
        tier: Tier = Tier.GPU,
        device: str = "cpu",
    ) -> None:
        self.tier, self.num_pages, self.page = tier, num_pages, page
        self.num_layers = spec.num_layers
        self.page_tokens, self.page_nbytes = page
        self.layer_page_nbytes = self.page_nbytes // spec.num_layers
        heads = (2, spec.num_kv_heads, spec.head_dim)
        shape = (num_pages, spec.num_layers, page.tokens, *heads)
        dtype = getattr(torch, spec.dtype)
        self._map = _mapping(num_pages * self.page_nbytes) if device == "cpu" else None
        if self._map is not None:
            self.pages = _tensor(self._map, shape, dtype)
        elif tier is Tier.GPU:
            # Zeros: padded keys weigh nothing, but nothing times NaN is NaN.
            self.pages = torch.zeros(shape, dtype=dtype, device=device)
        else:
            host = HostAllocator(pinned=True)
            nbytes = num_pages * self.page_nbytes
            self.pages = typed(host.take(nbytes), dtype, shape)
            finalize(self, host.close)
        self._rows = self.pages.view(-1, *heads)

    def layer(self, index: int) -> torch.Tensor:
        """The pages of one layer, [pages, page_tokens, 2, kv_heads, head_dim], for a compute.

        Raises WrongTier on any tier but the GPU's.
        """
        self._guard()
        return self.pages[:, index]

    def rows(self, index: int) -> torch.Tensor:
        """The tokens of one layer, [rows, 2, kv_heads, head_dim]; row_of() numbers the rows."""
        self._guard()
        return self._rows[index * self.page_tokens :]

    def row_of(self, page: int, offset: int = 0) -> int:
        """The row of a page's token in rows(i), equal for every layer."""
        return page * self.num_layers * self.page_tokens + offset

    def check(self, pages: Sequence[int]) -> None:
        """Raises DeviceOOM for a page beyond the budget."""
        if pages and not 0 <= min(pages) <= max(pages) < self.num_pages:
            raise DeviceOOM(
                f"KV page {max(pages)} of {self.tier}, which has {self.num_pages}: "
                "a plan went beyond its budget, or the budget has shrunk since"
            )

    def hold(self, pages: Sequence[int]) -> None:
        """Makes pages resident, contents untouched, so that the system counts booked pages."""
        self.check(pages)
        for start, stop in self._stretches(pages, outward=True):
            self._populate(start, stop)

    def release(self, pages: Sequence[int]) -> None:
        """Gives the memory of unused pages back to the system; their contents are lost."""
        self.check(pages)
        for start, stop in self._stretches(pages, outward=False):
            assert self._map is not None
            self._map.madvise(mmap.MADV_DONTNEED, start, stop - start)

    def _guard(self) -> None:
        if self.tier is not Tier.GPU:
            raise WrongTier(f"compute may not read the {self.tier} tier; copy the KV first")

    def _stretches(self, pages: Sequence[int], outward: bool) -> Iterator[tuple[int, int]]:
        """Byte ranges of system pages: all that a run of pages touches, or only those it fills."""
        if self._map is None:
            return
        up = mmap.PAGESIZE - 1
        for first, count in runs(sorted(pages)):
            start, stop = first * self.page_nbytes, (first + count) * self.page_nbytes
            start, stop = (start, stop + up) if outward else (start + up, stop)
            start, stop = start & ~up, stop & ~up
            if start < stop:
                yield start, stop

    def _populate(self, start: int, stop: int) -> None:
        assert self._map is not None
        try:
            self._map.madvise(POPULATE_WRITE, start, stop - start)
        except OSError:  # an older kernel: rewrite a byte of each system page
            for at in range(start, stop, mmap.PAGESIZE):
                self._map[at] = self._map[at]


def runs(pages: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Contiguous runs (first, count) of pages in the order given."""
    first, count = 0, 0
    for page in pages:
        if count and page == first + count:
            count += 1
            continue
        if count:
            yield first, count
        first, count = page, 1
    if count:
        yield first, count


def paired_runs(src: Sequence[int], dst: Sequence[int]) -> list[tuple[int, int, int]]:
    """Runs (src, dst, count) contiguous on both sides: one memcpy moves each."""
    found: list[tuple[int, int, int]] = []
    for a, b in zip(src, dst, strict=True):
        if found and (last := found[-1])[0] + last[2] == a and last[1] + last[2] == b:
            found[-1] = (last[0], last[1], last[2] + 1)
        else:
            found.append((a, b, 1))
    return found


def copy_pages(src: Arena, dst: Arena, moves: Sequence[tuple[int, int, int]]) -> None:
    """Copies pages, run by run; on a GPU, puts the copies on the current stream."""
    for a, b, count in moves:
        dst.pages[b : b + count].copy_(src.pages[a : a + count], non_blocking=True)


def _mapping(nbytes: int) -> mmap.mmap:
    size = max(1, -(-nbytes // mmap.PAGESIZE)) * mmap.PAGESIZE
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        memory.madvise(mmap.MADV_NOHUGEPAGE)  # else residency comes in pages of 2 MiB
    return memory


def _tensor(memory: mmap.mmap, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The start of a mapping as a tensor; a tensor without elements needs no mapping."""
    count = math.prod(shape)
    if not count:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count).view(shape)
