"""Claim: the real runtime serves requests on a CPU at less cost than `generate_batch`.

Three models and workloads (24, 32 and 64 requests at once, ShareGPT-like lengths, fp32, greedy, end
of sequence off, 512 tokens a step). Tandem runs the whole engine: policy, ledger, recorder, packing
and work on the service clock. The other side is transformers' continuous batching (sdpa) on a model
with equal weights, without prefix sharing. Its pages have 16 tokens or its default size, the faster
one of a first run after a warm-up. All run in one process with one thread, by turns, in CPU seconds
of the process; medians. Tokens must be equal up to near ties. `host` is a replay's share outside of
the model's forward, at most 5 %: preparation, bookkeeping, and the kernel's page faults of KV. The
value is the smallest of the three ratios over its bar.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from engine.contract.regions import PageSize
from models.spec import ModelSpec
from policies.composed import Composed
from policies.kv.paged_restart import PagedRestart
from policies.scheduling.chunked_prefill import ChunkedPrefill
from runtime.measure.calibrate import cpu_name
from runtime.serving.machine import GPU, Prepared, ServingMachine
from runtime.serving.model import build_model
from tandem.compiled import form
from tests.support.hand_made import SPREAD
from tests.support.reference import compare, generate
from tests.support.serving import replay
from traces.serving.request import Request

TOKEN_BUDGET, MAX_JOBS = 512, 64
PAGE_TOKENS = 16
OWN_PAGE_TOKENS = 256  # the default of generate_batch
MAX_PROMPT, MAX_OUTPUT = 512, 256
HOST_BAR = 0.05
LLAMA = ModelSpec(
    name="llama 6x256",
    family="llama",
    num_layers=6,
    hidden_size=256,
    num_heads=8,
    num_kv_heads=4,
    head_dim=32,
    intermediate_size=704,
    vocab_size=4000,
    max_positions=1024,
    dtype="float32",
)


@dataclass(frozen=True)
class Workload:
    """A model and its requests; totals of tokens are fixed."""

    spec: ModelSpec
    count: int
    prompt_tokens: int
    output_tokens: int
    bar: float  # times the speed of generate_batch
    aim: float


WORKLOADS = (
    Workload(LLAMA, 24, 4261, 2129, 1.7, 2.0),
    Workload(
        replace(LLAMA, name="qwen3 8x256", family="qwen3", num_layers=8), 32, 5111, 2723, 2.0, 2.5
    ),
    Workload(replace(LLAMA, name="llama 4x256", num_layers=4), 64, 10153, 5348, 3.0, 3.5),
)


class WatchedMachine(ServingMachine):
    """A machine that sums up the time of its forwards."""

    forward_ns = 0

    def start(self, prepared: Prepared) -> tuple[Any, ...]:
        begin = time.thread_time_ns()
        try:
            return super().start(prepared)
        finally:
            self.forward_ns += time.thread_time_ns() - begin


def requests_of(work: Workload, seed: int = 0) -> list[Request]:
    """All at once; lengths are lognormal, clipped, and add up to the totals."""
    rng = np.random.default_rng(seed)
    prompts = lengths(rng, work.count, work.prompt_tokens, MAX_PROMPT)
    outputs = lengths(rng, work.count, work.output_tokens, MAX_OUTPUT)
    return [
        Request(i, 0, n, m, prompt_ids=tuple(rng.integers(work.spec.vocab_size, size=n).tolist()))
        for i, (n, m) in enumerate(zip(prompts, outputs, strict=True))
    ]


def lengths(rng: np.random.Generator, count: int, total: int, most: int) -> list[int]:
    """`count` lengths from 2 to `most` that add up to `total`; sigma 1 as in chat traces."""
    drawn = np.clip(rng.lognormal(size=count), 0.1, 8.0)
    scale = total / drawn.sum()
    for _ in range(50):  # clipping shrinks the sum: scale up until it is `total` again
        scale *= total / np.clip(drawn * scale, 2, most).sum()
    bounds = np.rint(np.cumsum([0, *np.clip(drawn * scale, 2, most)])).astype(int)
    return np.diff(bounds).tolist()


@dataclass(frozen=True)
class Turn:
    """One run: CPU seconds, the part of them outside of forwards, and the tokens."""

    took_s: float
    outputs: Mapping[int, Sequence[int]]
    host: float = 0.0


def num_pages(work: Workload, page_tokens: int) -> int:
    """Pages for all requests at the longest possible length: memory never binds."""
    return work.count * -(-(MAX_PROMPT + MAX_OUTPUT) // page_tokens)


def ours(model: Any, work: Workload, requests: Sequence[Request]) -> Turn:
    """A replay by the engine."""
    prompts = {r.request_id: r.prompt_ids or () for r in requests}
    pages = {GPU: num_pages(work, PAGE_TOKENS)}
    policy = Composed(ChunkedPrefill(TOKEN_BUDGET, MAX_JOBS), PagedRestart())
    start = time.process_time()
    page = PageSize.of(work.spec, PAGE_TOKENS)
    machine = WatchedMachine(model, work.spec, page, pages, prompts)
    replay(policy, machine, pages, requests)
    took_s = time.process_time() - start
    outputs = {r.request_id: machine.outputs(r.request_id) for r in requests}
    return Turn(took_s, outputs, 1 - machine.forward_ns / 1e9 / took_s)


def theirs(model: Any, work: Workload, requests: Sequence[Request], page_tokens: int) -> Turn:
    """A run of generate_batch's manager, with an output length per request."""
    settings = ContinuousBatchingConfig(
        page_size=page_tokens,
        num_blocks=num_pages(work, page_tokens),
        max_batch_tokens=TOKEN_BUDGET,
        max_requests_per_batch=MAX_JOBS,
        allow_block_sharing=False,
    )
    greedy = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    start = time.process_time()
    with model.continuous_batching_context_manager(
        generation_config=greedy, continuous_batching_config=settings
    ) as manager:
        for r in requests:
            ids = list(r.prompt_ids or ())
            manager.add_request(ids, request_id=str(r.request_id), max_new_tokens=r.output_tokens)
        done: dict[int, list[int]] = {}
        while len(done) < len(requests):
            result = manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                done[int(result.request_id)] = list(result.generated_tokens)
    return Turn(time.process_time() - start, done)


