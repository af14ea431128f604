"""The CPU meter against the kernel: page-exact where KV pages are whole system pages."""

from __future__ import annotations

import mmap
import random
from contextlib import contextmanager
from pathlib import Path

import pandas as pd
import pytest
import torch

from engine.contract.regions import PageSize, Tier
from models.spec import ModelSpec
from runtime.measure.meter import CpuMeter, ProcessResidency, page_slack_bytes, process_bytes
from runtime.serving.kv import Arena
from tandem.config.compose import composed
from tandem.wiring.experiment import run_experiment

GPU, HOST = (Tier.GPU, 0), (Tier.HOST, 0)


def tiny(kv_heads: int = 2, head_dim: int = 32) -> ModelSpec:
    return ModelSpec("tiny", "llama", 2, 64, 2, kv_heads, head_dim, 128, 97, 512, dtype="float32")


def aligned() -> Arena:
    arena = Arena(tiny(), PageSize.of(tiny(), 16), num_pages=64)
    assert arena.page_nbytes % mmap.PAGESIZE == 0
    return arena


@pytest.mark.ci
def test_the_memory_of_training_is_read_beside_what_is_served(tmp_path: Path) -> None:
    words = ["model=micro_llama", "policy=time_shared", "training=random", "backend=lockstep"]
    words += ["training.sequence_tokens=32", "trace=random", "trace.requests=3"]
    words += ["trace.input_tokens=20", "trace.output_tokens=5", "budget.kv_pages=8000"]
    run_experiment(composed(words), tmp_path / "run")
    rows = pd.read_parquet(tmp_path / "run" / "memory.parquet").query("tier == 'host'")
    states = rows[["weight_bytes", "gradient_bytes", "optimizer_bytes"]].sum(axis=1)
    measured = rows["measured_bytes"].dropna()
    assert len(measured) > 10 and measured.max() == states.max() > 0


def test_an_untouched_arena_holds_nothing_and_a_written_page_shows() -> None:
    arena = aligned()
    seen = ProcessResidency(arena.pages)
    assert seen.read_bytes() == 0
    arena.pages[3].fill_(1.0)
    assert seen.read_bytes() == arena.page_nbytes
    arena.release([3])
    assert seen.read_bytes() == 0


def test_residency_follows_random_holds_and_releases_to_the_byte() -> None:
    arena, rng, held = aligned(), random.Random(5), set()
    meter = CpuMeter({}, {GPU: arena.pages})
    for _ in range(300):
        page = rng.randrange(arena.num_pages)
        if page in held:
            held.discard(page)
            arena.release([page])
        else:
            held.add(page)
            arena.hold([page])
        assert meter.read()[GPU].persistent_bytes == len(held) * arena.page_nbytes


@pytest.mark.parametrize(("kv_heads", "head_dim"), [(1, 3), (1, 20), (2, 21)])
def test_unaligned_pages_stay_within_the_stated_slack(kv_heads: int, head_dim: int) -> None:
    arena = Arena(tiny(kv_heads, head_dim), PageSize.of(tiny(kv_heads, head_dim), 16), num_pages=50)
    slack = page_slack_bytes(arena.num_pages, arena.page_nbytes)
    assert arena.page_nbytes % mmap.PAGESIZE and slack > 0
    meter, rng, held = CpuMeter({}, {GPU: arena.pages}), random.Random(7), set()
    for _ in range(300):
        page = rng.randrange(arena.num_pages)
        if page in held:
            held.discard(page)
            arena.release([page])
        else:
            held.add(page)
            arena.hold([page])
        excess = meter.read()[GPU].persistent_bytes - len(held) * arena.page_nbytes
        assert 0 <= excess <= slack
    assert page_slack_bytes(50, 3 * mmap.PAGESIZE) == 0


def test_weights_count_once_and_as_long_as_they_live() -> None:
    weight = torch.zeros(1000)
    meter = CpuMeter({GPU: [weight, weight.view(10, 100)]}, {HOST: aligned().pages})
    readings = meter.read()
    assert readings[GPU].persistent_bytes == 4000
    assert readings[HOST] == (0, None)
    del weight
    assert meter.read()[GPU].persistent_bytes == 0


def test_process_bytes_are_the_systems_own() -> None:
    before = process_bytes()
    memory = torch.ones(64 << 20, dtype=torch.uint8)
    grown = process_bytes() - before
    # Other allocations of the interpreter move it too, by far less than 4 MiB.
    assert abs(grown - (64 << 20)) < 4 << 20
    reading = CpuMeter({GPU: [memory]}, {}).read()[GPU]
    assert reading.process_bytes is not None and reading.process_bytes > 64 << 20


def test_calls_between_samples_return_nothing_and_pauses_wrap_the_rest() -> None:
    paused = []

    @contextmanager
    def pause():
        paused.append(True)
        yield

    meter = CpuMeter({}, {GPU: aligned().pages}, every=3, paused=pause)
    assert [bool(meter.read()) for _ in range(7)] == [True, False, False] * 2 + [True]
    assert len(paused) == 7 and meter.spent_ns > 0
    with pytest.raises(ValueError, match="every is 0"):
        CpuMeter({}, {}, every=0)
