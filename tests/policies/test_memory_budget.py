"""PatrickStar's budgets and margin on hand-made tides, and what they do to a run."""

from __future__ import annotations

import random

import pytest

from engine.contract.layout import Mode
from engine.contract.plan import COMPUTE_LANE, HOST_LANE, Compute, Copy, Grow
from engine.contract.regions import Tier, Work
from policies.training.eviction import FarthestUse, Future
from policies.training.out_of_memory import OutOfMemory
from policies.training.patrickstar import MemoryBudget, PatrickStar, device_updates
from tests.support.offload import (
    STATES,
    by_step,
    job_of,
    laid_out,
    launches,
    min_device_bytes,
    run,
    shape_of,
    state_bytes,
)

F, B, U = Work.FORWARD, Work.BACKWARD, Work.UPDATE
TIDE = (10, 40, 70, 70, 50, 20)  # bytes beside chunks at six launches


@pytest.mark.parametrize(
    ("moment", "expected"), [(0, 60), (1, 30), (2, 30), (3, 30), (4, 50), (5, 80)]
)
def test_chunks_get_what_this_moment_and_the_next_leave(moment: int, expected: int) -> None:
    budget = MemoryBudget(100)
    assert budget.available(F, moment, TIDE) == budget.available(B, moment, TIDE) == expected
    assert budget.ahead(moment, TIDE) == 100 - TIDE[(moment + 1) % 6]


def test_a_launch_that_the_step_before_had_not_counts_with_its_peak() -> None:
    budget = MemoryBudget(100, buffer_bytes=7)
    for moment in (len(TIDE), len(TIDE) + 3):
        assert budget.available(B, moment, TIDE) == 100 - max(TIDE) - 7
        assert budget.ahead(moment, TIDE) == 100 - max(TIDE)


def test_buffers_are_set_aside_once_forward_and_backward_alike() -> None:
    """The original squares the factor in backward."""
    budget = MemoryBudget(100, buffer_bytes=7, staging_bytes=30)
    assert budget.available(F, 1, TIDE) == budget.available(B, 1, TIDE) == 30 - 7
    assert budget.available(U, 5, TIDE) == 100 - 30


def test_in_warm_up_and_under_a_static_partition_chunks_get_a_share() -> None:
    assert MemoryBudget(100, staging_bytes=30).available(F, 3, ()) == 10
    assert MemoryBudget(100, staging_bytes=30).available(U, 3, ()) == 70
    static = MemoryBudget(100, warmup_share=0.25, is_static=True)
    assert static.available(B, 3, TIDE) == 25
    assert static.ahead(3, TIDE) == 100, "nothing is made room for"


def test_the_margin_is_what_is_left_at_the_peak() -> None:
    assert MemoryBudget(1000, buffer_bytes=10).margin(TIDE, 500) == 1000 - 70 - 500 - 10
    assert MemoryBudget(500).margin(TIDE, 500) == -70
    assert MemoryBudget(1000).margin((), 500) == 0, "warm-up"


@pytest.mark.parametrize(
    ("margin", "share", "expected"),
    [
        (0, 0.8, 0),
        (-50, 0.8, 0),
        (119, 1.0, 0),
        (120, 1.0, 1),
        (359, 1.0, 2),
        (360, 1.0, 3),
        (150, 0.8, 1),
        (149, 0.8, 0),
        (9999, 1.0, 5),
    ],
)
def test_device_updates_are_a_whole_number(margin: int, share: float, expected: int) -> None:
    """As many of five chunks of 120 bytes as fit. The original's float loses one of an exact
    number, since it counts from 1 and asks for less."""
    assert device_updates(margin, share, [120] * 5) == expected


def test_next_use_wraps_around() -> None:
    from engine.contract.regions import weight

    a, b, c = (weight(0, i) for i in range(3))
    order = FarthestUse({0: Future({a: [1, 4], b: [0, 5]}, 6, moment=3)})
    assert [order.rank_at_start(place, 0) for place in (a, b, c)] == [(-1, 0), (-2, 1), (-12, 2)]
    assert order.rank_after_use(a, 1, None, 0) == (-4, 0), (
        "at moment 4; again at 1 of the next step"
    )
    assert order.rank_after_use(b, 2, None, 0) == (-3, 1)


def share_on_device(found: object, step: int) -> float:
    plans = by_step(found)[step]  # type: ignore[arg-type]
    ops = [op for plan in plans for op in plan.ops if isinstance(op, Compute)]
    updates = [op.on for op in ops if op.slices[0].work is U]
    return updates.count(COMPUTE_LANE) / len(updates)


def test_the_margin_moves_updates_to_the_device_behind_warm_up() -> None:
    shape = shape_of(random.Random(2), layers=6)
    layout, job = laid_out(shape), job_of(shape)
    roomy = state_bytes(layout.training[0]) * 2 + 5_000
    found = run(PatrickStar(), layout, job, gpu=roomy)
    assert [share_on_device(found, step) for step in range(3)] == [0, 1, 1]
    least = min_device_bytes(layout.training[0], job, False, True)
    assert share_on_device(run(PatrickStar(), layout, job, gpu=least), 2) == 0
    for where, share in (("device", 1), ("host", 0)):
        found = run(PatrickStar(updates=where), layout, job, gpu=roomy)  # type: ignore[arg-type]
        assert share_on_device(found, 2) == share


