"""Groups of devices that train one model by data parallelism: shares of a node, and collectives."""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.contract.plan import Pattern
from sim.devices.device import Device, share

PASSES = {Pattern.ALL_GATHER: 1, Pattern.REDUCE_SCATTER: 1, Pattern.ALL_REDUCE: 2}  # round a ring


@dataclass(frozen=True, slots=True)
class Group:
    """The config node `group`: `devices` in each of `nodes`.

    Raises:
        ValueError: one of them is below 1.
    """

    devices: int = 1
    nodes: int = 1

    def __post_init__(self) -> None:
        for name in ("devices", "nodes"):
            if getattr(self, name) < 1:
                raise ValueError(f"group.{name}={getattr(self, name)}: it must be at least 1")

    @property
    def ranks(self) -> int:
        """Devices of all nodes."""
        return self.devices * self.nodes


ALONE = Group()


def rank_device(device: Device, group: Group) -> Device:
    """One device's part of its node while all devices of the node are equally busy.

    Args:
        device: the device alone.
        group: the group that it belongs to.

    Returns:
        The device with an equal part of the host's memory and bandwidth, its share of the rate of
        updates there, and its share of its link to the host.
    """
    count = group.devices
    if count == 1:
        return device
    link, updates = share(device.link_share, count), share(device.host_share, count)
    rate = device.host_bandwidth_bytes_per_s
    return replace(
        device,
        host_bytes=device.host_bytes // count,
        to_device_bytes_per_s=link * device.to_device_bytes_per_s,
        to_host_bytes_per_s=link * device.to_host_bytes_per_s,
        host_bandwidth_bytes_per_s=None if rate is None else rate / count,
        update_share=min(1.0, device.update_share * count * updates),
    )


def exchange_ns(device: Device, group: Group, pattern: Pattern, nbytes: int) -> int:
    """Duration of a collective round a ring of all devices, by the alpha-beta model.

    Each hop takes hop_ns + nbytes / ranks / rate. An all-gather or a reduce-scatter takes
    ranks - 1 hops, an all-reduce twice as many.

    Args:
        device: the device, with its links.
        group: the ring.
        pattern: the collective.
        nbytes: bytes of the whole tensor.

    Returns:
        Nanoseconds; 0 for a single device.

    Raises:
        ValueError: the device names no link that the ring needs.
    """
    ranks = group.ranks
    if ranks == 1:
        return 0
    hops = PASSES[pattern] * (ranks - 1)
    return round(hops * (device.hop_ns + nbytes / ranks / ring_rate(device, group) * 1e9))


def check_links(device: Device, group: Group) -> None:
    """Checks that a device has the links of its group.

    Raises:
        ValueError: the device names no link that the group needs.
    """
    if group.ranks > 1:
        ring_rate(device, group)


def ring_rate(device: Device, group: Group) -> float:
    """Rate of a ring: that of its slowest link. Every adapter of a node carries a ring of its own.

    Returns:
        Bytes per second.

    Raises:
        ValueError: the device names no link that the group needs.
    """
    rates = []
    if group.devices > 1:
        rates.append(device.link_rate("peer") * share(device.peer_share, group.devices))
    if group.nodes > 1:
        if device.network_bytes_per_s is None:
            raise ValueError(
                f"device {device.name} has no link to other nodes; set "
                "device.network_bytes_per_s, or take device=a100_superpod"
            )
        rates.append(device.network_bytes_per_s)
    return min(rates)
