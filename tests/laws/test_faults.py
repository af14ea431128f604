"""What befalls a run: each fault is noticed at once, told in a line, and spoils nothing else.

A foreign `_target_` is refused in tests/cli/test_build.py; a killed worker is in
tests/cli/test_sweep.py.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from analysis.run import load
from benchmarks.correctness.bit_flips import write_kernels
from engine.contract.regions import PageSize, Tier
from engine.loop.engine import Engine
from engine.results.plan_log import read_plans
from engine.results.schema import TABLES
from runtime.serving.kv import Arena
from sim.cost.piecewise import Ragged, Table
from sim.cost.tables import DECODE, FIRST, HEAD, HOST, LINEAR, PREFILL_SLICE, TableCost
from sim.foreign.aiconfigurator import AiConfiguratorCost
from sim.foreign.kernel_profile import KernelProfileCost
from sim.foreign.vidur import VidurCost
from tandem.cli.__main__ import main
from tandem.cli.calibrate import default_folder
from tandem.config.compose import composed
from tandem.wiring.folder import sole_user, status_of
from tandem.wiring.run_spec import run_spec_of
from tests.support.short_trace import PRESSED, SHORT, write_short
from tests.support.synthetic import write
from traces.files import seal
from traces.serving.request import Request
from traces.store import read_trace, write_trace

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["model=micro_llama", "limit=12", "arrival=all_at_once"]
TIGHT = [*SMALL, *SHORT, PRESSED, "policy=chunked_swap"]
KILLED = """
import os, signal, sys
import pyarrow.parquet as pq
from tandem.cli.__main__ import main

class Torn(pq.ParquetWriter):
    def write_table(self, table, **options):
        super().write_table(table, **options)
        if "lane" in table.column_names:
            os.kill(os.getpid(), signal.SIGKILL)

pq.ParquetWriter = Torn
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)


def line(capsys: pytest.CaptureFixture[str]) -> str:
    """The only line on stderr."""
    told = capsys.readouterr().err.strip()
    assert len(told.splitlines()) == 1, told
    return told


