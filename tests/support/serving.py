"""Real replays for token checks: the engine over the CPU executor, under memory pressure."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.contract.policy import Memory, Policy, Scheduling
from engine.contract.regions import PageSize, Pool
from engine.loop.engine import Engine
from engine.loop.state import VirtualClock
from engine.results.recorder import Recorder
from models.spec import ModelSpec
from policies.composed import Composed
from policies.kv.max_reservation import MaxReservation
from policies.kv.paged_restart import PagedRestart
from policies.kv.paged_swap import PagedSwap
from policies.scheduling.chunked_prefill import ChunkedPrefill
from policies.scheduling.continuous_batching import ContinuousBatching
from policies.scheduling.static_batching import StaticBatching
from runtime.executors.lockstep import CpuExecutor
from runtime.serving.machine import GPU, ServingMachine
from tests.support.hand_made import HOST, shared_model
from traces.serving.request import Request

PAGE_TOKENS = 8
MAX_PROMPT, MAX_OUTPUT = 60, 40
SCHEDULING: Mapping[str, Scheduling] = {
    "static_batching": StaticBatching(max_jobs=6),
    "continuous_batching": ContinuousBatching(token_budget=128, max_jobs=12),
    "chunked_prefill": ChunkedPrefill(token_budget=32, max_jobs=12),
}
MEMORY: Mapping[str, Memory] = {
    "paged_restart": PagedRestart(),
    "paged_swap": PagedSwap(),
    "max_reservation": MaxReservation(max_tokens=MAX_PROMPT + MAX_OUTPUT),
}
KEEPING: Mapping[str, Memory] = {  # prefix caching
    "paged_restart": PagedRestart(prefix_caching=True),
    "paged_swap": PagedSwap(prefix_caching=True),
}


@dataclass(frozen=True)
class Served:
    """What a replay generated, how often it took a job's memory, and what it found in pages."""

    outputs: Mapping[int, Sequence[int]]
    restarts: int
    swaps: int
    cached_tokens: int


def short_requests(
    count: int, vocab_size: int, seed: int = 0, max_output: int = MAX_OUTPUT
) -> list[Request]:
    """Requests that all arrive at once, with the ids of their prompts."""
    rng, requests = random.Random(seed), []
    for i in range(count):
        prompt = tuple(rng.choices(range(vocab_size), k=rng.randint(1, MAX_PROMPT)))
        output_tokens = rng.randint(2, max_output)
        requests.append(Request(i, 0, len(prompt), output_tokens, prompt_ids=prompt))
    return requests


def shared_requests(
    count: int, vocab_size: int, seed: int = 0, has_turns: bool = True
) -> list[Request]:
    """Prompts that begin alike, all at once; every third is followed by a turn that repeats it.

    In between stands the answer of the trace, which is not what will be generated.
    """
    rng, requests = random.Random(seed), list[Request]()

    def ids(least: int, most: int) -> tuple[int, ...]:
        return tuple(rng.choices(range(vocab_size), k=rng.randint(least, most)))

    def add(number: int, prompt: tuple[int, ...], session: int | None, turn: int) -> None:
        lengths = len(prompt), rng.randint(2, MAX_OUTPUT)
        requests.append(Request(number, 0, *lengths, session, turn, prompt_ids=prompt))

    begins = [ids(20, 36) for _ in range(3)]
    for i in range(count):
        prompt = rng.choice(begins) + ids(1, 8)
        session = i if has_turns and i % 3 == 2 else None
        add(i, prompt, session, 0)
        if session is not None:
            add(count + i, prompt + ids(1, 8) + ids(1, 8), session, 1)
    return requests


def serve(
    spec: ModelSpec,
    requests: Sequence[Request],
    scheduling: str,
    memory: str,
    gpu_pages: int,
    model: Any = None,
) -> Served:
    """Replays requests with real work on the CPU, in a tight KV budget."""
    policy = Composed(SCHEDULING[scheduling], MEMORY[memory])
    return serve_with(policy, spec, requests, gpu_pages, model)


def serve_with(
    policy: Policy,
    spec: ModelSpec,
    requests: Sequence[Request],
    gpu_pages: int,
    model: Any = None,
    depth: int = 2,
) -> Served:
    """Replays requests as `serve` does, under any policy."""
    pages = {GPU: gpu_pages, HOST: 4 * gpu_pages}
    prompts = {r.request_id: r.prompt_ids or () for r in requests}
    machine = ServingMachine(
        model or shared_model(spec), spec, PageSize.of(spec, PAGE_TOKENS), pages, prompts
    )
    outcomes = replay(policy, machine, pages, requests, depth).outcomes
    assert {o.status for o in outcomes.values()} == {"finished"}
    return Served(
        {i: machine.outputs(i) for i in outcomes},
        sum(o.restarts for o in outcomes.values()),
        sum(o.swaps for o in outcomes.values()),
        sum(o.cached_tokens for o in outcomes.values()),
    )


def replay(
    policy: Policy,
    machine: ServingMachine,
    pages: Mapping[Pool, int],
    requests: Sequence[Request],
    depth: int = 2,
) -> Recorder:
    """One run of the engine on the service clock."""
    env, recorder = VirtualClock(), Recorder()
    arena = machine.arenas[GPU]
    page = arena.page
    capacity = {pool: count * page.nbytes for pool, count in pages.items()}
    executor = CpuExecutor(env, machine)
    engine = Engine(env, policy, executor, capacity, page, depth=depth, recorder=recorder)
    engine.replay(requests)
    return recorder
