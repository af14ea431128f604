"""How much the machine drifted around a measured run."""

from __future__ import annotations

import numpy as np

from analysis.run import Run

STEADY = 0.03  # most that a machine may change by to count as the same


def drift(run: Run) -> float | None:
    """Largest departure of the drift probes from 1 around a measured run; None without probes.

    A probe ratio is the time of a fixed piece of work after the run over that before it.
    """
    ratios = run.provenance.get("probe_ratios")
    values = list(ratios.values()) if isinstance(ratios, dict) else ratios
    if not values:
        return None
    return max(abs(float(value) - 1.0) for value in np.atleast_1d(values))
