"""Gradients behind records of chunked, fused prefills stay as near to exact as plain torch's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.contract import regions
from runtime.finetuning.finetuner import Finetuner
from runtime.finetuning.model import NO_LABEL
from tests.finetuning.test_co_serving_runs import GPT2, Run, run_of
from tests.finetuning.test_feedback_runs import requests_of
from tests.finetuning.test_record_runs import SAMPLE, WORDS, plain_model
from tests.finetuning.windows_by_hand import ALL, GATED, Gradients, distance, float64, furthest

pytestmark = pytest.mark.ci

FAMILIES = ("llama", "gpt2")
MODELS = {"llama": (), "gpt2": GPT2, "opt": ("model=opt_125m", "model.num_kv_heads=4")}
AS_ONE = 1.25  # times the distance of plain torch from float64, as of windows without records


def settings_of(family: str, dtype: str) -> tuple[str, ...]:
    """A run whose adapters are on all products; of OPT on attention, so that it keeps signs."""
    kept = [w for w in WORDS if family == "llama" or not w.startswith(("model=", "model.num_kv"))]
    every = ("q_proj", "v_proj") if family == "opt" else ALL.get(family, GATED)
    targets = f"[{','.join(every)}]"
    own = (f"adapters.targets={targets}", f"training.recipe.lora_targets={targets}")
    dtypes = (f"model.dtype={dtype}", "+device.flops_per_s.float64=1e11")
    return (*kept, *MODELS[family], *own, *dtypes)


def first_gradients(
    settings: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> tuple[Run, Gradients]:
    """A run, and the gradients of its first step."""
    found, update = dict[str, Tensor](), Finetuner.update

    def watched(self: Finetuner, step: int, chunks: range) -> None:
        if not step:
            named = [(n, p.shape) for n, p in self.trainee.model.named_parameters()]
            for c in chunks:
                parts = self._parts(regions.gradient(self.job.job_id, c).region, c)
                own = zip(self._states.chunks[c], parts, strict=True)
                found.update({named[p][0]: part.view(named[p][1]).clone() for p, part in own})
        update(self, step, chunks)

    monkeypatch.setattr(Finetuner, "update", watched)
    run = run_of.__wrapped__("lockstep", settings)
    first = range(run.spec.trainees[0].job.microbatches)
    assert sum([row[SAMPLE] in first for row in run.recorder.records]) > 1, "few used records"
    return run, found


def plain_gradients(run: Run, dtype: str) -> Gradients:
    """Those of the first step by transformers, peft and torch.autograd, in a dtype."""
    trainee = run.spec.trainees[0]
    job, (model, _) = trainee.job, plain_model(run)
    model.to(getattr(torch, dtype))
    of_request = {sample.request: i for i, sample in enumerate(job.samples)}
    for k in range(job.microbatches):
        at = of_request[requests_of(run)[k]]
        ids = torch.tensor(trainee.batches.ids(at))
        labels = ids.clone()
        labels[:, : job.samples[at].prompt_tokens] = NO_LABEL
        logits: Tensor = model(input_ids=ids, use_cache=False).logits
        wide = logits if dtype == "float64" else logits.float()  # as transformers rounds
        loss = torch.nn.functional.cross_entropy(wide[0, :-1], labels[0, 1:], ignore_index=NO_LABEL)
        (loss / job.microbatches).backward()
    named = model.named_parameters()
    return {n: p.grad.clone() for n, p in named if p.grad is not None}


@pytest.mark.parametrize("family", (*FAMILIES, "opt"))
def test_in_float64(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with float64():
        run, own = first_gradients(settings_of(family, "float64"), monkeypatch)
        assert furthest(own, plain_gradients(run, "float64")) < 1e-12


@pytest.mark.parametrize("family", FAMILIES)
def test_in_float32(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run, own = first_gradients(settings_of(family, "float32"), monkeypatch)
    plain, exact = plain_gradients(run, "float32"), plain_gradients(run, "float64")
    assert furthest(own, plain) < 5e-6
    assert distance(own, exact) <= AS_ONE * distance(plain, exact)


@pytest.mark.parametrize("family", FAMILIES)
def test_in_bfloat16(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run, own = first_gradients(settings_of(family, "bfloat16"), monkeypatch)
    plain, exact = plain_gradients(run, "bfloat16"), plain_gradients(run, "float64")
    assert distance(own, exact) <= AS_ONE * distance(plain, exact)
