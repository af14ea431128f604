"""Launches made by hand: a tiny engine of a few lines, so the runtime is tested by itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import count
from typing import Any

import torch

from engine.contract.executor import Launch, Piece
from engine.contract.job import Job
from engine.contract.plan import Compute, Copy, Slice
from engine.contract.regions import PageSize, Tier, kv_place
from models.spec import ModelSpec
from runtime.serving.machine import GPU, ServingMachine
from runtime.serving.model import build_model
from runtime.serving.sampling import Sampling

HOST = (Tier.HOST, 0)
SPREAD = 0.15  # standard deviation of weights: large enough that the context decides the token
TINY = ModelSpec(
    name="tiny",
    family="llama",
    num_layers=3,
    hidden_size=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=128,
    vocab_size=211,
    max_positions=512,
    dtype="float32",
)
FAMILIES: Mapping[str, ModelSpec] = {
    "llama": TINY,
    "qwen2": replace(TINY, name="tiny-qwen2", family="qwen2", attention_bias=True),
    "qwen3": replace(TINY, name="tiny-qwen3", family="qwen3", head_dim=24, tie_embeddings=True),
    "biased": replace(TINY, name="tiny-biased", attention_bias=True),
    "mistral": replace(TINY, name="tiny-mistral", family="mistral"),
    "opt": replace(
        TINY, name="tiny-opt", family="opt", num_kv_heads=4, tie_embeddings=True, norm_eps=1e-5
    ),
    "gpt2": replace(TINY, name="tiny-gpt2", family="gpt2", num_kv_heads=4, tie_embeddings=True),
}


def own_model(spec: ModelSpec) -> Any:
    """The runtime's model of a tiny spec, for tests that move it or change its weights."""
    return build_model(spec, seed=1, spread=SPREAD)


shared_model = cache(own_model)  # built once for all tests that only read its weights


class HandMade:
    """Issues launches; hands out pages in a scrambled order, rubbish where no launch may read."""

    def __init__(
        self,
        spec: ModelSpec,
        prompts: Mapping[int, Sequence[int]],
        sampling: Sampling | None = None,
        num_pages: int = 96,
        page_tokens: int = 8,
        eos_ids: Sequence[int] = (),
        rubbish: float = float("nan"),
        model: Any = None,
        **options: Any,
    ) -> None:
        torch.set_num_threads(1)
        if model is None:
            device = options.get("device", "cpu")
            model = shared_model(spec) if device == "cpu" else own_model(spec).to(device)
        pools = {GPU: num_pages, HOST: num_pages}
        self.machine = ServingMachine(
            model,
            spec,
            PageSize.of(spec, page_tokens),
            pools,
            prompts,
            sampling,
            eos_ids,
            **options,
        )
        self.page_tokens, self.rubbish = page_tokens, rubbish
        self.jobs = {i: Job(i, 0, len(p), len(p)) for i, p in prompts.items()}
        order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(3)).tolist()
        self.free = {pool: list(order) for pool in pools}
        self.pages: dict[int, list[int]] = {i: [] for i in prompts}
        for arena in self.machine.arenas.values():
            arena.pages[:] = rubbish

    def launch(self, *job_tokens: tuple[int, int], layers: range | None = None) -> Launch:
        """A compute of (job, tokens) slices. With layers, progress moves at the last one."""
        slices, pieces = [], []
        last = layers is None or layers.stop == self.machine.spec.num_layers
        for job_id, tokens in job_tokens:
            job, context = self.jobs[job_id], self.jobs[job_id].computed_tokens
            reach = context + tokens
            while len(self.pages[job_id]) * self.page_tokens < reach:
                self.pages[job_id].append(self.free[GPU].pop())
            samples = reach == job.known_tokens
            slices.append(Slice(job, tokens, layers=layers))
            pieces.append(Piece(job_id, tokens, context, samples, self.pages[job_id]))
            if last:
                job._advance(reach - job.computed_tokens, int(samples))
        return Launch(Compute(tuple(slices)), pieces=tuple(pieces))

    def run(self, *job_tokens: tuple[int, int], layers: range | None = None) -> tuple[int, ...]:
        """Issues one compute and carries it out."""
        return self.machine.execute(self.machine.prepare(self.launch(*job_tokens, layers=layers)))

    def finish(self, lengths: Mapping[int, int], slice_tokens: int = 1 << 30) -> None:
        """Decodes (and prefills in slices) together until every job has its length."""
        while slices := self.next_slices(lengths, slice_tokens):
            self.run(*slices)

    def next_slices(self, lengths: Mapping[int, int], slice_tokens: int) -> list[tuple[int, int]]:
        """The next slice of every job that is not at its length."""
        return [
            (i, min(job.remaining_tokens, slice_tokens))
            for i, job in self.jobs.items()
            if job.known_tokens - job.prompt_tokens < lengths[i]
        ]

    def restart(self, job_id: int) -> None:
        """Takes a job's memory; its tokens must be computed again."""
        self._give(GPU, self.pages[job_id])
        self.pages[job_id] = []
        self.jobs[job_id]._compute_from(0)

    def swap(self, job_id: int, src: Tier, dst: Tier) -> None:
        """Copies a job's pages to the other tier and leaves rubbish where they were."""
        source, target = (src, 0), (dst, 0)
        there = [self.free[target].pop() for _ in self.pages[job_id]]
        op = Copy(kv_place(job_id, src), kv_place(job_id, dst))
        nbytes = len(there) * self.machine.arenas[source].page_nbytes
        launch = Launch(op, nbytes=nbytes, src_pages=self.pages[job_id], dst_pages=there)
        self.machine.execute(self.machine.prepare(launch))
        self._give(source, self.pages[job_id])
        self.pages[job_id] = there

    def _give(self, pool: tuple[Tier, int], pages: Sequence[int]) -> None:
        self.machine.arenas[pool].pages[list(pages)] = self.rubbish
        self.free[pool] = list(pages) + self.free[pool]


def make_prompts(lengths: Sequence[int], vocab_size: int, seed: int = 5) -> dict[int, list[int]]:
    """Random prompts by job id; ids are neither dense nor in order of length."""
    rng = torch.Generator().manual_seed(seed)
    ids = count(7, 3)
    return {next(ids): torch.randint(vocab_size, (n,), generator=rng).tolist() for n in lengths}