def test_room_is_made_behind_a_launch_for_the_next_one() -> None:
    """In a steady step nothing leaves before a launch but for what it fetches: activations find
    their room made."""
    shape = shape_of(random.Random(6), layers=6)
    layout, job = laid_out(shape), job_of(shape)
    least = min_device_bytes(layout.training[0], job, False, False)
    found = run(PatrickStar(updates="host"), layout, job, gpu=least * 3 // 2)
    moved = 0
    for plan in by_step(found)[2]:
        launch = next(i for i, op in enumerate(plan.ops) if isinstance(op, Compute))
        before = plan.ops[:launch]
        out = [op for op in before if isinstance(op, Copy) and op.dst.tier is Tier.HOST]
        back = [op for op in before if isinstance(op, Copy) and op.dst.tier is Tier.GPU]
        begun = [op for op in before if isinstance(op, Grow) and op.place.region.kind in STATES]
        is_update = plan.ops[launch].slices[0].work is U  # type: ignore[union-attr]
        assert is_update or not out or back or begun, "room was not there for activations"
        moved += len(out)
    assert moved > 0


def test_chunks_keep_within_the_budget_of_each_moment() -> None:
    """Where budgets can be kept: at each launch, states on the device against its tide."""
    shape = shape_of(random.Random(21), layers=6)
    layout, job = laid_out(shape), job_of(shape)
    gpu = min_device_bytes(layout.training[0], job, False, False) * 2
    found = run(PatrickStar(updates="host"), layout, job, gpu=gpu)
    moments = found.engine.state.profile.moments(0)
    others = [moment.other_bytes for moment in moments]
    held: dict[object, int] = dict(layout.places)
    sizes = {place.region: nbytes for place, nbytes in layout.places.items()}
    over = 0
    for step, plans in by_step(found).items():
        number = 0
        for op in [op for plan in plans for op in plan.ops]:
            if isinstance(op, Compute):
                states = sum(
                    n
                    for p, n in held.items()
                    if p.tier is Tier.GPU and p.region.kind in STATES  # type: ignore[attr-defined]
                )
                if step and op.on == COMPUTE_LANE:
                    budget = gpu - max(others[number], others[(number + 1) % len(others)])
                    own = sum(held[p] for p in (*op.reads, *op.writes) if p.region.kind in STATES)
                    over += states > max(budget, own)
                number += 1
            elif isinstance(op, Copy):
                held[op.dst] = held[op.src]
            elif hasattr(op, "nbytes"):
                held[op.place] = op.nbytes
                sizes[op.place.region] = op.nbytes
            else:
                del held[op.place]
    assert over == 0


def test_strict_budgets_are_the_limit_of_the_original() -> None:
    """A host that cannot take what warm-up does not leave: an error there, not here."""
    shape = shape_of(random.Random(7), layers=6)
    training, job = laid_out(shape).training[0], job_of(shape)
    gpu = state_bytes(training) + 1_000
    host = int(state_bytes(training) * 0.6)
    layout = laid_out(shape, start="host_first", gpu=gpu, host=host)
    run(PatrickStar(), layout, job, gpu=gpu, host=host)
    with pytest.raises(OutOfMemory, match=r"^host:0"):
        run(PatrickStar(warmup_share=0.02, strict=True), layout, job, gpu=gpu, host=host)


def test_statistics_count_what_launches_book_themselves() -> None:
    """Workspaces and what ends behind a launch are in its moment, also in a plan of a step."""
    shape = shape_of(random.Random(14), layers=3)
    layout, job = laid_out(shape, Mode.RECOMPUTE), job_of(shape)
    alone, whole = (
        run(PatrickStar(), layout, job, tasks=n).engine.state.profile.moments(0) for n in (1, 0)
    )
    assert [m.other_bytes for m in alone] == [m.other_bytes for m in whole]
    training = layout.training[0]
    first = training.units[0]
    assert alone[0].other_bytes == (
        first.forward_bytes + first.saved_bytes + training.units[1].input_bytes
    )


def test_a_profile_says_which_launches_touched_a_place() -> None:
    shape = shape_of(random.Random(16), layers=3)
    profile = run(PatrickStar(), laid_out(shape), job_of(shape)).engine.state.profile
    moments, uses = profile.moments(0), profile.uses(0)
    assert {place for moment in moments for place in moment.places} == {*uses}
    for place, numbers in uses.items():
        assert [*numbers] == sorted(numbers)
        assert {*numbers} == {i for i, moment in enumerate(moments) if place in moment.places}
    assert not profile.uses(1), "nothing is known of others"


def test_settings_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match=r"warmup_share is 1.5"):
        PatrickStar(warmup_share=1.5)
    with pytest.raises(ValueError, match="buffer_chunks is -1"):
        PatrickStar(buffer_chunks=-1)


def test_device_and_host_updates_are_told_apart_by_lane() -> None:
    shape = shape_of(random.Random(15))
    found = run(PatrickStar(updates="host"), laid_out(shape), job_of(shape))
    for op in launches(found):
        tiers = {place.tier for place in (*op.reads, *op.writes)}
        assert tiers == {Tier.HOST if op.on == HOST_LANE else Tier.GPU}
