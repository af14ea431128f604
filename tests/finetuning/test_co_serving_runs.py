"""Whole runs that serve and finetune: one policy, equal plans, losses, adapters and tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import pytest
from torch import Tensor

from engine.results.plan_log import encode
from engine.results.recorder import Recorder
from runtime.finetuning.machine import FinetuningMachine
from runtime.serving.model import build_model
from tandem.config.compose import composed
from tandem.wiring.backends import backend_of
from tandem.wiring.experiment import engine_of
from tandem.wiring.machines import prompts_of
from tandem.wiring.run_spec import RunSpec, run_spec_of
from tests.support.prefixes import alike
from tests.support.reference import compare, generate
from tests.training.training_runs import Result
from tests.training.trainings import differing
from traces.store import write_trace

SMALL = (
    *("policy=coserve", "training=finetune", "model=tiny_llama", "model.num_layers=3"),
    *("model.hidden_size=64", "model.num_heads=4", "model.num_kv_heads=2", "model.head_dim=16"),
    *("model.intermediate_size=96", "model.vocab_size=211", "model.max_positions=128"),
    *("trace=random", "trace.requests=6", "trace.input_tokens=30", "trace.output_tokens=24"),
    *("training.sequence_tokens=64", "training.data.mean_tokens=40", "training.data.count=6"),
    *("training.microbatches=2", "training.until_served=false", "training.data.prompt_share=0.2"),
    *("scheduling.token_budget=40", "arrival=all_at_once"),
)
WITHOUT_BUDGET = {f"policy={name}" for name in ("llm_station", "spatial", "temporal")}
BACKENDS = ("lockstep", "cpu", "cpu backend.clock=wall")


@dataclass(frozen=True)
class Run:
    """What a run has left."""

    spec: RunSpec
    recorder: Recorder
    losses: list[float]
    weights: Mapping[str, Tensor]
    outputs: Mapping[int, Sequence[int]]

    @property
    def result(self) -> Result:
        """Losses and adapters."""
        return self.losses, dict(self.weights)

    @property
    def log(self) -> list[str]:
        """The plans, without their times."""
        return [encode(row[-1]) for row in self.recorder.plans]


def run(backend: str, *overrides: str) -> Run:
    """Carries a small run out."""
    chosen = {word.partition("=")[0] for word in overrides}
    chosen |= {"scheduling.token_budget"} if {*overrides} & WITHOUT_BUDGET else set()
    small = [word for word in SMALL if word.partition("=")[0] not in chosen]
    return run_of(backend, (*small, *overrides))


@lru_cache
def run_of(backend: str, words: tuple[str, ...]) -> Run:
    """Carries a run of these words out."""
    point = composed([*words, *f"backend={backend}".split()])
    found = run_spec_of(point)
    with backend_of(found, point.config["backend"]) as world:
        recorder = Recorder(world.meter, finetunes=True)
        engine_of(found, world, recorder).replay(found.work)
        job, machine = found.trainees[0].job, world.machine
        if not isinstance(machine, FinetuningMachine):
            return Run(found, recorder, [], {}, {})
        count = range(job.num_steps * job.microbatches)
        losses = [machine.loss(job.job_id, k) for k in count]
        outputs = {r.request_id: machine.outputs(r.request_id) for r in found.requests}
        return Run(found, recorder, losses, machine.weights(job.job_id), outputs)


WINDOWS_BACK = ("scheduling.backward_tokens=16",)
UNFUSED = ("memory.fused=false",)
FAIR = ("policy=coserve_vtc", "tenants.shares={a: 0.5, b: 0.5}", "training.tenants=[a, c]")
PER_TOKEN = ("policy=coserve_slo", "scheduling.kind=token", "scheduling.multiple=4")
PER_TOKEN += ("scheduling.slo_s=0.001", "scheduling.ttft_s=0.01")
STATION = ("policy=llm_station", "scheduling.serving.token_budget=40", "scheduling.steps=4")
WHOLE_MODEL = ("training/recipe=sgd", "training.recipe.frozen_units=2")
GPT2 = ("model=tiny_gpt2", "model.num_kv_heads=4")
HALF = ("model.dtype=bfloat16", "training.recipe.clip_norm=1.0")
TIGHT = (
    *("budget.kv_pages=52", "trace.requests=24", "training.microbatches=1"),
    *("arrival=poisson", "arrival.rate=300"),
)


@pytest.mark.broad(2)
@pytest.mark.parametrize("words", [(), WINDOWS_BACK, UNFUSED, WHOLE_MODEL], ids=str)
def test_equal_launches_give_equal_bits_on_every_clock(words: tuple[str, ...]) -> None:
    expected = run("sim", *words)
    first = run("lockstep", *words)
    assert first.log == expected.log
    assert not any(math.isnan(loss) for loss in first.losses)
    for backend in BACKENDS[1:]:
        found = run(backend, *words)
        assert found.log == first.log
        assert not differing(
            (found.losses, dict(found.weights)), (first.losses, dict(first.weights))
        )
        assert found.outputs == first.outputs


@pytest.mark.parametrize("words", [FAIR, PER_TOKEN, STATION], ids=["vtc", "token", "station"])
def test_other_policies_plan_alike_in_lockstep(words: tuple[str, ...]) -> None:
    """Quotes and counters are equal there, and so is the clock."""
    found = run("lockstep", *words)
    assert found.log == run("sim", *words).log
    assert not any(math.isnan(loss) for loss in found.losses)
    check_tokens(found)


def test_counters_are_as_issued_on_every_clock() -> None:
    first = run("lockstep", *FAIR)
    rows = first.recorder.tables()["service"].to_pylist()
    assert {row["tenant"] for row in rows} == {"a", "b", "c"}
    assert all(row["forward_tokens"] for row in rows if row["tenant"] != "b")
    for backend in BACKENDS[1:]:
        found = run(backend, *FAIR)
        assert found.log == first.log
        assert found.recorder.tables()["service"].to_pylist() == rows


@pytest.mark.parametrize("words", [PER_TOKEN, STATION], ids=["token", "station"])
def test_a_policy_of_durations_finetunes_in_measured_time(words: tuple[str, ...]) -> None:
    found = run("cpu", *words)
    assert not any(math.isnan(loss) for loss in found.losses)
    check_tokens(found)


@pytest.mark.parametrize("words", [(), WINDOWS_BACK], ids=str)
def test_static_buffers_hold_one_sample_at_a_time(words: tuple[str, ...]) -> None:
    """What a job keeps to its end it writes anew with each sample: bits are those of grown ones."""
    grown, static = run("lockstep", *words), run("lockstep", *words, "memory.buffers=static")
    assert not differing(static.result, grown.result)
    rows = static.recorder.tables()["memory"].to_pandas()
    rows = rows[rows["tier"].eq("gpu") & rows["measured_bytes"].notna()]
    booked = rows["capacity_bytes"] - rows["free_bytes"]
    assert len(rows) and (rows["measured_bytes"] <= booked).all()


def test_kept_or_computed_again_gives_equal_bits() -> None:
    """Windows run by themselves here: what is computed again has rows of its own, too."""
    kept, again = (run("lockstep", *UNFUSED, f"planner.modes={m}") for m in ("keep", "recompute"))
    assert not differing(again.result, kept.result)


@pytest.mark.parametrize("words", [(), WINDOWS_BACK, WHOLE_MODEL], ids=str)
def test_buffers_that_last_change_no_bit(words: tuple[str, ...]) -> None:
    """Each sample finds the memory of the one before it, and none of its contents."""
    grown, static = (run("lockstep", *words, f"memory.buffers={b}") for b in ("grown", "static"))
    assert static.spec.trainees[0].job.num_steps * 2 > 2
    assert not differing(static.result, grown.result)


def test_a_turn_of_training_without_room_serves() -> None:
    """Temporal sharing under pressure ends, and every request has its tokens."""
    words = (*TIGHT, "policy=temporal", "scheduling.every=3")
    found = run("lockstep", *words)
    assert found.log == run("sim", *words).log
    check_tokens(found)


@pytest.mark.broad(2)
@pytest.mark.parametrize("words", [(), WINDOWS_BACK, UNFUSED], ids=str)
def test_kept_or_offloaded_gives_equal_bits_on_every_clock(words: tuple[str, ...]) -> None:
    kept, away = run("lockstep", *words), (*words, "planner.modes=offload")
    expected = run("sim", *away)
    assert any('"host"' in plan and '"activation"' in plan for plan in expected.log)
    for backend in BACKENDS:
        found = run(backend, *away)
        assert found.log == expected.log
        assert not differing(found.result, kept.result)
        assert found.outputs == kept.outputs


@pytest.mark.broad(2)
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_offloaded_sample_that_gives_way_begins_anew(backend: str) -> None:
    found = run(backend, *TIGHT, "planner.modes=offload")
    check_tokens(found)
    roomy = run("lockstep", *TIGHT, "budget.kv_pages=400")
    assert found.losses == pytest.approx(roomy.losses, rel=1e-6)


@pytest.mark.broad(2)
@pytest.mark.parametrize("words", [(), WINDOWS_BACK, TIGHT, GPT2, HALF], ids=str)
def test_requests_get_the_tokens_of_generate(words: tuple[str, ...]) -> None:
    check_tokens(run("lockstep", *words))


@pytest.fixture(scope="module")
def beginning_alike(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Requests that begin alike, in a device whose kept pages give way to samples."""
    path = tmp_path_factory.mktemp("alike") / "alike.parquet"
    write_trace(path, alike(3, 40, rate=300), {"source": "tests"})
    words = (f"trace.path={path}", "memory.serving.prefix_caching=true", "arrival=trace")
    others = ("trace", "arrival", "budget", "training.data.count", "model.num_layers")
    small = [word for word in (*SMALL, *TIGHT) if not word.startswith(others)]
    words += ("training.data.count=24", "budget.kv_pages=280")
    words += ("page_tokens=4", "model.num_layers=4")  # pages of 4 KiB, as the system has them
    return (*small, "trace=file", *words)


