"""Whole runs with a job that learns from feedback: real samples, masks and losses."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from analysis.run import load
from runtime.serving.model import build_model
from tandem.config.compose import composed
from tandem.wiring.experiment import run_experiment
from tandem.wiring.machines import prompts_of
from tandem.wiring.run_spec import run_spec_of
from tests.finetuning.test_co_serving_runs import SMALL, Run, check_tokens, run_of
from traces.serving.request import Request
from traces.training.feedback import FeedbackSamples

pytestmark = pytest.mark.usefixtures("short_probes")

OTHERS = ("training.data.", "training=", "training.until_served")
WORDS = (
    *[word for word in SMALL if not word.startswith(OTHERS)],
    *("training=feedback", "training.data.chance=0.7", "training.data.delay_s=0.01"),
    *("trace.requests=12", "arrival=poisson", "arrival.rate=100"),
)
BACKENDS = ("lockstep", "cpu", "cpu backend.clock=wall")


def requests_of(found: Run) -> list[int]:
    """The requests that the samples of a run's job were feedback on, in the order of training."""
    job = found.spec.trainees[0].job
    begun = range(job.num_steps * job.microbatches)
    on = [found.recorder._samples[job.job_id, k].request_id for k in begun]
    return [request for request in on if request is not None]


def plain_loss(found: Run, request: int) -> float:
    """The loss of feedback on a request by transformers, without an adapter."""
    trainee = found.spec.trainees[0]
    (at,) = [k for k, sample in enumerate(trainee.job.samples) if sample.request == request]
    ids, sample = torch.tensor(trainee.batches.ids(at)), trainee.job.samples[at]
    prompt = prompts_of(found.spec)[request]
    assert ids[0, : sample.prompt_tokens].tolist() == list(prompt), "as it was served"
    labels = ids.clone()
    labels[0, : sample.prompt_tokens] = -100
    model: Any = build_model(found.spec.spec, found.spec.seed, attention="sdpa")
    with torch.no_grad():
        return float(model(input_ids=ids, labels=labels).loss)


@pytest.mark.parametrize("backend", BACKENDS)
def test_losses_are_those_of_the_dialogues(backend: str) -> None:
    """With hardly any learning rate each loss is that of the model as it is served."""
    words = (*WORDS, "training.recipe.learning_rate=1e-12", "training.recipe.warmup_steps=0")
    found = run_of(backend, words)
    on = requests_of(found)
    assert len({*on}) == len(on) == len(found.losses) >= 6
    for loss, request in zip(found.losses, on, strict=True):
        assert loss == pytest.approx(plain_loss(found, request), rel=1e-5)
    check_tokens(found)


def test_lockstep_decides_as_a_simulation() -> None:
    found = run_of("lockstep", WORDS)
    assert found.log == run_of("sim", WORDS).log
    assert requests_of(found) == requests_of(run_of("sim", WORDS))
    assert not any(math.isnan(loss) for loss in found.losses)


@pytest.mark.ci
def test_another_device_trains_on_the_feedback_of_a_run(tmp_path: Path) -> None:
    """A separate cluster: each sample comes when it came to that run, and has its ids."""
    served = (*WORDS, "backend=cpu")
    run_experiment(composed(served), tmp_path / "served")
    words = [word for word in WORDS if not word.startswith(("trace", "training.data", "arrival"))]
    words += ["trace=none", "training/data=feedback_of_run", "scheduling.token_budget=64"]
    words += [f"training.data.run={tmp_path / 'served'}", "training.data.feedback.chance=0.7"]
    words += ["training.data.feedback.delay_s=0.01"]
    here, apart = (
        spec.trainees[0] for spec in (run_spec_of(composed(served)), run_spec_of(composed(words)))
    )
    requests = {sample.request: k for k, sample in enumerate(here.job.samples)}
    for k, sample in enumerate(apart.job.samples):
        assert (apart.batches.ids(k) == here.batches.ids(requests[sample.request])).all()
    logs = list[list[str]]()
    for backend in ("sim", "lockstep", "cpu"):
        run_experiment(composed([*words, f"backend={backend}"]), tmp_path / backend)
        samples = load(tmp_path / backend).samples
        assert samples is not None and (samples["status"] == "finished").all()
        logs.append(load(tmp_path / backend).plans["body"].tolist())
    assert logs[0] == logs[1]
    came = {sample.request: sample.release_ns for sample in apart.job.samples}
    ends = dict(load(tmp_path / "served").requests.set_index("request_id")["finish_ns"])
    assert all(came[request] > ends[request] for request in came)


def test_adapters_learn_from_their_requests() -> None:
    words = ("policy=coserve_adapters", "adapters.count=2", "adapters.rank=8", "adapters.zipf=0")
    words += ("training.publish=a1", "training.microbatches=1", "adapters.alpha=16")
    found = run_spec_of(composed([*WORDS, *words, "trace.requests=30"]))
    adapters = {request.request_id: request.adapter for request in found.requests}
    samples = found.trainees[0].job.samples
    assert {adapters[sample.request] for sample in samples if sample.request is not None} == {"a1"}


