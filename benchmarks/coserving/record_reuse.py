"""Claim: on a CPU, training behind records is as much faster as predicted, and recording is cheap.

Reuse: 16 requests are answered, then feedback on all of them comes, and one update is trained on
16 samples of 256 tokens. Of each sample a share was recorded while its prompt was served: 0, a
quarter, a half, three quarters and nine tenths. The step's speed-up over the one without records is
held to 5 % of what a profile of this machine predicts, and to 1.3 or more at nine tenths (LoRA of
rank 8 on all that peft takes; records go to the host and come back ahead of their backward). The
median of three runs each, in turns.

Recording: 200 ShareGPT requests at 50 and 80 % of the capacity of serving, all prompts recorded or
none, while feedback has not come yet: mean TPOT may rise by 3 % at both loads, mean TTFT by 3 % at
50 %. Recording answers as well (record=everything) holds exactly (prompt + answer - 1) / prompt
times the bytes, as the last token of an answer is computed by none; its TPOT is printed.

Service clock, micro_llama. Run it alone, on a machine at rest.
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
from traces.serving.request import Request
from traces.store import write_trace

OUT = Path("benchmarks/results/record_reuse.csv")
SHARES, SAMPLES, TOKENS, RUNS = (0.0, 0.25, 0.5, 0.75, 0.9), 16, 256, 3
LOADS, REQUESTS, REPEATS = (0.5, 0.8), 200, 3
REPLAYS = 2  # of the calibration
SPEED_BAR, LEAST, COST_BAR = 0.05, 1.3, 0.03
COLUMNS = ["case", "figure", "measured", "predicted", "bar", "used"]
MEASURED = ("backend=cpu", "backend.workspace_every=0")
LEARNING = (
    *("policy=alchemist", "scheduling.record=all", "training=feedback", "adapters.count=1"),
    *("training.publish=a0", "training.sequence_tokens=512", "training.data.chance=1.0"),
    *("model=micro_llama", "scheduling.sharing.token_budget=512", "budget.kv_pages=4096"),
    *("device.memory_bytes=6000000000", "device.host_bytes=12000000000"),
    "scheduling.sharing.serving.max_jobs=48",
)
AFTER = (  # all feedback comes when everything is served, and makes one update
    *("training.data.delay_s=1000", "training.data.delays=fixed", "arrival=all_at_once"),
    f"training.microbatches={SAMPLES}",
)
NEVER = (  # none comes while requests are served
    *("experiment=fidelity_chunked", *LEARNING, "training.data.delay_s=1000000"),
    *("training.data.delays=fixed", "training.until_served=true", "training.microbatches=4"),
)


def trained_s(done: Run) -> float:
    """From the first launch of the first sample to the last one of the last."""
    assert done.samples is not None
    return float(done.samples["last_ns"].max() - done.samples["start_ns"].min()) / 1e9


def dialogues(share: float, folder: Path) -> Path:
    """A trace whose samples have this share of their tokens in front of the last prompt token."""
    prompt = round(share * TOKENS) + 1
    path = folder / f"prompts-{prompt}.parquet"
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        requests = [Request(i, 0, prompt, TOKENS - prompt) for i in range(SAMPLES)]
        write_trace(path, requests, {"source": "made up by benchmarks/coserving/record_reuse.py"})
    return path


def reuse(
    root: Path, profile: Path, shares: Sequence[float], runs: int
) -> list[tuple[object, ...]]:
    """Rows of the speed-up at each share, predicted and measured in turns."""
    rows = list[tuple[object, ...]]()
    for share in shares:
        words = [*LEARNING, *AFTER, "trace=file", f"trace.path={dialogues(share, root)}"]
        backend = (*MEASURED, clock_of(profile))
        speedups = list[float]()
        for world, count in (((f"profile={profile}",), 1), (backend, runs)):
            took = list[tuple[float, float]]()
            for number in range(count):
                where = root / f"{share}-{len(world)}-{number}"
                found = [
                    run([*words, *world, f"scheduling.record={kind}"], where / kind)
                    for kind in ("none", "all" if share else "none")
                ]
                took.append((trained_s(found[0]), trained_s(found[-1])))
            speedups.append(median([none / own for none, own in took]))
        predicted, measured = speedups
        case = f"{share:.0%} recorded"
        error = abs(predicted / measured - 1)
        say(f"{case}: {measured:.3f} times as fast, predicted {predicted:.3f}")
        rows.append((case, "speed_up", measured, predicted, SPEED_BAR, error / SPEED_BAR))
        if share == max(SHARES):
            rows.append((case, "least_speed_up", measured, predicted, LEAST, LEAST / measured))
    return rows


def recording(
    root: Path, profile: Path, loads: Sequence[float], requests: int, repeats: int
) -> list[tuple[object, ...]]:
    """Rows of what recording costs requests, in turns with runs that record nothing."""
    words = [*NEVER, f"limit={requests}"]
    backend = (*MEASURED, clock_of(profile))
    most = capacity(words, backend, root / "capacity")
    rows = list[tuple[object, ...]]()
    for load in loads:
        found = dict[str, list[Run]]()
        for number in range(repeats):
            for kind in ("none", "all", "everything"):
                given = [*words, *backend, f"arrival.rate={load * most}"]
                where = root / f"{load}-{kind}-{number}"
                done = run([*given, f"scheduling.record={kind}"], where)
                found.setdefault(kind, []).append(done)
        means = {kind: [summary(one) for one in own] for kind, own in found.items()}
        case = f"recording at {load:.0%}"
        for figure in ("mean_tpot_s", "mean_ttft_s"):
            for kind in ("all", "everything"):
                pairs = zip(means[kind], means["none"], strict=True)
                added = median([float(a[figure]) / float(b[figure]) - 1 for a, b in pairs])
                is_judged = kind == "all" and (figure == "mean_tpot_s" or load == min(LOADS))
                bar = COST_BAR if is_judged else float("nan")
                told = figure if kind == "all" else f"{figure}, answers as well"
                rows.append((case, told, added, 0.0, bar, max(0.0, added) / bar))
        rows.append(_bytes_row(case, found["all"][0], found["everything"][0]))
    return rows


def _bytes_row(case: str, prompts: Run, everything: Run) -> tuple[object, ...]:
    """Whether records of answers hold the bytes that their tokens say, request by request."""
    assert prompts.records is not None and everything.records is not None
    own = prompts.records.groupby("request_id")[["tokens", "kept_bytes"]].sum()
    both = everything.records.groupby("request_id")[["tokens", "kept_bytes"]].sum()
    asked = prompts.requests.set_index("request_id")
    whole = both[both["tokens"].eq(asked["prompt_tokens"] + asked["output_tokens"] - 1)]
    pairs = own[own["tokens"].eq(asked["prompt_tokens"])].join(whole, how="inner", rsuffix="_both")
    ratio = (pairs["tokens_both"] / pairs["tokens"]).sub(
        pairs["kept_bytes_both"] / pairs["kept_bytes"]
    )
    is_exact = len(pairs) > 0 and ratio.abs().max() < 1e-12
    say(f"{case}: {len(pairs)} requests recorded whole in both runs")
    return (
        case,
        "bytes_of_everything",
        float(len(pairs)),
        float(len(pairs)),
        0.0,
        0.0 if is_exact else 2.0,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two shares, one load, 20 requests")
    parser.add_argument("--keep", type=Path, help="folder for all runs, to go on with if stopped")
    chosen = parser.parse_args()
    shares, runs = ((0.0, 0.9), 1) if chosen.quick else (SHARES, RUNS)
    loads, requests, repeats = ((0.5,), 20, 1) if chosen.quick else (LOADS, REQUESTS, REPEATS)
    with tempfile.TemporaryDirectory() as temporary:
        root = (chosen.keep or Path(temporary)).resolve()
        words = [*LEARNING, *MEASURED, f"{PACE}auto", "training.microbatches=4"]
        profile = calibrated(words, root / "profile", REPLAYS, say)
        rows = reuse(root / "reuse", profile, shares, runs)
        rows += recording(root / "recording", profile, loads, requests, repeats)
    table = pd.DataFrame(rows, columns=COLUMNS)
    out = OUT.with_stem("record_reuse_part") if chosen.quick else OUT
    return finish("record_reuse_worst", table, out)


if __name__ == "__main__":
    sys.exit(main())
