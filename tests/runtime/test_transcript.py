"""A job's page table in the runtime: it grows, and another one replaces it whole."""

from __future__ import annotations

import pytest

from policies.composed import Composed
from policies.kv.paged_restart import PagedRestart
from policies.scheduling.vllm_v1 import VllmV1
from runtime.serving.machine import GPU
from runtime.serving.packing import Transcript
from tests.laws.test_meter_replay import excess, machine, replay_with


def test_a_table_grows_and_only_what_is_new_is_taken() -> None:
    job, pages = Transcript([1, 2, 3]), [4, 7]
    assert list(job.follow(pages)) == [4, 7]
    pages.append(2)
    assert list(job.follow(pages)) == [2] and list(job.follow(pages)) == []
    assert job.pages.tolist() == [4, 7, 2]


def test_equal_pages_in_another_table_are_held_again() -> None:
    """After a restart a job may get equal ids in equal order: the pages were released meanwhile."""
    job = Transcript([1, 2, 3])
    job.follow([4, 7])
    assert list(job.follow([4, 7])) == [4, 7]
    assert list(job.follow([4, 9, 1])) == [4, 9, 1]
    assert job.pages.tolist() == [4, 9, 1]


@pytest.mark.parametrize("seed", range(2))
def test_memory_is_exact_where_a_job_takes_its_own_pages_again(seed: int) -> None:
    """vLLM's rules preempt a job that finds no victim: it gets its own pages again."""
    memory = PagedRestart(watermark=0.0, prompts="must_fit", gives_way=True)
    policy = Composed(VllmV1(token_budget=32, max_jobs=12), memory)
    recorder = replay_with(policy, machine(16, 8, seed), seed=seed)
    assert sum(o.restarts for o in recorder.outcomes.values()) > 0, "no pressure"
    rows = excess(recorder)
    rows = rows[rows["tier"] == GPU[0].value]
    assert (rows["excess"] == 0).all()
