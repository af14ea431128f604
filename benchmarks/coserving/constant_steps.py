"""Constant steps: a sample is finetuned in ceil(T / (B - n)) + ceil(L / k) steps, as FlexLLM's rule
says.

`n` requests decode to the end, so each step serves `n` tokens of the budget `B` and takes a
constant time `t`. A sample of `T` tokens goes forward in the rest of the budget and back by `k` of
`L` layers. Its rate is then `T / ((ceil(T / (B - n)) + ceil(L / k)) t)` (flexllm_alchemist.md, 3.5,
with ceilings). The engine, the policy `coserve` and its memory run unchanged; only durations are
constant. Rates are over whole samples behind the first. With tokens cut at their budget the error
of the form without ceilings is printed beside.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

from engine.contract.executor import Launch
from engine.contract.plan import Compute
from engine.contract.regions import SHARED_OWNER, Kind, PageSize, Place, Region, Tier
from engine.loop.engine import Engine
from engine.loop.state import VirtualClock
from engine.results.recorder import Recorder
from models.spec import ModelSpec
from models.training.kept import finetuning_shape
from policies.composed import Composed
from policies.kv.paged_restart import PagedRestart
from policies.planners.unit_chunks import Windows
from policies.scheduling.chunked_prefill import ChunkedPrefill
from policies.sharing.coserve import CoMemory, CoServe
from sim.cost.contract import LaunchCost
from sim.executor import SimExecutor
from traces.serving.request import Request, Sample, TrainingJob
from traces.training.recipe import Recipe

STEP_NS = 32_600_000  # mean TPOT of the 8B model at one request per second
TOKENS = 3575
BAR = 0.001
MEMORY_BYTES = 1 << 40


class ConstantCase(NamedTuple):
    """Decodes, layers, and layers that a step takes a backward down."""

    decodes: int
    layers: int
    backward_layers: int
    token_budget: int = 256


CASES = (
    ConstantCase(10, 32, 1),
    ConstantCase(10, 32, 2),
    ConstantCase(100, 32, 1),
    ConstantCase(40, 48, 3),
    ConstantCase(100, 64, 4),
    ConstantCase(200, 64, 1, 512),
)


class ConstantSteps(LaunchCost):
    """What serves takes STEP_NS; a launch beside it takes 1 ns."""

    form, provenance = "constant", f"a constant {STEP_NS} ns a step"

    def compute_ns(self, launch: Launch) -> int:
        op = launch.op
        assert isinstance(op, Compute)
        return STEP_NS if any([s.job.training is None for s in op.slices]) else 1

    def copy_ns(self, launch: Launch, contended: bool = False) -> int:
        return 1

    def host_ns(self, launches: Sequence[Launch]) -> int:
        return 0

    def peak_bytes(self, launch: Launch) -> int | None:
        return None


def rate(case: ConstantCase, samples: int) -> float:
    """Tokens per second of whole samples behind the first.

    Args:
        case: its sizes.
        samples: how many are finetuned.

    Returns:
        Tokens that went forward per second.
    """
    spec = ModelSpec("layers", "llama", case.layers, 16, 1, 1, 16, 32, 64, 1 << 20)
    page = PageSize.of(spec, 64)
    recipe = Recipe(optimizer="sgd", dtype="bfloat16", lora_rank=16, lora_targets=("down_proj",))
    own = (Sample(TOKENS),)
    job = TrainingJob(
        case.decodes, 0, case.layers + 2, TOKENS, num_steps=samples, samples=own, recipe=recipe
    )
    steps = ceil(TOKENS / (case.token_budget - case.decodes)) + ceil(
        case.layers / case.backward_layers
    )
    work = [Request(i, 0, 1, (samples + 1) * (steps + 1)) for i in range(case.decodes)]
    capacity = {(Tier.GPU, 0): MEMORY_BYTES, (Tier.HOST, 0): MEMORY_BYTES}
    shapes = {job.job_id: finetuning_shape(spec, job)}
    layout = Windows().prepare(shapes, [job], capacity)
    layout.places[Place(Region(SHARED_OWNER, Kind.WEIGHT), Tier.GPU, 0)] = spec.weight_bytes  # type: ignore[index]
    policy = Composed(
        CoServe(ChunkedPrefill(case.token_budget, 255), case.token_budget, case.backward_layers),
        CoMemory(PagedRestart()),
    )
    clock, recorder = VirtualClock(), Recorder(keeps_steps=False, finetunes=True)
    executor = SimExecutor(clock, ConstantSteps())
    engine = Engine(clock, policy, executor, capacity, page, layout=layout, recorder=recorder)
    engine.replay([*work, job])
    ends_ns = recorder.tables()["samples"]["last_ns"].to_pylist()
    return TOKENS * (samples - 1) / (ends_ns[-1] - ends_ns[0]) * 1e9


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer samples")
    samples, worst = 3 if parser.parse_args().quick else 8, 0.0
    for case in CASES:
        found, free = rate(case, samples), case.token_budget - case.decodes
        steps = ceil(TOKENS / free) + ceil(case.layers / case.backward_layers)
        whole = TOKENS / (steps * STEP_NS / 1e9)
        smooth = TOKENS / ((TOKENS / free + case.layers / case.backward_layers) * STEP_NS / 1e9)
        worst = max(worst, abs(found / whole - 1))
        print(
            f"{case.decodes} decodes, {case.layers} layers, {case.backward_layers} a step, budget "
            f"{case.token_budget}: {found:.1f} tokens/s, with ceilings {found / whole - 1:+.4%}, "
            f"without {found / smooth - 1:+.2%}"
        )
    print(f"constant_steps_error {worst:.6f} ratio {BAR} {'pass' if worst <= BAR else 'fail'}")
    return worst > BAR


if __name__ == "__main__":
    sys.exit(main())
