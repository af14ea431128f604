"""The steps of a leg priced at once: what each costs alone, and what each counts as outside."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from engine.contract.executor import Launch, Piece
from engine.contract.job import Job
from engine.contract.plan import Compute, Slice
from sim.cost.contract import FEW, ShapePriced
from sim.cost.launch_shape import forward_shape, shifted
from sim.foreign.aiconfigurator import AiConfiguratorCost
from sim.foreign.kernel_profile import SKEWS, KernelProfileCost
from tandem.config.compose import composed
from tandem.wiring.run_spec import run_spec_of
from tests.support.additive import fitted
from tests.support.strategies import cases

# New tokens and tokens in KV of a slice. Prompts are few in a leg, and some contexts are far out.
SLICES = st.one_of(
    st.tuples(st.just(1), st.integers(0, 3_000)),
    st.tuples(st.just(1), st.integers(1, 200_000)),
    st.tuples(st.integers(1, 300), st.integers(0, 3_000)),
)


@pytest.fixture(scope="module", params=["table", "aiconfigurator", *SKEWS])
def cost(shared: Path, request: pytest.FixtureRequest) -> ShapePriced:
    """A cost of each form whose tables lie on disk, without look-ups."""
    if request.param == "table":
        return deepcopy(fitted())
    peers = shared / "data" / "peers"
    spec = run_spec_of(composed(["device=h200", "model=llama3_8b", "limit=1"]))
    if request.param == "aiconfigurator":
        return AiConfiguratorCost.load(peers / "aiconfigurator_h200", spec.device, spec.spec)
    folder = peers / "kernel_profiles" / "RTX4090_Llama-3.1-8B"
    found: ShapePriced = KernelProfileCost.load(folder, spec.spec, request.param)
    return found


def launch_of(shapes: list[tuple[int, int]], samples: int) -> Launch:
    """A launch by new tokens and tokens in KV per slice; the first slices are sampled."""
    pieces = tuple(Piece(i, n, c, i < samples, ()) for i, (n, c) in enumerate(shapes))
    return Launch(Compute(tuple(Slice(Job(p.job_id, 0), p.tokens) for p in pieces)), pieces=pieces)


@given(shapes=st.lists(SLICES, min_size=1, max_size=20), count=st.integers(1, 200), data=st.data())
@example(shapes=[(1, 5)], count=FEW, data=None)
@example(shapes=[(1, 0), (1, 900)], count=9, data=None)
@example(shapes=[(64, 0), (1, 900), (300, 128), (1, 31)], count=9, data=None)
@cases(30)
def test_steps_priced_together_are_those_priced_alone(
    cost: ShapePriced, shapes: list[tuple[int, int]], count: int, data: st.DataObject | None
) -> None:
    samples = data.draw(st.integers(0, len(shapes))) if data else len(shapes)
    launch = launch_of(shapes, samples)
    together, alone = deepcopy(cost), deepcopy(cost)
    tokens, contexts, sampled = forward_shape(launch)
    rows = (shifted(tokens, contexts, i) for i in range(count))
    expected = [alone.shape_ns(tokens, row, sampled) for row in rows]  # type: ignore[attr-defined]
    assert list(together.repeat_ns(launch, count)) == expected
    assert together.extrapolated == alone.extrapolated
    assert list(together.repeat_ns(launch, count)) == expected, "from memory"
