"""The search of a chunk size: what it takes, and what it says where none fits."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.contract.regions import Pool, Tier
from engine.contract.rules import Remedy
from policies.planners.fixed_chunks import MEBI, SIZES, FixedChunks, footprint_bytes
from policies.training.out_of_memory import DoesNotFit, OutOfMemory
from tandem.config.compose import composed
from tests.support.offload import ROOMY, job_of, model
from tests.support.strategies import cases
from tests.training.trainings import run_spec

CAPACITY: Mapping[Pool, int] = {(Tier.GPU, 0): ROOMY, (Tier.HOST, 0): ROOMY}


def test_the_search_takes_the_smallest_footprint_that_fits() -> None:
    """Modules of 60 into chunks of 100, 130 or 180: 40, 10 and none of each chunk is empty."""
    shape = model([60] * 6)
    planner = FixedChunks(sizes=(100, 130, 180), warmup_share=1.0)
    assert planner.searched(shape, CAPACITY) == 180
    layout = planner.prepare({0: shape}, [job_of(shape)], CAPACITY).training[0]
    assert len(layout.chunks) == 2
    assert footprint_bytes(layout) == 6 * 60 * (2 + 2 + 12)
    # two chunks of 180 numbers are 720 bytes: more than warm-up leaves them of 700
    tight = {(Tier.GPU, 0): 7000, (Tier.HOST, 0): ROOMY}
    assert FixedChunks(sizes=(100, 130, 180), warmup_share=0.1).searched(shape, tight) == 130


def test_the_search_goes_by_the_shares_of_the_memory_policy() -> None:
    """Each share is set in one place: sizes are searched for what PatrickStar's warm-up has."""
    words = ("memory.warmup_share=0.3", "memory.device_share=0.6")
    assert planner_shares("policy=patrickstar", *words) == (0.3, 0.6)
    assert planner_shares("policy=zero3_offload", "planner=fixed_chunks") == (0.1, 1.0)


def planner_shares(*words: str) -> tuple[float, float]:
    planner = composed(["trace=none", "training=random", *words]).config["planner"]
    return planner["warmup_share"], planner["device_share"]


def test_the_search_takes_of_the_device_what_may_be_used() -> None:
    """Of 7200 bytes warm-up has 720, two chunks of 180 numbers; of half of them 360."""
    shape, whole = model([60] * 6), {(Tier.GPU, 0): 7200, (Tier.HOST, 0): ROOMY}
    assert FixedChunks(sizes=(180, 130, 90)).searched(shape, whole) == 180
    assert FixedChunks(sizes=(180, 130, 90), device_share=0.5).searched(shape, whole) == 90
    states, half = 6 * 60 * (2 + 2 + 12), FixedChunks(sizes=(60,), device_share=0.5)
    full = {(Tier.GPU, 0): 7200, (Tier.HOST, 0): states - 3600}
    assert half.searched(shape, full) == 60
    with pytest.raises(MemoryError):
        half.searched(shape, {**full, (Tier.HOST, 0): states - 3601})


def test_of_equal_footprints_the_search_takes_the_first() -> None:
    assert (
        FixedChunks(sizes=(240, 120), warmup_share=1.0).searched(model([60] * 4), CAPACITY) == 240
    )


def test_states_that_no_size_leaves_room_for_lack_what_the_best_one_lacks() -> None:
    shape, gpu = model([60] * 6), 7200
    states = 6 * 60 * (2 + 2 + 12)  # in chunks of 180, and 260 bytes more in those of 130
    small = {(Tier.GPU, 0): gpu, (Tier.HOST, 0): 0}
    many = model([60] * 30)
    for start, tier in (("host", Tier.HOST), ("host_first", Tier.HOST), ("device", Tier.GPU)):
        planner = FixedChunks(sizes=(130, 180), start=start)  # type: ignore[arg-type]
        assert planner.searched(shape, small) == 180
        with pytest.raises(OutOfMemory, match="chunks of 180 numbers") as short:
            planner.searched(many, small)
        lacks = 5 * states - gpu
        assert (short.value.pool, short.value.deficit_bytes) == ((tier, 0), lacks)
        enough = {**small, (tier, 0): small[tier, 0] + lacks}
        assert planner.searched(many, enough) == 180
        with pytest.raises(OutOfMemory, match=r" 1 bytes short"):
            planner.searched(many, {**enough, (tier, 0): enough[tier, 0] - 1})


