"""What a process has of a GPU once: streams by use, library workspaces, a memory budget."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import cuda

MIN_BUDGET_BYTES = 1 << 30  # torch takes segments of 2 to 20 MiB, cuBLAS 32 MiB per stream


class Peak(NamedTuple):
    """Bytes that clients of torch's allocator held before a launch, and at its peak."""

    before: int
    most: int


def stream_of(device: int, use: str) -> Any:
    """The one stream of a device for a use, such as a lane's name or "uploads".

    cuBLAS keeps a workspace for every stream that it has seen, as long as the process lives: 32 MiB
    on Hopper. So all executors and captures of a process share their streams.
    """
    return _made(cuda.Stream, device, use)


@cache
def _made(kind: Any, device: int, use: str) -> Any:
    return kind(device)


def clear_workspaces() -> None:
    """Gives the workspaces of cuBLAS back to torch's allocator; the next product takes a new one.

    No launch that uses them may be in flight.
    """
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)  # not in builds without CUDA
    if clear is not None:
        clear()


def without_cudnn_attention() -> None:
    """Makes torch's attention run by FlashAttention or by plain kernels, never by cuDNN.

    On Hopper cuDNN's attention would come first. It builds a plan for every new shape, and almost
    every launch of serving has a new shape.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)


# ---- memory
@contextmanager
def budgets(nbytes: Mapping[int, int]) -> Iterator[None]:
    """Limits the bytes that torch takes of each GPU, so that a big GPU stands in for a small one.

    The budget covers weights, arenas and workspace; the CUDA context (a few hundred MB) comes on
    top. A smaller budget than MIN_BUDGET_BYTES counts as that. What earlier runs have left in
    torch's cache is given back first. The limit ends with the block.

    Args:
        nbytes: Budget in bytes by the number of the GPU.

    Raises:
        ValueError: A GPU has less memory than its budget.
    """
    clear_workspaces()
    cuda.empty_cache()
    try:
        for device, budget in nbytes.items():
            total = cuda.get_device_properties(device).total_memory
            if budget > total:
                raise ValueError(
                    f"a budget of {budget} bytes does not fit GPU {device}, which has {total}"
                )
            share = min(1.0, max(budget, MIN_BUDGET_BYTES) / total)
            cuda.set_per_process_memory_fraction(share, device)
        yield
    finally:
        for device in nbytes:
            cuda.set_per_process_memory_fraction(1.0, device)


def count_peak(device: int) -> None:
    """Begins a count for `peak_since`."""
    cuda.reset_peak_memory_stats(device)
    cuda.reset_accumulated_memory_stats(device)


def peak_since(device: int) -> Peak:
    """The bytes that torch's allocator has counted since `count_peak`, in issue order.

    Reads the nested statistics once: torch's flat ones take 0.4 ms to build.
    """
    held = cuda.memory_stats_as_nested_dict(device)["allocated_bytes"]["all"]
    return Peak(held["current"] - held["allocated"] + held["freed"], held["peak"])
