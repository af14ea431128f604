"""Devices that train one model by data parallelism: what one of them has, what exchanges take."""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.contract.plan import Pattern
from sim.devices.device import Device, share

PASSES = {Pattern.ALL_GATHER: 1, Pattern.REDUCE_SCATTER: 1, Pattern.ALL_REDUCE: 2}  # round a ring


@dataclass(frozen=True, slots=True)
class Group:
    """The config node `group`: so many devices in each of so many nodes."""

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
    """What one device has of its node while all others do the same: an equal part of the host's
    memory, of its bandwidth and of updates there, and what is left of its link."""
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
    """A collective over `nbytes` round a ring of all devices (alpha-beta): each hop passes an equal
    part on. ValueError where the device names no link for it."""
    ranks = group.ranks
    if ranks == 1:
        return 0
    hops = PASSES[pattern] * (ranks - 1)
    return round(hops * (device.hop_ns + nbytes / ranks / ring_rate(device, group) * 1e9))


def check_links(device: Device, group: Group) -> None:
    """ValueError where the device names no link that the group needs."""
    if group.ranks > 1:
        ring_rate(device, group)


def ring_rate(device: Device, group: Group) -> float:
    """Bytes per second that a ring passes on: those of its slowest link. All adapters of a node
    carry rings of their own. ValueError as above."""
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
