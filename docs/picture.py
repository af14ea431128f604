"""Makes README's picture from two run folders: `python docs/picture.py SIM CPU docs/parity.png`."""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib.pyplot as plt

from analysis.compare import compare
from analysis.figures.plots import parity_data, plot_parity
from analysis.figures.style import RC
from analysis.run import load

METRICS = ("ttft", "tpot", "e2e")


def main(prediction: str, measurement: str, out: str) -> None:
    comparison = compare(load(prediction), load(measurement))
    with plt.rc_context(RC):
        figure, axes = plt.subplots(1, len(METRICS), figsize=(13, 4.0), layout="constrained")
        for metric, ax in zip(METRICS, axes, strict=True):
            plot_parity(parity_data(comparison.requests, metric), ax)
            ax.set_title(metric.upper())
        figure.savefig(Path(out), dpi=90)


if __name__ == "__main__":
    main(*sys.argv[1:])
