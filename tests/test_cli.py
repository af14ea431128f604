"""The command line: what it says, what it leaves behind, and how it ends."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from engine.record import TABLES
from policies.out_of_memory import DoesNotFit
from tandem.cli import main
from tandem.compose import composed
from tandem.errors import RunFailed, Usage
from tandem.folder import run_folder, write_status
from tandem.run import options_first

ROOT = Path(__file__).resolve().parent.parent
SMALL = ["model=micro_llama", "limit=4", "arrival=all_at_once"]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)


def runs(root: Path) -> list[Path]:
    """Folders of runs, in the order of their names."""
    return sorted(path.parent for path in root.rglob("status.json"))


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys, tandem.cli\n"
        "try: tandem.cli.main(['--help'])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "heavy = {'torch', 'hydra', 'pandas', 'simpy', 'transformers', 'pyarrow', 'matplotlib'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert told.returncode == 0, told.stderr
    assert "calibrate" in told.stdout


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["run", "polic=x"], "did you mean policy?"),
        (["run", "arrival.rat=3"], "did you mean arrival.rate"),
        (["run", "arival=poisson"], "arival: no such setting; did you mean arrival?"),
        (["run", "training=text", "training.path=x"], "did you mean training.data.path or trace."),
        (["run", "policy=chunked_restrat"], "did you mean chunked_restart"),
        (["run", "arrival.rate=abc"], "float wanted"),
        (["run", "arrival.rate=-1"], "must be a positive number"),
        (["run", "seed=abc"], "int wanted"),
        (["run", "seed=-1"], "seed=-1: it must be at least 0"),
        (["run", "slo.ttft_s=fast"], "slo.ttft_s=fast: str given, float | None wanted, in sec"),
        (["run", "budget.kv_bytes=70MB"], "kv_bytes=70MB: str given, int | None wanted, in bytes"),
        (
            ["run", "trace=none", "training=sample", "policy=zero_offload", "planner.modes=re"],
            "modes=re: str given, keep|recompute|offload | tuple[keep|recompute|offload",
        ),
        (["run", "slo.ttft_s=0"], "slo.ttft_s=0.0: it must be above 0 seconds"),
        (["run", "+slo.ttft=1"], "slo.ttft: no such limit; did you mean ttft_s"),
        (["run", "arrival.rate=1e-12"], "raise the rate"),
        (["run", "model.num_kv_heads=0"], "num_kv_heads is 0"),
        (["run", "depth=0"], "at least 1"),
        (["run", "limit=0"], "at least one request"),
        (["run", "policy=zero3_offload"], "this policy trains, and there is nothing to train"),
        (["run", "policy=zero3_offload", "training=sample"], "set trace=none"),
        (["run", "training=sample"], "training needs a policy that trains"),
        (["run", "trace=file"], "give one with trace.path=..."),
        (["run", "trace=file", "trace.path=/no/such.parquet"], "no such trace"),
        (["run", "trace=sharegpt", "trace.path=/no/such.json"], "no such file"),
        (["run", "policy=recorded", "replayed=/nowhere"], "no plan log"),
        (["run", "profile=/nowhere"], "tandem calibrate"),
        (["run", "backend.clock=wall"], "has no clock"),
        (["run", "--config-dir", "/nowhere"], "not found"),
        (["run", "scheduling._target_=os.system"], "trusted=[os]"),
        (["run", "scheduling._target_=policies.chunked_prefill.Chunked"], "mean ChunkedPrefill"),
        (["run", "+scheduling.budget=5"], "no such setting"),
        (["run", "+depht=5"], "depht: no such setting; did you mean depth?"),
        (["run", "+backend.reference=1", "backend=cpu"], "backend.reference: no such setting; did"),
        (["run", "+backend.probe_look_s=1"], "backend.probe_look_s: no such setting; there are"),
        (["run", "+sampling.top=1"], "sampling.top: no such setting; did you mean top_p or top_k"),
        (["run", "arrival=trace", "+arrival.rate=4"], "arrival.rate: no such setting"),
        (["run", "+router.load=tokens"], "router.load: no such setting"),
        (["run", "budget=5"], "budget=5: it has settings of its own; write budget.KEY=value"),
        (["run", "limit=2", "model=null"], "model=null: the name of an option is wanted"),
        (["run", "policy=recorded"], "a run with policy=recorded replayed=FOLDER"),
        (["run", "sampling.temperature=-1"], "sampling.temperature=-1.0: it must be at least 0"),
        (["run", "sampling.temperature=nan"], "sampling.temperature=nan: it must be at least 0"),
        (["run", "sampling.top_k=-1"], "sampling.top_k=-1: it must be at least 0"),
        (["run", "backend=cpu", "backend.reference_ns=[5]"], "tuple[int, int] | None wanted"),
        (["run", "device.linear_memory=[[1]]"], "linear_memory[0]=[1]: 1 values given, 2 wanted"),
        (["run", "sampling.top_p=0"], "sampling.top_p=0.0: it must be above 0 and at most 1"),
        (
            ["run", "policy=chunked_reservation", "memory.prefix_caching=true"],
            "take memory=paged_restart",
        ),
        (["run", "budget.kv_pages=10"], "pages of KV"),
        (
            ["run", "policy=orca", "budget.kv_pages=100"],
            "a reservation of memory.max_tokens=2048 needs 128 pages",
        ),
        (["run", "policy=orca", "memory.max_tokens=64"], "max_tokens=64: the longest request"),
        (["run", "budget.fraction=1.5"], "at most 1"),
        (["run", "model=gpt2"], "knows 1024 positions"),
        (["run", "model=hf"], "give one with model.path=..."),
        (["run", "model=hf", "model.path=/nowhere"], "model.path=/nowhere: no such file"),
        (["calibrate", "backend=sim"], "measures nothing"),
        (["calibrate", "polic=x"], "did you mean policy?"),
        (["calibrate", "--config-dir", "/nowhere"], "--config-dir /nowhere: no such folder"),
        (["list", "--config-dir", "/nowhere"], "--config-dir /nowhere: no such folder"),
        (["compare", "/nowhere", "/nowhere"], "is no folder"),
        (["trace", "show", "/no/such.parquet"], "no such trace"),
        (["trace", "import", "/no/such.json", "--out", "x.parquet"], "no such file"),
    ],
)
def test_a_mistake_is_told_in_one_line(
    words: list[str], wanted: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    told = capsys.readouterr().err.strip()
    assert wanted in told
    assert len(told.splitlines()) == 1


def test_what_an_experiment_leaves_of_another_choice_is_no_mistake() -> None:
    """It sets arrival.rate, which recorded times have no use for; who writes that is told."""
    words = ["experiment=demo", "arrival=trace"]
    assert composed(words).config["arrival"]["_target_"] is None
    with pytest.raises(Usage, match=r"arrival\.rate: no such setting"):
        composed([*words, "arrival.rate=2"])


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("_target_: a.B\n  max_jobs: 3\n", "mine.yaml: not YAML at line 2, column 11: mapping val"),
        ("a: 1\na: 2\n", "mine.yaml: not YAML at line 2, column 1: found duplicate key a"),
        ("a: \0\n", "mine.yaml: not YAML: "),
    ],
)
@pytest.mark.parametrize("verb", ["run", "calibrate", "sweep"])
def test_a_slip_in_a_users_yaml_is_told_with_its_place(
    verb: str, text: str, where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("conf/scheduling").mkdir(parents=True)
    Path("conf/scheduling/mine.yaml").write_text(text)
    assert main([verb, "--config-dir", "conf", "scheduling=mine"]) == 2
    told = capsys.readouterr().err.strip()
    assert str(Path("conf/scheduling").resolve() / where) in told
    assert len(told.splitlines()) == 1


@pytest.mark.parametrize(
    "words", [["seed=-1"], ["model=llama3_8b"], ["backend.clock=wall"], ["hydra.run.dir=here"]]
)
def test_a_rejected_run_leaves_nothing(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    assert main(["run", "depth=0", *words]) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_a_rejected_calibration_leaves_nothing(tmp_path: Path) -> None:
    for words in (["seed=-1"], ["model=llama3_8b"], ["backend=sim"]):
        assert main(["calibrate", *words, "--out", "profile"]) == 2
    assert not list(tmp_path.iterdir())


def test_a_rejected_run_leaves_what_others_put_there(tmp_path: Path) -> None:
    Path("here").mkdir()
    Path("here/theirs").touch()
    assert main(["run", "depth=0", "hydra.run.dir=here"]) == 2
    assert main(["run", *SMALL, "hydra.run.dir=here"]) == 2
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")] == [
        "here",
        "here/theirs",
    ]


def test_what_the_system_refuses_is_told_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *SMALL, "hydra.run.dir=all/run"]) == 0
    Path("all/runs.parquet").mkdir()
    capsys.readouterr()
    assert main(["collect", "all"]) == 1
    told = capsys.readouterr().err.strip()
    assert "runs.parquet" in told and "irectory" in told
    assert len(told.splitlines()) == 1


def test_an_impossible_budget_names_its_parts_and_the_knobs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """And only knobs that can help: no fraction of 256 MiB holds 15 GiB of weights."""
    larger, knobs = "take a larger device", ("budget.fraction", "token_budget", "page_tokens")
    assert main(["run", "model=llama3_8b"]) == 2
    told = capsys.readouterr().err
    for part in ("short", "weights 15,316.5 MiB", "256.0 MiB of device=cpu, a stand-in", larger):
        assert part in told
    assert not any(knob in told for knob in knobs)
    assert main(["run", "budget.fraction=0.1"]) == 2
    told = capsys.readouterr().err
    assert all(part in told for part in (larger, *knobs))


def test_what_this_machine_cannot_hold_is_told_before_weights_are_drawn(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tandem.machines.available_bytes", lambda: 2**30)
    large = ["model=llama3_8b", "device=a100", "budget.host_bytes=0"]
    for words, wanted in (
        (large, "model llama3_8b: weights of 15,317 MiB, and 1,024 MiB are free here"),
        (["budget.host_bytes=1e17"], "MiB of KV in the host tier are more than this machine gives"),
    ):
        assert main(["run", "backend=cpu", "limit=5", *words]) == 2
        told = capsys.readouterr().err.strip()
        assert wanted in told and "backend=sim" in told
        assert len(told.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (
            ["policy=chunked_reservation", "budget.kv_pages=100", "budget.may_refuse=true"],
            "each reserves 128 pages of KV (memory.max_tokens=2048), 28 more than there are; a "
            "device has 100 pages of 16 tokens; raise budget.kv_pages",
        ),
        (
            ["policy=chunked_reservation", "memory.max_tokens=2", "budget.may_refuse=true"],
            "none stays within its reservation",
        ),
        (["budget.kv_pages=1", "budget.may_refuse=true", "page_tokens=1"], "1 pages of 1 tokens"),
    ],
)
def test_a_run_that_serves_nobody_says_why_and_ends_with_1(
    words: list[str], wanted: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The results are in place all the same: nothing failed, everybody was refused."""
    assert main(["run", *SMALL, *words]) == 1
    told = capsys.readouterr()
    assert "0 of 4 requests finished, 4 refused" in told.out
    assert "all 4 requests were refused: " in told.err and wanted in told.err
    assert len(told.err.strip().splitlines()) == 1
    [folder] = runs(tmp_path)
    assert json.loads((folder / "status.json").read_text())["status"] == "ok"
    assert json.loads((folder / "metrics.json").read_text())["num_refused"] == 4


