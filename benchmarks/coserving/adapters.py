"""Claim: serving 1, 4 and 16 adapters is predicted: residents, loads, and time per token.

Requests of ShareGPT are drawn to adapters by Zipf's law. Two things are held to be equal, and one
to 5 %:

- With all requests at once and room for three adapters, the simulator, lockstep and the service
  clock of the CPU make equal copies in equal plans, and the device holds at most the bytes of the
  formula: so many adapters of rank x (inputs + outputs) numbers of each product and layer, by the
  books, and by the real storages where work is real.
- At half of the capacity, with room for eight adapters, mean TPOT of the simulation is within 5 %
  of the median of measured reruns. The profile is calibrated on synthetic requests of 16 adapters,
  and fitted to such replays between the judged runs (the protocol of `tandem fidelity`).

Run it alone, on a machine at rest; it takes an hour or two.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path

from analysis.fidelity import steady_pairs, table_of
from engine.contract.plan import Copy
from engine.contract.regions import Kind, Tier
from engine.results.plan_log import encode
from engine.results.recorder import Recorder
from models.spec import ModelSpec
from tandem.config.compose import composed
from tandem.fidelity.protocol import Case, calibrated, capacity, clock_of, reruns
from tandem.wiring.backends import backend_of
from tandem.wiring.experiment import engine_of
from tandem.wiring.run_spec import run_spec_of

BAR = 0.05
COUNTS, REQUESTS, RERUNS, REPLAYS = (1, 4, 16), 200, 5, 2
MOST, LOAD = 3, 0.5
TIMED = ("memory.most=8",)  # so that loads are timed, too, where there are 16
ADAPTERS = ("policy=adapters", "adapters.rank=8", "adapters.targets=[q_proj, v_proj, down_proj]")
SERVED = (
    *("experiment=fidelity_chunked", "model=micro_llama", *ADAPTERS),
    *("scheduling.token_budget=128", "scheduling.max_jobs=48", "budget.kv_pages=4096"),
)
MEASURED = ("backend=cpu", "backend.workspace_every=0")


@dataclass(frozen=True)
class Loads:
    """What a run has copied to the device, and held there.

    Attributes:
        plans: all plans, in words.
        copies: the numbers of the adapters that were copied, in order.
        peak_bytes: of adapters on the device, by the books.
    """

    plans: tuple[str, ...]
    copies: tuple[int, ...]
    peak_bytes: int


def loads_of(words: Sequence[str], backend: str) -> Loads:
    """Carries a run out and looks at its plans."""
    point = composed([*words, "arrival=all_at_once", f"memory.most={MOST}", f"backend={backend}"])
    run_spec = run_spec_of(point)
    with backend_of(run_spec, point.config["backend"]) as opened:
        recorder = Recorder(opened.meter, names_adapters=True)
        engine_of(run_spec, opened, recorder).replay(run_spec.work)
        machine = opened.machine
        if machine is not None and machine.store is not None:
            _check_storages(machine.store.stays(Tier.GPU), run_spec.spec)
    plans = [row[-1] for row in recorder.plans]
    ops = [op for plan in plans for op in plan.ops if isinstance(op, Copy)]
    copied = [op.dst.region.part for op in ops if op.dst.region.kind is Kind.ADAPTER]
    rows = recorder.tables()["memory"].to_pylist()
    peak = max([row["adapter_bytes"] for row in rows if row["tier"] == "gpu"])
    return Loads(tuple(map(encode, plans)), tuple(copied), peak)


def _check_storages(stays: Sequence[object], spec: ModelSpec) -> None:
    """AssertionError where none is on the device, or one has other bytes than the formula."""
    assert stays, "adapters stay on the device to the end of a run"
    for stay in stays:
        nbytes: int = stay.nbytes  # type: ignore[attr-defined]
        assert nbytes == formula_bytes(spec), f"{nbytes} bytes are not {formula_bytes(spec)}"


def formula_bytes(spec: ModelSpec, rank: int = 8) -> int:
    """Bytes of an adapter on q, v and down of each layer: rank x (inputs + outputs) numbers."""
    hidden, query, kv = spec.hidden_size, spec.query_size, spec.kv_size
    sizes = ((hidden, query), (hidden, kv), (spec.intermediate_size, hidden))
    return spec.num_layers * rank * sum([i + o for i, o in sizes]) * spec.item_bytes


def are_loads_equal(words: Sequence[str], count: int) -> bool:
    """Whether copies, plans and bytes of all backends are equal, and the bytes the formula's."""
    found = {name: loads_of(words, name) for name in ("sim", "lockstep", "cpu")}
    first, spec = found["sim"], run_spec_of(composed([*words])).spec
    most = min(count, MOST) * formula_bytes(spec)
    is_equal = all(one == first for one in found.values()) and first.peak_bytes == most
    told = {name: (len(one.copies), one.peak_bytes) for name, one in found.items()}
    print(f"{count} adapters, all requests at once: copies and peak bytes {told}, formula {most}")
    return is_equal


def tpot_error(case: Case, backend: Sequence[str], count: int) -> float:
    """The median error of the predicted mean TPOT over the steady reruns."""
    steady = steady_pairs(reruns(case, backend, count, print))
    if len(steady) < count:
        return inf
    row = table_of(case.name, steady, count).set_index("figure").loc["mean_tpot_s"]
    print(f"{case.name}: TPOT {row['measured'] * 1e3:.3f} ms measured, error {row['error']:+.2%}")
    return float(row["error"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="8 requests, loads and bytes alone")
    parser.add_argument("--counts", nargs="+", type=int, default=COUNTS)
    parser.add_argument("--requests", type=int, default=REQUESTS)
    parser.add_argument("--reruns", type=int, default=RERUNS)
    parser.add_argument("--keep", type=Path, help="folder for all runs, to go on with if stopped")
    chosen = parser.parse_args()
    worst, is_equal = 0.0, True
    with tempfile.TemporaryDirectory() as temporary:
        root = (chosen.keep or Path(temporary)).resolve()
        if not chosen.quick:
            grid = [
                *SERVED,
                *TIMED,
                *MEASURED,
                "backend.reference_ns=auto",
                f"adapters.count={max(COUNTS)}",
            ]
            profile = calibrated(grid, root / "calibration", REPLAYS, print)
        for count in chosen.counts:
            words = [*SERVED, f"adapters.count={count}"]
            few = 8 if chosen.quick else min(chosen.requests, 40)
            is_equal = are_loads_equal([*words, f"limit={few}"], count) and is_equal
            if chosen.quick:
                continue
            clock = clock_of(profile)
            words += [*TIMED, f"limit={chosen.requests}"]
            backend = (*MEASURED, clock)
            rate = LOAD * capacity(words, backend, root / f"{count}" / "capacity")
            settings = (*words, f"arrival.rate={rate}")
            case = Case(f"{count} adapters", settings, root / f"{count}", profile)
            error = abs(tpot_error(case, backend, chosen.reruns))
            worst = max(worst, error if error < inf else inf)  # also where it is no number
    if chosen.quick:
        print(f"adapters_unequal_loads {int(not is_equal)} runs 0 {'pass' if is_equal else 'fail'}")
        return int(not is_equal)
    passes = is_equal and worst <= BAR
    if not is_equal:
        worst = inf
    print(f"adapters_worst_tpot_error {worst:.4f} share {BAR} {'pass' if passes else 'fail'}")
    return int(not passes)


if __name__ == "__main__":
    sys.exit(main())
