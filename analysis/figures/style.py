"""Colours and styles of figures, and their saving beside the numbers that they show."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.metric_names import MEASUREMENT, PREDICTION

# Okabe and Ito's eight colours for policies that are often shown together; shades for variants.
COLORS = {
    "static_reservation": "#E69F00",
    "static_restart": "#F2C46D",
    "static_swap": "#9C6B00",
    "continuous_reservation": "#7FCDB5",
    "continuous_restart": "#009E73",
    "continuous_swap": "#005C43",
    "chunked_reservation": "#7E9BF5",
    "chunked_restart": "#0072B2",
    "chunked_swap": "#001A66",
    "sarathi": "#56B4E9",
    "vllm_v0": "#D55E00",
    "vllm_v1": "#7A3600",
    "orca": "#CC79A7",
    "deadline_restart": "#8E44AD",
    "shortest_restart": "#222222",
    "vtc_restart": "#F000F0",
    "recorded": "#B5B5B5",
    # of training: seldom in one figure with the policies above
    "train_on_device": "#4D4D4D",
    "zero_offload": "#E08214",
    "zero3_offload": "#A67463",
    "fsdp2_offload": "#FFD9A8",
    "train_lru": "#8073AC",
    "train_fifo": "#B2ABD2",
    "train_opt": "#542788",
    "patrickstar": "#1A9850",
    "protrain": "#8400C0",
    "time_shared": "#D6604D",
    "time_shared_protrain": "#B8A060",
    "coserve": "#00E000",
    "coserve_slo": "#0000F0",
    "coserve_vtc": "#B0D010",
    "llm_station": "#F00090",
    "temporal": "#700030",
    "elastic": "#0050F0",
    "elastic_protrain": "#00A0A0",
    "temporal_limited": "#404000",
    "spatial": "#F00020",
    "spatial_limited": "#00E070",
    "adapters": "#6C840C",
    "coserve_adapters": "#FC90FC",
    "alchemist": "#B0E888",
}
OTHERS = ("#1B9E77", "#B15928", "#6A3D9A", "#A6761D", "#E7298A", "#66A61E", "#4C72B0", "#937860")


def policy_color(policy: str) -> str:
    """The colour of a policy; for a policy outside COLORS it follows from the name."""
    if policy in COLORS:
        return COLORS[policy]
    return OTHERS[hashlib.sha256(policy.encode()).digest()[0] % len(OTHERS)]


# Okabe and Ito's colours, distinct under all common kinds of colour vision.
BLACK, ORANGE, SKY, GREEN = "#222222", "#E69F00", "#56B4E9", "#009E73"
BLUE, RED, PINK, GREY = "#0072B2", "#D55E00", "#CC79A7", "#B5B5B5"
YELLOW = "#F0E442"

PREDICTION_S, MEASUREMENT_S = f"{PREDICTION}_s", f"{MEASUREMENT}_s"  # columns of durations
RUNS: dict[str, dict[str, Any]] = {
    PREDICTION: {"color": RED, "linestyle": (0, (4, 1.5)), "linewidth": 1.6, "zorder": 3},
    MEASUREMENT: {"color": BLUE, "linestyle": "-", "linewidth": 1.6},
}
KINDS = {
    "weight": GREY,
    "kv": SKY,
    "activation": GREEN,
    "gradient": ORANGE,
    "optimizer": PINK,
    "buffer": YELLOW,
    "adapter": RED,
}
GROUPS = {"prefill": BLUE, "decode": SKY, "mixed": GREEN, "other": GREY, "host": ORANGE}
GROUPS |= {"forward": BLUE, "again": SKY, "backward": GREEN, "update": YELLOW}
COPY = PINK

RC: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 8.5,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E6E6E6",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "axes.formatter.useoffset": False,  # 3474.2, not 0.2 with +3.474e3 at the end of the axis
    "svg.hashsalt": "tandem",  # equal figures are equal files
}


def line(run: str) -> dict[str, Any]:
    """The style of a run's curves: predictions dashed, measurements solid."""
    return RUNS.get(run, RUNS[MEASUREMENT])


def group_color(group: str) -> str:
    """The colour of a class of operations; all copies share one."""
    return GROUPS.get(group, COPY)


def axes(ax: Any = None) -> Any:
    """The axes given, or new ones in a figure of their own (no pyplot, no display)."""
    if ax is not None:
        return ax
    from matplotlib.figure import Figure

    return Figure(figsize=(4.5, 3)).subplots()


def legend(ax: Any, **placing: Any) -> None:
    """Adds a legend if any artist has a label."""
    if ax.get_legend_handles_labels()[1]:
        ax.legend(**placing)


def opacity(points: int) -> float:
    """The opacity of a scatter's points by their number: of many, dense places alone are dark."""
    return float(min(0.8, max(0.06, 10 / max(1, points) ** 0.5)))


def save(fig: Any, data: pd.DataFrame, folder: Path, name: str) -> Path:
    """Writes name.svg (dense parts as pixels in it) and name.csv, the numbers that it shows.

    The layout is computed here once: a figure with a layout engine of its own is drawn twice.
    """
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    ConstrainedLayoutEngine().execute(fig)
    folder.mkdir(parents=True, exist_ok=True)
    data.to_csv(folder / f"{name}.csv", index=False, float_format="%.9g")
    path = folder / f"{name}.svg"
    fig.savefig(path, format="svg", dpi=130, metadata={"Date": None})
    return path