def test_a_device_too_small_for_warm_up_says_how_much_it_lacks() -> None:
    """The least device of two chunks of 75 numbers in a fifth of half of it has 3000 bytes."""
    shape, planner = (
        model([60] * 6),
        FixedChunks(sizes=(600, 150), device_share=0.5, warmup_share=0.2),
    )
    for gpu in (10, 1000, 2999):
        with pytest.raises(OutOfMemory, match=r"^gpu:0 .*two chunks of") as short:
            planner.searched(shape, {(Tier.GPU, 0): gpu, (Tier.HOST, 0): ROOMY})
        for remedy in (Remedy.LARGER_WARMUP_SHARE, Remedy.NAMED_SIZE):
            assert (remedy in short.value.remedies) is (gpu // 2 >= 300)  # two chunks in half of it
        assert (Remedy.OVERSIZE_ALONE in short.value.remedies) is (gpu // 2 >= 120)
        assert short.value.pool == (Tier.GPU, 0)
        assert short.value.deficit_bytes == 3000 - gpu
    assert planner.searched(shape, {(Tier.GPU, 0): 3000, (Tier.HOST, 0): ROOMY}) == 75


def test_a_module_larger_than_all_sizes_is_told_as_that() -> None:
    """No memory helps."""
    with pytest.raises(DoesNotFit, match=r"module m1 has 200 .*of any size") as short:
        FixedChunks(sizes=(100,), warmup_share=1.0).searched(model([60, 200]), CAPACITY)
    assert not isinstance(short.value, OutOfMemory)
    assert Remedy.OVERSIZE_ALONE in short.value.remedies
    assert FixedChunks(sizes=(100,), warmup_share=1.0, oversize="alone").searched(
        model([60, 200]), CAPACITY
    )
    with pytest.raises(DoesNotFit, match=r"warm-up has no share"):
        FixedChunks(warmup_share=0.0).searched(model([60] * 2), CAPACITY)


def test_sizes_are_halved_where_warm_up_leaves_room_for_none() -> None:
    """And not where one fits: published models on published devices keep the published sizes."""
    shape, small = model([60] * 6), {(Tier.GPU, 0): 4000, (Tier.HOST, 0): ROOMY}
    assert FixedChunks(sizes=(400, 260)).searched(shape, small) == 65, "or 100, of 200 and 130"
    assert FixedChunks(sizes=(400, 100)).searched(shape, small) == 100
    with pytest.raises(MemoryError, match=r"two chunks of 60 numbers .*module m0 has 60"):
        FixedChunks().searched(shape, {(Tier.GPU, 0): 800, (Tier.HOST, 0): ROOMY})


def test_patrickstar_trains_small_models_as_it_comes() -> None:
    """On the default device, of 256 MiB, where not even one layer was said to fit."""
    found = run_spec("policy=patrickstar")
    (job,) = found.trainees
    assert found.room.layout.training[job.job.job_id].chunks


def test_the_sizes_are_those_of_the_original() -> None:
    assert [size // MEBI for size in SIZES] == [312, 280, 248, 216, 184, 152, 120, 88]


# ---- against brute force
@cases(60)
@given(st.integers(0, 2**32), st.booleans())
def test_the_search_is_brute_force(seed: int, alone: bool) -> None:
    """Specification 8.3.9: of all sizes that fit, the one that wastes least, or none does."""
    rng = random.Random(seed)
    numbers = [rng.randint(1, 60) for _ in range(rng.randint(2, 12))]
    sizes = tuple(rng.sample(range(20, 200), rng.randint(1, 8)))
    planner = FixedChunks(
        sizes=sizes,
        oversize="alone" if alone else "error",
        device_share=rng.choice([0.5, 1.0]),
        warmup_share=rng.choice([0.25, 1.0]),
    )
    gpu, host = rng.randint(100, 4000), rng.randint(0, 16 * sum(numbers))
    capacity = {(Tier.GPU, 0): gpu, (Tier.HOST, 0): host}
    usable = int(gpu * planner.device_share)
    warm = int(usable * planner.warmup_share)
    while min(sizes) * 2 * 2 > warm:  # bytes of two chunks of the smallest
        sizes = tuple([size // 2 for size in sizes])
    found = dict[int, int]()
    for size in sizes:
        taken = taken_numbers(numbers, size)
        can_be = alone or max(numbers) <= size
        if can_be and 2 * size * 2 <= warm and taken * 16 <= usable + host:
            found.setdefault(size, taken)
    if found:
        assert planner.searched(model(numbers), capacity) == min(found, key=lambda s: found[s])
    else:
        with pytest.raises(DoesNotFit):
            planner.searched(model(numbers), capacity)


def taken_numbers(modules: list[int], size: int) -> int:
    """Room that chunks of a size take of modules: a chunk is opened where the last is full."""
    taken = left = 0
    for module in modules:
        if not taken or module > left:
            left = max(size, module)
            taken += left
        left -= module
    return taken
