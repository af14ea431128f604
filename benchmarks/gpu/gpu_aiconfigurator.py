"""Claim: steps measured on a GPU take at most 1 / 0.6 of their time by AIConfigurator's tables.

The tables hold independent timings of vLLM's and TensorRT-LLM's kernels on an H200 (../shared): the
time of a good engine without a host. `--run FOLDER` is a measured run, such as one of `make gpu`;
its launches are priced by the tables, class by class. The value is the tables' time for all
launches as a share of the measured time. Without a run it prints so and ends with 0.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from analysis.run import Run, load
from sim.devices.device import Device
from sim.fit.errors import ALL, errors
from sim.foreign.aiconfigurator import AiConfiguratorCost
from tandem.config.build import Builder
from tandem.config.compose import composed
from tandem.wiring.run_spec import spec_of

TABLES = Path(os.environ.get("TANDEM_SHARED", "../shared")) / "data" / "peers"
RUN = Path("benchmarks/results/gpu_run")
BAR = 60.0  # %, as for the decode step and its floor


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, default=RUN, help="a measured run [%(default)s]")
    parser.add_argument("--tables", type=Path, default=TABLES / "aiconfigurator_h200")
    chosen = parser.parse_args(words)
    if not chosen.run.is_dir():
        print(f"skipped: no run in {chosen.run}")
        return 0
    table = priced(load(chosen.run), chosen.tables)
    print(table.to_string(float_format=lambda x: f"{x:.3g}"))
    share = 100 * (1 + float(table.loc[ALL, "total"]))
    verdict = "pass" if share >= BAR else "fail"
    print(f"gpu_aiconfigurator {share:.1f} % {BAR:g} {verdict}")
    return int(verdict == "fail")


def priced(run: Run, tables: Path) -> pd.DataFrame:
    """Errors of the tables' times against the measured ones, by class of launches."""
    point = composed(list(run.provenance["overrides"]))
    device = Builder().build(point.config["device"], "device")
    assert isinstance(device, Device)
    return errors(AiConfiguratorCost.load(tables, device, spec_of(point)), run.steps)


if __name__ == "__main__":
    sys.exit(main())
