"""The choice of a planner that searches: what bounds it, what came next, and the whole surface."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from engine.contract.regions import Pool
from policies.planners.blocks import Configuration
from policies.planners.protrain import ProTrainLayout
from policies.planners.search import UNPRICED, Search, Space, TierBytes, TimedConfiguration
from sim.cost.policy_cost import PolicyCost
from tandem.cli.terminal import shown_bytes, shown_seconds
from tandem.config.composed_config import ComposedConfig
from tandem.wiring.run_spec import RunSpec, builder_of
from tandem.wiring.training import planner_of

OTHERS = 3  # runners-up that are told
COLUMNS = (*Configuration._fields, "step_s", "device_bytes", "host_bytes", "fits")


class Searched(NamedTuple):
    """What a planner searches.

    Attributes:
        space: The configurations that its knobs allow.
        room: What it may use of the device and the host.
        is_given: Whether every knob is fixed by hand.
    """

    space: Space
    room: TierBytes
    is_given: bool


def searched(
    point: ComposedConfig, run_spec: RunSpec, capacity_bytes: Mapping[Pool, int] | None = None
) -> Searched | None:
    """What the planner of a point searches; None where it searches nothing.

    `capacity_bytes` is there in the place of what the run has.
    """
    node = planner_of(point.config)
    if node.get("_target_") is None or len(run_spec.trainees) != 1:
        return None
    planner = builder_of(point).build(node, "planner")
    if not isinstance(planner, ProTrainLayout):
        return None
    (trainee,) = run_spec.trainees
    cost = PolicyCost(run_spec.quotes, lambda place: 0, run_spec.quote_pace)
    space, _ = planner.space(trainee.shape, trainee.job, cost)
    room = planner.room(capacity_bytes or run_spec.room.capacity_bytes)
    return Searched(space, room, planner.is_given)


def choice_lines(point: ComposedConfig, run_spec: RunSpec) -> Iterator[str]:
    """The choice, what bounds it, and runners-up; nothing where the planner searches nothing."""
    if (found := searched(point, run_spec)) is None:
        return
    space, room, is_given = found
    search = space.search(room, 1 + OTHERS)
    if not search.found:
        lacks = f"{search.lacks.device_bytes + search.lacks.host_bytes:,} bytes"
        if is_given:  # it makes do with less
            told = _told(space.everything()[0])
            yield f"planner: {told}; given, and {lacks} short of running freely"
        else:  # one of several layouts: the smallest
            (layout,) = run_spec.room.layout.training.values()
            least = shown_bytes(layout.peak_bytes)
            yield (
                f"planner: begins with the layout that needs least, {least}; its share of the "
                f"device is {lacks} short of any"
            )
        return
    best = search.found[0]
    yield f"planner: {_told(best)}; {_counted(search)}"
    lanes = sorted(space.lanes(best.knobs).items(), key=lambda lane: -lane[1])
    shares = [f"{name} {ns / best.step_ns:.0%}" for name, ns in lanes]
    if not space.updates_on_host:
        yield f"planner: all chunks persist, since {UNPRICED}"
    yield f"bound by: {', '.join(shares)} of the step"
    for other in search.found[1:]:
        yield f"next: {_told(other)} ({other.step_ns / best.step_ns - 1:+.1%})"


def _told(one: TimedConfiguration) -> str:
    pairs = zip(one.knobs._fields, one.knobs, strict=True)
    knobs = " ".join([f"{name}={value}" for name, value in pairs])
    return f"{knobs}: {shown_seconds(one.step_ns / 1e9)} in {shown_bytes(one.peak_bytes)}"


def _counted(search: Search) -> str:
    if search.num_all == 1:
        return "the only one that the knobs allow"
    return f"the fastest of {search.num_fitting:,} that fit, of {search.num_all:,}"


def write_surface(
    point: ComposedConfig,
    run_spec: RunSpec,
    path: Path,
    capacity_bytes: Mapping[Pool, int] | None = None,
) -> int | None:
    """Writes all configurations as CSV, the best one first; returns how many.

    None where the planner of the point searches nothing. Which of them fit is told of
    `capacity_bytes`, where that is given.
    """
    if (found := searched(point, run_spec, capacity_bytes)) is None:
        return None
    room, rows = found.room, found.space.everything()
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for one in rows:
            fits = one.peak_bytes <= room.device_bytes and one.host_bytes <= room.host_bytes
            sizes = (one.peak_bytes, one.host_bytes, fits)
            writer.writerow((*one.knobs, f"{one.step_ns / 1e9:.9g}", *sizes))
    return len(rows)
