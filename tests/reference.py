"""What transformers' own generate() says: the tokens to equal, and how near each choice was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

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


def near_ties(outputs: Mapping[int, Sequence[int]], expected: Mapping[int, Reference]) -> int:
    """Requests that differ from a near tie on; AssertionError for any other difference."""
    ties = 0
    for job_id, reference in expected.items():
        got = list(outputs[job_id])
        assert len(got) == len(reference.tokens), f"job {job_id}: {len(got)} tokens"
        if got == reference.tokens:
            continue
        pairs = zip(got, reference.tokens, strict=True)
        at = next(i for i, (ours, theirs) in enumerate(pairs) if ours != theirs)
        gap = reference.gaps[at]
        assert gap < NEAR_TIE, f"job {job_id} differs at token {at}, where the gap is {gap:.2e}"
        ties += 1
    return ties
