"""A mistake of a user: one line that says what, where and what to do, and nothing half-written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tandem.cli.__main__ import main
from tandem.cli.errors import Usage
from tandem.config.compose import composed

ROOT = Path(__file__).resolve().parents[2]
KEEPS_ROOM = str(ROOT / "examples/keeps_room/conf")
SMALL = ["model=micro_llama", "limit=4", "arrival=all_at_once"]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["run", "polic=x"], "did you mean policy?"),
        (["run", "arrival.rat=3"], "did you mean arrival.rate"),
        (["run", "arival=poisson"], "arival: no such setting; did you mean arrival?"),
        (
            ["run", "policy=alchemist", "memory.records.hedge_token=1"],
            "memory.records.hedge_token: no such setting; did you mean memory.records.hedge_tokens",
        ),
        (
            ["run", "policy=coserve", "memory.serving.watermrk=1"],
            "memory.serving.watermrk: no such setting; did you mean memory.serving.watermark",
        ),
        (
            ["run", "policy=coserve", "training=feedback", "training.data.chanc=1"],
            "training.data.chanc: no such setting; did you mean training.data.chance",
        ),
        (["run", "policy=coserve"], "choose it, such as training=finetune"),
        (["run", "training=text", "training.path=x"], "did you mean training.data.path or trace."),
        (["run", "policy=zero3"], "policy=zero3: no such option; did you mean zero3_offload?"),
        (["run", "training=sample", "training.steps=3"], "did you mean training.num_steps?"),
        (["run", "policy=magic"], "no such option; there are adapters, alchemist, chunked"),
        (["run", "pace=1e400"], "pace=inf: that is no finite number; give a number"),
        (["run", "budget.host_bytes=1e400"], "budget.host_bytes=inf: that is no finite number"),
        (["run", "pace=1" + "0" * 400], "pace: that number is beyond all bounds"),
        (["run", "budget.kv_pages=1" + "0" * 400], "budget.kv_pages: that number is beyond"),
        (["run", "seed=-1" + "0" * 400], "seed: that number is beyond all bounds"),
        (["run", "device.flops_per_s.float32=fast"], "device.flops_per_s.float32=fast: that is"),
        (["run", "model.rope_theta=-1"], "model tiny_llama: rope_theta is -1.0, not above 0"),
        (["run", "model.norm_eps=nan"], "model.norm_eps=nan: that is no finite number"),
        (["run", "model.norm_eps=-1e-6"], "model tiny_llama: norm_eps is -1e-06, not above 0"),
        (["run", "replicas=1000000000", "router=round_robin"], "replicas=1000000000: at most"),
        (["run", "trace=random", "trace.requests=1e12"], "trace.requests=1000000000000: at most"),
        (["run", "depth=1e12"], "depth=1000000000000: at most 1,000 are possible"),
        (["sweep", "seed=range(0,1e12)"], "seed=range(0,1e12): more than 100,000 values"),
        (["run", "-m", "seed=range(0,1e12)"], "seed=range(0,1e12): more than 100,000 values"),
        (["run", "seed=range(0,1e12)"], "seed=range(0,1e12): more than 100,000 values"),
        (
            ["sweep", "seed=range(0,1000)", "depth=range(1,1000)"],
            "999,000 points: a sweep has 100,000 at most",
        ),
        (["run", "trace=file", "trace.path=."], "that is a folder; name a file in it"),
        (["run", "trace=sharegpt", "trace.path=."], "that is a folder; name a file in it"),
        (["run", "trace=lengths", "trace.path=."], "that is a folder; name a file in it"),
        (["run", "arrival=recorded", "arrival.path=."], "that is a folder; name a file in it"),
        (["trace", "import", ".", "--out", "x.parquet"], "that is a folder; name a file in it"),
        (["run", "policy=chunked_restrat"], "did you mean chunked_restart"),
        (["run", "arrival.rate=abc"], "rate=abc: that is text; give a number"),
        (["run", "arrival.rate=-1"], "must be a positive number"),
        (["run", "seed=abc"], "seed=abc: that is text; give a whole number"),
        (["run", "seed=-1"], "seed=-1: it must be at least 0"),
        (
            ["run", "policy=alchemist", "training=feedback", "training.microbatches=2"],
            "this one publishes none; give it training.publish=a0 adapters.count=1",
        ),
        (
            ["plan", "policy=coserve", "training=finetune", "training.microbatches=0"],
            "training.microbatches=0: it must be at least 1",
        ),
        (["run", "slo.ttft_s=fast"], "fast: that is text; give a number or null (in seconds)"),
        (
            ["run", "budget.kv_bytes=70MB"],
            "70MB: that is text; give a whole number or null (in bytes)",
        ),
        (
            ["run", "trace=none", "training=sample", "policy=zero_offload", "planner.modes=re"],
            "re: there is no such choice; give keep, recompute or offload, or a list of these",
        ),
        (["run", "slo.ttft_s=0"], "slo.ttft_s=0.0: it must be above 0 seconds"),
        (
            ["run", "slo=mixed", "slo.shares={chat: 1.0}"],
            "slo.shares: the slo that is chosen has a mapping there without chat; replace it: "
            "~slo.shares '+slo.shares={...}'",
        ),
        (["sweep", "slo=mixed,none", "slo.shares={chat: 1.0}"], "replace it: ~slo.shares"),
        (["run", "+slo.ttft=1"], "slo.ttft: no such limit; did you mean ttft_s"),
        (["run", "arrival.rate=1e-12"], "raise the rate"),
        (["run", "model.num_kv_heads=0"], "num_kv_heads is 0"),
        (["run", "depth=0"], "at least 1"),
        (["run", "limit=0"], "at least one request"),
        (["run", "policy=zero3_offload"], "this policy trains, and there is nothing to train"),
        (["run", "policy=zero3_offload", "training=sample"], "set trace=none"),
        (
            [
                "run",
                "trace=none",
                "training=random",
                "policy=zero_offload",
                "training.sequence_tokens=1",
            ],
            "sequence_tokens must be at least 2",
        ),
        (["run", "training=sample"], "training needs a policy that trains"),
        (["run", "trace=file"], "give one with trace.path=..."),
        (["run", "trace=file", "trace.path=/no/such.parquet"], "no such trace"),
        (["run", "trace=sharegpt", "trace.path=/no/such.json"], "no such file"),
        (["run", "policy=recorded", "replayed=/nowhere"], "no plan log"),
        (["run", "quote_pace=0"], "quote_pace=0.0: it must be above 0"),
        (["run", "quote_pace=fast"], "quote_pace"),
        (
            ["run", "policy=coserve", "training=finetune", "training.rate=0"],
            "training.rate=0: it must be above 0",
        ),
        (["run", "profile=/nowhere"], "tandem calibrate"),
        (["run", "backend.clock=wall"], "has no clock"),
        (["run", "--config-dir", "/nowhere"], "not found"),
        (["run", "scheduling._target_=os.system"], "trusted=[os]"),
        (["run", "backend=gpu"], "backend=gpu: no such option; did you mean cuda?"),
        (["run", "limit"], "limit: a value is missing; give limit=..."),
        (["run", "arrival.rate=-1"], "arrival.rate=-1.0: it must be a positive number"),
        (
            ["run", "scheduling._target_=policies.scheduling.chunked_prefill.Chunked"],
            "mean ChunkedPrefill",
        ),
        (
            ["run", "--config-dir", KEEPS_ROOM, "memory=keeps_room", "memory.shar=0.3"],
            "did you mean memory.share or",
        ),
        (
            ["run", "--config-dir", str(Path(KEEPS_ROOM).parent), "memory=keeps_room"],
            f"has no folder memory; did you mean --config-dir {KEEPS_ROOM}?",
        ),
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
        (["run", "sampling.temperature=nan"], "sampling.temperature=nan: that is no finite number"),
        (["run", "sampling.top_k=-1"], "sampling.top_k=-1: it must be at least 0"),
        (
            ["run", "backend=cpu", "backend.reference_ns=[5]"],
            "reference_ns=[5]: that is a list of 1; give one of 2",
        ),
        (
            ["run", "device.linear_memory=[[1]]"],
            "linear_memory[0]=[1]: that is a list of 1; give one of 2",
        ),
        (["run", "sampling.top_p=0"], "sampling.top_p=0.0: it must be above 0 and at most 1"),
        (
            ["run", "policy=chunked_reservation", "memory.prefix_caching=true"],
            "of its own; take memory=paged_restart, or leave memory.prefix_caching out",
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
    """It sets arrival.rate, which recorded times have no use for; the user is told."""
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


def test_a_rejected_run_leaves_files_of_other_origin(tmp_path: Path) -> None:
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
    monkeypatch.setattr("tandem.wiring.machines.available_bytes", lambda: 2**30)
    large = ["model=llama3_8b", "device=a100", "budget.host_bytes=0"]
    for words, wanted in (
        (large, "model llama3_8b: weights of 15,317 MiB, and 1,024 MiB are free here"),
        (["budget.host_bytes=1e17"], "MiB of KV in the host tier are more than this machine gives"),
    ):
        assert main(["run", "backend=cpu", "limit=5", *words]) == 2
        told = capsys.readouterr().err.strip()
        assert wanted in told and "backend=sim" in told
        assert len(told.splitlines()) == 1


def test_settings_that_conflict_end_a_run_in_one_line_with_the_setting_that_helps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A policy says so while it plans: the line has the setting, and so has the run's folder."""
    words = ("policy=patrickstar", "training=random", "trace=none", "memory.reuses_gradients=true")
    assert main(["run", *words, "model=tiny_llama"]) == 1
    told = capsys.readouterr().err.strip()
    helps = "needs masters (bfloat16, not float32); set reuses_gradients=false"
    assert helps in told and len(told.splitlines()) == 1
    [status] = tmp_path.rglob("status.json")
    assert json.loads(status.read_text())["error"].endswith(helps)


@pytest.mark.broad(2)
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
        (
            ["policy=time_shared_protrain", "training=random", "memory.device_share=0.99995"],
            "of which training keeps 99.995%; lower memory.device_share (it is 0.99995), or raise",
        ),
    ],
)
def test_a_run_that_refuses_all_requests_says_why_and_ends_with_1(
    words: list[str], wanted: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The results are in place: no request failed, all were refused."""
    assert main(["run", *SMALL, *words]) == 1
    told = capsys.readouterr()
    assert "0 of 4 requests finished, " in told.out and ", 4 refused" in told.out
    assert "all 4 requests were refused: " in told.err and wanted in told.err
    assert len(told.err.strip().splitlines()) == 1
    [status] = tmp_path.rglob("status.json")
    folder = status.parent
    assert json.loads((folder / "status.json").read_text())["status"] == "ok"
    assert json.loads((folder / "metrics.json").read_text())["num_refused"] == 4
