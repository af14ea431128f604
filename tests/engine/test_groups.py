"""Data-parallel groups in plans: parts of chunks, gathers before launches, reductions behind."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.contract.layout import Layout, Mode
from engine.contract.plan import NET_LANE, Collective, Compute, Pattern
from engine.contract.regions import Kind, Tier, Work, gradient
from engine.results.plan_log import decode, encode
from policies.planners.fixed_chunks import FixedChunks
from policies.planners.unit_chunks import UnitChunks
from policies.training.out_of_memory import OutOfMemory
from policies.training.patrickstar import PatrickStar
from tests.support.offload import (
    MEMORIES,
    REUSING,
    ROOMY,
    job_of,
    launches,
    operations,
    run,
    shape_of,
)
from tests.support.replays import Replay
from tests.support.strategies import cases

CAPACITY = {(Tier.GPU, 0): ROOMY, (Tier.HOST, 0): ROOMY}


def in_group(
    memory: Any,
    ranks: int = 4,
    mode: Mode = Mode.KEEP,
    shape: Any = None,
    shards: bool = True,
    **more: Any,
) -> Replay:
    """A run of one device of a group; a chunk per unit. All laws hold of it."""
    how = {key: more.pop(key) for key in ("gpu", "host", "tasks", "depth") if key in more}
    shape = shape or shape_of(random.Random(3))
    job = job_of(shape, ranks=ranks, **more)
    layout = UnitChunks(mode, shards=shards).prepare({0: shape}, [job], CAPACITY)
    return run(memory, layout, job, **how)


def collectives(found: Replay) -> list[Collective]:
    return [op for plan in found.plans for op in plan.ops if isinstance(op, Collective)]


def layout_of(found: Replay) -> Any:
    return found.engine.state.layout.training[0]


# ---- parts
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_devices_have_equal_parts_and_lose_nothing(ranks: int) -> None:
    shape = shape_of(random.Random(1))
    job = job_of(shape, ranks=ranks)
    whole = UnitChunks().prepare({0: shape}, [job_of(shape)], CAPACITY).training[0]
    parts = UnitChunks().prepare({0: shape}, [job], CAPACITY).training[0]
    copies = UnitChunks(shards=False).prepare({0: shape}, [job], CAPACITY).training[0]
    assert parts.ranks == copies.ranks == ranks
    assert copies.chunks == whole.chunks
    for part, chunk in zip(parts.chunks, whole.chunks, strict=True):
        for name in ("weight_bytes", "gradient_bytes", "optimizer_bytes"):
            left = ranks * getattr(part, name) - getattr(chunk, name)
            assert 0 <= left < ranks * 8, "filled up to whole numbers"
        assert part.remote_bytes == (ranks - 1) * part.weight_bytes
        assert part.whole_bytes == ranks * part.weight_bytes


def test_a_chunk_of_fixed_size_is_that_of_the_whole_group() -> None:
    shape = shape_of(random.Random(1))
    job = job_of(shape, ranks=4)
    planner = FixedChunks(64, owned=False)
    chunks = planner.prepare({0: shape}, [job], CAPACITY).training[0].chunks
    assert {chunk.weight_bytes for chunk in chunks} == {16 * shape.item_bytes}


@cases(60)
@given(
    seed=st.integers(0, 1 << 16),
    layers=st.integers(1, 9),
    ranks=st.integers(1, 9),
    size=st.integers(30, 90),
)
def test_whole_chunks_are_those_of_the_device_that_owns_most(
    seed: int, layers: int, ranks: int, size: int
) -> None:
    """Chunk i is of device i mod n. Its states, spread over all chunks but for what fills each up
    to whole numbers; no chunk is larger than it is."""
    shape = shape_of(random.Random(seed), layers)
    planner, job = FixedChunks(size), job_of(shape, ranks=ranks)
    chunks = planner.prepare({0: shape}, [job], CAPACITY).training[0].chunks
    most = max(len(range(rank, len(chunks), ranks)) for rank in range(ranks))
    for name, each in (("weight_bytes", 4), ("gradient_bytes", 4), ("optimizer_bytes", 8)):
        extra = sum(getattr(chunk, name) for chunk in chunks) - most * size * each
        assert 0 <= extra < len(chunks) * each
    whole = {chunk.whole_bytes for chunk in chunks}
    assert max(whole) < (size + len(chunks)) * 4 and min(whole) >= size * 4


def test_owners_of_as_many_chunks_have_what_equal_parts_have() -> None:
    shape = shape_of(random.Random(4), layers=9)
    for ranks in (2, 3, 4):
        job = job_of(shape, ranks=ranks)
        found = [
            FixedChunks(40, owned=owned).prepare({0: shape}, [job], CAPACITY).training[0]
            for owned in (False, True)
        ]
        is_even = len(found[0].chunks) % ranks == 0
        assert (found[0].chunks == found[1].chunks) is is_even
    alone = job_of(shape)
    found = [
        FixedChunks(40, owned=owned).prepare({0: shape}, [alone], CAPACITY).training[0]
        for owned in (False, True)
    ]
    assert found[0] == found[1], "one device owns everything"


@pytest.mark.parametrize("mode", [*Mode])
@pytest.mark.parametrize("name", MEMORIES)
def test_every_policy_trains_as_the_owner_of_most_chunks(name: str, mode: Mode) -> None:
    """Five chunks or so of three devices, states made at their first update: all laws hold."""
    shape = shape_of(random.Random(8), layers=4, tied=True)
    job = job_of(shape, ranks=3)
    planner = FixedChunks(45, modes=mode, states="first_update")
    layout = planner.prepare({0: shape}, [job], CAPACITY)
    assert len(layout.training[0].chunks) % 3
    found = run(MEMORIES[name], layout, job)
    counts = Counter(op.pattern for op in collectives(found))
    assert counts[Pattern.REDUCE_SCATTER] == 3 * sum(c.trains for c in layout.training[0].chunks)


def test_a_group_of_one_exchanges_nothing() -> None:
    for memory in MEMORIES.values():
        assert not collectives(in_group(memory, ranks=1))


# ---- every policy
@pytest.mark.broad(2)
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("mode", [*Mode])
@pytest.mark.parametrize("name", MEMORIES)
def test_every_policy_trains_in_a_group(name: str, mode: Mode, microbatches: int) -> None:
    """Laws and contents are checked by `run`: gathered weights are never old."""
    shape = shape_of(random.Random(mode.value), tied=True)
    found = in_group(MEMORIES[name], 4, mode, shape, microbatches=microbatches)
    layout = layout_of(found)
    trained, steps = sum(c.trains for c in layout.chunks), 3
    counts = Counter(op.pattern for op in collectives(found))
    assert counts[Pattern.REDUCE_SCATTER] == trained * steps * microbatches
    assert counts[Pattern.ALL_GATHER] >= trained
    assert Pattern.ALL_REDUCE not in counts


@pytest.mark.broad(4)
@pytest.mark.parametrize("name", MEMORIES)
def test_a_whole_step_in_one_plan_is_the_same_program(name: str) -> None:
    shape = shape_of(random.Random(5), tied=True)
    logs = [
        operations(in_group(MEMORIES[name], 2, Mode.RECOMPUTE, shape, tasks=tasks, microbatches=2))
        for tasks in (1, 5, 0)
    ]
    assert logs[0] == logs[1] == logs[2]


@cases(30)
@given(
    seed=st.integers(0, 10_000),
    name=st.sampled_from([*MEMORIES]),
    mode=st.sampled_from([*Mode]),
    ranks=st.sampled_from([2, 4, 8]),
    share=st.floats(0.02, 1.2),
    depth=st.integers(1, 3),
)
def test_in_little_memory_a_group_trains_or_says_what_is_missing(
    seed: int, name: str, mode: Mode, ranks: int, share: float, depth: int
) -> None:
    shape = shape_of(random.Random(seed), layers=4)
    gpu = int(share * 2_000)
    try:
        in_group(MEMORIES[name], ranks, mode, shape, gpu=gpu, depth=depth)
    except OutOfMemory as error:
        assert error.deficit_bytes > 0
        in_group(MEMORIES[name], ranks, mode, shape, depth=depth)


# ---- when and what
def test_zero3_gathers_for_forward_and_backward_and_scatters_once() -> None:
    """But for what a unit uses twice in turn: the head, at the turn from forward to backward."""
    found = in_group(MEMORIES["zero3_offload"], 4)
    layout, steps = layout_of(found), 3
    per_chunk = defaultdict[int, Counter[Pattern]](Counter)
    for op in collectives(found):
        c = op.writes[0].region.part
        per_chunk[c][op.pattern] += 1
        assert op.nbytes == layout.chunks[c].whole_bytes
        assert op.lane == (0, NET_LANE)
    last = len(layout.chunks) - 1
    for c, counts in per_chunk.items():
        assert counts[Pattern.REDUCE_SCATTER] == steps
        assert counts[Pattern.ALL_GATHER] == (1 if c == last else 2) * steps


def test_what_stays_is_gathered_once_and_again_behind_each_update() -> None:
    found = in_group(MEMORIES["zero_offload"], 4)
    counts = Counter(op.pattern for op in collectives(found))
    chunks = len(layout_of(found).chunks)
    assert counts[Pattern.ALL_GATHER] == chunks * (1 + 3), "the first time, and after three updates"


def test_where_each_device_has_all_gradients_are_reduced_once_a_step() -> None:
    found = in_group(MEMORIES["all_on_device"], 4, shards=False, microbatches=4)
    layout, ops = layout_of(found), collectives(found)
    assert {op.pattern for op in ops} == {Pattern.ALL_REDUCE}
    assert len(ops) == 3 * len(layout.chunks)
    for op in ops:
        c = op.writes[0].region.part
        assert op.reads == op.writes == (gradient(0, c),)
        assert op.nbytes == layout.chunks[c].gradient_bytes


@pytest.mark.parametrize("name", ["zero3_offload", "zero_offload", "patrickstar", "all_on_device"])
def test_updates_come_behind_the_reduction_of_their_chunk(name: str) -> None:
    found = in_group(MEMORIES[name], 4, shards=name != "all_on_device")
    reduced: dict[int, int] = {}
    for plan in found.plans:
        for op in plan.ops:
            if isinstance(op, Collective) and op.pattern is not Pattern.ALL_GATHER:
                reduced[op.writes[0].region.part] = found.spans[op].end_ns
            elif isinstance(op, Compute) and op.slices[0].work is Work.UPDATE:
                c = op.slices[0].layers.start  # type: ignore[union-attr]
                assert found.spans[op].start_ns >= reduced.pop(c)
    assert not reduced


def test_a_unit_computes_behind_its_gather() -> None:
    found = in_group(MEMORIES["zero3_offload"], 4, depth=3)
    ended: dict[Any, int] = {}
    looked = 0
    for plan in found.plans:
        for op in plan.ops:
            if isinstance(op, Collective):
                ended[op.writes[0]] = found.spans[op].end_ns
            elif isinstance(op, Compute):
                away = [place for place in op.reads if place in ended]
                looked += len(away)
                assert all(found.spans[op].start_ns >= ended[place] for place in away)
    assert looked > 0


def test_prefetch_gathers_while_a_unit_computes() -> None:
    ends = [
        in_group(MEMORIES[name], 4, depth=1).engine.state.env.now
        for name in ("zero3_none_ahead", "zero3_offload")
    ]
    assert ends[0] > ends[1]


def test_a_device_takes_less_with_more_devices() -> None:
    shape = shape_of(random.Random(9), layers=6)
    copied = []
    for ranks in (1, 2, 4, 8):
        found = in_group(MEMORIES["zero3_offload"], ranks, shape=shape)
        copied.append(
            sum(
                launch.nbytes
                for *_, launch in found.recorder.steps
                if not launch.pieces and not isinstance(launch.op, Collective)
            )
        )
    assert copied == sorted(copied, reverse=True)
    assert copied[3] < copied[0] / 4, "parts are filled up to whole numbers"


def test_gradients_over_weights_are_scattered_there() -> None:
    shape = shape_of(random.Random(11), item_bytes=2, optimizer_item_bytes=12)
    found = in_group(PatrickStar(reuses_gradients=True), 4, shape=shape, recipe=REUSING)
    for op in collectives(found):
        assert op.writes[0].region.kind is not Kind.GRADIENT


@pytest.mark.parametrize("mode", [Mode.KEEP, Mode.RECOMPUTE])
def test_gathered_weights_of_a_tied_table_stay_while_gradients_lie_there(mode: Mode) -> None:
    """From the head's backward to that of the embedding; also where chunks span several units."""
    shape = shape_of(random.Random(11), tied=True, item_bytes=2, optimizer_item_bytes=12)
    job = job_of(shape, ranks=2, recipe=REUSING)
    for planner in (UnitChunks(mode), FixedChunks(60, modes=mode)):
        layout = planner.prepare({0: shape}, [job], CAPACITY)
        found = run(PatrickStar(reuses_gradients=True), layout, job)
        counts = Counter(op.pattern for op in collectives(found))
        assert counts[Pattern.REDUCE_SCATTER] == 3 * len(layout.training[0].chunks)


