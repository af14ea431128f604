"""`make demo`: one trace, simulated and measured on this CPU, compared. Sets up nothing itself."""

from __future__ import annotations

import argparse
import json
import secrets
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tandem.cli.__main__ import guarded
from tandem.cli.compare import compare_folders
from tandem.cli.errors import Usage
from tandem.config.compose import composed

REQUESTS, SHORT = 120, 30
# Time in reference works: a laptop's or shared machine's speed wanders between two minutes.
MEASURED = ("backend=cpu", "backend.reference_ns=auto")
RULE = "vllm_filter_plus_role_check"


def main(words: Sequence[str] | None = None) -> int:
    """Calibrates once, predicts, measures, compares; prints the table and the report's path."""
    return guarded(lambda: _demo(_parser().parse_args(words)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="make demo", description=__doc__)
    parser.add_argument("--trace", type=Path, help="a ShareGPT JSON file; default: our own sample")
    parser.add_argument("--tokenizer", help="of that file; default: that of our sample")
    parser.add_argument("--limit", type=int, help=f"requests to replay [{REQUESTS}]")
    parser.add_argument("--short", action="store_true", help=f"{SHORT} requests, for CI")
    parser.add_argument("--recalibrate", action="store_true", help="measure this CPU again")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="as for tandem run")
    return parser


def _demo(chosen: argparse.Namespace) -> int:
    began = time.perf_counter()
    settings = ["experiment=demo", *_trace(chosen), *chosen.overrides]
    profile = _profile(settings, chosen.recalibrate)
    folder = Path("outputs") / time.strftime("demo-%Y-%m-%d-%H-%M-%S") / secrets.token_hex(3)
    say("predicting (backend=sim)")
    _run(settings, profile, folder / "sim", "backend=sim")
    say("measuring (backend=cpu)")
    _run(settings, profile, folder / "cpu", *MEASURED)
    say("comparing, with the measured decisions replayed in the simulator")
    comparison, page = compare_folders(folder / "sim", folder / "cpu", folder / "report")
    from analysis.verdicts import table

    print(table(comparison))
    print(f"\nreport: {page}")
    say(f"took {time.perf_counter() - began:.0f} s")
    return 0


def _run(settings: Sequence[str], profile: Path, folder: Path, *more: str) -> None:
    from tandem.cli.terminal import told
    from tandem.wiring.experiment import run_experiment
    from tandem.wiring.folder import provenance_in

    point = composed([*settings, f"profile={profile}", *more])
    metrics = run_experiment(point, folder, sys.stderr.isatty())
    print(told(metrics, provenance_in(folder)), flush=True)


def _trace(chosen: argparse.Namespace) -> list[str]:
    """Overrides that name the trace and how much of it is replayed."""
    wanted = chosen.limit or (SHORT if chosen.short else REQUESTS)
    if chosen.trace is None:
        if chosen.tokenizer:
            raise Usage("--tokenizer is for a trace of your own: give --trace too")
        return [f"limit={wanted}"]
    found = ["trace=sharegpt", f"trace.path='{chosen.trace.resolve()}'", f"trace.rule={RULE}"]
    if chosen.tokenizer:
        found.append(f"trace.tokenizer='{Path(chosen.tokenizer).resolve()}'")
    from tandem.cli.trace import accounts
    from tandem.wiring.workload import trace_file
    from traces.store import read_trace, sidecar_path

    say(f"importing {chosen.trace}")
    config = composed(found).config
    imported = trace_file(config["trace"], Path(config["cache"]))
    for line in accounts(json.loads(sidecar_path(imported).read_text(encoding="utf-8"))):
        say(line)
    count = len(read_trace(imported))
    return [*found, f"limit={min(wanted, count)}"]


def _profile(settings: Sequence[str], is_new: bool) -> Path:
    """This CPU's profile: measured at the first demo, then kept."""
    from analysis.distance import STEADY
    from sim.fit.errors import ALL
    from tandem.wiring.cost import COST
    from tandem.wiring.profile import AGAIN, calibrate

    point = composed([*settings, *MEASURED])
    name = f"demo-{point.config['model']['name']}"
    kept = Path(point.config["cache"]) / "profiles" / name
    if (kept / COST).is_file() and not is_new:
        say(f"using the profile of an earlier demo: {kept} (ARGS=--recalibrate for a new one)")
        return kept
    say("calibrating this CPU, once: some minutes, more on a busy machine")
    new = kept.with_name(f"{name}-{time.strftime('%Y-%m-%dT%H-%M-%S')}")
    errors = calibrate(point, new)
    if kept.exists():  # one that is interrupted leaves it as it is
        kept.rename(kept.with_name(f"{new.name}-before"))
    new.rename(kept)
    total = float(errors["total"].loc[AGAIN + ALL])
    say(f"a replay that the profile was not fitted to is off by {total:+.1%} in all")
    if abs(total) > STEADY:
        say("the machine's speed changes: predictions below may be off by as much and more")
    return kept


def say(text: str) -> None:
    """Progress, for the terminal and for logs."""
    print(f"demo: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
