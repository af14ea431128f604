"""`tandem calibrate`: profiles a device through the executor of replays and fits its costs."""

from __future__ import annotations

import argparse
import csv
import secrets
import time
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from tandem.cli.terminal import shown_bytes, shown_seconds
from tandem.config.compose import composed
from tandem.config.composed_config import ComposedConfig

if TYPE_CHECKING:
    from tandem.wiring.profile import ProfiledUnits


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
    folder = chosen.out or default_folder(point, "units" if chosen.units else "profiles")
    if chosen.units:
        if chosen.stream or chosen.replays != REPLAYS:
            raise ValueError("--units makes no replays: leave --stream and --replays out")
        return _tell_units(point, folder / UNITS)
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


def default_folder(point: ComposedConfig, kind: str) -> Path:
    """A folder of the cache that says what was measured and when; never one that is there."""
    from tandem.wiring.run_spec import spec_of

    config = point.config
    names = (spec_of(point).name, config["device"]["name"], config["backend"]["clock"])
    stamp = time.strftime(f"%Y-%m-%dT%H-%M-%S-{secrets.token_hex(3)}")
    return Path(config["cache"]) / kind / "-".join([*names, stamp])


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


# ---- units of a model that trains
UNITS = "units.csv"
TIMES = ("forward_ns", "backward_ns", "update_ns", "host_update_ns")
SIZES = ("weight_bytes", "saved_bytes", "between_bytes", "peak_bytes")
HEADS = ("forward", "backward", "update", "on the host", "weights", "kept", "of it between", "peak")


def _tell_units(point: ComposedConfig, path: Path) -> int:
    """Measures units, writes them to `path` and prints them."""
    from tandem.wiring.profile import profile_units

    if path.exists():
        raise ValueError(f"{path} is there already; give a new folder")
    found = profile_units(point)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows([found.units[0]._fields, *found.units])
    for line in (*_unit_rows(found.units), *_unit_facts(found)):
        print(line)
    print(f"units: {path}")
    return 0


def _unit_rows(units: Sequence[Any]) -> Iterator[str]:
    """A line for each run of equal units, with medians of their times."""
    yield f"{'units':<12}" + "".join([f"{head:>15}" for head in HEADS])
    for sizes, group in groupby(units, key=lambda one: [getattr(one, name) for name in SIZES]):
        rows = [*group]
        first, last = rows[0].unit, rows[-1].unit
        name = str(first) if first == last else f"{first} to {last}"
        times_ns = [median([getattr(row, field) for row in rows]) for field in TIMES]
        cells = [*[f"{ns / 1e6:.3f} ms" for ns in times_ns], *map(shown_bytes, sizes)]
        yield f"{name:<12}" + "".join([f"{cell:>15}" for cell in cells])


def _unit_facts(found: ProfiledUnits) -> Iterator[str]:
    """A step with everything on the device, what hooks miss, and whether formulas agree."""
    count = found.job.microbatches
    each_ns = sum([one.forward_ns + one.backward_ns for one in found.units])
    step_ns = count * each_ns + sum([one.update_ns for one in found.units])
    plural = "es" * (count > 1)
    yield (
        f"a step of {count} microbatch{plural}: {shown_seconds(step_ns / 1e9)} with everything on "
        "the device"
    )
    yield (
        f"hooks on modules miss {found.missed_share:.0%} of the activations that a step keeps: "
        "operations between modules make them"
    )
    numbers = ", ".join(map(str, found.differing))
    if found.differing:
        yield f"bytes of units {numbers} differ from those that plans count with"
    else:
        yield "bytes are those that plans count with"
    if found.link is not None:
        to_device, to_host, both_ways = [rate / 1e9 for rate in found.link]
        yield (
            f"link: {to_device:.3g} GB/s to the device, {to_host:.3g} GB/s to the host, "
            f"{both_ways:.3g} GB/s each way at once"
        )
