"""Host memory that regions are copied to: pinned where CUDA is there, and exact in size."""

from __future__ import annotations

import mmap
from collections import defaultdict

import torch
from torch import UntypedStorage


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
