"""Claim: a GPU serves and finetunes at once, and learns behind records of what it has served.

An 8B-shape Llama in bf16 with random weights, requests of a synthetic stream, LoRA of rank 16
beside them. The job trains alone; then beside light and heavy load under `coserve` (a budget of
tokens) and under `temporal` (turns); then under `alchemist` on feedback that comes when all is
served, behind records and without. Each run is simulated first, by the device's roofline.

The value counts runs that failed, trained nothing, or held more than their budget; on a GPU that
is the budget and all pages. Printed beside: finetuning at heavy over light load and over finetuning
alone, latencies, and what reuse gains in training and costs in TTFT. With --keep an interrupted
call resumes without measuring a run again. Without a GPU it prints so and ends with 0;
`--backend cpu --device cpu --model micro_llama` tries it.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pandas as pd
import torch

from analysis.metrics import summary
from analysis.run import Run
from analysis.training import finetuning_summary
from benchmarks.coserving.record_reuse import trained_s
from benchmarks.fidelity.cases import keep, say
from tandem.cli.errors import RunFailed
from tandem.config.compose import composed
from tandem.fidelity.protocol import run
from tandem.wiring.run_spec import run_spec_of

OUT = Path("benchmarks/results/gpu_sharing.csv")
ALONE, TRAINED = "alone", "finetune_trained_tokens_per_s"
SERVED = ("trace=random", "trace.range_ratio=0.9")
SAMPLES = (  # more than are trained on until the last answer
    *("training=finetune", "training.until_served=true", "training.recipe.lora_rank=16"),
    *("training.num_steps=2000", "training.data.count=2000"),
)
FEEDBACK = (  # of requests that all run through the adapter that is trained
    *("adapters.count=1", "policy=alchemist", "training=feedback", "training.data.chance=1.0"),
    *("training.data.delays=fixed", "arrival=all_at_once", "training.staleness=100"),
    *("training.recipe.lora_rank=16", "adapters.rank=16", "training.publish=a0"),
    *("scheduling.sharing.token_budget=1024", "training.microbatches=4"),
)
POLICIES: Mapping[str, tuple[str, ...]] = {
    "coserve": ("policy=coserve", "scheduling.token_budget=1024", *SAMPLES),
    "temporal": ("policy=temporal", *SAMPLES),
    "alchemist": (*FEEDBACK, "scheduling.record=all"),
    "alchemist, nothing recorded": (*FEEDBACK, "scheduling.record=none"),
}
AT_ONCE, ON_FEEDBACK = "at once", ("alchemist", "alchemist, nothing recorded")


@dataclass(frozen=True)
class GpuSharingRow:
    """A policy at a load; NaN for what it has not, or was not measured."""

    policy: str
    load: str
    trained_per_s: float = math.nan  # tokens of samples that are through
    training_s: float = math.nan  # from the first sample's begin to the last one's end
    predicted_trained_per_s: float = math.nan
    mean_ttft_s: float = math.nan
    mean_tpot_s: float = math.nan
    predicted_tpot_s: float = math.nan
    device_peak_bytes: float = math.nan
    memory_bytes: float = math.nan  # that it may hold
    note: str = ""

    @property
    def is_wrong(self) -> bool:
        """Whether it has failed, trained nothing, or held too much."""
        is_within = self.device_peak_bytes <= self.memory_bytes
        return bool(self.note) or not self.trained_per_s > 0 or not is_within


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--device", default="h200")
    parser.add_argument("--model", default="llama3_8b")
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--host-bytes", type=int, default=40 * 10**9, help="for pages and records")
    parser.add_argument("--rates", nargs=2, type=float, default=(1.0, 6.0), help="light and heavy")
    parser.add_argument("--delay-s", type=float, default=20.0, help="of feedback: all is served")
    parser.add_argument("--tokens", type=int, default=256, help="of a prompt")
    parser.add_argument("--kv-bytes", type=int, default=40 * 10**9, help="a GPU holds them whole")
    parser.add_argument("--words", nargs="*", default=[], help="of the configuration, in addition")
    parser.add_argument("--keep", type=Path, help="folder for all runs")
    parser.add_argument("--out", type=Path, default=OUT)
    chosen = parser.parse_args(words)
    if chosen.backend == "cuda" and not torch.cuda.is_available():
        print("skipped: no GPU")
        return 0
    rows = list[GpuSharingRow]()
    with tempfile.TemporaryDirectory() as temporary:
        for row, settings in systems(chosen):
            rows.append(measured(chosen, row, settings, (chosen.keep or Path(temporary)).resolve()))
            say(str(rows[-1]))
            table = pd.DataFrame([asdict(row) for row in rows])
            keep(table, chosen.out)  # it takes long, and a call is cut
    print(table.to_string(index=False, float_format=lambda x: f"{x:.4g}", na_rep="-"))
    for line in compared(rows):
        print(line)
    count = sum(row.is_wrong for row in rows)
    print(f"gpu_sharing_wrong {count} runs 0 {'fail' if count else 'pass'}")
    return int(count > 0)


def systems(chosen: argparse.Namespace) -> Iterator[tuple[GpuSharingRow, list[str]]]:
    """Rows to be measured, and their settings."""
    common = [f"model={chosen.model}", f"device={chosen.device}", *chosen.words]
    common += [f"training.sequence_tokens={3 * chosen.tokens}"]  # a prompt with its answer
    apart = ("trace=none", "policy=coserve", "training=finetune", "training.recipe.lora_rank=16")
    apart += ("training.num_steps=8", "training.data.count=64", "scheduling.token_budget=1024")
    weights = run_spec_of(composed([*common, *apart])).spec.weight_bytes
    budget = f"budget.device_bytes={weights + chosen.kv_bytes}"
    yield GpuSharingRow("coserve", ALONE), [*common, *apart, budget]
    common += [f"budget.kv_bytes={chosen.kv_bytes}"]
    # Pages on the host are pinned whole, and records beside them.
    common += [f"budget.host_bytes={chosen.host_bytes}"]
    lengths = [f"trace.input_tokens={chosen.tokens}", f"trace.output_tokens={chosen.tokens // 4}"]
    served = [*common, *SERVED, *lengths, f"trace.requests={chosen.requests}"]
    for policy, words in POLICIES.items():
        if policy in ON_FEEDBACK:
            settings = [*served, *words, f"training.data.delay_s={chosen.delay_s}"]
            yield GpuSharingRow(policy, AT_ONCE), settings
            continue
        for load, rate in zip(("light", "heavy"), chosen.rates, strict=True):
            settings = [*served, *words, "arrival=poisson", f"arrival.rate={rate}"]
            yield GpuSharingRow(policy, load), settings


def measured(
    chosen: argparse.Namespace, row: GpuSharingRow, settings: Sequence[str], root: Path
) -> GpuSharingRow:
    """Simulates, then measures."""
    folder = root / f"{row.policy} {row.load}".replace(", ", " ").replace(" ", "_")
    try:
        guess = run([*settings, "backend=sim"], folder / "predicted", replaces=True)
        done = run([*settings, f"backend={chosen.backend}"], folder / "measured", replaces=True)
    except (RunFailed, RuntimeError, ValueError) as error:  # torch's, too: other runs go on
        return replace(row, note=f"failed: {error}")
    memory = done.memory[done.memory["tier"].eq("gpu")]
    held = memory["measured_bytes"] if memory["measured_bytes"].notna().any() else memory["bytes"]
    row = replace(
        row,
        trained_per_s=float(finetuning_summary(done).get(TRAINED, math.nan)),
        predicted_trained_per_s=float(finetuning_summary(guess).get(TRAINED, math.nan)),
        training_s=trained_s(done),
        device_peak_bytes=float(held.max()),
        memory_bytes=float(memory["capacity_bytes"].max()) + held_beside(chosen),
    )
    return row if row.load == ALONE else replace(row, **latencies(done, guess))


def held_beside(chosen: argparse.Namespace) -> int:
    """Bytes of pages that a GPU holds, whatever has taken their bytes in the books."""
    return int(chosen.kv_bytes) if chosen.backend == "cuda" else 0


def latencies(done: Run, guess: Run) -> dict[str, float]:
    """Of the requests of a run."""
    real, guessed = summary(done), summary(guess)
    return {
        "mean_ttft_s": float(real["mean_ttft_s"]),
        "mean_tpot_s": float(real["mean_tpot_s"]),
        "predicted_tpot_s": float(guessed["mean_tpot_s"]),
    }


def compared(rows: Sequence[GpuSharingRow]) -> Iterator[str]:
    """What the papers tell: shares of finetuning, and what reuse gains and costs."""
    found = {(row.policy, row.load): row for row in rows}
    alone = found["coserve", ALONE].trained_per_s
    for policy in ("coserve", "temporal"):
        light, heavy = (found[policy, load].trained_per_s for load in ("light", "heavy"))
        yield (
            f"{policy}: finetuning at heavy over light load {heavy / light:.2f}, "
            f"over finetuning alone {heavy / alone:.2f}"
        )
    own, none = (found[policy, AT_ONCE] for policy in ON_FEEDBACK)
    yield (
        f"alchemist: {none.training_s / own.training_s:.2f} times as fast behind records, TTFT "
        f"{own.mean_ttft_s / none.mean_ttft_s - 1:+.1%}"
    )


if __name__ == "__main__":
    sys.exit(main())
