"""Small training jobs under every offloading policy, and what must hold of their plans."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from engine.contract.executor import Launch
from engine.contract.layout import Chunk, Layout, Mode, TrainingLayout, Unit
from engine.contract.plan import HOST_LANE, Collective, Compute, Copy, Free, Grow, Plan
from engine.contract.policy import Memory, Policy
from engine.contract.regions import GATHERED, Kind, PageSize, Place, Region, Tier, optimizer, weight
from engine.loop.engine import Engine
from engine.loop.state import VirtualClock
from engine.memory.scoreboard import Journal
from engine.results.recorder import Recorder
from models.parameters import Parameter
from models.training.shape import TrainingShape, UnitShape
from policies.composed import Composed
from policies.planners.placement import Start
from policies.planners.unit_chunks import UnitChunks
from policies.training.all_on_device import AllOnDevice
from policies.training.demand_paging import DemandPaging
from policies.training.fsdp2_offload import Fsdp2Offload
from policies.training.patrickstar import PatrickStar
from policies.training.training_order import TrainingOrder
from policies.training.zero3_offload import Zero3Offload
from policies.training.zero_offload import ZeroOffload
from tests.support.replays import Replay, ToyExecutor
from traces.serving.request import TrainingJob
from traces.training.recipe import Recipe

NO_PAGES = PageSize(tokens=16, nbytes=1 << 40)
ROOMY = 1 << 20
STATES = (Kind.WEIGHT, Kind.GRADIENT, Kind.OPTIMIZER)

MEMORIES: dict[str, Memory] = {
    "all_on_device": AllOnDevice(),
    "zero_offload": ZeroOffload(),
    "zero3_offload": Zero3Offload(),
    "zero3_two_ahead": Zero3Offload(prefetch=2, persistent_bytes=60, overlaps_updates=True),
    "zero3_none_ahead": Zero3Offload(prefetch=0),
    "fsdp2_offload": Fsdp2Offload(),
    "lru": DemandPaging("lru"),
    "fifo_inclusive": DemandPaging("fifo", "inclusive"),
    "opt_on_device": DemandPaging("opt", updates="device"),
    "opt_inclusive": DemandPaging("opt", "inclusive", "device"),
    "patrickstar": PatrickStar(),
    "patrickstar_static": PatrickStar(static_partition=True, buffer_chunks=1, staging_chunks=8),
}


def shape_of(
    rng: random.Random,
    layers: int = 3,
    *,
    tied: bool = False,
    adapters: bool = False,
    frozen_units: int = 0,
    item_bytes: int = 4,
    optimizer_item_bytes: int = 8,
) -> TrainingShape:
    """A made-up model: a table, layers of two modules (and small adapters), a norm and a head."""
    parameters, owned = list[Parameter](), list[tuple[int, ...]]()

    def add(unit: int, name: str, elements: int, is_adapter: bool = False) -> int:
        trains = (is_adapter or not adapters) and unit >= frozen_units
        parameters.append(Parameter(name, (elements,), trains))
        return len(parameters) - 1

    owned.append((add(0, "embed.weight", rng.randint(5, 20)),))
    for i in range(layers):
        own = [add(i + 1, f"layer.{i}.attn.{n}", rng.randint(1, 12)) for n in ("weight", "bias")]
        own.append(add(i + 1, f"layer.{i}.mlp.weight", rng.randint(1, 15)))
        if adapters:
            own.append(add(i + 1, f"layer.{i}.mlp.lora.weight", 1, is_adapter=True))
        owned.append(tuple(own))
    head = [add(layers + 1, "norm.weight", rng.randint(1, 3))]
    head.append(0 if tied else add(layers + 1, "head.weight", rng.randint(5, 20)))
    owned.append(tuple(head))
    hidden = rng.randint(1, 12)
    units = [
        UnitShape(
            own,
            hidden if u else 0,
            rng.randint(0, 40) if 0 < u <= layers else rng.randint(0, 3),
            rng.randint(0, 20),
            rng.randint(0, 20),
            rng.randint(0, 30),
        )
        for u, own in enumerate(owned)
    ]
    return TrainingShape(tuple(parameters), tuple(units), item_bytes, optimizer_item_bytes)


def model(sizes: list[int], item_bytes: int = 2) -> TrainingShape:
    """A module of each size, a unit of each module."""
    parameters = tuple(Parameter(f"m{i}.weight", (n,)) for i, n in enumerate(sizes))
    units = tuple(UnitShape((i,), 0, 0, 0, 0, 0) for i in range(len(sizes)))
    return TrainingShape(parameters, units, item_bytes, 12)


def job_of(shape: TrainingShape, job_id: int = 0, **more: Any) -> TrainingJob:
    """A job of three steps on a shape."""
    given = {"sequence_tokens": 8, "num_steps": 3} | more
    return TrainingJob(job_id, 0, num_units=len(shape.units), **given)


def laid_out(
    shape: TrainingShape,
    mode: Mode = Mode.KEEP,
    start: Start = "host",
    gpu: int = ROOMY,
    host: int = ROOMY,
    offloads_inputs: bool = False,
) -> Layout:
    """A chunk per unit."""
    capacity = {(Tier.GPU, 0): gpu, (Tier.HOST, 0): host}
    planner = UnitChunks(mode, start, offloads_inputs=offloads_inputs)
    return planner.prepare({0: shape}, [job_of(shape)], capacity)


def run(
    memory: Memory,
    layout: Layout,
    job: TrainingJob,
    *,
    gpu: int = ROOMY,
    host: int = ROOMY,
    tasks: int = 1,
    **how: Any,
) -> Replay:
    """One job under a memory policy; sizes are bytes. All laws hold of it."""
    policy = Composed(TrainingOrder(tasks), memory)
    return trained(policy, [job], layout, gpu, host, **how)


def trained(
    policy: Policy,
    jobs: Sequence[TrainingJob],
    layout: Layout,
    gpu: int = ROOMY,
    host: int = ROOMY,
    *,
    depth: int = 2,
    noise: float = 0.0,
    seed: int = 0,
    fast_forward: bool = True,
    host_ns: int = 0,
) -> Replay:
    """Jobs under a policy, on toy hardware without a page of KV; all laws hold."""
    env, recorder = VirtualClock(), Recorder()
    journal = Journal(lambda: int(env.now))
    engine = Engine(
        env,
        policy,
        ToyExecutor(env, noise, seed, host_ns=host_ns, duration=duration_ns),
        {(Tier.GPU, 0): gpu, (Tier.HOST, 0): host},
        NO_PAGES,
        depth=depth,
        layout=layout,
        recorder=recorder,
        journal=journal,
        fast_forward=fast_forward,
    )
    engine.replay(jobs)
    found = Replay(engine, recorder, journal)
    check_contents(found.check())
    return found


def duration_ns(launch: Launch) -> int:
    """Made up: updates are slow, copies take time by their bytes."""
    if not launch.pieces:
        return 100 + 20 * launch.nbytes
    return 3_000 if getattr(launch.op, "on", "") == HOST_LANE else 1_000


# ---- what plans mean, read in their order
def check_contents(run: Replay) -> None:
    """Launches, copies and collectives find what is new, and weights of other devices are those of
    the own ones; gradients and activations end with their step."""
    newest, there = defaultdict[Region, int](int), dict[Place, int]()
    gathered = dict[Region, int]()  # the version of the own weights
    there.update(dict.fromkeys(run.engine.state.layout.places, 0))
    for plan in run.plans:
        for op in plan.ops:
            match op:
                case Compute() | Collective():
                    for place in op.reads if isinstance(op, Compute) else ():
                        if place.region.slot == GATHERED and place.region.kind is Kind.BUFFER:
                            own = place.region._replace(kind=Kind.WEIGHT, slot=0)
                            assert gathered[place.region] == newest[own], f"{place} is old"
                    for place in (*op.reads, *op.writes):
                        assert there[place] == newest[place.region], (
                            f"{op} finds {place} out of date"
                        )
                    for place in op.writes:
                        newest[place.region] += 1
                        there[place] = newest[place.region]
                    for region in [place.region for place in op.writes]:
                        if (region.kind, region.slot) == (Kind.BUFFER, GATHERED):
                            gathered[region] = newest[region._replace(kind=Kind.WEIGHT, slot=0)]
                case Copy():
                    assert there[op.src] == newest[op.src.region], f"copy of old {op.src}"
                    there[op.dst] = there[op.src]
                case Grow():
                    assert op.place not in there, f"{op.place} grows twice"
                    there[op.place] = newest[op.place.region]
                case Free():
                    del there[op.place]
    buffers = {p for p in there if (p.region.kind, p.region.slot) == (Kind.BUFFER, GATHERED)}
    there = {place: n for place, n in there.items() if place not in buffers}
    kinds = {place.region.kind for place in there}
    assert kinds <= {Kind.WEIGHT, Kind.OPTIMIZER}, f"{kinds} are left at the end"
    held = {place.region for place in there}
    assert held == {*_states(run.engine.state.layout)}, "states are lost"


def _states(layout: Layout) -> Iterator[Region]:
    """What is held of all jobs at their end: weights and optimizer states."""
    for job_id, laid in layout.training.items():
        for c, chunk in enumerate(laid.chunks):
            yield weight(job_id, c).region
            if chunk.optimizer_bytes:
                yield optimizer(job_id, c).region


def operations(run: Replay) -> list[Any]:
    """What was issued, over all plans, in the words of a plan log."""
    return [op for _, body in run.log() for op in json.loads(body)["ops"]]


def launches(run: Replay) -> list[Compute]:
    return [op for plan in run.plans for op in plan.ops if isinstance(op, Compute)]


def evictions(run: Replay, step: int) -> int:
    """Copies from the device to the host in the plans of a step."""
    return sum(
        isinstance(op, Copy) and op.src.tier is Tier.GPU
        for plan in by_step(run)[step]
        for op in plan.ops
    )


def by_step(run: Replay) -> dict[int, list[Plan]]:
    """Plans by the step of their first launch; none of these tests has one without."""
    found = defaultdict[int, list[Plan]](list)
    for plan in run.plans:
        first = next(op for op in plan.ops if isinstance(op, Compute))
        piece = first.slices[0]
        assert piece.job.training is not None
        found[piece.microbatch // piece.job.training.spec.microbatches].append(plan)
    return found


# ---- hand-made chunks
def equal_chunks(count: int, nbytes: int = 10) -> Layout:
    """Units with a chunk each, and nothing else that takes memory; all on the host."""
    chunks = tuple(Chunk((c,), nbytes, nbytes, 0) for c in range(count))
    units = tuple(Unit((u,), (u,), Mode.KEEP, 0, 0, 0, 0, 0) for u in range(count))
    places = {Place(Region(0, Kind.WEIGHT, c), Tier.HOST): nbytes for c in range(count)}
    return Layout(places, {0: TrainingLayout(chunks, units)})


REUSING = Recipe(dtype="bfloat16")


# ---- the least memory that an order of work needs, by hand
def min_device_bytes(
    layout: TrainingLayout, job: TrainingJob, all_weights: bool, device_updates: bool
) -> int:
    """What a launch needs at once where everything else can be away, at its worst.

    Walks a microbatch in order; inputs of units, saved activations and the flow are booked from
    launch to launch, weights and gradients only where a launch uses them (or all weights, always).
    """
    last, peak, booked = len(layout.units) - 1, 0, 0
    chunks, aside = layout.chunks, 0
    if job.microbatches > 1:  # a tied table's gradient waits from the head's backward on
        aside = layout.units[last].tied_gradient_bytes

    def weights(u: int) -> int:
        own = range(len(chunks)) if all_weights else layout.units[u].chunks
        return sum(chunks[c].weight_bytes for c in own)

    def out(u: int) -> int:
        return layout.units[u + 1].input_bytes if u < last else 0

    for u, unit in enumerate(layout.units):
        has_backward = u >= layout.first
        keeps = has_backward and unit.mode is not Mode.RECOMPUTE
        saved = unit.saved_bytes if keeps else 0
        work = unit.forward_bytes if keeps else unit.light_bytes
        peak = max(peak, booked + out(u) + saved + work + weights(u))
        booked += out(u) + (saved if unit.mode is Mode.KEEP else 0)
        booked -= 0 if has_backward else unit.input_bytes
    for u in range(last, layout.first - 1, -1):
        unit = layout.units[u]
        if unit.mode is not Mode.KEEP:
            booked += unit.saved_bytes
        if unit.mode is Mode.RECOMPUTE:
            peak = max(peak, booked + unit.forward_bytes + out(u) + weights(u))
        down = unit.input_bytes if u > layout.first else 0
        gradients = sum(chunks[c].gradient_bytes for c in unit.trained)
        work = max(aside, unit.backward_bytes) if u == last else unit.backward_bytes
        peak = max(peak, booked + down + work + gradients + weights(u))
        booked += down - unit.saved_bytes - unit.input_bytes - out(u)
        booked += aside if u == last else 0
    assert booked == aside, "nothing is left of a microbatch"
    if device_updates:
        each = [c.weight_bytes + c.gradient_bytes + c.optimizer_bytes for c in chunks if c.trains]
        peak = max(peak, *each)
    return peak


def state_bytes(layout: TrainingLayout) -> int:
    """Weights, gradients and optimizer states."""
    return sum(c.weight_bytes + c.gradient_bytes + c.optimizer_bytes for c in layout.chunks)


def sent_bytes(layout: TrainingLayout) -> int:
    """What units save for the host in a microbatch."""
    return sum(unit.saved_bytes for unit in layout.units if unit.mode is Mode.OFFLOAD)
