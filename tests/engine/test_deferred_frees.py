"""Memory that comes back where no plan follows has a row of its own."""

from __future__ import annotations

from typing import Any

import pytest

from analysis.usage import TimeMean
from engine.results.schema import MEMORY
from tests.support.replays import composed, replay
from traces.serving.request import Request

GAP = [Request(0, 0, 10, 20), Request(1, 1_000_000_000, 30, 5)]


@pytest.mark.parametrize("host_ns", [0, 30_000])
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("fast_forward", [True, False])
def test_an_idle_gap_holds_nothing(depth: int, fast_forward: bool, host_ns: int) -> None:
    run = replay(
        composed("chunked", "restart"), GAP, depth=depth, fast_forward=fast_forward, host_ns=host_ns
    )
    table = run.recorder.tables()["memory"]
    assert table.schema.equals(MEMORY)
    rows = [row for row in table.to_pylist() if row["tier"] == "gpu"]
    backs = [row for row in rows if row["cause"] == "return"]
    finished = {o.finish_ns: _last_step(rows, o.finish_ns) for o in run.recorder.outcomes.values()}
    assert {row["at_ns"]: row["step"] for row in backs} == finished
    assert all(row["free_bytes"] == row["capacity_bytes"] for row in backs)
    assert not any(row["kv_bytes"] or row["kv_pages"] for row in backs)
    assert rows[-1] == backs[-1], "the run ends with all memory back"


def _last_step(rows: list[dict[str, Any]], at_ns: int | None) -> int:
    return max(row["step"] for row in rows if row["at_ns"] == at_ns and row["cause"] == "settle")


def test_the_mean_over_time_counts_the_gap_as_empty() -> None:
    """A second of nothing between two short answers: the mean is what both held, not the first."""
    run = replay(composed("chunked", "restart"), GAP)
    rows = run.recorder.tables()["memory"].to_pandas().query("tier == 'gpu'")
    end_ns = rows["at_ns"].max()
    busy_ns = sum((o.finish_ns or 0) - o.arrival_ns for o in run.recorder.outcomes.values())
    bound = rows["kv_bytes"].max() * busy_ns / end_ns
    mean = TimeMean(0.0, float(end_ns))
    mean.add(rows["at_ns"].to_numpy(), rows["kv_bytes"].to_numpy())
    assert 0 < mean.value <= bound
