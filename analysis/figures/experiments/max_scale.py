"""The largest model that each policy trains, by host memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from analysis.figures.experiments.lines import bytes_axis, numbers_axis, plot_lines
from analysis.figures.run_figures import Shown, panel
from analysis.figures.style import policy_color

HOST = "config.budget.host_bytes"
REFUSED = "does_not_fit"  # a status of runs
TEXT = (
    "Maximum scale",
    "The largest tried model that trains inside the device, by the host memory beside it. Hollow "
    "(is_bound): no model was too large, so the true limit lies above. No parameters: not even "
    "the smallest model trained.",
)


def max_scale_data(runs: pd.DataFrame) -> pd.DataFrame:
    """Columns policy, host_bytes, parameters (0: none trained), is_bound (none was refused)."""
    rows = []
    for _, part in runs.groupby(["policy", HOST]):
        policy, host_bytes = part["policy"].iloc[0], int(part[HOST].iloc[0])
        done = part[part["status"].eq("ok")]
        parameters = int(done["made.parameters"].max()) if len(done) else 0
        rows.append((policy, host_bytes, parameters, REFUSED not in part["status"].array))
    return pd.DataFrame(rows, columns=["policy", "host_bytes", "parameters", "is_bound"])


def plot_max_scale(data: pd.DataFrame, ax: Any = None) -> Any:
    """A line per policy; hollow points did not reach the limit."""
    x = bytes_axis(data, "host_bytes", "host memory")
    y = numbers_axis(data, "parameters", "parameters of the largest model that trains")
    ax = plot_lines(data, ax, x, y, "policy")
    for row in data[data["is_bound"]].to_dict("records"):
        style = {"marker": "o", "markersize": 8, "fillstyle": "none", "linestyle": "none"}
        at = (row["host_bytes"] / x.unit, row["parameters"] / y.unit)
        ax.plot(*at, color=policy_color(str(row["policy"])), label="_bound", **style)
    ax.set_xlim(left=0)
    return ax


def drawn(runs: pd.DataFrame, root: Path, folder: Path) -> Shown:
    """Draws and saves the figure."""
    parts = [max_scale_data(runs)]
    return panel("max_scale", parts, plot_max_scale, (6.5, 3.6), folder, text=TEXT)
