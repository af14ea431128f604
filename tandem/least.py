"""The least memory in which a job trains: what `tandem plan` says of one that does not fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from engine.plan import Tier
from policies.out_of_memory import DoesNotFit, OutOfMemory
from tandem.composed import Composed
from tandem.foresight import foresee
from tandem.progress import search_bar
from tandem.screen import shown_bytes
from tandem.setting import training_space
from tandem.workload import is_nothing

Need = dict[Tier, int]  # bytes
Try = Callable[[Need], DoesNotFit | None]  # why so much is too little; None: it fits

KEYS = {Tier.GPU: "device_bytes", Tier.HOST: "host_bytes"}  # of the config node `budget`
TRIES = 64  # until it fits
PRECISION = 1000  # the answer is known to a part in so many at least,
CLOSE_TRIES = 4  # and then tried to the byte so often


def least_memory(tried: Try, start: Need, refused: DoesNotFit) -> Need | None:
    """What fits instead of `start`, and the least of each tier beside the others; None where
    nothing did after TRIES.

    As if more never hurt. What a launch lacks is mostly a lower bound, which the last one meets: so
    the answer is mostly exact, and always tried; and so is a byte less.
    """
    low, high = dict(start), dict(start)
    for _ in range(TRIES):
        for tier in high:
            if lacks := _lacking(refused, tier):
                if isinstance(refused, OutOfMemory):
                    low[tier] = high[tier] + lacks
                high[tier] += max(lacks, high[tier] - start[tier])
        if (found := tried(high)) is None:
            break
        refused = found
    else:
        return None
    for tier in high:
        high[tier] = _lowered(tried, high, tier, start[tier], low[tier])
    return high


def _lacking(refused: DoesNotFit, tier: Tier) -> int:
    """At least so much of a tier; one byte of each where nobody says how much of which."""
    if isinstance(refused, OutOfMemory):
        return refused.deficit_bytes if refused.pool[0] is tier else 0
    return 1


def _lowered(tried: Try, fitting: Need, tier: Tier, floor: int, low: int) -> int:
    """The least of one tier that fits, from a floor on: by turns what may be the answer, and
    halving.

    Where it is met a byte less is tried: a launch tells what it lacks as things lie, and with less
    than that they may have come to lie otherwise. If that fits, what is told is not believed again.
    """
    high, is_low, close_tries, believes = fitting[tier], True, 0, True
    while floor < high and close_tries < CLOSE_TRIES:
        is_met, is_close = low == high, high - low <= high // PRECISION
        close_tries += is_close and not is_met
        at = high - 1 if is_met else low if is_low or is_close else (low + high) // 2
        refused = tried({**fitting, tier: at})
        if refused is None:
            believes &= not is_met
            high, low = at, floor if is_met else low
        else:
            lacks = _lacking(refused, tier) if believes else 1
            floor, low = at + 1, min(high, at + max(1, lacks))
        is_low = not is_low
    return high


def least_of(point: Composed, refused: DoesNotFit) -> Need | None:
    """The budget with which a point that was refused, and only trains, fits; None if none does."""

    with search_bar("looking for the least budget") as count:

        def tried(need: Need) -> DoesNotFit | None:
            count()
            try:
                foresee(_with(point, need))
            except DoesNotFit as error:
                return error
            return None

        return least_memory(tried, _space(point), refused)


def told_least(point: Composed, refused: DoesNotFit) -> str:
    """One line: the budget with which the point fits; nothing beside what is served, or of plans
    that are played back."""
    if not is_nothing(point.config["trace"]) or point.config.get("replayed") is not None:
        return ""
    start, need = _space(point), least_of(point, refused)
    if need is None:
        return "fits from: no budget was found that is enough"
    words = [
        f"budget.{KEYS[tier]}={nbytes} ({shown_bytes(nbytes)})"
        for tier, nbytes in need.items()
        if nbytes > start[tier]
    ]
    if not words:  # the simulation, which is shorter than a run, finds room as it is
        return ""
    return f"fits from: {' '.join(words)}{_beyond(point, need[Tier.GPU])}"


def _space(point: Composed) -> Need:
    space = training_space(point)
    return {tier: space[tier, 0] for tier in KEYS}


def _with(point: Composed, need: Need) -> Composed:
    """The point with so much memory, on a device that has it."""
    config = point.config
    budget = {**config["budget"], **{KEYS[tier]: nbytes for tier, nbytes in need.items()}}
    has = max(config["device"]["memory_bytes"], need[Tier.GPU])
    device = {**config["device"], "memory_bytes": has}
    return replace(point, config={**config, "budget": budget, "device": device})


def _beyond(point: Composed, nbytes: int) -> str:
    device = point.config["device"]
    if nbytes <= device["memory_bytes"]:
        return ""
    has = shown_bytes(device["memory_bytes"])
    return f"; that is more than the {has} of {device['name']}: take a larger device, device=..."
