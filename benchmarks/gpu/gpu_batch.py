"""A batch on a machine of its own, launch by launch, for the timings of the GPU claims."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
import yaml

from engine.contract.executor import Launch, Piece
from engine.contract.job import Job
from engine.contract.plan import Compute, Slice
from engine.contract.regions import PageSize
from models.spec import ModelSpec
from runtime.executors.device import without_cudnn_attention
from runtime.serving.machine import GPU, ServingMachine

PAGE_TOKENS = 16
TRIED = "tried"  # instead of a verdict, on a CPU, which only shows that the script runs
MODELS, NAME = Path(__file__).resolve().parents[2] / "conf" / "model", "llama3_8b"
Slices = Sequence[tuple[Job, int]]  # jobs, and the most tokens of each


def spec_for(device: str) -> ModelSpec:
    """The 8B shape in bf16; on a CPU, which tries the wiring, a small one in float32."""
    path = MODELS / f"{'micro_llama' if device == 'cpu' else NAME}.yaml"
    fields = yaml.safe_load(path.read_text(encoding="utf-8"))
    del fields["_target_"]
    return ModelSpec(**fields)


def device_of(words: Sequence[str] | None, about: str | None) -> tuple[str, Path | None]:
    """The device that a claim's command line names, and where its figures go."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, help="CSV of the figures")
    chosen = parser.parse_args(words)
    return chosen.device, chosen.out


def name_of(device: str) -> str:
    """The device in words."""
    return torch.cuda.get_device_name() if device == "cuda" else "a CPU as a stand-in"


class Batch:
    """Jobs with these prompts, and room for `more_tokens` behind each."""

    def __init__(
        self,
        model: Any,
        spec: ModelSpec,
        prompts: Sequence[list[int]],
        more_tokens: int,
        device: str = "cuda",
        **how: Any,
    ) -> None:
        if device == "cuda":
            without_cudnn_attention()
        else:
            torch.set_num_threads(1)
        page = PageSize.of(spec, PAGE_TOKENS)
        counts = [page.count(len(prompt) + more_tokens) for prompt in prompts]
        order = torch.randperm(sum(counts)).tolist()
        ends = accumulate(counts)
        self.pages = [order[end - n : end] for n, end in zip(counts, ends, strict=True)]
        self.jobs = [Job(i, 0, len(p), len(p)) for i, p in enumerate(prompts)]
        pools, told = {GPU: len(order)}, dict(enumerate(prompts))
        self.machine = ServingMachine(model, spec, page, pools, told, device=device, **how)

    def launch(self, tasks: Slices) -> Launch:
        """A launch with a slice of each job, as the engine would issue it."""
        slices, pieces = [], []
        for job, most in tasks:
            tokens, context = min(job.remaining_tokens, most), job.computed_tokens
            samples = tokens == job.remaining_tokens
            slices.append(Slice(job, tokens))
            pieces.append(Piece(job.job_id, tokens, context, samples, self.pages[job.job_id]))
            job._advance(tokens, int(samples))
        return Launch(Compute(tuple(slices)), pieces=tuple(pieces))

    def run(self, tasks: Slices) -> None:
        """Executes one launch and waits for it."""
        self.machine.execute(self.machine.prepare(self.launch(tasks)))

    def timed_ms(self, tasks: Iterable[Slices]) -> list[float]:
        """Milliseconds of each launch, all prepared beforehand; by CUDA events on a GPU."""
        steps = [self.machine.prepare(self.launch(each)) for each in tasks]
        if self.machine.device == "cpu":  # tries the wiring
            return self._plainly_timed_ms(steps)
        torch.cuda.synchronize()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(steps) + 1)]
        marks[0].record()
        for step, mark in zip(steps, marks[1:], strict=True):
            self.machine.start(step)
            mark.record()
        torch.cuda.synchronize()
        return [a.elapsed_time(b) for a, b in pairwise(marks)]

    def _plainly_timed_ms(self, steps: Sequence[Any]) -> list[float]:
        marks = [time.perf_counter()]
        for step in steps:
            self.machine.start(step)
            marks.append(time.perf_counter())
        return [(b - a) * 1e3 for a, b in pairwise(marks)]
