"""`tandem fidelity` from its words to its folder: end to end, going on, and what is refused."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from analysis.fidelity import JUDGED, TTFT_UP_TO
from analysis.run import load
from runtime.measure import calibrate
from tandem.cli.__main__ import main
from tandem.cli.fidelity import loads_of, num_pieces, plan_of, progress, workload_of
from tandem.fidelity import protocol
from tandem.wiring import profile, workload
from tests.support.short_trace import SHORT, write_short
from traces.serving.request import Request
from traces.store import write_trace

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/shortest_prompt_first"
OWN = ("--config-dir", str(EXAMPLE / "conf"), "scheduling=shortest", "scheduling.max_jobs=4")
SMALL = ["model=micro_llama", "model.max_positions=256", "policy=vllm_v1", *SHORT]
SMALL += ["limit=10", "scheduling.max_jobs=4", "budget.kv_pages=64"]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    write_short(tmp_path)


@pytest.fixture
def drifts(
    monkeypatch: pytest.MonkeyPatch, short_probes: None, unrendered: None
) -> Callable[..., None]:
    """Calibrations of a few shapes and requests, on a machine that drifts as a test says."""

    def some(shapes: Callable[..., Sequence[Any]]) -> Callable[..., Sequence[Any]]:
        def kept(*given: Any) -> Sequence[Any]:
            found = shapes(*given)
            copies = [shape for shape in found if shape.moves][::3]
            return [*copies, *[shape for shape in found if not shape.moves][::12]]

        return kept

    torch.set_num_threads(1)
    for name in ("grid", "holdout"):
        monkeypatch.setattr(calibrate, name, some(getattr(calibrate, name)))
    monkeypatch.setattr(calibrate, "repeats", lambda shape: 2)
    monkeypatch.setattr(profile, "measured_ns", lambda spec, seed: (1_500_000, 4_000_000))
    monkeypatch.setattr(workload, "STREAMED", 4)
    monkeypatch.setattr(workload, "SESSIONS", 2)
    monkeypatch.setattr(profile, "REQUESTS", 4)
    monkeypatch.setattr(protocol, "is_steady", lambda table: True)

    def drifting(*moves: float) -> None:
        left = iter(moves)
        monkeypatch.setattr(protocol, "drift", lambda run: next(left))

    return drifting


def fidelity(*words: str) -> int:
    return main(["fidelity", *SMALL, "--out", "out", *words])


def report() -> dict[str, Any]:
    found = json.loads(Path("out/report/fidelity.json").read_text())
    assert isinstance(found, dict)
    return found


@pytest.mark.ci
def test_the_protocol_end_to_end_and_going_on_with_a_policy_of_the_users(
    drifts: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    drifts(0.05, 0.001, 0.2, 0.002)  # two runs of the capacity, two judged ones
    status = fidelity(*OWN, "--load", "0.5", "--reruns", "1")
    out, err = capsys.readouterr()
    assert status in (0, 1) and "to go on" not in err, err
    found, reruns = report(), pd.read_csv("out/report/reruns.csv")
    failed = found["failed"]
    assert status == int(bool(failed))
    assert out.splitlines()[-1] == "report: out/report/report.html"
    assert found["headline"] in out and "discarded" in out
    assert found["discarded"] == {"calibrations": 0, "capacity_runs": 1, "judged_runs": 1}
    # capacity: all at once; the judged runs arrive at half of it
    at_once = load("out/capacity").requests
    assert found["capacity"] == pytest.approx(10e9 / at_once["finish_ns"].max())
    measured, predicted = load("out/load-50/run0/measured"), load("out/load-50/predicted")
    assert measured.is_measured and not predicted.is_measured
    for run in (measured, predicted):
        assert run.config["arrival"]["rate"] == found["capacity"] / 2
    assert predicted.requests["arrival_ns"].equals(measured.requests["arrival_ns"])
    # one clock for calibration, runs and replays: reference works of the first calibration
    nominal = json.loads(Path("out/profile/profile.json").read_text())["reference_ns"]
    assert measured.config["backend"]["reference_ns"] == nominal
    # the profile holds replays of synthetic requests at the rate, one more than measured runs
    replays = sorted(Path("out/load-50/profile").glob("fitted-?"))
    assert len(replays) == 3
    for folder in replays:
        replay = load(folder)
        assert replay.config["arrival"]["rate"] == found["capacity"] / 2
        assert replay.provenance["trace_hash"] != measured.provenance["trace_hash"]
    # a discarded run is told beside its repeat, and judges nothing
    runs = reruns.groupby("rerun")[["counts", "moved"]].first()
    assert runs["counts"].tolist() == [False, True]
    assert runs["moved"].tolist() == [0.2, 0.002]
    kept = reruns[reruns["counts"] & reruns["figure"].eq("mean_tpot_s")]
    errors = pd.read_csv("out/report/errors.csv").set_index("figure")
    assert errors.loc["mean_tpot_s", "error"] == pytest.approx(kept["error"].item())
    assert {*JUDGED, "p99_ttft_s"} <= {*errors.index}
    assert errors.loc["mean_ttft_s", "bar"] == 0.1
    figure = pd.read_csv("out/report/figures/errors.csv")
    assert len(figure) == 2 * len(JUDGED)
    # the command goes on in its folder: what is there is not done again, and more may be asked for
    began = {path: path.stat().st_mtime_ns for path in Path("out").rglob("status.json")}
    drifts(0.001, 0.2, 0.002, 0.003)
    fidelity(*OWN, "--load", "0.5", "--reruns", "2")
    again = {path: path.stat().st_mtime_ns for path in Path("out").rglob("status.json")}
    assert {str(path.relative_to("out/load-50")) for path in {*again} - {*began}} == {
        *("run2/measured/status.json", "run2/replayed/status.json"),
        "profile/fitted-3/status.json",
    }
    moved = {str(path.parent) for path in began if again[path] != began[path]}
    paces = ["", *[f"-{pace}" for pace in protocol.PACES]]
    predictions = {f"out/load-50/predicted{pace}" for pace in paces}
    assert moved == predictions, "by the profile that has grown"


COSERVING = ["model=micro_llama", "model.max_positions=256", "policy=coserve_slo", *SHORT]
COSERVING += ["limit=10", "scheduling.serving.max_jobs=4", "budget.kv_pages=400"]
COSERVING += ["training=finetune", "training.sequence_tokens=64", "training.data.mean_tokens=40"]
COSERVING += ["training.microbatches=2", "training.num_steps=500", "scheduling.slo_s=0.02"]


@pytest.mark.slow
def test_a_job_finetunes_beside_what_is_judged(
    drifts: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    """The capacity is that of serving alone; quotes are those of one profile on both sides."""
    drifts(0.0, 0.0)
    status = main(["fidelity", *COSERVING, "--load", "1.2", "--reruns", "1", "--out", "out"])
    out, err = capsys.readouterr()
    assert status in (0, 1) and "to go on" not in err, err
    assert not load("out/capacity").rows("samples") and "finetuned" in out
    measured, predicted = load("out/load-120/run0/measured"), load("out/load-120/predicted")
    replayed = load("out/load-120/run0/replayed")
    for run in (measured, predicted, replayed):
        assert run.rows("samples"), "the job trains"
        assert run.config["quoted_profile"] == str(Path("out/profile").resolve())
    assert measured.config["profile"] is None
    assert predicted.config["profile"] == str(Path("out/load-120/profile").resolve())
    figures = {row["figure"]: row for row in report()["loads"][0]["figures"]}
    beside = figures["finetune_tokens_per_s"]
    assert beside["measured"] > 0 and beside["bar"] == 0.05 and figures["device_peak_bytes"]
    # what is fitted finetunes on other samples than the judged ones
    lengths = {tuple(measured.samples["tokens"][:5])}  # type: ignore[index]
    for folder in Path("out").glob("**/fitted-?"):
        fitted = load(folder)
        assert fitted.samples is not None
        lengths.add(tuple(fitted.samples["tokens"][:5]))
    assert len(lengths) == 3, "two replays of a calibration, of other seeds than the judged run"


def test_a_killed_measurement_says_how_to_go_on(
    drifts: Callable[..., None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(protocol, "calibrate", killed)
    assert fidelity() == 130
    assert "to go on: the same command with --out out" in capsys.readouterr().err
    assert not Path("out/.lock").exists()
    assert main(["fidelity", *SMALL, "seed=3", "--out", "out"]) == 2
    assert "another workload is judged in it (model=micro_llama" in capsys.readouterr().err


@pytest.mark.parametrize("changed", ["mine/rule.py", "mine/conf/slo/own.yaml", "short.parquet"])
def test_a_folder_is_not_gone_on_with_where_code_yaml_or_trace_has_changed(
    changed: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Equal words and an equal commit are not enough: the user's files are in neither."""
    own = ["--config-dir", "mine/conf", "slo=own"]
    Path("mine/conf/slo").mkdir(parents=True)
    Path("mine/rule.py").touch()
    Path("mine/conf/slo/own.yaml").write_text("ttft_s: 1\ntpot_s: 1")
    monkeypatch.setattr("tandem.cli.fidelity.measured", lambda *_: exit(3))
    for _ in range(2):  # where nothing has changed, the second begins too
        with pytest.raises(SystemExit):
            fidelity(*own)
    if changed == "short.parquet":
        write_trace(changed, [Request(i, 0, 20, 5) for i in range(12)], {"rule": "none"})
    else:
        Path(changed).write_text(Path(changed).read_text() + "0")
    capsys.readouterr()
    assert fidelity(*own) == 2
    told = capsys.readouterr().err
    assert "the code, a yaml file or the trace has changed since" in told
    assert len(told.splitlines()) == 1