@pytest.mark.ci
def test_kept_pages_give_way_to_samples(beginning_alike: tuple[str, ...]) -> None:
    """Tokens are those of generate, and no memory is in use beyond the device's."""
    expected = run_of("sim", beginning_alike)
    found = sum([o.cached_tokens for o in expected.recorder.outcomes.values()])
    roomy = [word for word in beginning_alike if not word.startswith("budget")]
    most = run_of("sim", (*roomy, "budget.kv_pages=2400")).recorder.outcomes.values()
    assert 0 < found < sum([outcome.cached_tokens for outcome in most])
    for backend in BACKENDS:
        run = run_of(backend, beginning_alike)
        if backend == "lockstep":
            assert run.log == expected.log
        check_tokens(run)
        assert not any(math.isnan(loss) for loss in run.losses)
        rows = run.recorder.tables()["memory"].to_pandas()
        rows = rows[rows["tier"].eq("gpu") & rows["measured_bytes"].notna()]
        assert len(rows) and (rows["measured_bytes"] <= rows["capacity_bytes"]).all()


def test_a_sample_that_gives_way_begins_anew() -> None:
    """Requests come while a sample holds the memory that they need."""
    found = run("lockstep", *TIGHT)
    job_id = found.spec.trainees[0].job.job_id
    assert found.log == run("sim", *TIGHT).log
    assert any(f'"restart":[{job_id}]' in plan for plan in found.log)
    roomy = run("lockstep", *TIGHT, "budget.kv_pages=400")
    assert found.losses == pytest.approx(roomy.losses, rel=1e-6)  # windows are others


