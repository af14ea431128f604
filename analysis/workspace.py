"""The workspace of sampled launches: predicted bytes beside measured ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from analysis.run import RunFacts

if TYPE_CHECKING:
    import pandas as pd

KIND, P90 = "workspace", "p90 |error|"  # in the memory table of a comparison


def workspace_errors(pairs: pd.DataFrame) -> dict[str, float | int]:
    """Figures of launches with a predicted and a measured workspace; empty without any.

    Args:
        pairs: a row per launch, columns predicted and measured, in bytes.

    Returns:
        launches; predicted_bytes and measured_bytes, the largest of each; p90_error of the
        absolute errors of single launches, relative to the measurement.
    """
    known = pairs[pairs["predicted"].notna() & (pairs["measured"] > 0)].astype(float)
    if known.empty:
        return {}
    error = known["predicted"] / known["measured"] - 1.0
    return {
        "launches": len(known),
        "predicted_bytes": int(known["predicted"].max()),
        "measured_bytes": int(known["measured"].max()),
        "p90_error": float(error.abs().quantile(0.9)),
    }


def workspace_figures(run: RunFacts, peak_bytes: float) -> dict[str, float | int]:
    """Workspace figures of a run for its metrics; a simulation has the largest predicted launch.

    `peak_bytes`: the largest workspace of the run's operations.
    """
    if run.is_measured:
        found = run.provenance.get("workspace") or {}
        return {f"{KIND}_{name}": value for name, value in found.items()}
    return {} if peak_bytes != peak_bytes else {f"{KIND}_predicted_bytes": int(peak_bytes)}


def workspace_rows(matched: pd.DataFrame) -> list[tuple[Any, ...]]:
    """Rows of a comparison's memory table, from operations that both runs have, per device.

    They hold the largest workspace of each run, and the p90 of the absolute errors of launches.
    """
    import pandas as pd

    from analysis.distance import relative_error

    rows: list[tuple[Any, ...]] = []
    for device, part in matched.groupby("device"):
        pair = {"predicted": part["peak_bytes_prediction"]}
        pair |= {"measured": part["peak_bytes_measurement"]}
        if found := workspace_errors(pd.DataFrame(pair)):
            pool, none = f"gpu:{device}", float("nan")
            peaks = found["predicted_bytes"], found["measured_bytes"]
            rows.append((pool, KIND, "peak", *peaks, relative_error(*peaks)))
            rows.append((pool, KIND, P90, none, none, found["p90_error"]))
    return rows
