"""Files that the points of a sweep import: once beforehand, instead of once by each worker."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tandem.build import Builder
from tandem.composed import Composed
from tandem.workload import is_file, trace_file


def import_files(points: Iterable[Composed]) -> None:
    """Imports each trace and each text to train on once. What is wrong with one, the points that
    want it will say."""
    points = list(points)
    for point in {str(point.config["trace"]): point for point in points}.values():
        with suppress(ValueError):
            import_trace(point)
    for point in {str(_data(point)): point for point in points}.values():
        with suppress(ValueError):
            import_text(point)


def import_trace(point: Composed) -> None:
    """Imports a point's trace, unless that is kept already, or drawn."""
    if is_file(point.config["trace"]):
        trace_file(point.config["trace"], Path(point.config["cache"]))


def import_text(point: Composed) -> None:
    """Imports the text that a point trains on, unless that is kept already, or drawn."""
    node = _data(point)
    if node is None:
        return
    data = Builder(point.config["trusted"], point.folders).build(node, "training.data")
    if hasattr(data, "file"):
        data.file(Path(point.config["cache"]))


def _data(point: Composed) -> Any:
    """The config node of what a point trains on; None where it trains nothing."""
    training = point.config.get("training") or {}
    return training.get("data") if training.get("_target_") else None