def test_warnings_look_like_errors() -> None:
    code = (
        "import sys, tandem.cli\n"
        "from sim.table import Lookup, Table\n"
        "tandem.cli.main(['list', 'policies'])\n"
        "from sim.tables import UNITS\n"
        "Lookup('chunk', Table(((1, 64), (1, 2048)), (1.0,) * 4), UNITS['chunk'])[73, 3879]\n"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    [line] = told.stderr.splitlines()
    first = "first at 73 new tokens, 3879 tokens in KV (it was fitted to 1 to 64, 1 to 2048): "
    assert line.startswith(f"tandem: cost table chunk is extrapolated, {first}")


def test_flags_and_overrides_may_stand_in_any_order() -> None:
    words = ["a=1", "--config-dir", "mine", "b=2", "-m", "--cfg", "job", "--config-name=x", "c=3"]
    flags = ["--config-dir", "mine", "-m", "--cfg", "job", "--config-name=x"]
    assert options_first(words) == [*flags, "a=1", "b=2", "c=3"]
    assert options_first(["a=1", "-c", "job", "-m", "b=2"]) == ["-c", "job", "-m", "a=1", "b=2"]


def test_a_short_flag_may_come_last(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "limit=4", "-c", "job"]) == 0
    assert "limit: 4" in capsys.readouterr().out


