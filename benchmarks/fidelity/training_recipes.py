"""Claim: training by other recipes is predicted: adapters, SGD with dropout and clipping, bfloat16.

Rules and bars are those of training_fidelity (full parameters, AdamW, float32), on the service
clock. Each recipe has a calibration and probes of its own. Small states press less, so budgets are
larger shares of the memory that a job takes on the device.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.fidelity.cases import verdict_of
from benchmarks.fidelity.training_cases import TrainingCase
from benchmarks.fidelity.training_fidelity import measured
from runtime.measure.shapes import Microbatch

OUT = Path("benchmarks/results/training_recipes.csv")
CASES = (
    TrainingCase("zero3_offload", "keep", 6, Microbatch(3, 120), 0.85, recipe="lora"),
    TrainingCase("fsdp2_offload", "offload", 5, Microbatch(5, 72), 0.85, recipe="lora"),
    TrainingCase("patrickstar", "keep", 6, Microbatch(3, 88), 0.85, recipe="lora"),
    TrainingCase("zero_offload", "recompute", 4, Microbatch(2, 152), 0.6, 2, recipe="sgd"),
    TrainingCase("fsdp2_offload", "offload", 5, Microbatch(5, 72), 0.6, recipe="sgd"),
    TrainingCase("zero3_offload", "keep", 6, Microbatch(3, 120), 0.6, recipe="bfloat16"),
    TrainingCase("zero_offload", "recompute", 4, Microbatch(2, 152), 0.5, 2, recipe="bfloat16"),
    TrainingCase("patrickstar", "keep", 6, Microbatch(3, 88), 0.6, recipe="bfloat16"),
)
QUICK = CASES[:1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--reruns", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12, help="of a judged run")
    parser.add_argument("--quick", action="store_true", help="one case, 2 reruns, 8 steps")
    parser.add_argument("--keep", type=Path, help="folder for all runs, to go on with if stopped")
    chosen = parser.parse_args()
    if chosen.quick:
        chosen.reruns, chosen.steps = 2, 8
    chosen.clocks = ["service"]
    table = measured(chosen, QUICK if chosen.quick else CASES, OUT, not chosen.quick)
    return verdict_of("training_recipes_worst", table)


if __name__ == "__main__":
    sys.exit(main())
