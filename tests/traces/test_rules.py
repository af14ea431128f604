"""The published rules: golden counts, and their conditions on any input."""

from __future__ import annotations

import json
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from traces.serving.rules import (
    RULES,
    Counted,
    MessageRule,
    messages_used,
    pick,
    rule_figures,
    rule_named,
)

NUM_BOS = {"llama2": 1, "llama3": 1, "qwen": 0, "gpt2": 0}
messages = st.lists(
    st.tuples(st.sampled_from(["human", "gpt", "system", "bing"]), st.integers(0, 3000)),
    max_size=9,
)
rules = st.sampled_from(list(RULES.values()))
num_bos = st.integers(0, 1)


@cache
def counted(path: Path, tokenizer: str) -> list[Counted]:
    roles: dict[str, list[str]] = {}
    tokens: dict[str, list[int]] = {}
    for row in pq.read_table(path).to_pylist():
        roles.setdefault(row["conv_id"], []).append(row["role"])
        tokens.setdefault(row["conv_id"], []).append(row[f"tok_{tokenizer}"])
    return [Counted(tuple(roles[c]), tuple(tokens[c])) for c in roles]


@pytest.mark.parametrize("tokenizer", NUM_BOS)
def test_golden_counts(shared: Path, tokenizer: str) -> None:
    folder = shared / "data" / "sharegpt"
    golden = json.loads((folder / "expected_rule_counts_dev.json").read_text())[tokenizer]
    conversations = counted(folder / "sharegpt_v3_sample_dev_tokens.parquet", tokenizer)
    assert len(golden) == 6
    for name, expected in golden.items():
        ours = rule_figures(rule_named(name), conversations, NUM_BOS[tokenizer])
        assert {key: ours[key] for key in expected} == expected, name


def made(drawn: list[tuple[str, int]]) -> Counted:
    return Counted(tuple(role for role, _ in drawn), tuple(count for _, count in drawn))


@given(rule=rules, drawn=messages, bos=num_bos)
def test_every_candidate_is_kept_or_named(
    rule: MessageRule, drawn: list[tuple[str, int]], bos: int
) -> None:
    conversation = made(drawn)
    picked = pick(rule, conversation, bos)
    assert (picked.reason is None) == bool(picked.picks)
    pairs = sum(a == "human" and b == "gpt" for (a, _), (b, _) in pairwise(drawn))
    candidates = len(picked.picks) + len(picked.reasons)
    assert candidates == pairs if rule.turns == "all" else candidates <= 1
    assert all(picked.reasons)


@given(rule=rules, drawn=messages, bos=num_bos)
def test_kept_requests_obey_the_rule(
    rule: MessageRule, drawn: list[tuple[str, int]], bos: int
) -> None:
    counted_bos = bos if rule.counts_bos else 0
    for chosen in pick(rule, made(drawn), bos).picks:
        prompt = sum(count for _, count in drawn[: chosen.last + 1]) + counted_bos
        output = drawn[chosen.last + 1][1] + counted_bos
        assert (chosen.prompt_tokens, chosen.output_tokens) == (prompt, output)
        assert min(prompt, output) >= rule.min_tokens
        assert prompt <= (rule.max_prompt_tokens or prompt)
        assert prompt + output <= (rule.max_total_tokens or prompt + output)
        assert chosen.prompt_role == drawn[chosen.last][0]
        assert chosen.new_tokens <= prompt
        if rule.has_role_check or rule.turns == "all":
            assert [role for role, _ in drawn[chosen.last : chosen.last + 2]] == ["human", "gpt"]


@given(rule=rules, drawn=messages, bos=num_bos, tail=messages)
def test_a_rule_needs_no_more_messages_than_it_asks_for(
    rule: MessageRule, drawn: list[tuple[str, int]], bos: int, tail: list[tuple[str, int]]
) -> None:
    conversation = made(drawn)
    used = messages_used(rule, conversation.roles)
    cut = Counted(conversation.roles, conversation.tokens[:used])
    assert pick(rule, cut, bos) == pick(rule, conversation, bos)


@given(drawn=messages, bos=num_bos)
def test_the_role_check_only_takes_away(drawn: list[tuple[str, int]], bos: int) -> None:
    with_check = pick(RULES["vllm_filter_plus_role_check"], made(drawn), bos).picks
    without = pick(RULES["vllm_first_two_msgs_4_1024_2048"], made(drawn), bos).picks
    assert set(with_check) <= set(without)
    assert [p for p in without if p.prompt_role == "human"] or not with_check


def pairs_of(*lengths: int) -> Counted:
    return Counted(("human", "gpt") * (len(lengths) // 2), lengths)


@pytest.mark.parametrize(
    ("rule", "lengths", "reason"),
    [
        ("vllm_filter_plus_role_check", (4, 4), None),
        ("vllm_filter_plus_role_check", (3, 4), "prompt under 4 tokens"),
        ("vllm_filter_plus_role_check", (4, 3), "output under 4 tokens"),
        ("vllm_filter_plus_role_check", (1024, 1024), None),
        ("vllm_filter_plus_role_check", (1025, 4), "prompt over 1024 tokens"),
        ("vllm_filter_plus_role_check", (1024, 1025), "prompt and output over 2048 tokens"),
        ("vllm_filter_plus_role_check", (4, 2044), None),
        ("sglang_min2_no_context_len", (2, 2), None),
        ("sglang_min2_no_context_len", (1, 2), "prompt under 2 tokens"),
        ("sglang_min2_no_context_len", (90_000, 90_000), None),
        ("flexllm_human_gpt_total_le_8192", (1, 8191), None),
        ("flexllm_human_gpt_total_le_8192", (2, 8191), "prompt and output over 8192 tokens"),
        ("nanoflow_human_gpt_no_length_filter", (240_000, 1), None),
        ("nanoflow_human_gpt_no_length_filter", (5, 0), "output under 1 tokens"),
        ("multiturn_cumulative", (0, 5), "empty message in the pair"),
    ],
)
def test_the_edges_of_each_rule(rule: str, lengths: tuple[int, ...], reason: str | None) -> None:
    assert pick(RULES[rule], pairs_of(*lengths), 0).reason == reason


def test_bos_counts_once_per_message_where_the_rule_counts_it() -> None:
    first: dict[str, Any] = {n: pick(r, pairs_of(10, 20), 1).picks[0] for n, r in RULES.items()}
    for name, chosen in first.items():
        bos = 0 if name.startswith("multiturn") else 1
        assert (chosen.prompt_tokens, chosen.output_tokens) == (10 + bos, 20 + bos)


def test_history_accumulates_over_turns() -> None:
    picks = pick(RULES["multiturn_cumulative"], pairs_of(1, 2, 3, 4, 5, 6), 1).picks
    assert [(p.prompt_tokens, p.output_tokens, p.new_tokens) for p in picks] == [
        (1, 2, 1),
        (6, 4, 5),
        (15, 6, 9),
    ]


def test_an_unknown_rule_is_refused_with_the_list() -> None:
    with pytest.raises(ValueError, match="vllm_filter_plus_role_check"):
        rule_named("vllm")
