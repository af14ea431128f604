"""Claim: a step of decodes with a prefill slice takes no longer than a step of each.

An 8B shape in bf16 with random weights: 32 decodes with 1,000 tokens each, slices of 128, 512 and
1,024 tokens of one prompt. Each kind of step (decodes, slice, both) is timed in turns by CUDA
events, medians of four after a warm-up, with Tandem's kernels if they are available, else with
torch's attention. The value is the worst time of both, as a share of the two apart. Without a GPU
it prints so and ends with 0; `--device cpu` tries it, on a small shape and without a verdict.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from statistics import median
from typing import Any, NamedTuple

import pandas as pd
import torch

from benchmarks.fidelity.cases import keep
from benchmarks.gpu.gpu_batch import TRIED, Batch, device_of, name_of, spec_for
from models.spec import ModelSpec
from runtime.kernels import available
from runtime.serving.model import build_model

ROWS, CONTEXT, STEPS = 32, 1000, 4
SLICES = (128, 512, 1024)
BAR = 1.0  # of both apart


class Hybrid(NamedTuple):
    """Milliseconds of a step of decodes, of a step of a prefill slice, and of a step of both."""

    decodes: float
    slice: float
    both: float

    @property
    def share(self) -> float:
        """Both in one step over both apart."""
        return self.both / (self.decodes + self.slice)


def measured(
    model: Any, spec: ModelSpec, rows: int, context: int, size: int, steps: int, **how: Any
) -> Hybrid:
    """Medians over `steps` steps of each kind, with prefill slices of `size` tokens."""
    draw = torch.Generator().manual_seed(0)
    long = size * (steps + 1) + 1  # it never samples
    sizes = [context] * rows + [long] * 2
    prompts = [torch.randint(spec.vocab_size, (n,), generator=draw).tolist() for n in sizes]
    batch = Batch(model, spec, prompts, 2 * (steps + 1) + 1, **how)
    *decoding, alone, beside = batch.jobs
    for job in decoding:
        batch.run([(job, context)])
    decodes = [(job, 1) for job in decoding]
    kinds = (decodes, [(alone, size)], [*decodes, (beside, size)])
    for kind in kinds:
        batch.run(kind)
    times = batch.timed_ms(kind for _ in range(steps) for kind in kinds)
    return Hybrid(*(median(times[place :: len(kinds)]) for place in range(len(kinds))))


def main(words: Sequence[str] | None = None) -> int:
    device, out = device_of(words, __doc__)
    if device == "cuda" and not torch.cuda.is_available():
        print("skipped: no GPU")
        return 0
    spec = spec_for(device)
    how = {"kernels": True} if device == "cuda" and available() else {}
    print(f"{name_of(device)}, {'kernels' if how else 'sdpa'}")
    model, rows, context = build_model(spec, device=device), ROWS, CONTEXT
    sizes = SLICES if device == "cuda" else (16,)
    if device == "cpu":
        rows, context = 4, 50
    table = pd.DataFrame()
    for size in sizes:
        found = measured(model, spec, rows, context, size, STEPS, device=device, **how)
        row = {"tokens": size, **found._asdict(), "share": found.share}
        table = pd.concat([table, pd.DataFrame([row])])
        if out is not None:
            keep(table, out)  # a call may be cut at the next one
        print(
            f"{rows} decodes {found.decodes:.2f} ms, {size} tokens {found.slice:.2f} ms, "
            f"both {found.both:.2f} ms: {found.share:.3f} of the two apart"
        )
    worst = float(table["share"].max())
    verdict = TRIED if device == "cpu" else "pass" if worst <= BAR else "fail"
    print(f"gpu_hybrid {worst:.3f} of_both_apart {BAR:g} {verdict}")
    return int(verdict == "fail")


if __name__ == "__main__":
    sys.exit(main())
