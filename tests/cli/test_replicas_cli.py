"""Replicas from the command line on: settings, memory, folders, comparison, figures."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pandas as pd
import pytest
import torch

from analysis.figures.style import RUNS
from analysis.metrics import summary
from analysis.replicas import replicas
from analysis.run import Run, load
from engine.contract.regions import Tier
from tandem.cli.__main__ import main
from tandem.cli.catalog import options
from tandem.config.compose import composed
from tandem.wiring.run_spec import run_spec_of
from tests.support.short_trace import PRESSED, SHORT, write_short

SMALL = ["model=micro_llama", "limit=12", "arrival=all_at_once", "budget.kv_pages=125"]
TWO = ["replicas=2", "router=least_outstanding"]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, short_probes: None) -> None:
    monkeypatch.chdir(tmp_path)
    write_short(tmp_path)
    torch.set_num_threads(1)


def run(capsys: pytest.CaptureFixture[str], *words: str) -> Run:
    """A run of the command line."""
    assert main(["run", *SMALL, *words]) == 0
    return load(capsys.readouterr().out.strip().splitlines()[-1])


@pytest.mark.broad(2)
@pytest.mark.parametrize("router", [name for name in options("router") if name != "none"])
def test_every_router_serves_two_replicas(router: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = run(capsys, *SHORT, "replicas=2", f"router={router}", "arrival=poisson")
    assert found.requests["status"].eq("finished").all()
    assert set(found.requests["device"]) == set(found.steps["device"]) == {0, 1}
    assert summary(found)["replicas"] == 2


def test_routers_are_needed_and_replicas_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    for words, told in (
        (["replicas=2"], "replicas=2: there is no router; choose one with router=round_robin"),
        (["replicas=0", "router=round_robin"], "replicas=0: it must be at least 1"),
        (["replicas=2", "router=prefix_affinity", "router.load_bound=0.1"], "must be at least 1"),
        (["replicas=2", "router=roundrobin"], "router=roundrobin: no such option"),
    ):
        assert main(["run", *SMALL, *words]) == 2
        assert told in capsys.readouterr().err


def test_each_replica_has_the_memory_of_a_run_alone() -> None:
    alone, two = (run_spec_of(composed([*SMALL, *words])).room for words in ([], TWO))
    for device in range(2):
        for tier in (Tier.GPU, Tier.HOST):
            assert two.capacity_bytes[tier, device] == alone.capacity_bytes[tier, 0]
    assert sorted(place.device for place in two.layout.places) == [0, 1]
    assert len(set(two.layout.places.values()) | set(alone.layout.places.values())) == 1


@pytest.mark.parametrize(
    "policy", [pytest.param("static_restart", marks=pytest.mark.slow), "chunked_swap"]
)
def test_two_replicas_are_predicted_measured_and_compared(
    policy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], unrendered: None
) -> None:
    """All at once: equal decisions by device, and a replay that books equal pages."""
    words = [*TWO, *SHORT, PRESSED, f"policy={policy}"]
    predicted, measured = (run(capsys, *words, f"backend={b}") for b in ("sim", "cpu"))
    lockstep = run(capsys, *words, "backend=lockstep")
    assert by_device(predicted) == by_device(measured) == by_device(lockstep)
    ids = [
        r.requests.set_index("request_id")["output_ids"].map(tuple) for r in (measured, lockstep)
    ]
    pd.testing.assert_series_equal(*ids)
    folders = [str(measured.folder), str(predicted.folder)]
    assert main(["compare", *folders, "--out", "report"]) == 0
    told = capsys.readouterr().out
    assert f"{len(measured.plans)} of {len(measured.plans)}" in told, "all plans are in common"
    text = (tmp_path / "report" / "report.html").read_text(encoding="utf-8")
    assert "Replicas" in text
    drawn = pd.read_csv(tmp_path / "report" / "figures" / "memory.csv")
    assert {*zip(drawn["run"], drawn["device"], strict=True)} == {*product(RUNS, range(2))}
    replay = load(tmp_path / "report-replay")
    assert booked(replay) == booked(measured)


def by_device(run: Run) -> dict[int, list[str]]:
    return {device: rows["body"].tolist() for device, rows in run.plans.groupby("device")}


def booked(run: Run) -> dict[int, list[tuple[int, int]]]:
    """KV of each device after each of its plans, and the requests of each device."""
    device_of = run.plans.set_index("step")["device"]
    rows = run.memory[run.memory["cause"].eq("issue") & run.memory["tier"].eq("gpu")]
    rows = rows[rows["step"].map(device_of).eq(rows["device"])].sort_values("step")
    return {
        device: list(zip(part["kv_bytes"], part["kv_pages"], strict=True))
        for device, part in rows.groupby("device")
    }


@pytest.mark.parametrize("clock", ["service", "wall"])
def test_the_meter_sees_each_replica_as_the_ledger_does(
    clock: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Weights are shared on the CPU, and counted for each replica; KV pages are each its own."""
    words = [*TWO, *SHORT, PRESSED, "depth=1", "backend=cpu", f"backend.clock={clock}"]
    found = run(capsys, *words)
    rows = found.memory[found.memory["measured_bytes"].notna()]  # on a wall clock not all settles
    excess = rows["measured_bytes"] - rows["weight_bytes"] - rows["kv_bytes"]
    assert (excess >= 0).all() and (excess <= rows["coming_bytes"]).all()
    read = {int(device) for device in rows["device"][rows["tier"].eq("gpu")]}
    # On a wall clock a replica is read only while no lane of the machine is busy: by chance never.
    assert read == {0, 1} or (clock == "wall" and read)
    for device in read:
        own = rows[rows["tier"].eq("gpu") & rows["device"].eq(device)]
        assert own["weight_bytes"].min() > 0 and own["kv_bytes"].max() > 0


