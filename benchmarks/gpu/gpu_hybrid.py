"""Claim: a step of decodes with a prompt's chunk takes no longer than a step of each.

An 8B shape in bf16 with random weights: 32 decodes with 1,000 tokens each, chunks of 128, 512 and
1,024 tokens of one prompt. Each kind of step (decodes, chunk, both) is timed in turns by CUDA
events, medians of four behind one that warms up; ours with our kernels where there are any, else
with torch's attention. The value is the worst time of both, as a share of the two apart. Without a
GPU it says so and ends with 0; `--device cpu` tries it, on a small shape and without a verdict.
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
CHUNKS = (128, 512, 1024)
BAR = 1.0  # of both apart


class Hybrid(NamedTuple):
    """Milliseconds of a step of decodes, of one of a chunk, and of one of both."""

    decodes: float
    chunk: float
    both: float

    @property
    def share(self) -> float:
        """Both in one step over both apart."""
        return self.both / (self.decodes + self.chunk)


def measured(
    model: Any, spec: ModelSpec, rows: int, context: int, chunk: int, steps: int, **how: Any
) -> Hybrid:
    """Medians over so many steps of each kind."""
    draw = torch.Generator().manual_seed(0)
    long = chunk * (steps + 1) + 1  # it never samples
    sizes = [context] * rows + [long] * 2
    prompts = [torch.randint(spec.vocab_size, (n,), generator=draw).tolist() for n in sizes]
    batch = Batch(model, spec, prompts, 2 * (steps + 1) + 1, **how)
    *decoding, alone, beside = batch.jobs
    for job in decoding:
        batch.run([(job, context)])
    decodes = [(job, 1) for job in decoding]
    kinds = (decodes, [(alone, chunk)], [*decodes, (beside, chunk)])
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
    chunks = CHUNKS if device == "cuda" else (16,)
    if device == "cpu":
        rows, context = 4, 50
    table = pd.DataFrame()
    for chunk in chunks:
        found = measured(model, spec, rows, context, chunk, STEPS, device=device, **how)
        row = {"chunk": chunk, **found._asdict(), "share": found.share}
        table = pd.concat([table, pd.DataFrame([row])])
        if out is not None:
            keep(table, out)  # a call may be cut at the next one
        print(
            f"{rows} decodes {found.decodes:.2f} ms, {chunk} tokens {found.chunk:.2f} ms, "
            f"both {found.both:.2f} ms: {found.share:.3f} of the two apart"
        )
    worst = float(table["share"].max())
    verdict = TRIED if device == "cpu" else "pass" if worst <= BAR else "fail"
    print(f"gpu_hybrid {worst:.3f} of_both_apart {BAR:g} {verdict}")
    return int(verdict == "fail")


if __name__ == "__main__":
    sys.exit(main())
