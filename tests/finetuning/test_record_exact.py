"""Behind the record of a whole, unfused prefill, training has the bits of plain torch and peft.

Plain torch goes through a dialogue in two calls, the prompt and what follows it, with the keys and
values of the first in transformers' cache; gradients pass through both. The last token of a prompt
goes through again with the answer, as its label is the answer's first.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.contract.plan import Compute
from tests.finetuning.test_co_serving_runs import Run, run_of
from tests.finetuning.test_feedback_runs import requests_of
from tests.finetuning.test_record_bounds import settings_of
from tests.finetuning.test_record_runs import SAMPLE, plain_model, updates_behind
from tests.training.trainings import differing

pytestmark = pytest.mark.ci

REQUESTS = 4
CHANGED = (
    *("arrival", "trace.", "training.microbatches", "training.data.chance"),
    *("training.sequence_tokens", "scheduling.sharing.token_budget"),
)


def alone(family: str, prompt_tokens: int, answer_tokens: int) -> tuple[str, ...]:
    """Requests far apart: each prompt goes forward alone and whole, and trains before the next.

    The backward goes in two windows, what follows the prompt and the prompt, which is no longer.
    """
    assert prompt_tokens <= answer_tokens + 2, "a third window back would cut the prompt"
    kept = [word for word in settings_of(family, "float32") if not word.startswith(CHANGED)]
    return (
        *kept,
        *(f"trace.requests={REQUESTS}", f"trace.input_tokens={prompt_tokens}"),
        *(f"trace.output_tokens={answer_tokens}", "training.microbatches=1", "arrival=gamma"),
        *("arrival.rate=2", "arrival.burstiness=10000", "scheduling.sharing.token_budget=128"),
        "training.sequence_tokens=128",
        *("training.data.chance=1.0", f"scheduling.sharing.backward_tokens={answer_tokens + 1}"),
    )


def trained_in_two_calls(
    found: Run, through_first: bool = False
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and the last adapter by transformers, peft and torch.optim.

    `through_first`: every sample goes through the weights of the beginning, and updates the newest.
    """
    from transformers import DynamicCache

    trainee = found.spec.trainees[0]
    job, recipe = trainee.job, trainee.job.recipe
    model, _ = plain_model(found)
    own = {n: p for n, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(
        own.values(), lr=recipe.learning_rate, weight_decay=recipe.weight_decay, fused=True
    )
    of_request = {sample.request: i for i, sample in enumerate(job.samples)}
    losses, begun = list[float](), {n: p.detach().clone() for n, p in own.items()}
    for request in requests_of(found):
        newest = {n: p.detach().clone() for n, p in own.items()}
        if through_first:
            model.load_state_dict(begun, strict=False)
        at = of_request[request]
        ids, prompt = torch.tensor(trainee.batches.ids(at)), job.samples[at].prompt_tokens
        cache = DynamicCache()
        model(input_ids=ids[:, : prompt - 1], past_key_values=cache, use_cache=True)
        rest = ids[:, prompt - 1 :]
        logits = model(input_ids=rest, past_key_values=cache, use_cache=True).logits
        loss = torch.nn.functional.cross_entropy(logits[0, :-1].float(), ids[0, prompt:])
        optimizer.zero_grad()
        loss.backward()
        model.load_state_dict(newest, strict=False)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, {n: p.detach() for n, p in own.items()}


# Family, settings of the model, tokens of prompt and answer. Where heads share keys, transformers
# repeats them behind a cache, and adds the heads' gradients in the end; the kernel adds them for 32
# queries at a time. Up to 31 tokens of an answer bits are equal; longer ones have a key per head.
CASES = [
    ("llama", (), (20, 24)),
    ("llama", ("model.num_kv_heads=4",), (41, 60)),
    ("gpt2", (), (20, 24)),
    ("gpt2", (), (41, 60)),
]


@pytest.mark.parametrize(("family", "heads", "lengths"), CASES, ids=str)
@pytest.mark.parametrize("backend", ["lockstep", "cpu", "cpu backend.clock=wall"])
def test_losses_and_adapters_are_plain_torchs_to_the_bit(
    backend: str, family: str, heads: tuple[str, ...], lengths: tuple[int, int]
) -> None:
    found = run_of(backend, (*alone(family, *lengths), *heads))
    assert sorted(row[SAMPLE] for row in found.recorder.records) == [*range(REQUESTS)]  # type: ignore[type-var]
    recorded = [
        [(piece.tokens, piece.record) for piece in op.slices]
        for row in found.recorder.plans
        for op in row[-1].ops
        if isinstance(op, Compute) and any(s.record and s.job.training is None for s in op.slices)
    ]
    assert recorded == [[(lengths[0], True)]] * REQUESTS, "each prompt whole, and alone"
    losses, adapter = trained_in_two_calls(found)
    assert found.losses == losses
    own = {name: found.weights[name] for name in adapter}
    assert not differing((found.losses, own), (losses, adapter))


@pytest.mark.parametrize("backend", ["lockstep", "cpu"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_behind_stale_records_they_are_those_of_the_weights_that_served(
    family: str, backend: str
) -> None:
    """All feedback comes when all is served: records are up to three updates old."""
    later = ("training.data.delay_s=100", "training.data.delays=fixed", "training.staleness=9")
    words = [word for word in alone(family, 20, 24) if not word.startswith("training.data.delay")]
    found = run_of(backend, (*words, *later))
    assert sorted(updates_behind(found)) == [*range(REQUESTS)]
    losses, adapter = trained_in_two_calls(found, through_first=True)
    own = {name: found.weights[name] for name in adapter}
    assert not differing((found.losses, own), (losses, adapter))
    fresh = trained_in_two_calls(found)
    assert differing((losses, adapter), fresh), "the weights of each step would give others"
