"""Cost tables: look-ups everywhere, warnings of extrapolation, storage."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sim.cost.piecewise import Table
from sim.cost.tables import TableCost
from tests.support.additive import fitted, truth_ns


@pytest.fixture(scope="module")
def cost() -> TableCost:
    return fitted()


def test_outside_the_grid_it_extrapolates_and_counts(
    cost: TableCost, caplog: pytest.LogCaptureFixture
) -> None:
    cost = replace(cost)  # equal tables without look-ups
    assert cost.extrapolated == {}
    inside = cost.shape_ns([1] * 8, [500] * 8, 8)
    assert cost.extrapolated == {}
    far = cost.shape_ns([1] * 8, [8000] * 8, 8)
    cost.shape_ns([1] * 8, [8000] * 8, 8)
    assert far > inside
    assert cost.extrapolated == {"decode": 1}
    assert far == pytest.approx(truth_ns([(1, 8000)] * 8, 8), rel=0.2)  # four times the grid
    cost.shape_ns([4000], [3000], 1)
    assert set(cost.extrapolated) == {"decode", "chunk", "linear"}
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 3


def test_saving_keeps_everything(cost: TableCost, tmp_path: Path) -> None:
    cost.save(tmp_path / "cost.json")
    assert TableCost.load(tmp_path / "cost.json") == cost
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(ValueError, match="broken"):
        TableCost.load(tmp_path / "broken.json")
    with pytest.raises(ValueError, match="none"):
        TableCost.load(tmp_path / "none.json")


def test_a_drifted_device_is_slower_by_the_factor(cost: TableCost) -> None:
    slow = cost.scaled(1.05, "probe")
    before = cost.shape_ns([1] * 9, [300] * 9, 9)
    assert slow.shape_ns([1] * 9, [300] * 9, 9) == pytest.approx(before * 1.05, abs=2)
    assert "x1.0500 (probe)" in slow.provenance


def test_a_link_does_not_slow_down_with_its_device(cost: TableCost) -> None:
    slow = cost.scaled(2.0, "probe")
    copies = [c.transfer_ns("gpu->host", 1 << 20, contended=True) for c in (cost, slow)]
    assert copies[0] == copies[1] > 0
    assert slow.plan_ns(3) == pytest.approx(2 * cost.plan_ns(3), abs=2)


def test_a_table_is_straight_between_nodes_and_beyond_its_ends() -> None:
    line = Table(((2, 4, 8),), (10.0, 20.0, 60.0))
    assert [line.value((x,)) for x in (2, 3, 4, 6, 8, 10, 1, 0)] == [10, 15, 20, 40, 60, 80, 5, 0]
    assert Table(((3,),), (7.0,)).value((99,)) == 7.0
    plane = Table(((0, 10), (0, 100)), (0.0, 100.0, 10.0, 310.0))
    assert plane.value((5, 50)) == (0 + 100 + 10 + 310) / 4
    assert plane.value((10, 100)) == 310.0
    assert Table(((5, 10),), (1.0, 100.0)).value((0,)) == 0.0  # never below zero
