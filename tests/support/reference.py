"""What transformers' own generate() says: the tokens to equal, and how near each choice was."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

from models.spec import ModelSpec
from runtime.serving.model import build_model
from tests.support.hand_made import SPREAD
from traces.serving.request import Request

NEAR_TIE = 1e-4  # a difference is accepted only where the best two logits are this close


class Reference(NamedTuple):
    """Greedy tokens of one request, and the gap between the best two logits at each."""

    tokens: list[int]
    gaps: list[float]


def generate(model: Any, prompt: Sequence[int], output_tokens: int) -> Reference:
    """Greedy, end of sequence off, exactly so many tokens; the model's attention is plain."""
    out = model.generate(
        torch.tensor([list(prompt)]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        do_sample=False,
        min_new_tokens=output_tokens,
        max_new_tokens=output_tokens,
        eos_token_id=None,
        pad_token_id=0,
        use_cache=True,
        return_dict_in_generate=True,
        output_logits=True,
    )
    best = torch.stack(out.logits)[:, 0].float().topk(2).values
    return Reference(out.sequences[0, len(prompt) :].tolist(), (best[:, 0] - best[:, 1]).tolist())


@cache
def plain_model(spec: ModelSpec) -> Any:
    """The model as transformers runs it, with the weights of `shared_model`; only to be read."""
    return build_model(spec, seed=1, attention="sdpa", spread=SPREAD)


@cache
def greedy(spec: ModelSpec, prompt: tuple[int, ...], output_tokens: int) -> Reference:
    """What a plain model generates, once for all tests that ask."""
    return generate(plain_model(spec), prompt, output_tokens)


def expected(spec: ModelSpec, requests: Iterable[Request]) -> dict[int, Reference]:
    """The reference of each request, by its id."""
    return {r.request_id: greedy(spec, r.prompt_ids or (), r.output_tokens) for r in requests}


class Agreement(NamedTuple):
    """How requests compare with their references."""

    equal: int
    near_ties: int  # they differ from a near tie on
    wrong: list[str]  # what else differs, in words


def compare(outputs: Mapping[int, Sequence[int]], expected: Mapping[int, Reference]) -> Agreement:
    """Sorts requests into equal ones, near ties and wrong ones."""
    ties, wrong = 0, list[str]()
    for job_id, (tokens, gaps) in expected.items():
        got = list(outputs[job_id])
        if got == tokens:
            continue
        differ = (i for i, (a, b) in enumerate(zip(got, tokens, strict=False)) if a != b)
        at = next(differ, None)
        if at is None:
            wrong.append(f"job {job_id}: {len(got)} tokens, not {len(tokens)}")
        elif gaps[at] < NEAR_TIE and len(got) == len(tokens):
            ties += 1
        else:
            wrong.append(f"job {job_id}: token {at} differs, where the gap is {gaps[at]:.2e}")
    return Agreement(len(expected) - ties - len(wrong), ties, wrong)
