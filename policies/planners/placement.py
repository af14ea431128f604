"""What planners of training have in common: modes of units, and where states lie at the start."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from engine.contract.layout import Layout, Mode, TrainingLayout, sending_inputs
from engine.contract.regions import Place, Pool, Tier, optimizer, weight
from models.training.shape import TrainingShape
from policies.training.out_of_memory import OutOfMemory, Remedy, remedies_of_states
from traces.serving.request import TrainingJob

Start = Literal["host", "host_first", "device"]
STARTS: Mapping[Start, frozenset[Tier]] = {  # and where states may then lie
    "host": frozenset({Tier.HOST}),
    "host_first": frozenset({Tier.HOST, Tier.GPU}),
    "device": frozenset({Tier.GPU}),
}
States = Literal["given", "first_update"]
LayOut = Callable[[TrainingShape, Sequence[Mode], int], TrainingLayout]  # for so many ranks


def prepared(
    shapes: Mapping[int, TrainingShape],
    jobs: Sequence[TrainingJob],
    modes: Mode | tuple[Mode, ...],
    start: Start,
    capacity_bytes: Mapping[Pool, int],
    lay_out: LayOut,
    states: States = "given",
    offloads_inputs: bool = False,
) -> Layout:
    """The layout of all training jobs. ValueError where modes do not fit them,
    OutOfMemory where memory does not.

    `start`: all states on the host, or on the device, or on the host as far as it has room
    (optimizer states before weights) and the rest on the device. `states` of the optimizer that are
    made at the `first_update` lie nowhere before it: they begin where it finds none.
    `offloads_inputs`: of units that recompute or offload, those wait for the backward on the host.
    """
    ranks = {job.job_id: job.ranks for job in jobs}
    layouts = {
        job_id: lay_out(shape, modes_of(modes, len(shape.units), job_id), ranks[job_id])
        for job_id, shape in shapes.items()
    }
    if offloads_inputs:
        layouts = {job_id: sending_inputs(layout) for job_id, layout in layouts.items()}
    kinds = (optimizer, weight) if states == "given" else (weight,)
    remedies = remedies_of_states(jobs)
    return Layout(places=_places(layouts, start, capacity_bytes, kinds, remedies), training=layouts)


def modes_of(modes: Mode | tuple[Mode, ...], num_units: int, job_id: int) -> tuple[Mode, ...]:
    """One per unit. A single one is for all layers; a list has one for each layer, or for each
    unit. Embedding and head keep where nothing is said of them."""
    if isinstance(modes, Mode):
        modes = (modes,) * (num_units - 2)
    if len(modes) == num_units - 2:
        return (Mode.KEEP, *modes, Mode.KEEP)
    if len(modes) != num_units:
        raise ValueError(
            f"modes: {len(modes)} given, but training job {job_id} has {num_units - 2} "
            f"layers between embedding and head; give one for all, or one for each"
        )
    return tuple(modes)


def _places(
    layouts: Mapping[int, TrainingLayout],
    start: Start,
    capacity_bytes: Mapping[Pool, int],
    kinds: Sequence[Callable[..., Place]],
    remedies: Sequence[Remedy],
) -> dict[Place, int]:
    states = [*_states(layouts, kinds)]
    room = dict(capacity_bytes)
    found: dict[Place, int] = {}
    for on_host, on_device, nbytes in states:
        place = on_device if start == "device" else on_host
        if start == "host_first" and nbytes > room.get(on_host.pool, 0):
            place = on_device
        room[place.pool] = left = room.get(place.pool, 0) - nbytes
        if left < 0:
            raise OutOfMemory(place.pool, -left, "the model states", remedies, start)
        found[place] = nbytes
    return found


def _states(
    layouts: Mapping[int, TrainingLayout], kinds: Sequence[Callable[..., Place]]
) -> list[tuple[Place, Place, int]]:
    """Places on host and device with their bytes, kind by kind."""
    found = list[tuple[Place, Place, int]]()
    for kind in kinds:
        for job_id, layout in layouts.items():
            for c, chunk in enumerate(layout.chunks):
                nbytes = chunk.optimizer_bytes if kind is optimizer else chunk.weight_bytes
                if nbytes:
                    found.append((kind(job_id, c, Tier.HOST), kind(job_id, c), nbytes))
    return found


def apart(shape: TrainingShape, parameters: Sequence[int]) -> list[list[int]]:
    """Frozen and trained ones of a list of parameters, each in their order; none is empty."""
    found = [[p for p in parameters if shape.parameters[p].trains is t] for t in (False, True)]
    return [part for part in found if part]
