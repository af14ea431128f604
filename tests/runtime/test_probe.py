"""The drift probe: three fixed launches on any clock, with all pages free behind them."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace

import pytest
import torch

from engine.contract.regions import PageSize, Tier
from engine.loop.state import VirtualClock
from models.spec import ModelSpec
from runtime.executors.clock import WallClock
from runtime.executors.lockstep import CpuExecutor
from runtime.executors.wall import WallExecutor
from runtime.measure.meter import CpuMeter
from runtime.measure.reference import MIN_ROUNDS, probe, ratios
from runtime.serving.machine import ServingMachine
from runtime.serving.model import build_model

GPU, HOST = (Tier.GPU, 0), (Tier.HOST, 0)
MICRO = ModelSpec("micro", "llama", 2, 64, 4, 2, 16, 176, 211, 512, dtype="float32", norm_eps=1e-5)


def machine(pages: int = 256) -> ServingMachine:
    torch.set_num_threads(1)
    return ServingMachine(
        build_model(MICRO), MICRO, PageSize.of(MICRO, 32), {GPU: pages, HOST: 16}, {}
    )


def test_probes_are_timed_and_leave_pages_and_transcripts_as_they_were() -> None:
    box, env = machine(), VirtualClock()
    meter = CpuMeter({}, {GPU: box.arenas[GPU].pages})
    times = probe(env, CpuExecutor(env, box), box, min_rounds=3)
    assert list(times) == ["decode_1", "decode_8", "prefill_128"]
    assert all(1e-5 < seconds < 1 for seconds in times.values())
    assert not box.packer.transcripts
    assert meter.read()[GPU].persistent_bytes == 0


def test_an_arena_too_small_for_eight_jobs_gets_a_smaller_probe() -> None:
    box, env = machine(pages=8), VirtualClock()
    times = probe(env, CpuExecutor(env, box), box, min_rounds=1)
    assert list(times) == ["decode_1", "decode_2", "prefill_128"]


@pytest.mark.parametrize("look_s", [0.0, 0.3])
def test_a_probe_looks_for_its_time_and_some_rounds_at_least(
    look_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large model's rounds take longer than the look; a small model has many rounds."""
    clock = count(0, 0.01)  # seconds that pass from look to look
    monkeypatch.setattr(
        "runtime.measure.reference.time", SimpleNamespace(perf_counter=lambda: next(clock))
    )
    env, box = VirtualClock(), machine()
    executor, looks = CpuExecutor(env, box), list[int]()
    prepare = executor.prepare
    monkeypatch.setattr(executor, "prepare", lambda plan: looks.append(len(plan)) or prepare(plan))
    probe(env, executor, box, look_s)
    launched = sum(looks)  # three a round
    assert launched == 3 * MIN_ROUNDS if not look_s else launched > 3 * MIN_ROUNDS


def test_the_same_probe_runs_in_real_time() -> None:
    box, clock = machine(), WallClock()
    with WallExecutor(clock, box) as executor:
        times = probe(clock, executor, box, min_rounds=2)
    assert all(1e-5 < seconds < 5 for seconds in times.values())


def test_a_slower_machine_shows_in_the_ratios() -> None:
    assert ratios({"a": 0.5, "b": 1.0}, {"a": 0.6, "b": 0.9}) == {"a": 1.2, "b": 0.9}
