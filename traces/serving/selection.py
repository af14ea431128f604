"""Applies a rule to conversations: the requests that it takes, and the account of the rest."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

from traces.serving.request import Request
from traces.serving.rules import (
    Counted,
    MessageRule,
    Pick,
    Picked,
    messages_used,
    pick,
    shape_fault,
)
from traces.serving.sharegpt import Conversation
from traces.tokenizer import LoadedTokenizer

BATCH = 256  # conversations tokenized at once: enough for every core, few enough for memory
KNOWN_ROLES = frozenset({"human", "gpt", "system"})
Ids = list[list[int]]  # token ids per message, without BOS


@dataclass
class Selection:
    """The requests of an import, and its accounts.

    A conversation is kept, or has a fault by its row. Pairs are the candidates of the conversations
    that the rule looked at: pairs_read = len(requests) + pairs_dropped.total(). `noted` counts odd
    messages of kept requests: messages of an unknown role, and empty ones.
    """

    rows_kept: int = 0
    faults: dict[int, str] = field(default_factory=dict)
    noted: Counter[str] = field(default_factory=Counter)
    pairs_read: int = 0
    pairs_dropped: Counter[str] = field(default_factory=Counter)
    requests: list[Request] = field(default_factory=list)


def select(
    conversations: Sequence[Conversation],
    rule: MessageRule,
    tokenizer: LoadedTokenizer,
    *,
    seed: int | None = None,
    limit: int | None = None,
    keep_ids: bool = True,
) -> Selection:
    """Applies a rule in file order, or in an order shuffled by `seed` as the published code does.

    It stops at `limit` requests, as vLLM does. The conversations behind the limit count as dropped.
    """
    selection, looked = Selection(), 0
    usable = _usable(conversations, rule, selection)
    if seed is not None:
        random.Random(seed).shuffle(usable)
    limit = limit if limit is not None else sum(len(c.roles) for c in usable)
    beyond = f"beyond the limit of {limit} requests"
    for conversation, ids, picked in _picked(usable, rule, tokenizer):
        room = limit - len(selection.requests)
        if room == 0:
            break
        looked += 1
        _count(selection, conversation, picked, room, beyond)
        session = selection.rows_kept - 1 if rule.is_closed_loop else None
        bos_ids = tokenizer.bos_ids if rule.counts_bos else ()
        for turn, chosen in enumerate(picked.picks[:room]):
            prompt_ids = (*bos_ids, *chain.from_iterable(ids[: chosen.last + 1]))
            number = len(selection.requests)
            made = _request(number, chosen, session, turn, prompt_ids if keep_ids else None)
            selection.requests.append(made)
    selection.faults |= {conversation.row: beyond for conversation in usable[looked:]}
    assert len(conversations) == selection.rows_kept + len(selection.faults)
    return selection


def _usable(
    conversations: Iterable[Conversation], rule: MessageRule, selection: Selection
) -> list[Conversation]:
    """The conversations to shuffle: vLLM shuffles all of two messages before it looks further."""
    usable = []
    for conversation in conversations:
        fault = shape_fault(rule, conversation.roles)
        if fault in (None, "does not start with human, gpt"):
            usable.append(conversation)
        else:
            selection.faults[conversation.row] = str(fault)
    return usable


def _picked(
    conversations: Sequence[Conversation], rule: MessageRule, tokenizer: LoadedTokenizer
) -> Iterator[tuple[Conversation, Ids, Picked]]:
    """Each conversation, the ids of the messages that the rule needs, and what the rule picks."""
    from tqdm import tqdm

    bar = tqdm(total=len(conversations), desc="tokenizing", unit=" conversations", disable=None)
    with bar:
        for start in range(0, len(conversations), BATCH):
            batch = conversations[start : start + BATCH]
            used = [c.texts[: messages_used(rule, c.roles)] for c in batch]
            ids = iter(tokenizer.encode(list(chain.from_iterable(used))))
            for conversation, texts in zip(batch, used, strict=True):
                own = [next(ids) for _ in texts]
                counted = Counted(conversation.roles, tuple(map(len, own)))
                yield conversation, own, pick(rule, counted, len(tokenizer.bos_ids))
            bar.update(len(batch))


def _count(
    selection: Selection, conversation: Conversation, picked: Picked, room: int, beyond: str
) -> None:
    selection.pairs_read += len(picked.picks) + len(picked.reasons)
    selection.pairs_dropped.update(picked.reasons)
    if len(picked.picks) > room:
        selection.pairs_dropped[beyond] += len(picked.picks) - room
    if picked.reason is None:
        selection.rows_kept += 1
        used = slice(picked.picks[:room][-1].last + 2)  # prompts hold all messages before
        roles, texts = conversation.roles[used], conversation.texts[used]
        odd = {"message of an unknown role": sum(role not in KNOWN_ROLES for role in roles)}
        selection.noted += Counter(odd | {"empty message": sum(not text for text in texts)})
    else:
        selection.faults[conversation.row] = picked.reason


def _request(
    number: int, chosen: Pick, session: int | None, turn: int, prompt_ids: tuple[int, ...] | None
) -> Request:
    return Request(
        request_id=number,
        arrival_ns=0,
        prompt_tokens=chosen.prompt_tokens,
        output_tokens=chosen.output_tokens,
        session=session,
        turn=0 if session is None else turn,
        prompt_ids=prompt_ids,
    )
