"""What routers share: the load of a replica, and who has the least of it."""

from __future__ import annotations

from engine.fleet import Fleet

LOADS = ("requests", "tokens")


def check_load(name: str, load: str) -> None:
    """ValueError for a load that nobody counts."""
    if load not in LOADS:
        raise ValueError(f"{name}: load is {load!r}, not one of {', '.join(LOADS)}")


def load_of(fleet: Fleet, replica: int, load: str) -> int:
    """Outstanding requests of a replica, or their tokens."""
    if load == "tokens":
        return fleet.outstanding_tokens(replica)
    return fleet.outstanding(replica)


def least_loaded(fleet: Fleet, load: str) -> int:
    """At a tie who was given fewer requests so far, then the lower number."""
    return min(range(len(fleet)), key=lambda i: (load_of(fleet, i, load), fleet.assigned[i], i))
