"""The figure of each experiment that trains."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pandas as pd

from analysis.figures.experiments import (
    adam_placement,
    alchemist,
    chunk_size,
    coserving,
    estimator_error,
    eviction,
    knob_surface,
    link_bandwidth,
    max_scale,
    memory_tide,
    model_size,
)
from analysis.figures.experiments.lines import finished
from analysis.figures.run_figures import Shown

Draw = Callable[[pd.DataFrame, Path, Path], Shown]  # all runs, their folder, that of the figure
FIGURES: Mapping[str, Draw] = {
    "adam_placement": adam_placement.drawn,
    "alchemist_burst": alchemist.burst,
    "alchemist_delay": alchemist.delay,
    "alchemist_link": alchemist.link,
    "alchemist_share": alchemist.share,
    "alchemist_staleness": alchemist.staleness,
    "breathing_kv": coserving.breathing_kv,
    "budget_sweep": coserving.budget_sweep,
    "burstiness": coserving.burstiness,
    "chunk_size": chunk_size.drawn,
    "coserve_frontier": coserving.frontier,
    "coserve_table": coserving.coserve_table,
    "estimator_error": estimator_error.drawn,
    "eviction": eviction.drawn,
    "finetune_length": coserving.finetune_length,
    "knob_surface": knob_surface.drawn,
    "link_bandwidth": link_bandwidth.drawn,
    "link_bandwidth_swaps": link_bandwidth.swaps_drawn,
    "max_scale": max_scale.drawn,
    "memory_tide": memory_tide.drawn,
    "model_size": model_size.drawn,
    "slo_sweep": coserving.slo_sweep,
    "tide_under_kv": coserving.tide_under_kv,
}


def training_figures(runs: pd.DataFrame, root: Path, folder: Path) -> list[Shown]:
    """Draws and saves the figure of each training experiment among the runs."""
    if "experiment" not in runs:
        return []
    kinds = runs.groupby("experiment", sort=True)
    known = {str(name): part for name, part in kinds if name in FIGURES and len(finished(part))}
    return [FIGURES[name](part, root, folder) for name, part in known.items()]
