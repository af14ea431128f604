"""What a process has of a GPU once: streams by their use, libraries' workspaces, a budget."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import cuda

LEAST_BYTES = 1 << 30  # of a budget: torch's segments are of 2 to 20 MiB, cuBLAS takes 32 a stream


class Peak(NamedTuple):
    """Bytes that clients of torch's allocator held before a launch, and at its peak."""

    before: int
    most: int


def stream_of(device: int, use: str) -> Any:
    """The one stream of a device for this use, such as a lane's name or "uploads".

    cuBLAS keeps a workspace for every stream that it has seen, as long as the process lives: 32 MiB
    on Hopper. So executors and captures that follow each other share theirs.
    """
    return _made(cuda.Stream, device, use)


@cache
def _made(kind: Any, device: int, use: str) -> Any:
    return kind(device)


def clear_workspaces() -> None:
    """Gives the workspaces of cuBLAS back to torch's allocator; the next product takes a new one.

    Nothing may be on its way that uses them.
    """
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)  # not in builds without CUDA
    if clear is not None:
        clear()


def without_cudnn_attention() -> None:
    """torch's attention runs by FlashAttention or by plain kernels from here on.

    On Hopper cuDNN's would come first, and it builds a plan for every new shape: shapes of serving
    are new at almost every launch.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)


# ---- memory
@contextmanager
def budgets(nbytes: Mapping[int, int]) -> Iterator[None]:
    """Inside, torch takes at most so many bytes of each GPU, so that a big one stands in for a
    small one; behind it, all of it again.

    Covers weights, arenas and workspace; the CUDA context (a few hundred MB) comes on top. Less
    than LEAST_BYTES is taken for these. What earlier runs have left in torch's cache is given
    back first. ValueError if a device has less.
    """
    clear_workspaces()
    cuda.empty_cache()
    try:
        for device, wanted in nbytes.items():
            total = cuda.get_device_properties(device).total_memory
            if wanted > total:
                raise ValueError(
                    f"a budget of {wanted} bytes does not fit GPU {device}, which has {total}"
                )
            share = min(1.0, max(wanted, LEAST_BYTES) / total)
            cuda.set_per_process_memory_fraction(share, device)
        yield
    finally:
        for device in nbytes:
            cuda.set_per_process_memory_fraction(1.0, device)


def count_peak(device: int) -> None:
    """The next `peak_since` counts from here."""
    cuda.reset_peak_memory_stats(device)
    cuda.reset_accumulated_memory_stats(device)


def peak_since(device: int) -> Peak:
    """What torch's allocator has counted since `count_peak`; it counts in issue order.

    One reading, of the nested statistics: torch's flat ones take 0.4 ms to build.
    """
    held = cuda.memory_stats_as_nested_dict(device)["allocated_bytes"]["all"]
    return Peak(held["current"] - held["allocated"] + held["freed"], held["peak"])
