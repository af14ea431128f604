"""Counts what Triton compiles for random hybrid launches: `python -m tests.kernels.variants`.

For a Hopper GPU that is not here: kernels are compiled, and none runs. Prints how many variants of
which kernel were compiled at a machine's construction, and how many by its launches.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from dataclasses import replace
from typing import Any

import torch
import triton
from triton.runtime.jit import JITFunction

import runtime.serving.machine
from runtime.kernels import paged_attention, shapes, warm
from tests.kernels.compiled import Compiler
from tests.support.hand_made import TINY, HandMade

LAUNCHES, JOBS, MULTIPROCESSORS = 400, 160, 132
SPEC = replace(TINY, num_layers=2, max_positions=2048, dtype="bfloat16")


def main() -> int:
    triton.runtime.driver.set_active(Compiler(90))
    found, plain = Counter[str](), JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        before = _known(self)
        kernel = plain(self, *args, grid=grid, warmup=True, **options)
        found[self.__name__] += _known(self) - before
        return kernel

    def processors(device: torch.device) -> int:
        return MULTIPROCESSORS

    for module in (paged_attention, shapes, warm):
        module.num_programs = processors  # type: ignore[attr-defined]

    def recorded(step: Any) -> Any:
        step()  # as a capture does
        return step

    JITFunction.run, runtime.serving.machine.direct = run, recorded
    rng = random.Random(1)
    prompts = {i: [1] * rng.randint(2, 700) for i in range(JOBS)}
    made = HandMade(
        SPEC, prompts, num_pages=20_000, page_tokens=16, rubbish=0.0, kernels=True, graph_rows=3
    )
    made.machine.collect = lambda *_: ()  # tokens of kernels that do not run are no ids
    print("construction", sum(found.values()), dict(found))
    found.clear()
    for _ in range(LAUNCHES):
        wanted = launch(made, rng)
        prepared = made.machine.prepare(made.launch(*wanted))
        made.machine._ring.zero_()
        made.machine.execute(prepared)
    print("launches", sum(found.values()), dict(found))
    return 0


def launch(made: HandMade, rng: random.Random) -> list[tuple[int, int]]:
    """Decodes, slices of prompts, or both."""
    waiting = [i for i, job in made.jobs.items() if job.remaining_tokens > 1]
    decoding = [i for i, job in made.jobs.items() if job.remaining_tokens == 1]
    decoding = [i for i in decoding if made.jobs[i].known_tokens < 1900]
    kind = rng.choice(("both", "both", "prompts", "decodes"))
    rows = rng.randint(1, len(decoding)) if decoding and kind != "prompts" else 0
    count = rng.choice((1, 1, 2, 3)) if kind != "decodes" or not rows else 0
    slices = [(i, min(made.jobs[i].remaining_tokens, rng.randint(2, 700))) for i in waiting[:count]]
    return [*slices, *((i, 1) for i in rng.sample(decoding, rows))] or [(decoding[0], 1)]


def _known(function: Any) -> int:
    return sum(len(cache[0]) for cache in function.device_caches.values())


if __name__ == "__main__":
    sys.exit(main())
