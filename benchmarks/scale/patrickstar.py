"""Simulation of the systems that PatrickStar's page compares.

Settings: its examples/model_builder.py, run_transformers.sh and ps_config.py: BERT with a
classifier of two labels, float16, dropout 0.1, activations recomputed, memory-saving communication,
no asynchronous moves, nine tenths of either memory, a tenth of the device in warm-up, embeddings in
chunks (CPU_EBD=0). Chunks belong to devices whole and in turn, and optimizer states are made at the
first update (its core/chunk_list.py and ops/fp16_cpu_adam.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from benchmarks.scale.patrickstar_figures import (
    DDP,
    DEEPS,
    LABELS,
    MODELS,
    PSTAR,
    TOKENS,
    WORDS,
    parameters,
)
from engine.contract.job import Job
from engine.contract.layout import Mode
from engine.contract.policy import Memory, Planner
from engine.contract.regions import PageSize, Pool, Tier
from engine.loop.engine import Engine
from engine.loop.state import VirtualClock
from engine.results.recorder import Recorder
from models.by_size import gpt2_shape
from models.spec import ModelSpec
from models.training.shape import TrainingShape, training_shape
from policies.composed import Composed
from policies.planners.fixed_chunks import MEBI, FixedChunks, OversizeModule
from policies.planners.placement import Updates
from policies.planners.unit_chunks import UnitChunks
from policies.training.all_on_device import AllOnDevice
from policies.training.out_of_memory import DoesNotFit
from policies.training.patrickstar import PatrickStar
from policies.training.training_order import TrainingOrder
from policies.training.zero3_offload import Zero3Offload
from sim.cost.roofline import Roofline
from sim.devices.device import Device
from sim.devices.group import Group, rank_device
from sim.executor import SimExecutor
from traces.serving.request import TrainingJob
from traces.training.recipe import Recipe

CONF = Path(__file__).resolve().parents[2] / "conf"
VOCABULARY = 50_304  # of the baseline's GPT-2, filled up to a multiple of 128
STEPS = 3  # a warm-up, one step that settles the memory, and the one that counts
NO_PAGES = PageSize(tokens=16, nbytes=1 << 50)
BATCHES, CHUNKS = (64, 32, 16, 8, 4), (288, 256, 384)  # a batch per device; Mi of numbers
# Bytes that updates read and write in the host's memory per number. In one pass: a gradient of 2
# bytes, states of 12 twice, a weight of 2. DeepSpeed's gradients are float32 there: 8 bytes to
# scale and clip them, 28 for Adam, 6 to cast weights (its runtime/zero/stage3.py).
PASS_BYTES, DEEPS_PASS_BYTES = 28, 42
SEARCHED = tuple(mebi * MEBI for mebi in range(64, 513, 8))  # chunk sizes of a search


@dataclass(frozen=True)
class PublishedPoint:
    """One simulation: a system with its choices."""

    system: str
    device: str
    group: Group
    model: str
    batch: int  # sequences of a device
    chunk_mebi: int = 0  # Mi of numbers in a chunk of PatrickStar; 0: the smallest footprint
    is_eager: bool = False  # updates follow their last backward, as in no original


def tflops(point: PublishedPoint, step_s: float) -> float:
    """Tflops of all devices by the page's count: 8 per number and token, recompute included."""
    tokens = point.group.ranks * point.batch * TOKENS
    return 8 * parameters(point.model) * tokens / step_s / 1e12


# ---- the simulation
@lru_cache(maxsize=32)
def spec_of(model: str, system: str = PSTAR) -> ModelSpec:
    """The decoder nearest to the page's encoder: OPT's layers, since GELU is one kernel there.

    The head is as large as the page's pooler and classifier together, and both tables are as large
    as the page's. DeepSpeed trained a language model with a head over all words.
    """
    if system == DEEPS:
        return gpt2_shape(*MODELS[model], vocab_size=VOCABULARY, max_positions=TOKENS)
    head = MODELS[model][0] + LABELS  # rows: the pooler's, and one for each label
    shape = gpt2_shape(*MODELS[model], vocab_size=head, max_positions=WORDS + TOKENS - head)
    return replace(shape, family="opt", tie_embeddings=False)


class Scales(NamedTuple):
    """Factors to conf's efficiency curve of a device and to its updates on the host."""

    compute: float = 1.0
    updates: float = 1.0


AS_IT_IS = Scales()


@lru_cache(maxsize=8)
def device_of(name: str, group: Group, scales: Scales = AS_IT_IS) -> Device:
    """The device of one rank, from conf."""
    fields = yaml.safe_load((CONF / "device" / f"{name}.yaml").read_text(encoding="utf-8"))
    device = Device(**{key: value for key, value in fields.items() if not key.startswith("_")})
    curve = tuple((rows, scales.compute * reached) for rows, reached in device.linear_compute)
    updates = scales.updates * device.update_share
    return rank_device(replace(device, linear_compute=curve, update_share=updates), group)