def test_the_trace_back_is_there_on_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(ValueError, match="no such setting"):
        main(["run", "polic=x"])


def test_a_run_writes_its_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *SMALL]) == 0
    [folder] = runs(tmp_path)
    assert capsys.readouterr().out.splitlines()[-1] == str(folder.relative_to(tmp_path))
    names = {path.name for path in folder.iterdir()}
    tables = {f"{name}.parquet" for name in TABLES}
    assert names == tables | {"config.yaml", "provenance.json", "status.json", "metrics.json"}
    provenance = json.loads((folder / "provenance.json").read_text())
    for key in ("commit", "dirty", "versions", "host", "backend", "seed", "trace_hash", "depth"):
        assert key in provenance
    metrics = json.loads((folder / "metrics.json").read_text())
    assert metrics["num_finished"] == 4 and metrics["cost_form"] == "roofline"


def test_the_screen_says_what_a_result_rests_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *SMALL]) == 0
    assert "sim (roofline): 4 of 4 requests finished" in capsys.readouterr().out


def test_one_seed_gives_the_same_bytes_twice(tmp_path: Path) -> None:
    for _ in range(2):
        assert main(["run", *SMALL, "arrival=poisson"]) == 0
    first, second = runs(tmp_path)
    for path in first.glob("*.parquet"):
        assert path.read_bytes() == (second / path.name).read_bytes()


