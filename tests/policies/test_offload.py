"""Every offloading policy under every law: all modes of activations, what trains, accumulation."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from engine.contract.layout import Mode
from engine.contract.plan import COMPUTE_LANE, HOST_LANE
from engine.contract.regions import Kind, Tier, Work
from engine.contract.rules import Remedy, SettingsConflict
from policies.training.demand_paging import DemandPaging
from policies.training.out_of_memory import OutOfMemory
from policies.training.patrickstar import PatrickStar
from policies.training.zero3_offload import Zero3Offload
from tandem.wiring.budget import advised_line
from tests.support.offload import (
    MEMORIES,
    REUSING,
    ROOMY,
    job_of,
    laid_out,
    launches,
    min_device_bytes,
    operations,
    run,
    sent_bytes,
    shape_of,
    state_bytes,
)
from tests.support.strategies import cases
from traces.training.recipe import Recipe

TRAINED: dict[str, dict[str, Any]] = {
    "full": {},
    "tied": {"tied": True},
    "adapters": {"adapters": True},
    "frozen first units": {"frozen_units": 2},
}
STREAMING = (
    "zero_offload",
    "zero3_offload",
    "zero3_two_ahead",
    "zero3_none_ahead",
    "fsdp2_offload",
)
INCLUSIVE = (*STREAMING, "fifo_inclusive", "opt_inclusive")
ON_DEVICE = ("all_on_device", "opt_on_device", "opt_inclusive")  # updates


def combinations() -> Iterator[Any]:
    """All of them; the fast set has every policy with every mode, and all else in turn."""
    for i, case in enumerate(product(MEMORIES, Mode, TRAINED, (1, 2, 4))):
        is_fast = i % 12 == i // 12 % 12  # of the twelve that a policy and mode have
        yield pytest.param(*case, marks=() if is_fast else pytest.mark.slow)


@pytest.mark.broad(2)
@pytest.mark.parametrize(("name", "mode", "trained", "microbatches"), [*combinations()])
def test_every_policy_with_every_mode(
    name: str, mode: Mode, trained: str, microbatches: int
) -> None:
    """In little memory where it can do with little; laws and contents are checked by `run`."""
    shape = shape_of(random.Random(f"{trained}{microbatches}"), **TRAINED[trained])
    layout, job = laid_out(shape, mode), job_of(shape, microbatches=microbatches)
    training = layout.training[0]
    gpu = ROOMY
    if name != "all_on_device":
        gpu = min_device_bytes(training, job, name == "zero_offload", device_updates=True)
    found = run(MEMORIES[name], layout, job, gpu=gpu)
    counts = {work: 0 for work in Work}
    for op in launches(found):
        counts[op.slices[0].work] += not op.again
    steps = job.num_steps * microbatches
    backward = len(training.units) - training.first
    assert counts[Work.FORWARD] == steps * len(training.units)
    assert counts[Work.BACKWARD] == steps * backward
    assert counts[Work.UPDATE] == job.num_steps * sum(c.trains for c in training.chunks)
    again = sum(op.again for op in launches(found))
    assert again == steps * sum(
        unit.mode is Mode.RECOMPUTE for unit in training.units[training.first :]
    )


@pytest.mark.broad(4)
@pytest.mark.parametrize("name", MEMORIES)
@pytest.mark.parametrize(
    "mode", [Mode.RECOMPUTE, pytest.param(Mode.OFFLOAD, marks=pytest.mark.slow)]
)
def test_a_whole_step_in_one_plan_is_the_same_program(name: str, mode: Mode) -> None:
    """Places, stamps and next uses of a draft are those that the engine would have shown."""
    shape = shape_of(random.Random(5), layers=3, tied=True)
    layout, job = laid_out(shape, mode), job_of(shape, microbatches=2)
    gpu = ROOMY
    if name != "all_on_device":
        gpu = min_device_bytes(layout.training[0], job, name == "zero_offload", True) * 5 // 4
    programs = [operations(run(MEMORIES[name], layout, job, gpu=gpu, tasks=n)) for n in (1, 7, 0)]
    assert programs[0] == programs[1] == programs[2]


SHAPES = {
    "seed": st.integers(0, 1 << 16),
    "layers": st.integers(1, 5),
    "trained": st.sampled_from([*TRAINED]),
    "mode": st.sampled_from([*Mode]),
    "microbatches": st.sampled_from([1, 2, 4]),
}


@cases(100)
@given(
    **SHAPES,
    name=st.sampled_from(INCLUSIVE),
    share=st.floats(0.6, 1.6),
    host_share=st.floats(0.9, 1.3),
    depth=st.integers(1, 3),
    tasks=st.integers(0, 3),
)
def test_inclusive_tiers_run_in_the_least_memory_and_only_there(
    seed: int,
    layers: int,
    trained: str,
    mode: Mode,
    microbatches: int,
    name: str,
    share: float,
    host_share: float,
    depth: int,
    tasks: int,
) -> None:
    """Out of memory if and only if the device has less than a launch needs at once, or the host
    less than all states and all that is sent to it; reckoned by hand in
    tests/support/offload.py."""
    shape = shape_of(random.Random(seed), layers, **TRAINED[trained])
    layout, job = laid_out(shape, mode), job_of(shape, microbatches=microbatches)
    training, on_device = layout.training[0], name in ON_DEVICE
    least = min_device_bytes(training, job, name == "zero_offload", on_device)
    states = state_bytes(training)
    gpu, host = int(least * share), int((states + sent_bytes(training)) * host_share)
    assume(host >= sum(layout.places.values()))
    try:
        run(MEMORIES[name], layout, job, gpu=gpu, host=host, depth=depth, tasks=tasks)
    except OutOfMemory as error:
        assert error.deficit_bytes > 0
        assert gpu < least or host < states + sent_bytes(training), error
    else:
        assert gpu >= least


@cases(100)
@given(
    **SHAPES,
    name=st.sampled_from(["lru", "opt_on_device", "patrickstar", "patrickstar_static"]),
    share=st.floats(0.6, 3.0),
    both_share=st.floats(0.7, 1.4),
    depth=st.integers(1, 3),
    tasks=st.integers(0, 3),
)
@example(  # its budget once sent to the host what took the room of an update there
    seed=81,
    layers=2,
    trained="full",
    mode=Mode.RECOMPUTE,
    microbatches=1,
    name="patrickstar_static",
    share=2.875,
    both_share=1.34375,
    depth=1,
    tasks=1,
)
def test_exclusive_tiers_run_wherever_a_chunk_can_move(
    seed: int,
    layers: int,
    trained: str,
    mode: Mode,
    microbatches: int,
    name: str,
    share: float,
    both_share: float,
    depth: int,
    tasks: int,
) -> None:
    """A copy under way counts on both tiers, and a chunk moves whole: beside all states and what a
    launch needs, room for the two that change places is all that is ever asked for."""
    shape = shape_of(random.Random(seed), layers, **TRAINED[trained])
    training, job = laid_out(shape, mode).training[0], job_of(shape, microbatches=microbatches)
    least = min_device_bytes(training, job, False, True)
    gpu = int(least * share)
    host = max(0, int((state_bytes(training) + least) * both_share) - gpu)
    try:
        layout = laid_out(shape, mode, "host_first", gpu, host)
    except OutOfMemory:
        assume(False)
    kept = sum(u.saved_bytes + u.input_bytes for u in training.units)
    chunk = max(max(c.weight_bytes, c.gradient_bytes, c.optimizer_bytes) for c in training.chunks)
    moving = 2 * max(chunk, *(u.saved_bytes for u in training.units))
    try:
        run(MEMORIES[name], layout, job, gpu=gpu, host=host, depth=depth, tasks=tasks)
    except OutOfMemory as error:
        assert error.deficit_bytes > 0
        enough = state_bytes(training) + kept + least + moving
        assert gpu < least or gpu + host < enough, error
    else:
        needed = min_device_bytes(training, job, False, False)
        assert gpu >= needed


@cases(30)
@given(**SHAPES, name=st.sampled_from([*MEMORIES]), depth=st.integers(1, 3))
def test_plans_do_not_depend_on_durations(
    seed: int,
    layers: int,
    trained: str,
    mode: Mode,
    microbatches: int,
    name: str,
    depth: int,
) -> None:
    shape = shape_of(random.Random(seed), layers, **TRAINED[trained])
    layout, job = laid_out(shape, mode), job_of(shape, microbatches=microbatches)
    gpu = ROOMY
    if name != "all_on_device":
        whole = name == "zero_offload"
        gpu = min_device_bytes(layout.training[0], job, whole, True) * 4 // 3
    logs = [
        run(MEMORIES[name], layout, job, gpu=gpu, depth=depth, noise=noise, seed=i).log()
        for i, noise in enumerate((0.0, 0.4, 0.4))
    ]
    assert logs[0] == logs[1] == logs[2]


def test_out_of_memory_names_the_launch_the_tier_and_the_deficit() -> None:
    shape = shape_of(random.Random(3))
    layout, job = laid_out(shape), job_of(shape)
    least = min_device_bytes(layout.training[0], job, False, False)
    with pytest.raises(
        OutOfMemory, match=r"^gpu:0 is at least 1 bytes short for the .* of training job 0"
    ):
        run(Zero3Offload(), layout, job, gpu=least - 1)
    with pytest.raises(OutOfMemory, match=r"^gpu:0 is"):
        run(MEMORIES["all_on_device"], layout, job, gpu=least)
    with pytest.raises(OutOfMemory, match=r"^host:0 is .* bytes short for the update of chunk"):
        run(Zero3Offload(), layout, job, host=sum(layout.places.values()))


def test_what_went_in_the_place_of_something_larger_is_no_part_of_a_deficit() -> None:
    """With what the larger one lacked, it would have gone: with a byte less nothing changes."""
    shape = shape_of(random.Random(52879), 1, frozen_units=2)
    gpu, host, job = 295, 119, job_of(shape, microbatches=4)
    layout = laid_out(shape, Mode.OFFLOAD, "host_first", gpu, host)

    def deficit_bytes(more: int) -> int:
        with pytest.raises(OutOfMemory, match=r"^host:0") as caught:
            run(MEMORIES["lru"], layout, job, gpu=gpu, host=host + more, tasks=0)
        return caught.value.deficit_bytes

    lacks = deficit_bytes(0)
    assert lacks > 1
    assert deficit_bytes(lacks - 1) == 1


def test_deficits_are_the_same_in_every_timing() -> None:
    shape = shape_of(random.Random(4), layers=4)
    layout, job = laid_out(shape, Mode.OFFLOAD), job_of(shape, microbatches=2)
    least = min_device_bytes(layout.training[0], job, False, False)
    for name in ("zero3_offload", "lru", "patrickstar"):
        said = set()
        for depth, noise in ((1, 0.0), (2, 0.4), (3, 0.4)):
            with pytest.raises(OutOfMemory) as caught:
                run(MEMORIES[name], layout, job, gpu=least - 3, depth=depth, noise=noise)
            said.add(str(caught.value))
        assert len(said) == 1


# ---- what distinguishes policies
def test_inclusive_tiers_copy_no_weights_out_and_exclusive_ones_each() -> None:
    shape = shape_of(random.Random(8), layers=5)
    layout, job = laid_out(shape), job_of(shape)
    gpu = min_device_bytes(layout.training[0], job, False, False)
    for tiers, wanted in (("inclusive", False), ("exclusive", True)):
        found = run(DemandPaging("lru", tiers), layout, job, gpu=gpu)
        out = [op[1] for op in operations(found) if op[0] == "copy" and op[1][4] == Tier.GPU]
        assert any(src[1] == Kind.WEIGHT for src in out) is wanted
        assert any(src[1] == Kind.GRADIENT for src in out)


def test_prefetch_hides_transfers_that_run_ahead_alone_does_not() -> None:
    """At run-ahead 1 the next unit's weights come while this one computes, if asked for."""
    shape = shape_of(random.Random(9), layers=5)
    layout, job = laid_out(shape), job_of(shape)
    ends = [
        run(Zero3Offload(prefetch=n), layout, job, depth=1).engine.state.env.now for n in (0, 1, 2)
    ]
    assert ends[0] > ends[1] >= ends[2]