@dataclass(frozen=True)
class System:
    """A system's memory policy and planner, and its share of the host's memory."""

    memory: Memory
    planner: Planner
    host_share: float = 1.0


def system_of(point: PublishedPoint, device: Device) -> System:
    """PatrickStar as its scripts run it; ZeRO-3 with everything offloaded, one unit ahead; DDP.

    PatrickStar takes nine tenths of the device's memory, the reserve of conf included. DeepSpeed's
    own estimator takes 27 bytes of the host per number where plans book 16.
    """
    recompute = Mode.RECOMPUTE
    updates: Updates = "eager" if point.is_eager else "last"
    if point.system == DDP:
        return System(AllOnDevice(), UnitChunks(recompute, "device", shards=False, updates=updates))
    if point.system == DEEPS:
        return System(Zero3Offload(), UnitChunks(recompute, updates=updates), 16 / 27)
    memory = PatrickStar(
        device_share=0.9 * device.memory_bytes / device.usable_bytes,
        reuses_gradients=True,
        buffer_chunks=1,
        staging_chunks=8,
        overlaps_updates=False,
        strict=True,
    )
    size = point.chunk_mebi * MEBI
    planner = FixedChunks(
        size,
        SEARCHED,
        modes=recompute,
        start="host_first",
        states="first_update",
        updates=updates,
    )
    return System(memory, planner, 0.9)


class StepEndRecorder(Recorder):
    """A recorder that also notes the end of each training step."""

    def __init__(self) -> None:
        super().__init__()
        self.ends_ns: list[int] = []

    def trained(self, job: Job, step: int, now_ns: int) -> None:
        super().trained(job, step, now_ns)
        self.ends_ns.append(now_ns)


def step_s(point: PublishedPoint, steps: int = STEPS, scales: Scales = AS_IT_IS) -> float | None:
    """Seconds of the last of `steps`; None if the states, or a module in its chunk, do not fit."""
    if point.system == DEEPS:
        scales = scales._replace(updates=scales.updates * PASS_BYTES / DEEPS_PASS_BYTES)
    device, spec = device_of(point.device, point.group, scales), spec_of(point.model, point.system)
    system = system_of(point, device)
    job, shape = job_of(spec, point.batch, steps, point.group.ranks)
    capacity: dict[Pool, int] = {
        (Tier.GPU, 0): device.usable_bytes,
        (Tier.HOST, 0): int(system.host_share * device.host_bytes),
    }
    env, recorder = VirtualClock(), StepEndRecorder()
    cost: Any = Roofline(device, spec, group=point.group)
    try:
        layout = system.planner.prepare({0: shape}, [job], capacity, cost)
    except (DoesNotFit, OversizeModule):
        return None
    policy, executor = Composed(TrainingOrder(1), system.memory), SimExecutor(env, cost)
    # Run-ahead 1: copies begin when a launch needs them, as in the original.
    how: dict[str, Any] = {"depth": 1, "layout": layout, "recorder": recorder}
    engine = Engine(env, policy, executor, capacity, NO_PAGES, **how)
    try:
        engine.replay([job])
    except DoesNotFit:
        return None
    before_ns = recorder.ends_ns[-2] if steps > 1 else 0
    return (recorder.ends_ns[-1] - before_ns) / 1e9


@lru_cache(maxsize=64)
def job_of(
    spec: ModelSpec, batch: int, steps: int, ranks: int
) -> tuple[TrainingJob, TrainingShape]:
    """The training job of each rank, and its shape."""
    recipe = Recipe(dtype="bfloat16", dropout=0.1)
    units = spec.num_layers + 2
    job = TrainingJob(0, 0, units, TOKENS, batch, steps, recipe=recipe, ranks=ranks)
    return job, training_shape(spec, job)


# ---- the best of a system's choices by simulation
@dataclass(frozen=True)
class Best:
    """The choice with the most Tflops; `point` is None if nothing fits."""

    point: PublishedPoint | None
    tflops: float


def best(
    system: str, device: str, group: Group, model: str, chunks: Sequence[int] = CHUNKS
) -> Best:
    """The best of all batches with all chunk sizes; the first of equal ones."""
    found = Best(None, float("nan"))
    for size, batch in product(chunks if system == PSTAR else (0,), BATCHES):
        point = PublishedPoint(system, device, group, model, batch, size)
        took_s = step_s(point)
        if took_s is None or tflops(point, took_s) <= found.tflops:
            continue
        found = Best(point, tflops(point, took_s))
    return found
