"""Traces whose prompts begin alike, and what each job's tokens are: for tests of prefix caching."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Container, Hashable, Sequence
from dataclasses import replace
from functools import cache

from hypothesis import strategies as st

from engine.contract.executor import Launch, Piece
from engine.contract.regions import PageSize
from engine.laws.check_replay import Contents, Token
from policies.composed import Composed
from policies.kv.paged_restart import PagedRestart
from policies.kv.paged_swap import PagedSwap
from policies.scheduling.chunked_prefill import ChunkedPrefill
from policies.scheduling.continuous_batching import ContinuousBatching
from policies.scheduling.earliest_deadline import EarliestDeadline
from policies.scheduling.orca import Orca
from policies.scheduling.static_batching import StaticBatching
from policies.scheduling.vllm_v1 import VllmV1
from tests.support.replays import PAGE, Replay
from traces.serving.request import Request, prompt_of

VOCABULARY = 3  # so few that pages are alike by chance, too, behind other tokens
SCHEDULING = {
    "static": StaticBatching(max_jobs=6),
    "continuous": ContinuousBatching(token_budget=128, max_jobs=12),
    "chunked": ChunkedPrefill(token_budget=48, max_jobs=12),
    "v1": VllmV1(token_budget=48, max_jobs=12),
    "orca": Orca(max_jobs=8),
    "deadline": EarliestDeadline(token_budget=24, max_jobs=12),
}
MEMORY = {
    "restart": PagedRestart(prefix_caching=True),
    "swap": PagedSwap(prefix_caching=True),
    "v0": PagedRestart(prompts="reserved", spare_pages=1, gives_way=True, prefix_caching=True),
    "v1": PagedRestart(0.0, prompts="must_fit", gives_way=True, prefix_caching=True),
}


def composed(scheduling: str, memory: str) -> Composed:
    return Composed(SCHEDULING[scheduling], MEMORY[memory])


def named(requests: Sequence[Request]) -> Token:
    """What a job has at a position with all before it, from the prompts that would be computed."""
    prompts = {r.request_id: prompt_of(r, 1 << 30, seed=0) for r in requests}
    adapters = {r.request_id: r.adapter for r in requests}
    before = defaultdict[int, list[int]](list)

    @cache
    def token(job_id: int, at: int) -> Hashable:
        prompt, names = prompts.get(job_id, ()), before[job_id]  # a sample's tokens are its own
        while len(names) <= at:
            here = len(names)
            own = prompt[here] if here < len(prompt) else (job_id, here)
            names.append(hash((names[-1] if names else adapters.get(job_id), own)))
        return names[at]

    return token


def check_contents(run: Replay, requests: Sequence[Request], page: PageSize = PAGE) -> int:
    """Checks what every launch read; returns how many tokens were found instead of computed."""
    served = {request.request_id for request in requests}
    launches = ((_on_pages(row[4], page, served), row[3]) for row in run.recorder.steps)
    Contents(page, named(requests)).carry_out(launches)
    return sum(outcome.cached_tokens for outcome in run.recorder.outcomes.values())


def _on_pages(launch: Launch, page: PageSize, served: Container[int]) -> Launch:
    """Without the pieces of samples that go back: their keys and values leave layer by layer."""

    def has_all(piece: Piece) -> bool:
        return len(piece.pages) * page.tokens >= piece.context_tokens + piece.tokens

    pieces = [p for p in launch.pieces if p.job_id in served or has_all(p)]
    return replace(launch, pieces=tuple(pieces))


def alike(seed: int, count: int = 24, rate: float | None = None) -> list[Request]:
    """Prompts that continue one of three beginnings, or one of the prompts before them."""
    rng, now_ns, requests = random.Random(seed), 0, list[Request]()
    begins = [tuple(rng.choices(range(VOCABULARY), k=n)) for n in (10, 24, 40)]
    for i in range(count):
        if rate:
            now_ns += int(rng.expovariate(rate) * 1e9)
        base = rng.choice([*begins, *[r.prompt_ids or () for r in requests[-4:]]])[:60]
        if not rng.randrange(4):
            base = (rng.randrange(VOCABULARY), *base[1:])  # equal pages behind another first one
        ids = base + tuple(rng.choices(range(VOCABULARY), k=rng.randint(1, 20)))
        requests.append(Request(i, now_ns, len(ids), rng.randint(1, 40), prompt_ids=ids))
    return requests


def in_blocks(requests: Sequence[Request], block_tokens: int = 4) -> list[Request]:
    """These prompts by the names of their blocks; a name stands for all blocks before it, too."""
    names: dict[tuple[int, tuple[int, ...]], int] = {}

    def blocks(ids: tuple[int, ...]) -> tuple[int, ...]:
        found = [-1]
        for start in range(0, len(ids), block_tokens):
            key = (found[-1], ids[start : start + block_tokens])
            found.append(names.setdefault(key, len(names)))
        return tuple(found[1:])

    return [
        replace(
            request,
            prompt_ids=None,
            prefix_ids=blocks(request.prompt_ids or ()),
            prefix_block_tokens=block_tokens,
        )
        for request in requests
    ]


def alike_or_not() -> st.SearchStrategy[list[Request]]:
    """Prompts of ids or of named blocks, or lengths only, that arrive at any time."""
    ids = st.lists(st.integers(0, 1), min_size=1, max_size=80).map(tuple)
    row = st.tuples(
        st.integers(0, 30_000_000),
        st.integers(1, 40),
        st.sampled_from(["ids", "blocks", "lengths"]),
        st.integers(0, 2),  # which beginning
        st.integers(0, 40),  # tokens of it
        ids,
    )
    return st.lists(row, min_size=1, max_size=25).map(_requests)


def _requests(rows: Sequence[tuple]) -> list[Request]:  # type: ignore[type-arg]
    requests = []
    for i, (at_ns, output, kind, begin, shared, rest) in enumerate(rows):
        prompt = (begin,) * shared + rest
        tokens = min(len(prompt), 80)
        given: dict[str, object] = {}
        if kind == "ids":
            given = {"prompt_ids": prompt[:tokens]}
        elif kind == "blocks":
            names = (begin,) * (shared // 7) + rest
            given = {"prefix_ids": names[: -(-tokens // 7)], "prefix_block_tokens": 7}
        requests.append(Request(i, at_ns, tokens, output, **given))  # type: ignore[arg-type]
    return requests
