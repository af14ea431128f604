"""Closed loops of clients, think times between turns, and SLO classes and tenants of requests."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from traces.records import NS_PER_S
from traces.serving.request import Request

# Streams of a seed: arrivals draw from the seed itself, lengths from its stream 1.
STREAM, TENANT_STREAM, ADAPTER_STREAM = 2, 3, 4


@dataclass(frozen=True, kw_only=True)
class Clients:
    """A closed loop of a fixed concurrency: at most `clients` requests are in flight at once.

    Request i belongs to client i modulo `clients`. Unlike under vLLM's `--max-concurrency`, no
    client takes over requests of another one, so concurrency falls towards the end. `think_s` is
    the think time between answer and next request, in seconds.
    """

    clients: int = 8
    think_s: float = 0.0

    def __post_init__(self) -> None:
        if self.clients < 1:
            raise ValueError(f"arrival.clients={self.clients}: it must be at least 1")

    def as_sessions(self, requests: Sequence[Request]) -> list[Request]:
        """The requests as turns of the clients. Raises ValueError for a trace with sessions."""
        if any(request.session is not None for request in requests):
            raise ValueError(
                "arrival: the trace has sessions, a closed loop already; take arrival=all_at_once"
            )
        dealt = [
            replace(r, arrival_ns=0, session=i % self.clients, turn=i // self.clients)
            for i, r in enumerate(requests)
        ]
        return with_think(dealt, Think(mean_s=self.think_s))


@dataclass(frozen=True, kw_only=True)
class Think:
    """Think times of one mean in seconds: all equal, or exponential by seed."""

    mean_s: float = 0.0
    is_exponential: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.mean_s < float("inf"):
            raise ValueError(f"think time is {self.mean_s} s; it must be at least 0")

    def times_ns(self, n: int, seed: int = 0) -> list[int]:
        """n think times, in nanoseconds."""
        drawn = np.random.default_rng(seed).exponential(1.0, n) if self.is_exponential else 1.0
        return [int(t) for t in np.rint(np.broadcast_to(drawn, n) * self.mean_s * NS_PER_S)]


def with_think(requests: Sequence[Request], think: Think, seed: int = 0) -> list[Request]:
    """The requests, with a think time for every turn after the first of its session."""
    times = iter(think.times_ns(sum(r.turn > 0 for r in requests), seed))
    return [replace(r, think_ns=next(times)) if r.turn > 0 else r for r in requests]


def with_shares(
    requests: Sequence[Request], shares: Mapping[str, float], seed: int = 0
) -> list[Request]:
    """The requests with SLO classes drawn by their shares; the turns of a session have one class.

    Equal seeds give equal classes, and further requests do not change the classes of earlier ones.
    Raises ValueError where the shares do not sum to 1.
    """
    names = _drawn(requests, shares, "slo.shares", (seed, STREAM))
    return [replace(request, slo=name) for request, name in zip(requests, names, strict=True)]


def with_tenants(
    requests: Sequence[Request], shares: Mapping[str, float], seed: int = 0
) -> list[Request]:
    """The requests with tenants drawn by their shares; the turns of a session have one tenant.

    Equal seeds give equal tenants, and further requests do not change the tenants of earlier ones.
    Raises ValueError where the shares do not sum to 1.
    """
    names = _drawn(requests, shares, "tenants.shares", (seed, TENANT_STREAM))
    return [replace(request, tenant=name) for request, name in zip(requests, names, strict=True)]


def with_adapters(
    requests: Sequence[Request], shares: Mapping[str, float], seed: int = 0
) -> list[Request]:
    """The requests with adapters drawn by their shares; the turns of a session have one adapter.

    A request that names an adapter keeps it. Equal seeds give equal adapters, and further requests
    do not change the adapters of earlier ones. Raises ValueError where the shares do not sum to 1.
    """
    names = _drawn(requests, shares, "adapters", (seed, ADAPTER_STREAM))
    pairs = zip(requests, names, strict=True)
    return [r if r.adapter else replace(r, adapter=name) for r, name in pairs]


def _drawn(
    requests: Sequence[Request], shares: Mapping[str, float], where: str, seed: tuple[int, int]
) -> list[str]:
    """A name for each request, drawn by shares once for a session."""
    if min(shares.values(), default=0) < 0 or abs(sum(shares.values()) - 1) > 1e-6:
        given = ", ".join(f"{name}: {share:g}" for name, share in shares.items())
        raise ValueError(f"{where}={{{given}}}: they must be at least 0 and make up 1")
    rng, names = np.random.default_rng(seed), list(shares)
    ends = list(accumulate(shares.values()))[:-1]
    of_session: dict[int, str] = {}
    found = list[str]()
    for request in requests:
        name = of_session.get(-1 if request.session is None else request.session)
        if name is None:
            name = names[bisect_right(ends, rng.random())]
            if request.session is not None:
                of_session[request.session] = name
        found.append(name)
    return found
