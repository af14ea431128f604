"""Claim: records pay over a fast link and not over a slow one, in simulation and on the wall clock.

Four requests are answered, then feedback on all of them comes, and one update is trained on it. Of
each sample nine tenths were recorded while its prompt was served (as in record_reuse.py). Over a
slow link records come back later than the prompt would have gone forward again.

- In simulation, with the roofline of this CPU's stand-in, the link is found at which both take
  equally long.
- On the wall clock, over links that much slower and faster as `AWAY` says, recomputing and reuse
  must win as simulated: medians of three runs each, in turns.

Beside it, without a bar: requests that arrive, their feedback by delay and link, simulated. Where
updates are more often than feedback, records grow old, and nothing is left to pay.

GPT-2 by the wall clock, micro_llama where requests arrive. Run it alone, on a machine at rest.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import pandas as pd

from benchmarks.coserving.feedback_fidelity import LEARNING, SERVED, SHARING
from benchmarks.coserving.record_reuse import AFTER, dialogues, trained_s
from benchmarks.coserving.record_reuse import LEARNING as AT_ONCE
from benchmarks.fidelity.cases import finish, say
from tandem.fidelity.protocol import run

OUT = Path("benchmarks/results/when_it_pays.csv")
SHARE, RUNS, AWAY = 0.9, 3, 8.0
LINKS = tuple(10 ** (7 + i / 2) for i in range(9))  # bytes per second, 10 MB/s to 100 GB/s
DELAYS_S, FEW_LINKS = (0.5, 2.0, 8.0, 32.0), (1e7, 1e8, 1e9, 1e10)
WALL = ("backend=cpu", "backend.clock=wall", "backend.workspace_every=0", "training.data.delay_s=5")
COLUMNS = ["case", "figure", "measured", "bar", "used"]


def over(link: float) -> tuple[str, ...]:
    """Settings of a link of so many bytes a second, each way."""
    return f"device.to_device_bytes_per_s={link}", f"device.to_host_bytes_per_s={link}"


def speed_up(words: Sequence[str], where: Path) -> float:
    """How many times as fast a step trains behind records as without."""
    found = [run([*words, f"scheduling.record={k}"], where / k) for k in ("none", "all")]
    return trained_s(found[0]) / trained_s(found[1])


def crossing(links: Sequence[float], speed_ups: Sequence[float]) -> float:
    """The link from which on reuse wins, by logarithms between neighbours; NaN where it never does.

    It is that of the last link that is too slow.
    """
    slow = [i for i, found in enumerate(speed_ups) if found < 1]
    if not slow or slow[-1] + 1 == len(links):
        return math.nan
    i = slow[-1]
    share = math.log(1 / speed_ups[i]) / math.log(speed_ups[i + 1] / speed_ups[i])
    return float(links[i] * (links[i + 1] / links[i]) ** share)


def arriving(
    root: Path, delays_s: Sequence[float], links: Sequence[float]
) -> list[tuple[object, ...]]:
    """The links from which on a sample is faster behind its record, by delay, as simulated.

    Prints how much faster it is over each link; where it is over all links, none is the answer.
    """
    found = list[tuple[object, ...]]()
    words = [*SERVED, *SHARING, *LEARNING, "backend=sim", "limit=120", "arrival.rate=14"]
    for delay_s in delays_s:
        row = list[float]()
        for link in links:
            given = [*words, *over(link), f"training.data.delay_s={delay_s}"]
            where = root / f"{delay_s:g}-{link:g}"
            times = []
            for kind in ("none", "all"):
                samples = run([*given, f"scheduling.record={kind}"], where / kind).samples
                assert samples is not None
                done = samples[samples["status"].eq("finished")]
                times.append(float((done["last_ns"] - done["start_ns"]).mean()))
            row.append(times[0] / times[1])
        at = crossing(links, row)
        told = ", ".join(f"{x:.3f}" for x in row)
        print(
            f"feedback after {delay_s:g} s: a sample is {told} times as fast behind records over "
            f"{', '.join(f'{x:.0e}' for x in links)} B/s; equal at {at:.3g} B/s",
            flush=True,
        )
        case = f"simulated, feedback after {delay_s:g} s"
        found.append((case, "crossing, B/s", at, math.nan, math.nan))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="simulation alone, few links")
    parser.add_argument("--keep", type=Path, help="folder for all runs, to go on with if stopped")
    chosen = parser.parse_args()
    rows = list[tuple[object, ...]]()
    with tempfile.TemporaryDirectory() as temporary:
        root = (chosen.keep or Path(temporary)).resolve()
        words = [*AT_ONCE, *AFTER, "trace=file", f"trace.path={dialogues(SHARE, root)}"]
        links = LINKS[::4] if chosen.quick else LINKS
        found = [
            speed_up([*words, "backend=sim", *over(link)], root / f"sim-{link:g}") for link in links
        ]
        at = crossing(links, found)
        for link, one in zip(links, found, strict=True):
            print(f"simulated over {link:.3g} B/s: {one:.3f} times as fast behind records")
        print(f"equally fast over {at:.3g} B/s", flush=True)
        rows.append(("simulated", "crossing, B/s", at, math.nan, 0.0 if at == at else math.inf))
        few = (DELAYS_S[1:2], FEW_LINKS[::3]) if chosen.quick else (DELAYS_S, FEW_LINKS)
        rows += arriving(root / "arriving", *few)
        for name, link in () if chosen.quick else (("slow", at / AWAY), ("fast", at * AWAY)):
            given = [*words, *WALL, *over(link)]
            own = [speed_up(given, root / f"{name}-{i}") for i in range(RUNS)]
            expected = speed_up([*words, "backend=sim", *over(link)], root / f"{name}-simulated")
            middle = median(own)
            say(f"{name}, {link:.3g} B/s: {own} times as fast, simulated {expected:.3f}")
            is_right = (middle > 1) is (name == "fast") and (expected > 1) is (name == "fast")
            rows.append((f"simulated, {name} link", "speed_up", expected, math.nan, math.nan))
            rows.append(
                (f"wall clock, {name} link", "speed_up", middle, 1.0, 0.0 if is_right else 2.0)
            )
    table = pd.DataFrame(rows, columns=COLUMNS)
    out = OUT.with_stem("when_it_pays_part") if chosen.quick else OUT
    return finish("when_it_pays_wrong", table, out)


if __name__ == "__main__":
    sys.exit(main())
