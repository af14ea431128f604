"""Cost tables of training: which of them a launch is the sum of."""

from __future__ import annotations

from collections.abc import Iterator

from sim.trained import ADAPTERS, AGAIN, BACKWARD, FORWARD, LAYER, LIGHT, UPDATE, Trained

ROWS, PAIRS = "by rows", "by pairs"
ANY = "any"  # a forward is the same whatever of its unit trains, but for adapters
LIKE = {LIGHT: (FORWARD, AGAIN), AGAIN: (FORWARD, LIGHT), FORWARD: (AGAIN, LIGHT)}

Terms = list[tuple[str, tuple[int, ...]]]


def training_terms(launch: Trained) -> Terms:
    """Tables with the points at which they add up to a launch's time.

    A unit's work by its rows and, in a layer, by its pairs of queries and keys (sequences times
    their length squared), where a straight line will do; an update by its bytes, straight as well.
    """
    if launch.work == UPDATE:
        return [(f"{launch.dtype} {launch.group}", (launch.update_bytes,))]
    matters = launch.work == BACKWARD or launch.trains == ADAPTERS
    what = f"lowest {launch.trains}" if launch.is_lowest else launch.trains
    name = f"{launch.dtype} {what if matters else ANY} {launch.group}"
    found: Terms = [(f"{name} {ROWS}", (launch.rows,))]
    if launch.kind == LAYER:
        found.append((f"{name} {PAIRS}", (launch.sequences * launch.tokens**2,)))
    return found


def is_straight(name: str) -> bool:
    """Whether two values say all of a table: at nothing, and at the largest that was seen."""
    return name.endswith(PAIRS) or f" {UPDATE} " in name


def is_of_training(name: str) -> bool:
    """Whether a table is one of these."""
    return name.endswith((ROWS, PAIRS)) or is_straight(name)


def likenesses(launch: Trained) -> Iterator[Trained]:
    """What may be taken for a launch, itself first: all forwards compute the same, and the lowest
    adapters' backward lacks but a little of the others'."""
    yield launch
    if launch.work == BACKWARD and launch.trains == ADAPTERS:
        yield launch._replace(is_lowest=not launch.is_lowest)
    for work in LIKE.get(launch.work, ()):
        yield launch._replace(work=work)