def test_a_sweep_gives_every_point_a_folder_and_outlives_a_bad_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "-m", *SMALL, "depth=1,0,2"]) == 2
    assert "at least 1" in capsys.readouterr().err
    states = {f.name: json.loads((f / "status.json").read_text())["status"] for f in runs(tmp_path)}
    assert states == {"0": "ok", "1": "rejected", "2": "ok"}


def test_a_failed_run_keeps_its_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "conf" / "scheduling").mkdir(parents=True)
    (tmp_path / "conf" / "scheduling" / "broken.yaml").write_text("_target_: broken.Broken\n")
    (tmp_path / "broken.py").write_text(
        "class Broken:\n    def batch(self, view):\n        raise RuntimeError('out of ideas')\n"
    )
    assert main(["run", "--config-dir", "conf", "scheduling=broken", *SMALL]) == 1
    told = capsys.readouterr().err.strip()
    assert "out of ideas" in told
    assert len(told.splitlines()) == 1
    [folder] = runs(tmp_path)
    status = json.loads((folder / "status.json").read_text())
    assert status["status"] == "failed"
    assert "broken.py" in status["traceback"]


def test_a_killed_run_never_looks_finished(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with run_folder(folder) as aside:
        assert not folder.exists()
        assert json.loads((aside / "status.json").read_text())["status"] == "starting"
    assert folder.is_dir()
    assert not aside.exists()


@pytest.mark.parametrize(
    ("error", "at", "wanted", "told"),
    [
        (ValueError, "starting", "rejected", ValueError),
        (ValueError, "running", "failed", RunFailed),  # a policy's, say: no setting is wrong
        (OSError, "starting", "failed", RunFailed),
        (DoesNotFit, "running", "does_not_fit", RunFailed),
        (KeyboardInterrupt, "starting", "interrupted", KeyboardInterrupt),
        (KeyboardInterrupt, "running", "interrupted", KeyboardInterrupt),
    ],
)
def test_a_run_that_ended_badly_says_how(
    error: type[BaseException],
    at: str,
    wanted: str,
    told: type[BaseException],
    tmp_path: Path,
) -> None:
    with pytest.raises(told), run_folder(tmp_path / "run") as aside:
        write_status(aside, at)
        raise error("out of it")
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert status["status"] == wanted and "out of it" in status["traceback"]


def test_results_are_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "requests.parquet").write_text("precious")
    with pytest.raises(ValueError, match="never overwritten"), run_folder(tmp_path / "run"):
        pass
    assert (tmp_path / "run" / "requests.parquet").read_text() == "precious"


def test_list_shows_every_policy_with_a_line_on_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "policies"]) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    found = {path.stem for path in (ROOT / "conf" / "policy").glob("*.yaml")}
    assert {line.split()[0] for line in lines} == found
    assert all(len(line.split(maxsplit=1)) == 2 for line in lines)


def test_doctor_names_what_a_bug_report_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    told = capsys.readouterr().out
    for name in ("python", "torch", "gpu", "cores", "shared data"):
        assert name in told


def test_doctor_tells_of_a_broken_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> None:
        raise RuntimeError("CUDA error: unknown error\nCompile with TORCH_USE_CUDA_DSA ...")

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.mem_get_info", broken)
    assert main(["doctor"]) == 0
    told = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    assert ["gpu", "broken: RuntimeError: CUDA error: unknown error"] in told
    assert any(name == "writable" for name, *_ in told), "and of all that comes after it"
