"""The specification's states of tensors and chunks, as they follow from places and launches."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.contract.layout import Mode
from engine.contract.plan import Compute, Copy, Free, Grow
from engine.contract.regions import Kind, Place, Region, Tier, weight
from tests.support.offload import (
    MEMORIES,
    ROOMY,
    STATES,
    job_of,
    laid_out,
    min_device_bytes,
    run,
    shape_of,
)
from tests.support.replays import Replay
from tests.support.strategies import cases

EXCLUSIVE = ("lru", "opt_on_device", "patrickstar", "patrickstar_static")


@pytest.mark.broad(4)
@pytest.mark.parametrize("name", MEMORIES)
@cases(20)
@given(st.integers(0, 2**32))
def test_states_of_chunks_follow_from_places_and_launches(name: str, seed: int) -> None:
    found = random_run(name, random.Random(seed))
    computing_stays(found)
    freed_is_dead(found)
    chunks_are_somewhere(found, name in EXCLUSIVE)


def random_run(name: str, rng: random.Random) -> Replay:
    """All laws hold of it: bytes of what is in flight come back behind it (law 11b)."""
    shape, mode = shape_of(rng, rng.randint(1, 5), tied=rng.random() < 0.3), rng.choice([*Mode])
    job = job_of(shape, microbatches=rng.choice([1, 2, 4]))
    training = laid_out(shape, mode).training[0]
    least = min_device_bytes(training, job, False, True)
    gpu = least + 2 * max(chunk.whole_bytes for chunk in training.chunks) + rng.randint(0, 300)
    if name in ("all_on_device", "zero_offload"):  # all weights lie there
        gpu = ROOMY
    start = "device" if name == "all_on_device" else "host"
    layout = laid_out(shape, mode, start, gpu)  # type: ignore[arg-type]
    return run(MEMORIES[name], layout, job, gpu=gpu, tasks=rng.choice([0, 1, 5]))


def computing_stays(found: Replay) -> None:
    """COMPUTE: once the first of what a launch touches comes, nothing of it leaves before it."""
    for plan in found.plans:
        since = list[Copy | Grow | Free]()  # the last launch
        for op in plan.ops:
            if isinstance(op, Copy | Grow | Free):
                since.append(op)
            elif isinstance(op, Compute):
                own = {*op.reads, *op.writes}
                here = [i for i, one in enumerate(since) if _arrives(one) in own]
                behind = since[here[0] :] if here else []
                left = {one.place for one in behind if isinstance(one, Free)}
                assert left.isdisjoint(own), f"{op} lost {left & own}"
                since.clear()


def _arrives(op: Copy | Grow | Free) -> Place | None:
    return op.dst if isinstance(op, Copy) else op.place if isinstance(op, Grow) else None


def freed_is_dead(found: Replay) -> None:
    """FREE: what goes without a copy is not used again in its step; weights and states never go."""
    there = set(found.engine.state.layout.places)
    ended = dict[Region, int]()
    for step, op in operations_by_step(found):
        match op:
            case Compute():
                for place in (*op.reads, *op.writes):
                    assert place in there, f"{place} is computed on and not there"
                    assert ended.get(place.region, -1) < step, f"{place} was not dead"
            case Copy():
                assert op.src in there, f"{op} moves what is gone"
                there.add(op.dst)
            case Grow():
                there.add(op.place)
            case Free():
                there.remove(op.place)
                region = op.place.region
                if region.kind is not Kind.BUFFER and not any(p.region == region for p in there):
                    assert region.kind in (Kind.GRADIENT, Kind.ACTIVATION), f"{region} is lost"
                    ended[region] = step


def chunks_are_somewhere(found: Replay, is_exclusive: bool) -> None:
    """HOLD: at each launch the weights of a chunk lie somewhere, and a region of an exclusive tier
    in one place."""
    there = set(found.engine.state.layout.places)
    count = len(found.engine.state.layout.training[0].chunks)
    for _, op in operations_by_step(found):
        if isinstance(op, Copy):
            there.add(op.dst)
        elif isinstance(op, Grow):
            there.add(op.place)
        elif isinstance(op, Free):
            there.remove(op.place)
        elif isinstance(op, Compute):
            tiers = defaultdict[Region, list[Tier]](list)
            for place in there:
                tiers[place.region].append(place.tier)
            assert all(tiers[weight(0, c).region] for c in range(count)), "a chunk is nowhere"
            states = [n for region, n in tiers.items() if region.kind in STATES]
            assert not is_exclusive or all(len(n) == 1 for n in states), "in both tiers"


def operations_by_step(found: Replay) -> Iterator[tuple[int, object]]:
    """Each operation with the step of the last launch before it, or its own."""
    step = 0
    for op in [op for plan in found.plans for op in plan.ops]:
        if isinstance(op, Compute):
            piece = op.slices[0]
            assert piece.job.training is not None
            step = piece.microbatch // piece.job.training.spec.microbatches
        yield step, op
