"""How planners of training lay chunks out, and where states lie at the start."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.contract.layout import Mode
from engine.contract.plan import Compute, Grow
from engine.contract.regions import Kind, Pool, Tier, Work
from models.training.shape import TrainingShape
from policies.planners.fixed_chunks import FixedChunks, OversizeModule
from policies.planners.placement import modes_of
from policies.planners.unit_chunks import UnitChunks
from policies.training.out_of_memory import OutOfMemory
from policies.training.patrickstar import PatrickStar
from tests.support.offload import MEMORIES, REUSING, ROOMY, by_step, job_of, model, run, shape_of
from tests.support.strategies import cases

CAPACITY: Mapping[Pool, int] = {(Tier.GPU, 0): ROOMY, (Tier.HOST, 0): ROOMY}


def named(shape: TrainingShape, chunks: object) -> list[list[str]]:
    return [[shape.parameters[p].name for p in c.parameters] for c in chunks]  # type: ignore[attr-defined]


def test_a_chunk_per_unit_with_a_tied_table_once() -> None:
    shape = shape_of(random.Random(0), layers=2, tied=True)
    layout = UnitChunks().prepare({0: shape}, [job_of(shape)], CAPACITY).training[0]
    assert named(shape, layout.chunks) == [
        ["embed.weight"],
        ["layer.0.attn.weight", "layer.0.attn.bias", "layer.0.mlp.weight"],
        ["layer.1.attn.weight", "layer.1.attn.bias", "layer.1.mlp.weight"],
        ["norm.weight"],
    ]
    assert layout.units[3].chunks == (0, 3), "the head uses the table's chunk, too"


def test_frozen_and_trained_parameters_lie_apart() -> None:
    shape = shape_of(random.Random(0), layers=2, adapters=True)
    for planner in (UnitChunks(), FixedChunks(100), FixedChunks(100, padded=False)):
        layout = planner.prepare({0: shape}, [job_of(shape)], CAPACITY).training[0]
        for chunk in layout.chunks:
            assert len({shape.parameters[p].trains for p in chunk.parameters}) == 1
        assert any(chunk.trains for chunk in layout.chunks)
        assert any(not chunk.trains for chunk in layout.chunks)
        assert layout.first == 1, "below the first adapters nothing goes backward"


@cases(200)
@given(
    seed=st.integers(0, 1 << 16),
    layers=st.integers(1, 6),
    size=st.integers(30, 120),
    adapters=st.booleans(),
    tied=st.booleans(),
    padded=st.booleans(),
)
def test_chunks_of_one_size(
    seed: int, layers: int, size: int, adapters: bool, tied: bool, padded: bool
) -> None:
    """Each parameter once, in module order; a module's stay together; no chunk overflows, and no
    module would have found room in the chunk before."""
    shape = shape_of(random.Random(seed), layers, adapters=adapters, tied=tied)
    layout = FixedChunks(size, padded=padded).laid_out(shape, size, (Mode.KEEP,) * (layers + 2))
    flat = [p for chunk in layout.chunks for p in chunk.parameters]
    assert sorted(flat) == list(range(len(shape.parameters)))
    for trains in (False, True):
        own = [p for p in flat if shape.parameters[p].trains is trains]
        assert own == sorted(own), "in module order"
    where = {p: c for c, chunk in enumerate(layout.chunks) for p in chunk.parameters}
    modules: dict[tuple[str, bool], set[int]] = {}
    for p, parameter in enumerate(shape.parameters):
        key = (parameter.name.rpartition(".")[0], parameter.trains)
        modules.setdefault(key, set()).add(where[p])
    assert all(len(chunks) == 1 for chunks in modules.values()), "all or nothing"
    for c, chunk in enumerate(layout.chunks):
        elements = sum(shape.parameters[p].elements for p in chunk.parameters)
        assert elements <= size
        assert chunk.weight_bytes == (size if padded else elements) * shape.item_bytes
        follower = layout.chunks[c + 1] if c + 1 < len(layout.chunks) else None
        if follower is not None and follower.trains is chunk.trains:
            name = shape.parameters[follower.parameters[0]].name.rpartition(".")[0]
            module = [
                p
                for p in follower.parameters
                if shape.parameters[p].name.rpartition(".")[0] == name
            ]
            assert elements + sum(shape.parameters[p].elements for p in module) > size


def test_a_module_larger_than_a_chunk_is_an_error_or_alone() -> None:
    shape = shape_of(random.Random(1), layers=1)
    largest = max(parameter.elements for parameter in shape.parameters)
    with pytest.raises(OversizeModule, match=f"more than a chunk of {largest - 1}"):
        FixedChunks(largest - 1).prepare({0: shape}, [job_of(shape)], CAPACITY)
    planner = FixedChunks(largest - 1, oversize="alone", padded=False)
    layout = planner.prepare({0: shape}, [job_of(shape)], CAPACITY).training[0]
    assert max(chunk.weight_bytes for chunk in layout.chunks) == largest * shape.item_bytes


def tiers(layout: object, kind: Kind) -> list[Tier]:
    return [p.tier for p in layout.places if p.region.kind is kind]  # type: ignore[attr-defined]


def test_states_start_on_the_host_on_the_device_or_on_the_host_as_far_as_it_goes() -> None:
    shape = model([10] * 4)  # 20 bytes of weights each, 120 of optimizer states
    jobs = [job_of(shape)]
    for start, tier in (("host", Tier.HOST), ("device", Tier.GPU)):
        layout = UnitChunks(start=start).prepare({0: shape}, jobs, CAPACITY)  # type: ignore[arg-type]
        assert {place.tier for place in layout.places} == {tier}
        assert sum(layout.places.values()) == 4 * 140
    capacity = {(Tier.GPU, 0): 500, (Tier.HOST, 0): 3 * 120 + 2 * 20 + 5}
    layout = UnitChunks(start="host_first").prepare({0: shape}, jobs, capacity)
    assert tiers(layout, Kind.OPTIMIZER) == [Tier.HOST] * 3 + [Tier.GPU]
    assert tiers(layout, Kind.WEIGHT) == [Tier.HOST] * 2 + [Tier.GPU] * 2


@pytest.mark.parametrize("name", MEMORIES)
def test_states_of_the_first_update_take_nothing_before_it(name: str) -> None:
    """They begin with the updates of the first step, once, and are there in all others."""
    shape = shape_of(random.Random(6), layers=4)
    planner, job = FixedChunks(50, states="first_update"), job_of(shape)
    layout = planner.prepare({0: shape}, [job], CAPACITY)
    assert {place.region.kind for place in layout.places} == {Kind.WEIGHT}
    found = run(MEMORIES[name], layout, job)
    chunks = layout.training[0].chunks
    for step, plans in by_step(found).items():
        begun = Counter[int]()
        for plan in plans:
            for i, op in enumerate(plan.ops):
                if isinstance(op, Grow) and op.place.region.kind is Kind.OPTIMIZER:
                    begun[op.place.region.part] += 1
                    assert op.nbytes == chunks[op.place.region.part].optimizer_bytes
                    assert not any(_is_forward(o) for o in plan.ops[i:]), "before its update"
        assert begun == Counter(range(len(chunks)) if step == 0 else ())


def _is_forward(op: object) -> bool:
    return isinstance(op, Compute) and op.slices[0].work is not Work.UPDATE


def test_a_job_trains_where_only_warm_up_has_no_room_for_all_states() -> None:
    """PatrickStar, strict: warm-up leaves chunks a tenth of the device, updates and later steps all
    of it. With states from the start they must fit the host and that tenth, else the rest."""
    shape = model([10] * 4)  # 20 bytes of weights each, 120 of optimizer states
    gpu, host = 400, 400
    capacity = {(Tier.GPU, 0): gpu, (Tier.HOST, 0): host}
    memory = PatrickStar(reuses_gradients=True, strict=True, updates="host")
    job = job_of(shape, recipe=REUSING)
    given = FixedChunks(10, start="host_first").prepare({0: shape}, [job], capacity)
    with pytest.raises(OutOfMemory, match="host:0"):
        run(memory, given, job, gpu=gpu, host=host)
    planner = FixedChunks(10, start="host_first", states="first_update")
    run(memory, planner.prepare({0: shape}, [job], capacity), job, gpu=gpu, host=host)


def test_states_that_fit_nowhere_are_refused_with_the_deficit() -> None:
    shape = model([10] * 4)
    small = {(Tier.GPU, 0): 100, (Tier.HOST, 0): 559}
    with pytest.raises(OutOfMemory, match="host:0 is at least 1 bytes short"):
        UnitChunks().prepare({0: shape}, [job_of(shape)], small)


def test_modes_are_for_layers_unless_all_units_are_named() -> None:
    keep, again, out = Mode.KEEP, Mode.RECOMPUTE, Mode.OFFLOAD
    assert modes_of(again, 4, 0) == (keep, again, again, keep)
    assert modes_of((again, out), 4, 0) == (keep, again, out, keep)
    assert modes_of((out, again, out, keep), 4, 0) == (out, again, out, keep)
    with pytest.raises(ValueError, match="has 2 layers"):
        modes_of((again,), 4, 0)