def test_updates_overlap_the_next_forward_only_where_they_may() -> None:
    shape = shape_of(random.Random(10), layers=5)
    layout, job = laid_out(shape), job_of(shape)
    for overlaps in (False, True):
        found = run(Zero3Offload(overlaps_updates=overlaps), layout, job)
        ops = launches(found)
        forward = next(op for op in ops if op.slices[0][2:5] == (Work.FORWARD, range(0, 1), 1))
        updates = [op for op in ops if op.on == HOST_LANE and op.slices[0].microbatch == 0]
        last = found.spans[updates[-1]].end_ns
        assert (found.spans[forward].start_ns < last) is overlaps


def test_gradients_in_the_place_of_weights_have_no_region() -> None:
    shape = shape_of(random.Random(11), item_bytes=2, optimizer_item_bytes=12)
    layout, job = laid_out(shape), job_of(shape, recipe=REUSING)
    for memory in (PatrickStar(reuses_gradients=True), DemandPaging(reuses_gradients=True)):
        found = run(memory, layout, job)
        assert Kind.GRADIENT not in {p.region.kind for op in launches(found) for p in op.writes}
    for recipe, microbatches in ((Recipe(), 1), (REUSING, 2)):
        job = job_of(shape, recipe=recipe, microbatches=microbatches)
        with pytest.raises(SettingsConflict, match="reuses_gradients puts gradients") as caught:
            run(PatrickStar(reuses_gradients=True), layout, job)
        assert caught.value.remedies == (Remedy.OWN_GRADIENTS,)
        assert advised_line(caught.value).endswith("; set reuses_gradients=false")


def test_an_optimizer_without_states_has_no_region() -> None:
    shape = shape_of(random.Random(12), optimizer_item_bytes=0)
    layout, job = laid_out(shape), job_of(shape)
    assert {place.region.kind for place in layout.places} == {Kind.WEIGHT}
    for memory in MEMORIES.values():
        run(memory, layout, job)


def test_where_the_host_is_full_an_update_runs_on_the_device() -> None:
    shape = shape_of(random.Random(13), layers=4)
    training, job = laid_out(shape).training[0], job_of(shape)
    gpu, host = state_bytes(training) + 400, sum(c.weight_bytes for c in training.chunks)
    layout = laid_out(shape, start="host_first", gpu=gpu, host=host)
    found = run(DemandPaging(), layout, job, gpu=gpu, host=host)
    lanes = {op.on for op in launches(found) if op.slices[0].work is Work.UPDATE}
    assert COMPUTE_LANE in lanes