@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_a_tight_run_in_measured_time(backend: str) -> None:
    found = run(backend, *TIGHT)
    check_tokens(found)
    roomy = run("lockstep", *TIGHT, "budget.kv_pages=400")
    assert found.losses == pytest.approx(roomy.losses, rel=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_job_may_end_with_the_last_request(backend: str) -> None:
    """Its steps are not through, and its adapters are those of the last whole step."""
    words = ("training.until_served=true", "training.num_steps=500", "training.data.count=50")
    found = run(backend, *words)
    assert 0 < sum(not math.isnan(loss) for loss in found.losses) < len(found.losses)
    assert any("lora_B" in name and bool(weight.any()) for name, weight in found.weights.items())
    check_tokens(found)


def check_tokens(found: Run) -> None:
    """Every request has the tokens of generate, near ties counted apart."""
    model = build_model(found.spec.spec, found.spec.seed, attention="sdpa")
    prompts, requests = prompts_of(found.spec), found.spec.requests
    expected = {
        r.request_id: generate(model, prompts[r.request_id], r.output_tokens) for r in requests
    }
    equal, ties, wrong = compare(found.outputs, expected)
    assert (equal + ties, wrong) == (len(requests), [])


def test_replicas_are_refused_in_one_line() -> None:
    with pytest.raises(ValueError, match="replicas") as raised:
        run("lockstep", "replicas=2")
    assert "\n" not in str(raised.value)


def test_finetuning_alone_has_equal_losses_and_plans_in_every_backend() -> None:
    """The device apart from the server (separate devices): trace=none, in the same windows."""
    alone = tuple(word for word in SMALL if not word.startswith(("trace", "arrival")))
    words = (*alone, "trace=none", "scheduling.token_budget=64")
    found = {name: run_of(name, words) for name in BACKENDS}
    simulated = run_spec_of(composed([*words, "backend=sim"]))
    with backend_of(simulated, composed([*words, "backend=sim"]).config["backend"]) as world:
        recorder = Recorder(world.meter, finetunes=True)
        engine_of(simulated, world, recorder).replay(simulated.work)
    log = [encode(row[-1]) for row in recorder.plans]
    first = found["lockstep"]
    assert len(first.losses) == 6 and first.log == log
    for name in BACKENDS[1:]:
        assert not differing(found[name].result, first.result), name
        assert found[name].log == first.log
