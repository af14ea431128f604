"""`tandem calibrate`: profiles a device through the executor of replays and fits its costs."""

from __future__ import annotations

import argparse
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tandem.config.compose import composed
from tandem.config.composed_config import ComposedConfig


def main(words: Sequence[str]) -> int:
    """Prints the held-out errors and where the profile is."""
    from tandem.wiring.profile import REPLAYS, calibrate, calibrate_training, finetunes

    parser = argparse.ArgumentParser(
        prog="tandem calibrate",
        description="Example: tandem calibrate model=tiny_llama backend=cpu; with training=sample "
        "in microbatches of other shapes",
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="as for tandem run")
    parser.add_argument("--config-dir", help="a folder of your own yaml files")
    parser.add_argument("--out", type=Path, help="folder of the profile; default: in the cache")
    parser.add_argument(
        "--replays",
        type=int,
        default=REPLAYS,
        help="that are fitted, half as many more are held out: more where a shared "
        "machine's speed wanders [%(default)s]",
    )
    parser.add_argument(
        "--stream",
        action="store_true",
        help="replays whose requests arrive as arrival=... says, for a profile of that load",
    )
    parser.add_argument(
        "--units",
        action="store_true",
        help="measure no profile, but each unit of the model that training=... trains, alone: "
        "times, bytes and peaks, into units.csv",
    )
    chosen = parser.parse_intermixed_args(words)
    backend = [] if any(o.startswith("backend=") for o in chosen.overrides) else ["backend=cpu"]
    point = composed([*backend, *chosen.overrides], chosen.config_dir)
    folder = chosen.out or default_folder(point)
    if chosen.units:
        from tandem.cli.unit_table import measured_units

        for line in measured_units(point, folder):
            print(line)
        return 0
    began = time.perf_counter()
    is_training = (point.config.get("training") or {}).get("_target_") is not None
    if is_training and not finetunes(point):
        table = calibrate_training(point, folder)
    else:
        table = calibrate(point, folder, chosen.replays, chosen.stream)
    print(told(table))
    took_s = time.perf_counter() - began
    print(f"profile: {folder}, made in {took_s:.0f} s  (use it with profile={folder})")
    return 0


def default_folder(point: ComposedConfig) -> Path:
    """A folder of the cache that says what was measured and when; never one that is there."""
    from tandem.wiring.run_spec import spec_of

    config = point.config
    names = (spec_of(point).name, config["device"]["name"], config["backend"]["clock"])
    stamp = time.strftime(f"%Y-%m-%dT%H-%M-%S-{secrets.token_hex(3)}")
    return Path(config["cache"]) / "profiles" / "-".join([*names, stamp])


def told(table: Any) -> str:
    """Errors on what was held out, in percent of what was measured."""
    from sim.fit.errors import ALL, OPERATOR
    from tandem.wiring.profile import AGAIN

    is_operator = table.index.str.startswith(OPERATOR)
    lines = _rows("held-out shapes", table[~is_operator])
    if is_operator.any():
        lines += ["", *_rows("mostly of one operator", table[is_operator]), ""]
    if AGAIN + ALL in table.index:
        lines.append(
            "Launches of a replay decide the fit. Shapes alone run faster: their caches are warm\n"
            "and, on the wall clock, no host is busy beside them."
        )
        lines += _unsteady(float(table.loc[AGAIN + ALL, "total"]), "replay is")
    elif ALL in table.index:
        lines += _unsteady(float(table.loc[ALL, "total"]), "launches of training are")
    return "\n".join(lines)


def _unsteady(total: float, what: str) -> list[str]:
    """What to say where the sum of what was held out is off; single launches scatter anyway."""
    from analysis.distance import STEADY

    if abs(total) <= STEADY:
        return []
    return [
        f"The held-out {what} {total:+.1%} off in all: the machine may have changed meanwhile.\n"
        "Predictions may be off by as much; calibrate again when it is quieter."
    ]


def _rows(title: str, table: Any) -> list[str]:
    """A heading, and a line for each row; what rules no launch has no errors."""
    width = max(30, *(len(name) + 1 for name in table.index))
    lines = [f"{title:<{width}}{'rows':>6}{'mean |e|':>10}{'p90 |e|':>10}{'bias':>10}"]
    for name, row in table.iterrows():
        shares = (row[key] for key in ("mape", "p90", "bias"))
        cells = (f"{share:>9.1%} " if share == share else f"{'-':>9} " for share in shares)
        lines.append(f"{name:<{width}}{int(row['rows']):>6}" + "".join(cells))
    return lines
