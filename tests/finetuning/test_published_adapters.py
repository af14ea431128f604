"""Versions of an adapter that a job publishes while requests run through it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.contract.plan import Compute, Copy, Free
from engine.contract.regions import Kind, Tier, Work
from engine.loop.engine import Engine
from engine.results.schema import read_table
from models.parameters import adapter_parameters
from runtime.finetuning.adapters import ServedAdapters, drawn_adapter
from runtime.finetuning.model import over_served
from runtime.serving.model import build_model
from runtime.training.store import flat_parts
from tandem.cli.terminal import told
from tandem.config.compose import composed
from tandem.wiring.experiment import run_experiment
from tandem.wiring.machines import prompts_of
from tandem.wiring.run_spec import run_spec_of
from tests.finetuning.test_co_serving_runs import SMALL, Run, run, run_of
from tests.support.reference import compare, generate
from traces.serving.request import Request
from traces.store import write_trace

pytestmark = [pytest.mark.ci, pytest.mark.usefixtures("short_probes")]

WORDS = (
    *("policy=coserve_adapters", "adapters.count=3", "adapters.rank=4", "training.publish=a0"),
    *("training.recipe.lora_rank=4", "training.microbatches=1", "adapters.zipf=0.5"),
    *("arrival=poisson", "arrival.rate=300", "training.recipe.learning_rate=0.05"),
)
TIGHT = (*WORDS, "budget.kv_pages=52", "trace.requests=24", "memory.serving.most=2")
Version = tuple[int, int]  # the number of an adapter, and of its version


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[Version, Tensor]]:
    """The contents of each version, as it is published."""
    found, publish = dict[Version, Tensor](), ServedAdapters.publish

    def kept(self: ServedAdapters, op: Copy) -> None:
        publish(self, op)
        (storage,) = self._store.find(op.dst.region, Tier.HOST, "a test").storages_held()
        numbers = storage.nbytes() // 4
        (flat,) = flat_parts(storage, torch.float32, [numbers])
        found[op.dst.region.part, op.dst.region.slot] = flat.clone()

    monkeypatch.setattr(ServedAdapters, "publish", kept)
    run_of.cache_clear()  # such a run has published before
    yield found
    run_of.cache_clear()


def check_tokens(found: Run, versions: Mapping[Version, Tensor]) -> Counter[Version | None]:
    """Each request has the tokens of generate with the version with which it was admitted."""
    spec, adapters = found.spec.spec, found.spec.room.layout.adapters
    names = [adapter.name for adapter in adapters]
    plain = build_model(spec, found.spec.seed, attention="sdpa")
    prompts, expected, used = prompts_of(found.spec), {}, Counter[Version | None]()
    rows = {row["request_id"]: row for row in found.recorder.tables()["requests"].to_pylist()}
    for request in found.spec.requests:
        model: Any = plain
        key = None
        if request.adapter:
            number = names.index(request.adapter)
            key = number, found.recorder.outcomes[request.request_id].adapter_version or 0
            recipe = adapters[number].recipe
            model = over_served(plain, recipe).eval()
            state = {f"base_model.model.{n}": m for n, m in drawn_adapter(spec, recipe).items()}
            if key[1]:
                parameters = adapter_parameters(spec, recipe)
                parts = versions[key].split([parameter.elements for parameter in parameters])
                pairs = zip(parameters, parts, strict=True)
                state = {f"base_model.model.{p.name}": x.view(p.shape) for p, x in pairs}
            assert not model.load_state_dict(state, strict=False).unexpected_keys
        used[key] += 1
        prompt = prompts[request.request_id]
        expected[request.request_id] = generate(model, prompt, request.output_tokens)
    assert len(rows) == len(expected)
    equal, ties, wrong = compare(found.outputs, expected)
    assert (equal + ties, wrong) == (len(expected), [])
    return used


@pytest.mark.broad(2)
@pytest.mark.parametrize("words", [WORDS, TIGHT], ids=["roomy", "tight"])
def test_a_request_keeps_the_version_with_which_it_was_admitted(
    words: tuple[str, ...], published: dict[Version, Tensor]
) -> None:
    found = run("lockstep", *words)
    assert found.log == run("sim", *words).log
    used = check_tokens(found, published)
    versions = {key[1] for key in used if key is not None and key[0] == 0}
    assert len(versions) > 1 and len(published) >= max(versions)
    assert all(key[1] == 0 for key in used if key is not None and key[0])


def test_each_tenant_publishes_an_adapter(published: dict[Version, Tensor]) -> None:
    words = ("training.tenants=[a,b]", "training.publish=[a0,a2]", "scheduling=coserve_vtc")
    found = run("lockstep", *WORDS, *words)
    assert found.log == run("sim", *WORDS, *words).log
    used = check_tokens(found, published)
    for number, is_published in enumerate([True, False, True]):
        versions = {key[1] for key in used if key is not None and key[0] == number}
        assert (len(versions) > 1) == is_published, number


def test_what_a_job_has_trained_is_kept_for_peft(tmp_path: Path) -> None:
    """Beside requests; of several jobs in folders of their tenants."""
    from safetensors.torch import load_file

    words = [*SMALL, *WORDS, "training.save_model=true", "backend=lockstep"]
    run_experiment(composed(words), tmp_path / "one")
    (file,) = (tmp_path / "one/model").glob("*.safetensors")
    assert (tmp_path / "one/model/adapter_config.json").is_file()
    saved, trained = load_file(file), run("lockstep", *WORDS).weights
    assert len(saved) == len(trained) > 0
    for name, value in trained.items():
        assert torch.equal(saved[name.replace(".default.", ".")], value)
    more = ["training.tenants=[a,b]", "training.publish=[a0,a2]", "scheduling=coserve_vtc"]
    run_experiment(composed([*words, *more]), tmp_path / "two")
    found = {path.parent.name for path in (tmp_path / "two/model").glob("*/*.safetensors")}
    assert found == {"a", "b"}


@pytest.mark.parametrize("backend", ["cpu", "cpu backend.clock=wall"])
def test_tokens_in_measured_time(backend: str, published: dict[Version, Tensor]) -> None:
    found = run(backend, *TIGHT)
    check_tokens(found, published)


def test_versions_are_given_back_with_their_last_request() -> None:
    """At the end the newest version of each adapter has its home, and no older one."""
    found = run("sim", *TIGHT)
    plans = [row[-1] for row in found.recorder.plans]
    ops = [op for plan in plans for op in plan.ops]
    made = [op for op in ops if isinstance(op, Copy) and op.src.region.kind is Kind.WEIGHT]
    rows = [r for r in found.recorder.tables()["memory"].to_pylist() if r["tier"] == "host"]
    layout = found.spec.room.layout
    assert len(made) > 3 and not any(op.place.tier is Tier.HOST for op in ops if type(op) is Free)
    kinds = [figures for _, _, _, pools, _ in found.recorder._facts.memory for figures in pools]
    last = [figures for figures in kinds if figures.pool[0] is Tier.HOST][-1]
    assert rows and last.kind_bytes[-1] == sum([adapter.nbytes for adapter in layout.adapters])


def test_versions_go_on_from_the_first_one(published: dict[Version, Tensor]) -> None:
    """With hardly any learning rate all versions are the one that was drawn."""
    found = run("lockstep", *WORDS, "training.recipe.learning_rate=1e-12")
    recipe = found.spec.room.layout.adapters[0].recipe
    drawn = torch.cat([m.flatten() for m in drawn_adapter(found.spec.spec, recipe).values()])
    assert len(published) > 3 and drawn.abs().min() > 0
    for version in published.values():  # AdamW moves no number by more than its rate, a step
        assert torch.allclose(version, drawn, rtol=0, atol=1e-9)


def test_every_so_many_updates_make_a_version() -> None:
    each, third = (run("sim", *WORDS, f"training.publish_every={n}") for n in (1, 3))
    counts = []
    for found in (each, third):
        ops = [op for row in found.recorder.plans for op in row[-1].ops]
        counts.append(sum(isinstance(o, Copy) and o.src.region.kind is Kind.WEIGHT for o in ops))
    assert counts[1] == counts[0] // 3 > 0


def test_a_version_without_room_leaves_its_number_out() -> None:
    """Each version is numbered by the updates before it, so that its age is told."""
    nbytes = run("sim", *WORDS).spec.room.layout.adapters[0].nbytes
    found = run("sim", *WORDS, f"budget.host_bytes={4 * nbytes}")
    updates, made = 0, list[int]()
    for row in found.recorder.plans:
        for op in row[-1].ops:
            if isinstance(op, Compute):
                updates += sum([piece.work is Work.UPDATE for piece in op.slices])
            elif isinstance(op, Copy) and op.src.region.kind is Kind.WEIGHT:
                made.append(op.dst.region.slot)
                assert made[-1] == updates
    assert 1 < len(made) < updates


REFUSED = {
    ("training.tenants=[a,b]",): "training.publish=a0: there is a job for each tenant; give a list",
    ("training.publish=[a0,a1]",): "a list has another adapter for each of training.tenants=[]",
    ("training.publish=[a0,a0]", "training.tenants=[a,b]"): "has another adapter for each",
    ("training.microbatches=0",): "training.microbatches=0: it must be at least 1",
    ("training.publish=b",): "training.publish=b: the run has adapters a0, a1, a2; name one",
    ("adapters.rank=2",): "the job trains another kind of adapter; set adapters.rank=4 adapters.a",
    ("training.publish_every=0",): "training.publish_every=0: it must be at least 1",
    ("adapters.count=0",): "training.publish=a0: the run has adapters none; name one of them",
    ("policy=coserve",): "this policy brings none to the device; take policy=adapters, or pol",
    ("adapters.names=[x]",): "adapters.count=3: it must be at least 0, and 0 beside adapters.names",
    ("adapters.zipf=-1",): "adapters.zipf=-1.0: it must be at least 0, or null",
    ("adapters.targets=[z]",): "recipe.lora_targets: 'z' is no product of a llama layer",
    ("budget.host_bytes=5",): "short: homes of all versions take",
    ("adapters.size=3",): "adapters.size",
    ("training.recipe.frozen_units=2",): "training.publish=a0: the job does not train an adapter o",
}


@pytest.mark.parametrize("words", REFUSED, ids=" ".join)
def test_what_cannot_be_is_refused_in_one_line(words: tuple[str, ...]) -> None:
    with pytest.raises(ValueError) as caught:
        run("sim", *WORDS, *words)
    assert REFUSED[words] in str(caught.value) and "\n" not in str(caught.value)


def test_a_trace_that_names_an_unknown_adapter_is_refused_in_one_line(tmp_path: Any) -> None:
    path = tmp_path / "named.parquet"
    requests = [Request(0, 0, 4, 2, adapter="mine"), Request(1, 0, 4, 2)]
    write_trace(path, requests, {"source": "a test"})
    words = ["trace=file", f"trace.path={path}", "policy=adapters", "adapters.count=2"]
    with pytest.raises(
        ValueError, match=r"^request 0 names adapter 'mine', and the run has a0, a1"
    ):
        run_spec_of(composed(words))
    named = [*words[:3], "adapters.names=[mine, other]", "adapters.zipf=null"]
    assert [r.adapter for r in run_spec_of(composed(named)).requests] == ["mine", ""]


def test_results_tell_of_adapters(tmp_path: Path) -> None:
    words = ["policy=adapters", "adapters.count=6", "memory.most=2", "limit=12", "seed=3"]
    metrics = run_experiment(composed(words), tmp_path / "run")
    run_spec, recorder = run_spec_of(composed(words)), read_table(tmp_path / "run/steps.parquet")
    rows = [row for row in recorder.to_pylist() if row["lane"] == "host->gpu"]
    sizes = {adapter.nbytes for adapter in run_spec.room.layout.adapters}
    assert metrics["adapter_loads"] == len(rows) > 2 and {row["nbytes"] for row in rows} == sizes
    assert metrics["adapter_loaded_bytes"] == sum([row["nbytes"] for row in rows])
    assert metrics["peak_gpu0_adapter_bytes"] == 2 * sizes.pop()
    requests = read_table(tmp_path / "run/requests.parquet").to_pylist()
    assert [row["adapter"] for row in requests] == [r.adapter for r in run_spec.requests]
    assert {row["adapter_version"] for row in requests} == {0}
    provenance = json.loads((tmp_path / "run/provenance.json").read_text())
    assert "adapters: " in told(metrics, provenance)


def test_runs_of_requests_without_an_adapter_tell_of_adapters(tmp_path: Path) -> None:
    """Steps that are issued as one have rows like those that are issued one by one."""
    path = tmp_path / "named.parquet"
    requests = [Request(i, i * 10**9, 20, 60, adapter="x" * (i % 2)) for i in range(6)]
    write_trace(path, requests, {"source": "a test"})
    words = ["trace=file", f"trace.path={path}", "policy=adapters", "adapters.names=[x]"]
    words += ["adapters.zipf=null", "arrival=trace"]
    made = list[Any]()
    for fast in (True, False):
        with pytest.MonkeyPatch.context() as patched:

            def engine(*given: Any, fast: bool = fast, **named: Any) -> Engine:
                made.append(Engine(*given, **named, fast_forward=fast))
                return made[-1]

            patched.setattr("tandem.wiring.experiment.Engine", engine)
            run_experiment(composed(words), tmp_path / str(fast))
    assert made[0].reuse.jump.runs > 0, "some steps were issued as one"
    tables = [read_table(tmp_path / f"{fast}/memory.parquet") for fast in (True, False)]
    assert tables[0].equals(tables[1]) and max(tables[0]["adapter_bytes"].to_pylist()) > 0


def test_popularity_follows_zipf() -> None:
    words = ["trace=random", "trace.requests=2000", "policy=adapters", "adapters.count=4"]
    counts = Counter(r.adapter for r in run_spec_of(composed(words)).requests)
    weights = [1, 1 / 2, 1 / 3, 1 / 4]
    for number, weight in enumerate(weights):
        share = counts[f"a{number}"] / 2000
        assert share == pytest.approx(weight / sum(weights), abs=0.03)
