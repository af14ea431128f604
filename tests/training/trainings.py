"""Training through the whole engine, as a configuration names it, beside plain torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from engine.contract.regions import Tier
from engine.results.plan_log import encode
from engine.results.recorder import Recorder
from tandem.config.compose import composed
from tandem.config.composed_config import ComposedConfig
from tandem.wiring.backends import backend_of
from tandem.wiring.experiment import engine_of
from tandem.wiring.run_spec import RunSpec, run_spec_of
from tandem.wiring.training import Trainee
from tests.training.training_runs import Result, plainly

GPU = (Tier.GPU, 0)
SMALL = (
    "trace=none",
    "training=random",
    "model=tiny_llama",
    "model.num_layers=3",
    "model.hidden_size=64",
    "model.num_heads=4",
    "model.num_kv_heads=2",
    "model.head_dim=16",
    "model.intermediate_size=96",
    "model.vocab_size=211",
    "model.max_positions=64",
    "training.sequence_tokens=24",
    "training.sequences=2",
    "training.num_steps=3",
    "budget.host_bytes=200000000",
)


@dataclass(frozen=True, eq=False)
class Trained:
    """The result of a run."""

    setting: RunSpec
    recorder: Recorder
    losses: list[float]
    weights: Mapping[str, torch.Tensor]
    plans: int  # that were carried out
    asked: int  # of the policy

    @property
    def result(self) -> Result:
        return self.losses, dict(self.weights)

    @property
    def log(self) -> list[str]:
        """The plans, without their times."""
        return [encode(row[-1]) for row in self.recorder.plans]


def run_spec(*overrides: str) -> RunSpec:
    """The RunSpec of a small training run."""
    return run_spec_of(composed([*SMALL, *overrides]))


def state_bytes(found: RunSpec) -> int:
    """Weights, gradients and optimizer states of the job."""
    chunks = found.room.layout.training[found.trainees[0].job.job_id].chunks
    return sum(c.weight_bytes + c.gradient_bytes + c.optimizer_bytes for c in chunks)


def train(backend: str, *overrides: str) -> Trained:
    """Carries a small training run out; `backend` is its override, such as lockstep."""
    return train_at(composed([*SMALL, f"backend={backend}", *overrides]))


def train_at(point: ComposedConfig) -> Trained:
    """Carries a training run of a whole configuration out."""
    found = run_spec_of(point)
    with _one_thread(), backend_of(found, point.config["backend"]) as world:
        recorder = Recorder(world.meter)
        engine = engine_of(found, world, recorder)
        engine.replay(found.work)
        asked = (engine.steps, engine.asked)
        job = found.trainees[0].job
        if world.machine is None:
            return Trained(found, recorder, [], {}, *asked)
        count = range(job.num_steps * job.microbatches)
        losses = [world.machine.loss(job.job_id, k) for k in count]
        weights = world.machine.weights(job.job_id)
        return Trained(found, recorder, losses, weights, *asked)


@dataclass(frozen=True)
class _Task:
    """A job as tests.training.training_runs.plainly takes it."""

    trainee: Trainee
    seed: int

    @property
    def recipe(self) -> Any:
        return self.trainee.job.recipe

    @property
    def num_steps(self) -> int:
        return self.trainee.job.num_steps

    @property
    def microbatches(self) -> int:
        return self.trainee.job.microbatches

    def ids(self, microbatch: int) -> np.ndarray:
        return self.trainee.batches.ids(microbatch)

    def build(self) -> Any:
        from runtime.training.trainer import build_trainee

        return build_trainee(self.trainee.spec, self.recipe, self.seed)


@lru_cache
def plain(*overrides: str, device: str = "cpu") -> Result:
    """Losses and weights of plain torch training of the job."""
    found = run_spec(*overrides)
    with _one_thread():
        return plainly(_Task(found.trainees[0], found.seed), device)  # type: ignore[arg-type]


def differing(own: Result, other: Result) -> Sequence[str]:
    """The parts in which two results are not equal to the bit."""
    wrong = [
        f"loss {k}"
        for k, pair in enumerate(zip(*(r[0] for r in (own, other)), strict=True))
        if len({*pair}) > 1
    ]
    assert own[1].keys() == other[1].keys()
    return wrong + [name for name in other[1] if not torch.equal(own[1][name], other[1][name])]


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
