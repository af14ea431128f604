"""Published rules that make requests of conversations, by roles and token counts alone.

`pick` applies a rule to one conversation, `rule_figures` counts what a rule keeps of many.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class MessageRule:
    """One way to make requests of conversations; lengths are in tokens, with BOS if it counts.

    `turns` is "first" (messages 0 and 1 are prompt and output) or "all" (a request per adjacent
    human-gpt pair, whose prompt is all up to the human message). `shuffle_seed` is that of the
    published code.
    """

    name: str
    turns: str = "first"
    has_role_check: bool = False
    counts_bos: bool = True
    min_tokens: int = 1
    max_prompt_tokens: int | None = None
    max_total_tokens: int | None = None
    is_closed_loop: bool = False
    shuffle_seed: int | None = None


RULES = {
    rule.name: rule
    for rule in (
        # vLLM benchmarks/datasets.py; its prompt may be a gpt message
        MessageRule(
            "vllm_first_two_msgs_4_1024_2048",
            min_tokens=4,
            max_prompt_tokens=1024,
            max_total_tokens=2048,
            shuffle_seed=0,
        ),
        MessageRule(
            "vllm_filter_plus_role_check",
            has_role_check=True,
            min_tokens=4,
            max_prompt_tokens=1024,
            max_total_tokens=2048,
            shuffle_seed=0,
        ),
        # SGLang bench_serving.py; its context length is max_total_tokens of an import
        MessageRule("sglang_min2_no_context_len", min_tokens=2),
        # FlexLLM benchmarking/get_sharegpt_trace.py
        MessageRule(
            "flexllm_human_gpt_total_le_8192",
            has_role_check=True,
            max_total_tokens=8192,
            shuffle_seed=42,
        ),
        MessageRule("nanoflow_human_gpt_no_length_filter", has_role_check=True),
        # a turn is an independent request, whose prompt is the conversation before it
        MessageRule("multiturn_cumulative", turns="all", counts_bos=False),
        # the requests of multiturn_cumulative as sessions: the answer before releases a turn
        MessageRule("multiturn_closed_loop", turns="all", counts_bos=False, is_closed_loop=True),
    )
}


def rule_named(name: str) -> MessageRule:
    """The rule of a name. Raises a ValueError that lists all rules."""
    if name not in RULES:
        raise ValueError(f"no rule {name!r}; choose one of {', '.join(RULES)}")
    return RULES[name]


@dataclass(frozen=True, slots=True)
class Counted:
    """A conversation as rules see it: role and tokens of each message, without BOS."""

    roles: tuple[str, ...]
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Pick:
    """A request: messages 0 to last are its prompt, message last + 1 is its output.

    `new_tokens` are those that the prompt of the turn before lacks: the human message and the reply
    before it.
    """

    last: int
    prompt_tokens: int
    output_tokens: int
    new_tokens: int
    prompt_role: str


@dataclass(frozen=True, slots=True)
class Picked:
    """The requests that a rule takes from one conversation.

    `reasons` has one entry per dropped pair. `reason` says why the conversation gives no request;
    it is None where it gives one.
    """

    picks: tuple[Pick, ...]
    reasons: tuple[str, ...] = ()
    reason: str | None = None


def messages_used(rule: MessageRule, roles: tuple[str, ...]) -> int:
    """How many leading messages a rule needs token counts of; 0 where roles alone decide."""
    return 0 if shape_fault(rule, roles) else 2 if rule.turns == "first" else len(roles)


def shape_fault(rule: MessageRule, roles: tuple[str, ...]) -> str | None:
    """Why the roles of a conversation exclude it; None where they do not."""
    if not roles:
        return "no messages"
    if rule.turns == "all":
        return None if _pairs(roles) else "no human message followed by a gpt message"
    if len(roles) < 2:
        return "fewer than 2 messages"
    if rule.has_role_check and roles[:2] != ("human", "gpt"):
        return "does not start with human, gpt"
    return None


def pick(rule: MessageRule, conversation: Counted, num_bos: int) -> Picked:
    """The requests that a rule takes from a conversation, and why it drops other pairs.

    `num_bos` tokens are added to prompt and output where the rule counts BOS.
    """
    fault = shape_fault(rule, conversation.roles)
    if fault:
        return Picked((), reason=fault)
    lasts = (0,) if rule.turns == "first" else _pairs(conversation.roles)
    picks, reasons = [], []
    for last in lasts:
        candidate = _candidate(rule, conversation, last, num_bos)
        reason = _length_fault(rule, conversation, candidate)
        if reason:
            reasons.append(reason)
        else:
            picks.append(candidate)
    return Picked(tuple(picks), tuple(reasons), None if picks else reasons[0])


def _pairs(roles: tuple[str, ...]) -> tuple[int, ...]:
    """Places of the human messages that a gpt message follows."""
    return tuple(i for i in range(len(roles) - 1) if roles[i : i + 2] == ("human", "gpt"))


def _candidate(rule: MessageRule, conversation: Counted, last: int, num_bos: int) -> Pick:
    tokens = conversation.tokens
    bos = num_bos if rule.counts_bos else 0
    reply = tokens[last - 1] if last > 0 and conversation.roles[last - 1] == "gpt" else 0
    return Pick(
        last=last,
        prompt_tokens=sum(tokens[: last + 1]) + bos,
        output_tokens=tokens[last + 1] + bos,
        new_tokens=tokens[last] + reply + bos,
        prompt_role=conversation.roles[last],
    )


def _length_fault(rule: MessageRule, conversation: Counted, pick: Pick) -> str | None:
    if rule.turns == "all" and 0 in conversation.tokens[pick.last : pick.last + 2]:
        return "empty message in the pair"
    for part, length in (("prompt", pick.prompt_tokens), ("output", pick.output_tokens)):
        if length < rule.min_tokens:
            return f"{part} under {rule.min_tokens} tokens"
    if rule.max_prompt_tokens is not None and pick.prompt_tokens > rule.max_prompt_tokens:
        return f"prompt over {rule.max_prompt_tokens} tokens"
    total = pick.prompt_tokens + pick.output_tokens
    if rule.max_total_tokens is not None and total > rule.max_total_tokens:
        return f"prompt and output over {rule.max_total_tokens} tokens"
    return None


def spread(values: Sequence[int]) -> dict[str, float]:
    """n, sum, mean, linear percentiles (numpy's) and maximum of token counts."""
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


def rule_figures(
    rule: MessageRule, conversations: Sequence[Counted], num_bos: int
) -> dict[str, Any]:
    """Counts, lengths and turns that a rule keeps, in the layout of the golden counts."""
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