def test_a_run_killed_while_it_writes_is_never_taken_for_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["run", *SMALL, "hydra.run.dir=all/run"]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", KILLED, *words], env={**os.environ, "PYTHONPATH": path}
    )
    assert done.returncode == -signal.SIGKILL
    left = Path("all/run.running")
    assert status_of(left) == "running" and not any(Path("all/run").iterdir())
    assert not (left / "steps.parquet").exists(), "a table has its name when it is whole"
    for folder, wanted in ((Path("all/run"), "not a run folder"), (left, "status running")):
        with pytest.raises(ValueError, match=wanted):
            load(folder)
    assert main(["collect", "all"]) == 2
    assert "no run lies there" in line(capsys)
    assert main(words) == 2
    assert "run.running: a run is going on there, or was killed" in line(capsys)
    left.rename("elsewhere")
    assert main(words) == 0 and status_of(Path("all/run")) == "ok"


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_a_truncated_table_of_a_run_is_named(
    name: str, share: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, cut = (write(tmp_path / name) for name in ("whole", "cut"))
    path = cut / f"{name}.parquet"
    os.truncate(path, int(share * path.stat().st_size))
    assert main(["compare", str(whole), str(cut), "--out", "report"]) == 2
    told = line(capsys)
    assert f"{path} is damaged" in told and "run it again" in told
    if name == "plans":
        with pytest.raises(ValueError, match="is damaged"):
            read_plans(path)


def test_a_truncated_trace_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.parquet"
    write_trace(path, [Request(i, i, 3, 4) for i in range(50)], {})
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(ValueError, match="its bytes are not those"):
        read_trace(path)


class Still(datetime.datetime):
    """A clock that stands."""

    @classmethod
    def now(cls, tz: Any = None) -> datetime.datetime:
        return datetime.datetime(2026, 11, 21, 12, 0, 0)


def test_two_runs_and_two_calibrations_in_one_second_have_folders_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in ("hydra.core.utils", "tandem.config.composed_config"):
        monkeypatch.setattr(f"{module}.datetime", Still)
    for _ in range(2):
        assert main(["run", *SMALL]) == 0
    folders = [path.parent for path in Path("outputs/2026-11-21").glob("*/metrics.json")]
    assert len(folders) == 2 and all(f.name.startswith("12-00-00-") for f in folders)
    monkeypatch.setattr("time.strftime", lambda form: form)
    point = composed(["backend=cpu"])
    assert default_folder(point, "profiles") != default_folder(point, "profiles")


def test_two_calibrations_may_not_share_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second would clear what the first has measured so far."""
    with sole_user(tmp_path / ".profile.lock", "of this test"):
        assert main(["calibrate", "model=micro_llama", "--out", str(tmp_path / "profile")]) == 2
    assert "profile: another calibration is running there" in line(capsys)


@pytest.mark.ci
def test_what_finds_no_room_on_the_host_restarts(tmp_path: Path) -> None:
    """Nothing is lost and the host never overflows; where it is full, with real copies, too."""
    write_short(tmp_path)
    fates = {}
    for host, pages in (("roomy", 1000), ("full", 3), ("none", 0)):
        size = f"budget.host_bytes={pages * page_nbytes()}"
        runs = []
        for backend in ("sim", "lockstep") if host == "full" else ("sim",):
            folder = f"{host}-{backend}"
            words = [*TIGHT, size, f"backend={backend}", f"hydra.run.dir={folder}"]
            assert main(["run", *words]) == 0
            runs.append(load(folder))
        if host == "full":
            assert runs[0].plans["body"].tolist() == runs[1].plans["body"].tolist()
        requests, memory = runs[-1].requests, runs[-1].memory
        assert (requests["status"] == "finished").all()
        kept = memory[memory["tier"] == Tier.HOST.value]
        assert kept["kv_pages"].max() <= pages
        fates[host] = requests["swaps"].sum() > 0, requests["restarts"].sum() > 0
    assert fates == {"roomy": (True, False), "full": (True, True), "none": (False, True)}


def page_nbytes() -> int:
    """Of the pages of these runs."""
    return run_spec_of(composed(TIGHT)).room.page.nbytes


@pytest.mark.usefixtures("short_probes")
@pytest.mark.parametrize("clock", ["service", "wall"])
def test_a_budget_that_shrinks_under_a_run_ends_it_and_says_where(
    clock: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hold, replay, held, threads = Arena.hold, Engine.replay, set[int](), threading.active_count()

    def shrinking(arena: Arena, pages: list[int]) -> None:
        held.update(pages)
        if len(held) > 60:
            arena.num_pages = 60
        hold(arena, pages)

    def replaying(engine: Engine, work: Any) -> None:  # not before: probes hold pages too
        monkeypatch.setattr(Arena, "hold", shrinking)
        replay(engine, work)

    monkeypatch.setattr(Engine, "replay", replaying)
    words = [*SMALL, "backend=cpu", f"backend.clock={clock}", "hydra.run.dir=run"]
    assert main(["run", *words]) == 1
    told = line(capsys)
    assert "DeviceOOM: KV page" in told and "of gpu, which has 60" in told
    status = json.loads(Path("run/status.json").read_text())
    assert status["status"] == "failed" and "shrinking" in status["traceback"]
    with pytest.raises(ValueError, match="did not finish"):
        load("run")
    assert threading.active_count() == threads, "a lane is still alive"


def profiled(folder: Path, longest: int = 4000) -> Path:
    """A profile folder of micro_llama made up by hand; nodes reach as far as said."""
    line = Table(((1, longest),), (1e5, 1e5 + longest))
    grid = Table(((1, longest), (1, longest)), (1e4,) * 4)
    names = dict.fromkeys((LINEAR, HEAD, FIRST, DECODE, HOST, "gpu->host", "host->gpu"), line)
    spec = run_spec_of(composed(SMALL)).spec
    folder.mkdir()
    cost = TableCost({**names, PREFILL_SLICE: grid}, spec, PageSize.of(spec, 16), "a test")
    cost.save(folder / "cost.json")
    return folder


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_cost_table_that_is_not_finite_is_refused(
    value: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = profiled(tmp_path / "profile") / "cost.json"
    content = json.loads(path.read_text())
    content["tables"][DECODE]["values"][1] = value
    path.write_text(json.dumps(content))
    seal(path.parent, path.name)
    assert main(["run", *SMALL, f"profile={path.parent}"]) == 2
    told = line(capsys)
    assert f"{path}, table decode: row 2: a cost is {value}" in told and "measure it again" in told


@pytest.mark.parametrize(
    ("axes", "values", "told"),
    [
        ([[1, 2]], [1.0, -0.5], "table decode: row 2: a cost is -0.5, below zero"),
        ([[2, 1]], [1.0, 2.0], "table decode: axis 1 does not rise from 0 or above"),
        ([[-1, 1]], [1.0, 2.0], "table decode: axis 1 does not rise from 0 or above"),
        ([[1, 1]], [1.0, 2.0], "table decode: axis 1 does not rise from 0 or above"),
    ],
)
def test_a_profile_with_no_times_or_no_axis_is_refused(
    axes: Any, values: Any, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = profiled(tmp_path / "profile") / "cost.json"
    content = json.loads(path.read_text())
    content["tables"][DECODE] = {"axes": axes, "values": values}
    path.write_text(json.dumps(content))
    seal(path.parent, path.name)
    assert main(["run", *SMALL, f"profile={path.parent}"]) == 2
    assert f"{path}, {told}" in line(capsys)


@pytest.mark.parametrize(
    ("name", "before", "after", "told"),
    [
        (
            "dense",
            "o_proj,16,7.5",
            "o_proj,16,",
            "dense.csv, column time_us, row 11: a cost",
        ),
        ("dense", "o_proj,16,7.5", "o_proj,16,-1", "row 11: a cost is -1.0, below zero"),
        ("dense", "o_proj,16,7.5\n", "", "dense.csv: no time of o_proj at tokens=16; profile it"),
        ("dense", "o_proj,16,7.5", "o_proj,1,7.5", "dense.csv: a layer has two times"),
        ("dense", "o_proj,16,7.5", "o_proj,16,x", "column time_us: not all are numbers"),
        ("dense", "time_us", "time", "dense.csv lacks column time_us"),
        ("dense", "sampler", "s", None),
        ("per_sequence", "sampler", "s", "per_sequence.csv lacks layer sampler"),
        ("attention", "1,0,0,0,1.5", "1,0,0,0,inf", "attention.csv, column time_us, row 1: a cost"),
        ("attention", "1,0,0,0,1.5", "-1,0,0,0,1.5", "column prefill_chunk, row 1: a cost is -1.0"),
        ("attention", "1,0,0,0,1.5", "1,0,0,0,1.5,9,9", "attention.csv is damaged"),
    ],
)
def test_a_kernel_profile_is_refused_by_file_and_row(
    name: str, before: str, after: str, told: str | None, tmp_path: Path
) -> None:
    folder = write_kernels(tmp_path / "kernels")
    spec = run_spec_of(composed(SMALL)).spec
    path = folder / f"{name}.csv"
    text = path.read_text()
    assert told is None or before in text
    path.write_text(text.replace(before, after))
    if told is None:
        assert KernelProfileCost.load(folder, spec, "none").attention
        return
    with pytest.raises(ValueError, match=re.escape(told)) as caught:
        KernelProfileCost.load(folder, spec, "none")
    assert str(folder) in str(caught.value) and "\n" not in str(caught.value)


def test_a_table_of_aiconfigurators_with_no_time_is_refused_by_its_row(tmp_path: Path) -> None:
    for wrong in (float("nan"), float("inf"), -1.0):
        path = tmp_path / "gemm.parquet"
        pd.DataFrame({"gemm_dtype": "bfloat16", "latency": [1.0, wrong]}).to_parquet(path)
        setting = run_spec_of(composed(SMALL))
        with pytest.raises(ValueError, match=r"gemm\.parquet, column latency, row 2: a cost is"):
            AiConfiguratorCost.load(tmp_path, setting.device, setting.spec)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("[]", "is no cost table"),
        ("{}", "is no cost table"),
        ("{", "is no cost table"),
        ('{"format": 1}', "is damaged (KeyError('tables'))"),
        ('{"format": 1, "tables": 3}', "is damaged"),
    ],
)
def test_a_cost_table_that_is_none_is_refused(
    content: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cost.json").write_text(content)
    assert main(["run", *SMALL, f"profile={tmp_path}"]) == 2
    assert f"{tmp_path / 'cost.json'} {told}" in line(capsys)


def lacks_a_table(content: Any) -> None:
    del content["tables"][DECODE]


def lacks_a_value(content: Any) -> None:
    content["tables"][DECODE]["values"].pop()


def holds_no_list(content: Any) -> None:
    content["tables"][DECODE]["axes"] = 3


def has_another_model(content: Any) -> None:
    content["model"]["hidden"] = 3


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lacks_a_table, "cost.json has no table decode"),
        (lacks_a_value, "cost.json, table decode: not a value for each point"),
        (holds_no_list, "cost.json is damaged (TypeError"),
        (has_another_model, "cost.json is damaged (TypeError"),
    ],
)
def test_a_damaged_cost_table_is_told_with_its_path(
    damage: Any, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = profiled(tmp_path / "profile") / "cost.json"
    content = json.loads(path.read_text())
    damage(content)
    path.write_text(json.dumps(content))
    seal(path.parent, path.name)
    assert main(["run", *SMALL, f"profile={path.parent}"]) == 2
    assert told in line(capsys)


@pytest.mark.parametrize("content", ["{", "[]"])
@pytest.mark.parametrize("words", [(), ("backend=cpu", "backend.reference_ns=auto")])
def test_a_damaged_profile_is_told_with_its_path(
    words: tuple[str, ...], content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = profiled(tmp_path / "profile")
    (folder / "profile.json").write_text(content)
    seal(folder, "profile.json")
    assert main(["run", *SMALL, *words, f"profile={folder}"]) == 2
    assert f"{folder / 'profile.json'} is damaged" in line(capsys)


def test_a_foreign_profile_that_is_not_finite_is_refused(shared: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a cost is nan"):
        Ragged.of([(1, 1, 5.0), (1, 2, float("nan"))])
    peers = shared / "data" / "peers"
    spec = run_spec_of(composed(["model=llama3_8b", "device=h200"])).spec
    folder = peers / "kernel_profiles" / "RTX4090_Llama-3.1-8B"
    for name in ("attention.csv", "per_sequence.csv", "dense.csv"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    rows = (tmp_path / "dense.csv").read_text().splitlines()
    rows[-1] = rows[-1].rpartition(",")[0] + ",inf"
    (tmp_path / "dense.csv").write_text("\n".join(rows))
    with pytest.raises(ValueError, match="a cost is inf"):
        KernelProfileCost.load(tmp_path, spec, "none")
    with np.load(peers / "cost_tables" / "llama2-7b_a100_tp1.npz") as arrays:
        tables = {name: arrays[name] for name in arrays.files}
    tables["attn_decode_ms"][5, 3] = np.nan
    np.savez(tmp_path / "vidur.npz", **tables)
    with pytest.raises(ValueError, match=r"vidur\.npz, table attn_decode_ms, row 6, 4: a cost"):
        VidurCost.load(tmp_path / "vidur.npz", spec)


def test_a_foreign_profile_with_a_time_below_zero_is_refused(shared: Path, tmp_path: Path) -> None:
    spec = run_spec_of(composed(["model=llama3_8b", "device=h200"])).spec
    with np.load(shared / "data/peers/cost_tables/llama2-7b_a100_tp1.npz") as arrays:
        tables = {name: arrays[name] for name in arrays.files}
    tables["add_ms"][3] = -0.5
    np.savez(tmp_path / "vidur.npz", **tables)
    with pytest.raises(ValueError, match=r"vidur\.npz, table add_ms, row 4: a cost is -0\.5"):
        VidurCost.load(tmp_path / "vidur.npz", spec)
    with pytest.raises(ValueError, match=r"a cost is -1\.0, below zero"):
        Ragged.of([(1, 1, 5.0), (1, 2, -1.0)])


def test_a_foreign_profile_that_lacks_a_table_says_which(shared: Path, tmp_path: Path) -> None:
    setting = run_spec_of(composed(["model=llama3_8b", "device=h200"]))
    peers = shared / "data" / "peers"
    with np.load(peers / "cost_tables" / "llama2-7b_a100_tp1.npz") as arrays:
        tables = {name: arrays[name] for name in arrays.files if name != "attn_rope_ms"}
    np.savez(tmp_path / "vidur.npz", **tables)
    with pytest.raises(ValueError, match=r"vidur\.npz lacks attn_rope_ms; give"):
        VidurCost.load(tmp_path / "vidur.npz", setting.spec)
    gemm = peers / "aiconfigurator_h200" / "gemm.parquet"
    (tmp_path / gemm.name).write_bytes(gemm.read_bytes())
    with pytest.raises(ValueError, match=r"has no context_attention\*\.parquet; add"):
        AiConfiguratorCost.load(tmp_path, setting.device, setting.spec)


def test_a_run_beyond_its_profile_is_extrapolated_warned_of_and_marked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name, longest in (("wide", 4000), ("narrow", 40)):
        profile = profiled(tmp_path / f"profile-{name}", longest)
        assert main(["run", *SMALL, f"profile={profile}", f"hydra.run.dir={name}"]) == 0
    wide, narrow = (load(name).provenance["cost_extrapolated"] for name in ("wide", "narrow"))
    assert wide == {} and narrow[DECODE] > 0 and narrow[LINEAR] > 0
    warned = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert all("cost_extrapolated" in w and "--max-total-tokens" in w for w in warned)
    assert sorted(w.split()[2] for w in warned) == sorted(narrow), "one line per table"


def test_a_shape_beyond_a_foreign_profile_is_warned_of(
    shared: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = shared / "data" / "peers" / "kernel_profiles" / "RTX4090_Llama-3.1-8B"
    spec = run_spec_of(composed(["model=llama3_8b", "device=h200"])).spec
    cost = KernelProfileCost.load(folder, spec, "none")
    inside = cost.shape_ns([1] * 4, [900] * 4, 4)
    assert cost.extrapolated == {} and not caplog.records
    assert cost.shape_ns([1] * 4, [10**6] * 4, 4) > inside
    cost.shape_ns([1] * 4, [10**6] * 4, 4)
    assert cost.extrapolated == {"attention by context": 2}
    assert len(caplog.records) == 1 and "attention by context" in caplog.text


def test_a_shape_beyond_aiconfigurators_tables_is_warned_of(
    shared: Path, caplog: pytest.LogCaptureFixture
) -> None:
    setting = run_spec_of(composed(["model=llama3_8b", "device=h200"]))
    folder = shared / "data" / "peers" / "aiconfigurator_h200"
    cost = AiConfiguratorCost.load(folder, setting.device, setting.spec)
    caplog.clear()  # cells that cannot be true were left out, and told
    inside = cost.shape_ns([1] * 4, [900] * 4, 4)
    assert cost.extrapolated == {} and not caplog.records
    assert cost.shape_ns([1] * 4, [10**6] * 4, 4) > inside
    cost.shape_ns([1] * 4, [10**6] * 4, 4)
    assert cost.extrapolated == {"decode by mean context": 2}
    assert len(caplog.records) == 1 and "decode by mean context" in caplog.text
    cost.shape_ns([10**6], [0], 1)
    assert {"prompt", "decode by mean context"} < set(cost.extrapolated)
    assert any("cost table prompt" in record.getMessage() for record in caplog.records)
