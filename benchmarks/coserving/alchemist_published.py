"""Claim: in simulation, training behind records is as much faster as the forward that they spare.

Alchemist's published figures (1.26 to 1.72 times the throughput, 30 to 42 % redundant computation,
47 % less memory) name neither model, device nor batch. Here Llama-3-8B with LoRA learns on an A100,
once all feedback is there, with records of prompts and without: from 64 dialogues of ShareGPT, and
from samples of 1,024 tokens of which a share is prompt. The redundant share is the time of the
forwards that records spare, in that of training without them; 1/(1 - share) would be the speed-up
if no copy of a record delayed anything. The speed-up must be at least nine tenths of that.
Published figures stand beside in analysis/REPRODUCTION.md, without a bar.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pandas as pd

from analysis.run import Run, load
from benchmarks.coserving.record_reuse import trained_s
from benchmarks.fidelity.cases import keep, say, verdict_of
from benchmarks.fidelity.fidelity_command import SHAREGPT, TOKENIZER
from benchmarks.fidelity.reproduction import write_page
from tandem.config.compose import composed
from tandem.wiring.experiment import run_experiment
from traces.serving.request import Request
from traces.store import write_trace

OUT = Path("benchmarks/results/alchemist_published.csv")
HIDDEN = 0.9  # of the speed-up that spared forwards would give
COMMON = (
    *("model=llama3_8b", "device=a100", "policy=alchemist", "training=feedback"),
    *("adapters.count=1", "training.publish=a0", "training.sequence_tokens=2048"),
    *("training.data.chance=1.0", "training.data.delay_s=100000", "training.data.delays=fixed"),
    *("arrival=all_at_once", "budget.host_bytes=200000000000"),
    *("device.host_bytes=200000000000", "scheduling.sharing.token_budget=2048"),
)
REQUESTS, SAMPLES, TOKENS = 64, 8, 1024
SHARES = (0.5, 0.75, 0.9, 0.99)  # of a sample, that are prompt
SHAREGPT_CASE = "ShareGPT"
Row = tuple[str, str, float, float]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one share")
    is_quick = parser.parse_args().quick
    rows = list[Row]()
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        cases = {f"{share:.0%} prompt": of_equal_lengths(share, root) for share in SHARES}
        cases = dict([*cases.items()][-1:]) if is_quick else {SHAREGPT_CASE: sharegpt(), **cases}
        for case, (words, count) in cases.items():
            say(case)
            runs = list[Run]()
            for kind in ("none", "all"):
                folder = root / f"{case}-{kind}"
                # One update: records of older weights would be dropped behind it.
                own = (*COMMON, *words, f"training.microbatches={count}")
                own = (*own, f"scheduling.samples={count}", f"scheduling.record={kind}")
                run_experiment(composed(own), folder)
                runs.append(load(folder))
            rows += rows_of(case, *runs)
    table = pd.DataFrame(rows, columns=["case", "figure", "value", "used"])
    if not is_quick:
        keep(table, OUT)
        write_page()
    return verdict_of("alchemist_published", table)


def sharegpt() -> tuple[tuple[str, ...], int]:
    """Overrides of the first dialogues of ShareGPT, and how many."""
    shared = Path(os.environ.get("TANDEM_SHARED", "../shared"))
    words = ("trace=sharegpt", f"trace.path={shared / SHAREGPT}", f"limit={REQUESTS}")
    rule = "trace.rule=vllm_filter_plus_role_check"
    return (*words, f"trace.tokenizer={shared / TOKENIZER}", rule), REQUESTS


def of_equal_lengths(share: float, folder: Path) -> tuple[tuple[str, ...], int]:
    """Overrides of dialogues of equal lengths, whose prompts have a share of their tokens."""
    prompt, path = round(share * TOKENS), folder / f"prompts-{share:.0%}.parquet"
    requests = [Request(i, 0, prompt, TOKENS - prompt) for i in range(SAMPLES)]
    write_trace(
        path, requests, {"source": "made up by benchmarks/coserving/alchemist_published.py"}
    )
    return ("trace=file", f"trace.path={path}"), SAMPLES


def rows_of(case: str, none: Run, own: Run) -> Iterator[Row]:
    """Figures of training without records, and with them."""
    took_s, speed_up = trained_s(none), trained_s(none) / trained_s(own)
    redundant = (forward_s(none) - forward_s(own)) / took_s
    ideal = 1 / (1 - redundant)
    yield case, "forward_share", forward_s(none) / took_s, math.nan
    yield case, "redundant_share", redundant, math.nan
    yield case, "ideal_speed_up", ideal, math.nan
    yield case, "speed_up", speed_up, HIDDEN * ideal / speed_up
    yield case, "peak_activation_share", peak_bytes(own) / peak_bytes(none), math.nan
    yield case, "peak_device_share", held_bytes(own) / held_bytes(none), math.nan
    assert own.records is not None
    yield case, "record_bytes", float(own.records["kept_bytes"].sum()), math.nan


def begun_ns(run: Run) -> int:
    """When the first sample goes forward: everything is served then."""
    assert run.samples is not None
    return int(run.samples["start_ns"].min())


def forward_s(run: Run) -> float:
    """Seconds of launches that take samples forward."""
    rows = run.steps[run.steps["start_ns"].ge(begun_ns(run)) & run.steps["work"].eq("forward")]
    return float((rows["end_ns"] - rows["start_ns"]).sum()) / 1e9


def in_training(run: Run) -> pd.DataFrame:
    """The device's memory while samples train."""
    return run.memory[run.memory["tier"].eq("gpu") & run.memory["at_ns"].ge(begun_ns(run))]


def peak_bytes(run: Run) -> float:
    """Most activations on the device while samples train."""
    return float(in_training(run)["activation_bytes"].max())


def held_bytes(run: Run) -> float:
    """Most of the device that is in use while samples train, weights among it."""
    rows = in_training(run)
    return float((rows["capacity_bytes"] - rows["free_bytes"] - rows["coming_bytes"]).max())


if __name__ == "__main__":
    sys.exit(main())