def test_a_folder_of_an_earlier_version_is_of_other_code(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its settings.json is a list of words."""
    Path("out").mkdir()
    Path("out/settings.json").write_text(json.dumps(workload_of(SMALL, "0.5", 1).measuring))
    assert fidelity() == 2
    assert "the code, a yaml file or the trace has changed since" in capsys.readouterr().err
    assert fidelity("seed=3") == 2
    assert "another workload is judged in it (model=micro" in capsys.readouterr().err


def test_a_folder_with_something_else_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    Path("out").mkdir()
    Path("out/thesis.tex").touch()
    assert fidelity() == 2
    assert "--out" in (told := capsys.readouterr().err) and "take another folder" in told
    assert [path.name for path in Path("out").iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--load", "0"], "--load 0: 0 is no share of the capacity; give numbers above 0"),
        (["--load", "0.5,-1"], "--load 0.5,-1: -1 is no share of the capacity"),
        (["--load", "0.5,"], "--load 0.5,: nothing is no share"),
        (["--load", "half"], "half is no share"),
        (["--load", "nan"], "nan is no share"),
        (["--reruns", "0"], "--reruns 0: at least one is needed"),
        (["backend=sim"], "backend=sim: tandem fidelity measures, and predicts beside it"),
        (["backend=openai"], "take backend=cpu or backend=cuda"),
        (["profile=x"], "profile=x: tandem fidelity calibrates a profile of its own"),
        (["quoted_profile=x"], "quoted_profile=x: tandem fidelity calibrates a profile"),
        (["arrival.rate=3"], "arrival.rate=3: the rate follows from --load"),
        (["arrival=all_at_once"], "arrival: the one that is chosen has no rate"),
        (["arrival=trace"], "take arrival=poisson or arrival=gamma"),
        (["policy=orca,sarathi"], "policy=orca,sarathi: tandem fidelity judges one workload"),
        (["replicas=2"], "replicas=2: tandem fidelity judges one device"),
        (["training=sample"], "training: tandem fidelity judges serving, alone or beside a job"),
        (["backend.probe_look_s=null"], "without probes nothing tells that the machine drifted"),
        (["record=requests"], "record=requests: peaks of KV are judged too"),
        (["polic=orca"], "did you mean policy?"),
        (["limit=100"], "limit=100: the trace holds 12 requests"),
        (["--config-dir", "nowhere"], "--config-dir nowhere: no such folder"),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_written(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert fidelity(*words) == 2
    out, err = capsys.readouterr()
    assert told in err and len(err.splitlines()) == 1 and not out
    assert not Path("out").exists()


def test_an_unknown_flag_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        fidelity("--bogus")
    assert ended.value.code == 2 and "--bogus" in capsys.readouterr().err


def test_settings_of_the_measuring_backend_stay_on_its_side() -> None:
    words = ["backend.clock=wall", *SMALL, "backend.probe_look_s=1"]
    made = workload_of(words, "0.5", 1)
    assert made.settings == tuple(SMALL)
    assert made.backend == (
        *("backend=cpu", "backend.clock=wall", "backend.probe_look_s=1"),
        *("backend.reference_ns=auto", "backend.workspace_every=0"),
    )
    assert made.has_clock


def test_loads_are_kept_in_order_and_once() -> None:
    assert loads_of("0.8,0.5,0.80") == (0.8, 0.5) and TTFT_UP_TO == 0.5


def test_a_dry_run_tells_the_work_and_writes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert fidelity("--dry-run", "--load", "0.5,0.8", "--reruns", "3") == 0
    lines = capsys.readouterr().out.splitlines()
    counts = {line[:40].strip(): line[40:48].strip() for line in lines[1:-1]}
    assert counts["load 80 %: measured runs"] == "3"
    assert counts["load 80 %: synthetic replays"] == "4"
    assert not Path("out").exists()
    made = workload_of(SMALL, "0.5,0.8", 3)
    planned = plan_of(made)
    assert int(counts["in all"]) == sum(work.count for work in planned)
    # told on the way: one calibration for its four parts, and a verdict for each load
    assert num_pieces(made) == sum(work.count for work in planned) - 4 + 1 + 2
    assert all(work.each_s > 0 for work in planned)


def test_a_dry_run_counts_the_capacity_of_serving_alone(tmp_path: Path) -> None:
    made = workload_of(COSERVING, "0.5", 2)
    assert made.finetunes and not workload_of(SMALL, "0.5", 2).finetunes
    assert made.at(2.0, tmp_path)[-2:] == ("arrival.rate=2.0", f"quoted_profile='{tmp_path}'")
    assert workload_of(SMALL, "0.5", 2).at(2.0, tmp_path)[-1] == "arrival.rate=2.0"
    seconds = {work.name: work.each_s for work in plan_of(made)}
    assert seconds["load 50 %: measured runs"] > seconds["capacity: all requests at once"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [Terminal, io.StringIO])
def test_pieces_of_work_are_told_on_a_terminal_alone(
    stream: type[io.StringIO], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Repeated runs are more pieces than were planned."""
    monkeypatch.setattr("sys.stderr", told := stream())
    with progress(2) as tell:
        for text in ("calibrated", "run 0", "run 1"):
            tell(text)
    text = told.getvalue()
    assert ("calibrated\n" in text and "3/3" in text) if stream is Terminal else text == ""