def test_the_summary_says_how_even_the_load_was(capsys: pytest.CaptureFixture[str]) -> None:
    found = run(capsys, *SHORT, "replicas=3", "router=round_robin", "limit=7")
    table = replicas(found)
    assert table["requests"].tolist() == [3, 2, 2]
    counts = found.requests.groupby("device")["output_tokens"].sum()
    assert table["output_tokens"].tolist() == counts.tolist()
    assert summary(found)["request_imbalance"] == pytest.approx(3 / (7 / 3))
    metrics = json.loads((found.folder / "metrics.json").read_text())
    assert metrics["replicas"] == 3 and metrics["busy_imbalance"] >= 1
    assert {f"busy_share_{device}:compute" for device in range(3)} <= metrics.keys()
    assert {f"peak_gpu{device}_kv_bytes" for device in range(3)} <= metrics.keys()
    one = run(capsys, *SHORT)
    assert "request_imbalance" not in summary(one) and replicas(one).empty
    assert set(one.requests["device"]) == {0}
    assert main(["run", *SMALL, "replicas=2", "router=round_robin", "limit=3"]) == 0
    assert "2 replicas, the fullest against their mean: requests +33.3%" in capsys.readouterr().out


@pytest.mark.slow
def test_sessions_stay_together_with_affinity(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["replicas=2", "trace=sessions", "arrival=poisson", "limit=8", "budget.kv_pages=400"]
    words.append(f"cache={tmp_path.parent / 'cache'}")  # where test_configs.py has it from, too
    homes = {}
    for router in ("prefix_affinity", "round_robin"):
        more = ["router.load_bound=2"] if router == "prefix_affinity" else []
        found = run(capsys, *words, f"router={router}", *more)
        assert found.requests["status"].eq("finished").all()
        homes[router] = found.requests.groupby("session")["device"].nunique().max()
    assert homes == {"prefix_affinity": 1, "round_robin": 2}