def test_another_device_learns_from_the_requests_of_an_adapter(tmp_path: Path) -> None:
    """As many updates as their samples fill, each of which it trains on once."""
    adapters = ("policy=adapters", "adapters.count=2", "adapters.zipf=0", "trace.requests=30")
    served = [word for word in WORDS if not word.startswith(("policy", "training", "scheduling"))]
    served += [*adapters, "tenants.shares={x: 0.5, y: 0.5}"]
    run_experiment(composed(served), tmp_path / "served")
    rows = load(tmp_path / "served").requests.set_index("request_id")
    words = [word for word in WORDS if not word.startswith(("trace", "training.data", "arrival"))]
    words += ["trace=none", "training/data=feedback_of_run", f"training.data.run={tmp_path}/served"]
    words += ["training.data.feedback.chance=1.0", "training.microbatches=2"]

    def learned(*more: str) -> tuple[set[int], int]:
        (trainee,) = run_spec_of(composed([*words, *more])).trainees
        return {sample.request for sample in trainee.job.samples}, trainee.job.num_steps  # type: ignore[misc]

    a1 = {*rows.index[rows["adapter"] == "a1"]}
    x = {*rows.index[rows["tenant"] == "x"]}
    assert len(a1) > 4 and learned("training.data.adapter=a1") == (a1, len(a1) // 2)
    assert learned("training.data.adapter=a1", "training.tenant=x")[0] == a1 & x
    rows.reset_index().drop(columns="finish_ns").to_parquet(tmp_path / "served/requests.parquet")
    with pytest.raises(ValueError, match=r"requests.parquet has no column finish_ns; give the"):
        learned()


def test_each_tenant_has_a_chance_of_its_own() -> None:
    words = ["tenants.shares={a: 0.5, b: 0.5}", "training.tenants=[a, b]", "trace.requests=200"]
    found = run_spec_of(composed([*WORDS, *words, "training.data.chance={a: 0.8, b: 0.2}"]))
    tenants = {request.request_id: request.tenant for request in found.requests}
    counts = [list(tenants.values()).count(name) for name in "ab"]
    for trainee, count, share in zip(found.trainees, counts, (0.8, 0.2), strict=True):
        on = {tenants[sample.request] for sample in trainee.job.samples if sample.request}
        assert on == {trainee.job.tenant}
        # Four standard errors of a share among some 100 answers.
        assert abs(len(trainee.job.samples) / count - share) < 4 * math.sqrt(0.25 / count)


def test_feedback_is_drawn_by_seed_and_request() -> None:
    requests = [Request(i, i, 10 + i % 7, 20) for i in range(2000)]
    source = FeedbackSamples(chance=0.3, delay_s=2.0).on(requests, 0)
    found = source.samples(1000, 5, Path())
    delays = [sample.release_ns / 1e9 for sample in found]
    # Four standard errors: of a share among 2000, and of the mean of some 600 exponential delays.
    assert abs(len(found) / 2000 - 0.3) < 4 * math.sqrt(0.21 / 2000)
    assert abs(sum(delays) / len(delays) / 2 - 1) < 4 / math.sqrt(len(delays))
    assert source.on(requests[::2], 0).samples(1000, 5, Path()) == tuple(
        [sample for sample in found if sample.request is not None and sample.request % 2 == 0]
    )
    assert source.samples(1000, 6, Path()) != found
    fixed = FeedbackSamples(chance=1.0, delay_s=2.0, delays="fixed").on(requests, 0)
    assert {sample.release_ns for sample in fixed.samples(1000, 0, Path())} == {2 * 10**9}
    assert len(fixed.samples(12, 0, Path())) < 2000, "of a long prompt no answer is left"
    assert max([sample.tokens for sample in fixed.samples(33, 0, Path())]) == 33


REFUSED = {
    ("trace=none",): "training=feedback learns from answered requests, and there are none",
    ("training.data.chance=0",): "training.microbatches=2: only 0 requests get feedback",
    ("training.data.chance=1.5",): "training.data.chance=1.5: it must be in [0, 1]",
    ("training.data.chance={a: 2}",): "training.data.chance=2.0 of tenant a: it must be in [0, 1]",
    ("training.data.delay_s=-1",): "training.data.delay_s=-1.0: it must be at least 0",
    ("training.data.delays=x",): "training.data.delays=x: there is no such choice; give exp",
    ("training.rate=3",): "training.rate=3: feedback comes behind answers",
    ("training.num_steps=50",): "50 steps of 2 samples, and feedback on",
}


@pytest.mark.parametrize("words", REFUSED, ids=" ".join)
def test_what_cannot_be_is_refused_in_one_line(words: tuple[str, ...]) -> None:
    kept = WORDS if words != ("trace=none",) else [w for w in WORDS if not w.startswith("trace")]
    with pytest.raises(ValueError) as caught:
        run_spec_of(composed([*kept, *words]))
    assert REFUSED[words] in str(caught.value) and "\n" not in str(caught.value)
