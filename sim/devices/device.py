"""A device in numbers: rates, overheads and the share of each rate that an operation reaches."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import inf, log

CURVES = ("linear_compute", "linear_memory", "prefill_compute", "decode_memory")
CURVES_BY_DEVICES = ("peer_share", "link_share", "host_share")  # by busy devices of a node
COUNTS = (
    "reserve_bytes",
    "host_bytes",
    "link_ns",
    "hop_ns",
    "kernel_ns",
    "dispatch_ns",
    "sequence_kernels",
    "host_plan_ns",
    "host_slice_ns",
)
Curve = tuple[tuple[float, float], ...]  # (size, share of the peak rate), sizes ascending


def share(curve: Curve, size: float) -> float:
    """The share of a peak rate at a size: a power law between two points, flat outside.

    Kernels too small to fill a device take a constant time, so their share rises with their size:
    a power law is exact there, and close where a share saturates.

    Args:
        curve: (size, share) points by rising size.
        size: the size, in the curve's unit.

    Returns:
        A share above 0 and at most the curve's largest.
    """
    index = bisect_right(curve, (size, inf))
    if index == 0:
        return curve[0][1]
    if index == len(curve):
        return curve[-1][1]
    (low, at_low), (high, at_high) = curve[index - 1], curve[index]
    part = log(size / low) / log(high / low)
    return float(at_low * (at_high / at_low) ** part)


def shares(curve: Curve, sizes: Sequence[float]) -> list[float]:
    """`share` at each of some sizes, which do not fall.

    Args:
        curve: (size, share) points by rising size.
        sizes: the sizes, in the curve's unit.

    Returns:
        A share for each size, to the bit that of `share`.
    """
    found = list[float]()
    while len(found) < len(sizes):
        begin = len(found)
        index = bisect_right(curve, (sizes[begin], inf))
        if index == len(curve):
            return found + [curve[-1][1]] * (len(sizes) - begin)
        end = bisect_left(sizes, curve[index][0], begin)  # the sizes between two points
        if index == 0:
            found += [curve[0][1]] * (end - begin)
            continue
        (low, at_low), (high, at_high) = curve[index - 1], curve[index]
        span, ratio = log(high / low), at_high / at_low
        found += [float(at_low * ratio ** (log(s / low) / span)) for s in sizes[begin:end]]
    return found


@dataclass(frozen=True, slots=True)
class Device:
    """Hardware and its launch overheads. Rates are peaks; curves give the share that is reached.

    `kernel_ns` is each kernel's cost beside its work. `dispatch_ns` is the host's time to issue
    one: a launch never ends before all its kernels are issued. `sequence_kernels` is the number of
    kernels that attention needs per sequence and layer (0: one fused kernel for all decodes).

    Raises:
        ValueError: a rate, share, count or curve is out of its range.
    """

    name: str
    memory_bytes: int
    reserve_bytes: int  # context, allocator and library workspaces
    host_bytes: int  # host memory for offloaded states and swapped KV
    bandwidth_bytes_per_s: float
    flops_per_s: Mapping[str, float]  # dense matrix rate by dtype
    to_device_bytes_per_s: float  # host link, alone
    to_host_bytes_per_s: float
    link_ns: int  # latency of one copy
    duplex: float  # share of its rate a direction keeps while the other one runs
    kernel_ns: int
    dispatch_ns: int
    sequence_kernels: int
    host_plan_ns: int  # deciding and preparing one plan
    host_slice_ns: int  # and each of its slices
    linear_compute: Curve  # by rows
    linear_memory: Curve  # by bytes a kernel moves
    prefill_compute: Curve  # by the side of the square of query-key pairs
    decode_memory: Curve  # by KV bytes a kernel reads
    peer_bytes_per_s: float | None = None  # to another device, one direction; None: no link
    # Rate of the host's DRAM, which all devices, copies and updates there share; None: not stated.
    host_bandwidth_bytes_per_s: float | None = None
    update_share: float = 0.4  # of that rate, reached by an update on the host
    # To other nodes, one direction, all adapters of a node together.
    network_bytes_per_s: float | None = None
    hop_ns: int = 5000  # latency of one hop of a ring; assumed
    # Of its rate, what a copy to or from the host keeps while a collective of the group is under
    # way: below 1 where cards reach each other over their links to the host.
    copy_share: float = 1.0
    # By the number of devices of a node that are busy at once: the share of the peer rate that
    # rings reach, of its host link that each device keeps, and of the rate of updates there
    # (default: an equal part).
    peer_share: Curve = ((1, 1.0),)
    link_share: Curve = ((1, 1.0),)
    host_share: Curve = ((1, 1.0), (1024, 1 / 1024))
    is_cpu: bool = False  # the stand-in: a CPU allocates otherwise than an engine on a GPU

    def __post_init__(self) -> None:
        for name in (*CURVES, *CURVES_BY_DEVICES):
            points = tuple((float(x), float(y)) for x, y in getattr(self, name))
            is_rising = list(points) == sorted(points)
            if not points or not is_rising or not all(0 < n < inf for n in chain(*points)):
                raise ValueError(f"device {self.name}: {name} needs (size, share) by rising size")
            object.__setattr__(self, name, points)
        for name in COUNTS:
            if getattr(self, name) < 0:
                raise ValueError(
                    f"device {self.name}: {name} is {getattr(self, name)}, must be at least 0"
                )
        for name in ("duplex", "update_share", "copy_share"):
            if not 0 < (value := getattr(self, name)) <= 1:
                raise ValueError(
                    f"device {self.name}: {name} is {value}, must be above 0 and at most 1"
                )
        rates = {dtype: float(rate) for dtype, rate in self.flops_per_s.items()}
        object.__setattr__(self, "flops_per_s", rates)
        links = [self.to_device_bytes_per_s, self.to_host_bytes_per_s]
        links += [
            rate
            for rate in (
                self.peer_bytes_per_s,
                self.host_bandwidth_bytes_per_s,
                self.network_bytes_per_s,
            )
            if rate is not None
        ]
        if not all(
            0 < rate < inf for rate in (self.bandwidth_bytes_per_s, *links, *rates.values())
        ):
            raise ValueError(f"device {self.name}: every rate must be above 0 and finite")
        if self.usable_bytes <= 0:
            raise ValueError(f"device {self.name}: reserve_bytes leaves nothing of memory_bytes")

    @property
    def usable_bytes(self) -> int:
        """Bytes for weights, KV and workspace together."""
        return self.memory_bytes - self.reserve_bytes

    def link_rate(self, direction: str) -> float:
        """Rate of a link.

        Args:
            direction: name of a copy lane, such as gpu->host or gpu->gpu, or "peer".

        Returns:
            Bytes per second, one direction.

        Raises:
            ValueError: the device has no link to its peers.
        """
        if direction == "gpu->gpu":  # within its memory, which is read and written
            return self.bandwidth_bytes_per_s / 2
        if not direction.startswith("peer"):
            inward = direction.endswith("->gpu")
            return self.to_device_bytes_per_s if inward else self.to_host_bytes_per_s
        if self.peer_bytes_per_s is None:
            raise ValueError(
                f"device {self.name} has no link to others; set device.peer_bytes_per_s, or take "
                "one that has, such as device=a100_superpod"
            )
        return self.peer_bytes_per_s

    @property
    def update_rate(self) -> float:
        """Bytes per second that an update on the host reads and writes.

        Raises:
            ValueError: the host's memory has no rate.
        """
        if self.host_bandwidth_bytes_per_s is None:
            raise ValueError(
                f"device {self.name} says nothing of its host's memory; set "
                "host_bandwidth_bytes_per_s to update there"
            )
        return self.update_share * self.host_bandwidth_bytes_per_s

    def matrix_rate(self, dtype: str) -> float:
        """Peak rate of dense products.

        Args:
            dtype: name of a dtype.

        Returns:
            Flops per second.

        Raises:
            ValueError: the device has no rate for that dtype.
        """
        if dtype not in self.flops_per_s:
            raise ValueError(f"device {self.name} has no rate for {dtype}; add it to flops_per_s")
        return self.flops_per_s[dtype]
