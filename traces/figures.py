"""Counts and lengths of what a rule kept, in the layout of the golden counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from traces.rules import Counted, Rule, pick


def spread(values: Sequence[int]) -> dict[str, float]:
    """n, sum, mean, numpy's linear percentiles and maximum of token counts."""
    if not values:
        return {"n": 0, "sum": 0}
    p50, p90, p99 = (float(p) for p in np.percentile(values, [50, 90, 99]))
    return {
        "n": len(values),
        "sum": sum(values),
        "mean": round(sum(values) / len(values), 3),
        "p50": p50,
        "p90": p90,
        "p99": p99,
        "max": max(values),
    }


def rule_figures(rule: Rule, conversations: Sequence[Counted], num_bos: int) -> dict[str, Any]:
    """What a rule keeps of counted conversations: how many, how long, how deep."""
    picked = [pick(rule, conversation, num_bos) for conversation in conversations]
    picks = [chosen for result in picked for chosen in result.picks]
    prompt_tokens = sum(chosen.prompt_tokens for chosen in picks)
    return {
        "eligible": len(picks),
        "of_conversations": len(conversations),
        "with_ge2_msgs": sum(len(c.roles) >= 2 for c in conversations),
        "prompt_is_gpt_message": sum(chosen.prompt_role == "gpt" for chosen in picks),
        "requests": len(picks),
        "conversations_with_ge1": sum(bool(result.picks) for result in picked),
        "depth": spread([len(result.picks) for result in picked]),
        "prompt": spread([chosen.prompt_tokens for chosen in picks]),
        "output": spread([chosen.output_tokens for chosen in picks]),
        "reusable_prefix_share_of_prompt_tokens": round(
            1 - sum(chosen.new_tokens for chosen in picks) / max(prompt_tokens, 1), 4
        ),
    }
