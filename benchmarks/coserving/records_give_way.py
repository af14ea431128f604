"""Claim: serving comes first: records keep 99 % of the tokens in time that serving alone keeps.

ShareGPT requests at 80 % of the capacity of serving, micro_llama on the CPU's service clock, under
`alchemist` with `coserve_slo` as the policy that shares the device. Token i of a request is due i
SLOs behind its first; the SLO is a multiple of the mean TPOT of serving alone. Of the tokens that
are in time when requests are served alone, through the same adapter, 99 % are to stay in time; the
training beside them is printed, as it is with nothing recorded.

That records give way within one plan to a burst, and no request restarts for them, is a test
(tests/engine/test_records.py). Run it alone, on a machine at rest.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import pandas as pd

from analysis.metrics import summary
from analysis.training import finetuning_summary, record_summary
from benchmarks.coserving.feedback_fidelity import LEARNING, SERVED
from benchmarks.coserving.token_deadlines import kept_share
from benchmarks.fidelity.cases import finish, say
from tandem.fidelity.protocol import PACE, calibrated, capacity, clock_of, run, serving_alone

OUT = Path("benchmarks/results/records_give_way.csv")
LOAD, REQUESTS, SLOS, KEPT = 0.8, 200, (2.0, 4.0), 0.99
REPLAYS = 2  # of the calibration
MEASURED = ("backend=cpu", "backend.workspace_every=0")
WITHIN_SLO = (
    *("policy=alchemist", "scheduling@scheduling.sharing=coserve_slo", "scheduling.record=all"),
    *("scheduling.sharing.token_budget=512", "scheduling.sharing.margin=0.05"),
    *("scheduling.sharing.multiple=8", "scheduling.sharing.serving.token_budget=128"),
    "scheduling.sharing.serving.max_jobs=48",
)
COLUMNS = ["case", "figure", "measured", "bar", "used"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one SLO, 20 requests")
    parser.add_argument("--keep", type=Path, help="folder for all runs, to go on with if stopped")
    chosen = parser.parse_args()
    slos, requests = ((4.0,), 20) if chosen.quick else (SLOS, REQUESTS)
    rows = list[tuple[object, ...]]()
    with tempfile.TemporaryDirectory() as temporary:
        root = (chosen.keep or Path(temporary)).resolve()
        words = [*SERVED, *WITHIN_SLO, *LEARNING, f"limit={requests}"]
        profile = calibrated([*words, *MEASURED, f"{PACE}auto"], root / "profile", REPLAYS, say)
        backend = (*MEASURED, clock_of(profile))
        most = capacity(words, backend, root / "capacity")
        words += [f"arrival.rate={LOAD * most}", f"profile={profile}", *backend]
        alone = run(serving_alone(words), root / "alone")
        tpot_s = float(summary(alone)["mean_tpot_s"])
        for multiple in slos:
            case, slo_s = f"SLO {multiple:g} x TPOT alone", multiple * tpot_s
            given = [*words, f"scheduling.sharing.slo_s={slo_s}"]
            own = run(given, root / f"{multiple}")
            none = run([*given, "scheduling.record=none"], root / f"{multiple}-none")
            shares = [kept_share(done, alone, slo_s) for done in (own, none)]
            rates = [finetuning_summary(d)["finetune_trained_tokens_per_s"] for d in (own, none)]
            used = (1 - shares[0]) / (1 - KEPT)
            rows.append((case, "in_time", shares[0], KEPT, used))
            rows.append((case, "in_time, nothing recorded", shares[1], float("nan"), float("nan")))
            hits = record_summary(own)["record_hit_rate"]
            rows.append((case, "records used", hits, float("nan"), float("nan")))
            for name, rate in zip(("trained", "trained, nothing recorded"), rates, strict=True):
                rows.append((case, f"{name} tokens/s", rate, float("nan"), float("nan")))
    table = pd.DataFrame(rows, columns=COLUMNS)
    out = OUT.with_stem("records_give_way_part") if chosen.quick else OUT
    return finish("records_give_way_worst", table, out)


if __name__ == "__main__":
    sys.exit(main())
