"""Collectives of a group: rings by formula, a device's share of its node, whole runs."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest

from engine.contract.layout import ALL, Mode, equal_share, lay_out
from engine.contract.plan import HOST_LANE, Pattern
from models.training.shape import training_shape
from policies.planners.unit_chunks import unit_chunks
from sim.cost.contract import ShapePriced
from sim.cost.roofline import Roofline
from sim.cost.training_launch import update_of
from sim.devices.group import Group, exchange_ns, rank_device
from tandem.cli.plan_command import plan_run
from tandem.config.compose import composed
from tandem.wiring.backends import backend_of
from tandem.wiring.run_spec import run_spec_of
from tests.training.training_jobs import TINY, device, job_of
from tests.training.trainings import SMALL

GB = 10**9
A100 = replace(device("a100_superpod"), peer_share=((1, 1.0),), hop_ns=5_000)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_ring_passes_each_byte_on_once(ranks: int) -> None:
    """All-gather and reduce-scatter: n - 1 hops of an n-th part each; all-reduce is both."""
    group, nbytes = Group(ranks), 3 * GB
    alone = (ranks - 1) * (5_000 + nbytes / ranks / 300)  # 300 bytes a ns
    for pattern in (Pattern.ALL_GATHER, Pattern.REDUCE_SCATTER):
        assert exchange_ns(A100, group, pattern, nbytes) == pytest.approx(alone, abs=1)
    assert exchange_ns(A100, group, Pattern.ALL_REDUCE, nbytes) == pytest.approx(2 * alone, abs=1)
    assert exchange_ns(A100, Group(), Pattern.ALL_REDUCE, nbytes) == 0


def test_small_exchanges_take_hops_and_large_ones_bytes() -> None:
    times = [exchange_ns(A100, Group(n), Pattern.ALL_GATHER, 64) for n in (2, 8)]
    assert times[1] == pytest.approx(7 * times[0], rel=0.01)
    times = [exchange_ns(A100, Group(n), Pattern.ALL_GATHER, 100 * GB) for n in (2, 8)]
    assert times[1] == pytest.approx(times[0] * (7 / 8) / (1 / 2), rel=0.01)


def test_a_ring_over_nodes_is_as_fast_as_its_slowest_link() -> None:
    near = exchange_ns(A100, Group(8), Pattern.ALL_GATHER, GB)
    far = exchange_ns(A100, Group(4, 2), Pattern.ALL_GATHER, GB)
    assert far > near
    assert far == pytest.approx(7 * (5_000 + GB / 8 / 100), rel=0.001)
    with pytest.raises(ValueError, match="network_bytes_per_s"):
        exchange_ns(replace(A100, network_bytes_per_s=None), Group(1, 2), Pattern.ALL_GATHER, GB)
    with pytest.raises(ValueError, match="peer_bytes_per_s"):
        exchange_ns(replace(A100, peer_bytes_per_s=None), Group(2), Pattern.ALL_GATHER, GB)


def test_devices_of_a_node_share_its_host() -> None:
    whole = device("a100_superpod")
    part = rank_device(whole, Group(8, 2))
    assert part.host_bytes == whole.host_bytes // 8
    assert part.host_bandwidth_bytes_per_s == whole.host_bandwidth_bytes_per_s / 8  # type: ignore[operator]
    assert part.update_rate == pytest.approx(0.209 * whole.update_rate)
    assert part.to_device_bytes_per_s == pytest.approx(0.696 * whole.to_device_bytes_per_s)
    assert rank_device(whole, Group(1, 8)) == whole, "a node each"
    equal = rank_device(replace(whole, host_share=((1, 1.0), (1024, 1 / 1024))), Group(4))
    assert equal.update_rate == pytest.approx(whole.update_rate / 4)


def test_a_device_updates_its_own_part() -> None:
    job = job_of(TINY)
    shape = training_shape(TINY, job)
    modes = [Mode.KEEP] * len(shape.units)
    chunks, shares = unit_chunks(shape), (ALL, equal_share(4), Fraction(2, 7))
    found = [lay_out(shape, chunks, modes, ranks=4, share=share) for share in shares]
    whole, part, owned = (update_of(TINY, job, f, 1, HOST_LANE).elements for f in found)
    assert part == -(-whole // 4)
    assert owned == pytest.approx(whole * 2 / 7, abs=1)


def test_a_cost_without_groups_refuses_collectives() -> None:
    class Bare(ShapePriced):
        form, provenance = "table", "a profile"

    with pytest.raises(ValueError, match=r"knows no groups.*group.devices=1"):
        Bare().exchange_ns(Pattern.ALL_GATHER, 1)
    assert Roofline(A100, TINY, group=Group(2)).exchange_ns(Pattern.ALL_GATHER, GB) > 0


# ---- as a configuration names it
GROUP = ("device=a100_superpod", "group.devices=4", "backend=sim")


@pytest.mark.broad(3)
@pytest.mark.parametrize(
    "policy", ["train_on_device", "zero_offload", "zero3_offload", "patrickstar"]
)
def test_a_group_is_planned(policy: str) -> None:
    words = [*SMALL, *GROUP, f"policy={policy}"]
    if policy == "patrickstar":
        words.append("planner.chunk_elements=20000")
    found = plan_run(composed(words))
    lanes = found.run.steps.groupby("lane")["nbytes"].sum()
    assert lanes["net"] > 0
    trainee = found.run_spec.trainees[0]
    assert trainee.job.ranks == 4
    assert set(found.run.training["tokens"]) == {4 * trainee.job.microbatch_tokens}


def test_serving_missing_links_and_real_backends_are_refused_to_groups() -> None:
    with pytest.raises(ValueError, match="serve nothing"):
        run_spec_of(composed(["group.devices=2", "limit=2", "device=a100"]))
    with pytest.raises(ValueError, match=r"group.nodes=0"):
        run_spec_of(composed([*SMALL, "policy=zero3_offload", "group.nodes=0"]))
    for links, key in (((), "peer"), (("device=v100", "group.nodes=2"), "network")):
        group = (*SMALL, "policy=zero3_offload", "group.devices=2", *links)
        with pytest.raises(ValueError, match=f"set device.{key}_bytes_per_s"):
            run_spec_of(composed(group))
    for backend in ("lockstep", "cpu"):
        words = [*SMALL, "policy=zero3_offload", "group.devices=2", f"backend={backend}"]
        point = composed(words)
        refused = pytest.raises(ValueError, match=r"trains on one device.*backend=sim")
        with refused, backend_of(run_spec_of(point), point.config["backend"]):
            pass