@dataclass(frozen=True)
class Result:
    """One workload: medians over turns."""

    ratio: float
    host: float
    wrong: tuple[str, ...]  # our requests that differ from generate(), but for near ties


def measured(work: Workload, turns: int) -> Result:
    """Runs a workload both ways, by turns, and prints its row."""
    requests = requests_of(work)
    own = build_model(work.spec, seed=1, spread=SPREAD)
    other = build_model(work.spec, seed=1, attention="sdpa", spread=SPREAD)
    expected = {
        r.request_id: generate(other, r.prompt_ids or (), r.output_tokens) for r in requests
    }
    ours(own, work, requests)  # warms up
    sizes = (PAGE_TOKENS, OWN_PAGE_TOKENS)
    theirs(other, work, requests, OWN_PAGE_TOKENS)  # warms up
    first_s = {n: theirs(other, work, requests, n).took_s for n in sizes}
    page_tokens = min(first_s, key=lambda n: first_s[n])
    rows = [
        (ours(own, work, requests), theirs(other, work, requests, page_tokens))
        for _ in range(turns)
    ]
    wrong = tuple(words for row in rows for words in compare(row[0].outputs, expected).wrong)
    equal, ties, differ = compare(rows[0][1].outputs, expected)
    ratios = [b.took_s / a.took_s for a, b in rows]
    host = median(a.host for a, _ in rows)
    print(
        f"{work.spec.name}: {work.count} requests, {work.prompt_tokens} + {work.output_tokens} "
        f"tokens; ours {median(a.took_s for a, _ in rows):.2f} s, host {host:.1%}, {len(wrong)} "
        f"requests wrong; generate_batch {median(b.took_s for _, b in rows):.2f} s with pages of "
        f"{page_tokens}, {equal} equal, {ties} near ties, {len(differ)} wrong; "
        f"{median(ratios):.2f} times as fast ({min(ratios):.2f}-{max(ratios):.2f}), "
        f"bar {work.bar:g}, aim {work.aim:g}",
        *wrong,
        sep="\n  ",
        flush=True,
    )
    return Result(median(ratios), host, wrong)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one turn instead of five")
    turns = 1 if parser.parse_args().quick else 5
    torch.set_num_threads(1)
    print(f"{form()}; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs, {cpu_name()}")
    results = [measured(work, turns) for work in WORKLOADS]
    of_bar = min(r.ratio / work.bar for r, work in zip(results, WORKLOADS, strict=True))
    host = max(result.host for result in results)
    wrong = sum(len(result.wrong) for result in results)
    print(f"host {host:.1%} at most, bar {HOST_BAR:.0%}; {wrong} requests wrong")
    passed = of_bar >= 1 and host <= HOST_BAR and not wrong
    print(f"runtime_speed_of_bar {of_bar:.3f} ratio 1 {'pass' if passed else 'fail'}")
    return int(not passed)


if __name__ == "__main__":
    sys.exit(main())
