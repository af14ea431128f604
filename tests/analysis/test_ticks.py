"""Labels of a logarithmic axis are round, and none overlaps the next one."""

from __future__ import annotations

from itertools import pairwise

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from analysis.figures.plots import MOST_TICKS, plot_parity, round_values


@given(low=st.floats(1e-6, 1e3), ratio=st.floats(1.5, 1e9))
def test_there_are_some_and_never_too_many(low: float, ratio: float) -> None:
    found = round_values(low, low * ratio)
    assert 1 <= len(found) <= MOST_TICKS
    assert all(low <= value <= low * ratio for value in found)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.0013, 0.0047, [0.0015, 0.002, 0.003, 0.004]),
        (0.003, 0.12, [0.005, 0.01, 0.02, 0.05, 0.1]),
        (0.04, 16, [0.1, 1, 10]),
    ],
)
def test_they_are_round(low: float, high: float, expected: list[float]) -> None:
    assert round_values(low, high) == expected


@pytest.mark.parametrize("values", [(0.0015, 0.004), (0.003, 0.1), (0.09, 2.7), (0.5, 0.6)])
def test_no_label_lies_over_another(values: tuple[float, float]) -> None:
    figure = Figure(figsize=(13, 4))
    renderer = FigureCanvasAgg(figure).get_renderer()
    ax = figure.subplots(1, 3)[0]
    plot_parity(pd.DataFrame({"prediction_s": values, "measurement_s": values}), ax)
    figure.canvas.draw()
    for axis, side in ((ax.xaxis, "x"), (ax.yaxis, "y")):
        boxes = [t.get_window_extent(renderer) for t in axis.get_ticklabels() if t.get_text()]
        ends = sorted((getattr(b, f"{side}0"), getattr(b, f"{side}1")) for b in boxes)
        assert ends and all(one[1] < two[0] for one, two in pairwise(ends))
