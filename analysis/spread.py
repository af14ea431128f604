"""How much the same run varies when it is run again, and how much the machine drifted."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from analysis.metrics import summary
from analysis.run import Run


def spread(runs: Sequence[Run]) -> pd.DataFrame:
    """Per metric over reruns: runs, median, min, max, iqr (the metric's unit), iqr_share.

    iqr_share is the interquartile range over the median: an error below it is within noise.
    """
    if len(runs) < 2:
        raise ValueError(f"a spread needs at least 2 runs, not {len(runs)}: give the reruns")
    values: dict[str, list[float]] = {}
    for run in runs:
        for key, value in summary(run).items():
            if not isinstance(value, str):
                values.setdefault(key, []).append(float(value))
    rows = []
    for key, found in values.items():
        q25, median, q75 = (float(q) for q in np.percentile(found, (25, 50, 75), method="linear"))
        share = (q75 - q25) / abs(median) if median else float("nan")
        rows.append((key, len(found), median, min(found), max(found), q75 - q25, share))
    names = ["metric", "runs", "median", "min", "max", "iqr", "iqr_share"]
    return pd.DataFrame(rows, columns=names)


def drift(run: Run) -> float | None:
    """Largest departure of the drift probes from 1 around a measured run; None without probes.

    A probe ratio is the time of a fixed piece of work after the run over that before it.
    """
    ratios = run.provenance.get("probe_ratios")
    values = list(ratios.values()) if isinstance(ratios, dict) else ratios
    if not values:
        return None
    return max(abs(float(value) - 1.0) for value in np.atleast_1d(values))