def test_patrickstar_makes_room_for_what_is_gathered() -> None:
    """Gathered weights count as other bytes of the launches that use them."""
    found = in_group(PatrickStar(), 4)
    layout = layout_of(found)
    moments = found.engine.state.profile.moments(0)
    for moment in moments[: len(layout.units)]:
        ((_, units, _),) = moment.unit
        assert units is not None
        own = layout.units[units.start].chunks
        assert moment.other_bytes >= sum(layout.chunks[c].remote_bytes for c in own)


# ---- logs and tables
def test_collectives_are_in_the_plan_log_and_in_the_tables() -> None:
    found = in_group(MEMORIES["zero3_offload"], 4)
    jobs = {0: launches(found)[0].slices[0].job}
    for plan in found.plans:
        assert encode(decode(encode(plan), jobs)) == encode(plan)
    rows = [row for row in found.rows("steps") if row["lane"] == NET_LANE]
    assert len(rows) == len(collectives(found))
    assert {row["work"] for row in rows} == {"all_gather", "reduce_scatter"}
    assert all(row["nbytes"] > 0 and row["jobs"] == [0] for row in rows)
    tokens = {row["tokens"] for row in found.rows("training")}
    assert tokens == {4 * 8}, "of all devices"


def test_layouts_without_a_group_are_as_before() -> None:
    shape = shape_of(random.Random(2))
    layout: Layout = UnitChunks().prepare({0: shape}, [job_of(shape)], CAPACITY)
    assert all(chunk.remote_bytes == 0 for chunk in layout.training[0].chunks)
