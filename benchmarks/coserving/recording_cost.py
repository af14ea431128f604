"""Claim: recording prompts costs requests little, on a CPU.

200 ShareGPT requests through an adapter at 50 and 80 % of the capacity of serving, all prompts
recorded or none, while feedback has not come yet: mean TPOT may rise by 3 % at both loads, mean
TTFT by 3 % at 50 % (medians of three runs each, in turns). Recording the answers of 20 requests as
well (record=everything) holds exactly (prompt + answer - 1) / prompt times the bytes, as the last
token of an answer is computed by none; what it adds to TPOT is printed. Each token of an answer is
a window of its own, so that planning takes most of that.

What is kept of a token grows with the width of a model, what is computed with its square: one layer
as wide as those of models of 1B (2,048) is judged. micro_llama (128), whose launch of 128 tokens
takes 2 ms, is printed beside.

Service clock. Run it alone, on a machine at rest.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import pandas as pd

from analysis.metrics import summary
from analysis.run import Run
from benchmarks.fidelity.cases import finish, say
from tandem.fidelity.protocol import PACE, calibrated, capacity, clock_of, run

OUT = Path("benchmarks/results/recording_cost.csv")
LOADS, REQUESTS, REPEATS = (0.5, 0.8), 200, 3
FEW = 20  # requests whose answers are recorded as well
REPLAYS = 2  # of the calibration
BAR = 0.03
JUDGED = "wide_llama"
MODELS = {
    JUDGED: (
        *("model.name=wide_llama", "model.num_layers=1", "model.hidden_size=2048"),
        *("model.num_heads=16", "model.num_kv_heads=4", "model.head_dim=128"),
        "model.intermediate_size=5632",
    ),
    "micro_llama": (),
}
COLUMNS = ["case", "figure", "measured", "bar", "used"]
MEASURED = ("backend=cpu", "backend.workspace_every=0")
NEVER = (  # no feedback comes while requests are served
    *("experiment=fidelity_chunked", "policy=alchemist", "training=feedback", "adapters.count=1"),
    *("training.publish=a0", "training.sequence_tokens=512", "training.data.chance=1.0"),
    *("model=micro_llama", "scheduling.sharing.token_budget=512", "budget.kv_pages=4096"),
    *("device.memory_bytes=6000000000", "device.host_bytes=12000000000"),
    *("scheduling.sharing.serving.max_jobs=48", "training.data.delay_s=1000000"),
    *("training.data.delays=fixed", "training.until_served=true", "training.microbatches=4"),
)


def recording(
    root: Path, name: str, loads: Sequence[float], requests: int, repeats: int
) -> list[tuple[object, ...]]:
    """Rows of what recording costs a model's requests, in turns with runs that record nothing."""
    words = [*NEVER, *MODELS[name], f"limit={requests}"]
    profile = calibrated([*words, *MEASURED, f"{PACE}auto"], root / "profile", REPLAYS, say)
    backend = (*MEASURED, clock_of(profile))
    most = capacity(words, backend, root / "capacity")
    rows = list[tuple[object, ...]]()
    for load in loads:
        given = [*words, *backend, f"arrival.rate={load * most}"]
        found = dict[str, list[Run]]()
        for number in range(repeats):
            for kind in ("none", "all"):
                where = root / f"{load}-{kind}-{number}"
                done = run([*given, f"scheduling.record={kind}"], where)
                found.setdefault(kind, []).append(done)
        case = f"{name} at {load:.0%}"
        for figure in ("mean_tpot_s", "mean_ttft_s"):
            is_judged = name == JUDGED and (figure == "mean_tpot_s" or load == min(LOADS))
            bar = BAR if is_judged else float("nan")
            added = added_share(found["all"], found["none"], figure)
            rows.append((case, figure, added, bar, max(0.0, added) / bar))
        few = {
            kind: run(
                [*given, f"limit={min(FEW, requests)}", f"scheduling.record={kind}"],
                root / f"{load}-{kind}-few",
            )
            for kind in ("none", "all", "everything")
        }
        added = added_share([few["everything"]], [few["none"]], "mean_tpot_s")
        rows.append((case, "mean_tpot_s, answers as well", added, float("nan"), float("nan")))
        rows.append(_bytes_row(case, few["all"], few["everything"]))
    return rows


def added_share(runs: Sequence[Run], others: Sequence[Run], figure: str) -> float:
    """The median over pairs of runs of what a figure is more."""
    pairs = zip([*map(summary, runs)], [*map(summary, others)], strict=True)
    return median([float(own[figure]) / float(other[figure]) - 1 for own, other in pairs])


def _bytes_row(case: str, prompts: Run, everything: Run) -> tuple[object, ...]:
    """Whether records of answers hold the bytes that their tokens say, request by request."""
    assert prompts.records is not None and everything.records is not None
    own = prompts.records.groupby("request_id")[["tokens", "kept_bytes"]].sum()
    both = everything.records.groupby("request_id")[["tokens", "kept_bytes"]].sum()
    asked = prompts.requests.set_index("request_id")
    whole = both[both["tokens"].eq(asked["prompt_tokens"] + asked["output_tokens"] - 1)]
    # A prompt whose last slice is one token is recorded without it: decodes keep nothing.
    pairs = own[own["tokens"].ge(asked["prompt_tokens"] - 1)].join(
        whole, how="inner", rsuffix="_both"
    )
    ratio = (pairs["tokens_both"] / pairs["tokens"]).sub(
        pairs["kept_bytes_both"] / pairs["kept_bytes"]
    )
    is_exact = len(pairs) == len(asked) and ratio.abs().max() < 1e-12
    say(f"{case}: {len(pairs)} requests recorded whole in both runs")
    used = 0.0 if is_exact else 2.0
    return (case, "requests with exact bytes of everything", float(len(pairs)), 0.0, used)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one load, 20 requests, once")
    parser.add_argument("--keep", type=Path, help="folder for all runs, to go on with if stopped")
    chosen = parser.parse_args()
    loads, requests, repeats = ((0.5,), 20, 1) if chosen.quick else (LOADS, REQUESTS, REPEATS)
    with tempfile.TemporaryDirectory() as temporary:
        root = (chosen.keep or Path(temporary)).resolve()
        rows = recording(root / JUDGED, JUDGED, loads, requests, repeats)
        if not chosen.quick:
            rows += recording(root / "micro_llama", "micro_llama", loads[:1], requests, 1)
    table = pd.DataFrame(rows, columns=COLUMNS)
    out = OUT.with_stem("recording_cost_part") if chosen.quick else OUT
    return finish("recording_cost_worst", table, out)


if __name__ == "__main__":
    sys.exit(main())
