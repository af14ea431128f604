"""A tiny model, its finetuning jobs and policies that co-serve, for tests."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from engine.contract.layout import Layout, Mode
from engine.contract.regions import PageSize, Tier
from models.spec import ModelSpec
from models.training.kept import finetuning_shape
from policies.composed import Composed
from policies.kv.paged_restart import PagedRestart
from policies.planners.unit_chunks import Windows
from policies.scheduling.chunked_prefill import ChunkedPrefill
from policies.sharing.coserve import CoMemory, CoServe
from traces.serving.request import Sample, TrainingJob
from traces.training.recipe import Recipe

SPEC = ModelSpec("tiny", "llama", 4, 32, 2, 2, 16, 64, 128, 512, dtype="float32")
PAGE = PageSize.of(SPEC, 4)
BUDGET = 48


def finetuning_job(job_id: int, samples: Sequence[Sample], **given: Any) -> TrainingJob:
    """A job on these samples that trains adapters, unless a recipe is given."""
    given.setdefault("recipe", Recipe(lora_rank=4))
    given.setdefault("num_steps", max(1, len(samples) // given.get("microbatches", 1)))
    longest = max([sample.tokens for sample in samples])
    units = SPEC.num_layers + 2
    return TrainingJob(job_id, 0, units, longest, samples=tuple(samples), **given)


def random_job(rng: random.Random, job_id: int, **given: Any) -> TrainingJob:
    """A job on five samples of 2 to 60 tokens, of which two make an update, or one."""
    samples = [Sample(rng.randint(2, 60)) for _ in range(5)]
    given.setdefault("microbatches", rng.choice([1, 2]))
    return finetuning_job(job_id, samples, num_steps=3, **given)


def layout_of_jobs(
    jobs: Sequence[TrainingJob], pages: int, modes: Mode | tuple[Mode, ...] = Mode.KEEP
) -> Layout:
    """Where adapters and optimizer states of jobs lie, in a device of so many pages."""
    shapes = {job.job_id: finetuning_shape(SPEC, job) for job in jobs}
    capacity = {(Tier.GPU, 0): pages * PAGE.nbytes, (Tier.HOST, 0): 1 << 30}
    return Windows(modes).prepare(shapes, jobs, capacity)


def coserving(memory: CoMemory | None = None, **given: Any) -> Composed:
    """Chunked prefill with what is left of its budget for finetuning."""
    serving = ChunkedPrefill(BUDGET, 12)
    return Composed(CoServe(serving, BUDGET, **given), memory or CoMemory(PagedRestart()))
