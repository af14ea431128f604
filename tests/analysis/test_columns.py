"""Columns of a run by blocks: figures are equal, in whichever blocks the rows come."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis import columns
from analysis.columns import (
    CountedNumbers,
    Lists,
    Named,
    block_of,
    block_of_frame,
    joined,
    percentiles,
)
from analysis.metrics import summary
from analysis.run import load, run_files
from engine.results import schema
from engine.results.schema import TABLES, column, rows_at
from tandem.cli.__main__ import main
from tests.support.strategies import cases

pytestmark = pytest.mark.ci

numbers = st.lists(st.integers(-5, 5), max_size=40)


@pytest.mark.parametrize("merged", [0, 5, 1 << 20])
@given(values=numbers, cuts=st.lists(st.integers(0, 40), max_size=4), rank=st.floats(0, 100))
@cases(100)
def test_percentiles_of_counted_numbers_are_numpys(
    merged: int, values: list[int], cuts: list[int], rank: float
) -> None:
    counted = CountedNumbers()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(columns, "MERGED", merged)
        for part in np.split(np.array(values, np.int64), sorted(cuts)):
            counted.add(part)
    found, counts = counted.sorted()
    assert (np.diff(found) > 0).all()
    assert np.repeat(found, counts).tolist() == sorted(values)
    if values:
        wanted = float(np.percentile(np.array(values) / 1e9, rank, method="linear"))
        assert percentiles(found / 1e9, counts, [rank]) == [wanted]


def test_no_numbers_have_no_percentile() -> None:
    with pytest.raises(ValueError, match="no percentile of no numbers"):
        percentiles(np.empty(0), np.empty(0, np.int64), [50])


@given(st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 9), max_size=4)), max_size=6))
@cases(100)
def test_gaps_are_those_within_the_lists_that_are_kept(rows: list[tuple[bool, list[int]]]) -> None:
    values = np.array([number for _, own in rows for number in own], np.int64)
    lists = Lists(np.cumsum([0, *(len(own) for _, own in rows)]), values)
    kept = np.array([keep for keep, _ in rows], bool)
    wanted = [gap for keep, own in rows if keep for gap in np.diff(own).tolist()]
    assert lists.gaps(kept).tolist() == wanted
    assert lists.of(kept).tolist() == [n for keep, own in rows if keep for n in own]


def test_a_block_of_arrow_is_that_of_a_frame() -> None:
    """Nulls of numbers are NaN and of texts no name, however the rows are cut."""
    values = {
        "a": [1, None, 3, 4],
        "b": ["x", None, "y", "x"],
        "tokens": [[1, 2], [], [3], [4, 5]],
        "d": [1.5, 2.5, None, 0.0],
    }
    kinds = {"a": pa.int64(), "b": pa.string(), "tokens": pa.list_(pa.int64()), "d": pa.float64()}
    table = pa.table({name: column(own, kinds[name]) for name, own in values.items()})
    for cut in range(5):
        parts = [table.slice(0, cut), table.slice(cut)]
        for found in (
            block_of(pa.concat_tables(parts)),
            block_of_frame(pa.concat_tables(parts).to_pandas()),
        ):
            assert np.array_equal(found["a"], [1, np.nan, 3, 4], equal_nan=True)
            assert [found["b"].is_(name).tolist() for name in ("x", "y", "z")] == [
                [True, False, False, True],
                [False, False, True, False],
                [False] * 4,
            ]
            assert found["tokens"].starts.tolist() == [0, 2, 2, 3, 5]
            assert found["tokens"].values.tolist() == [1, 2, 3, 4, 5]
            assert np.array_equal(found["d"], [1.5, 2.5, np.nan, 0.0], equal_nan=True)
        two = joined([block_of(part.select(["a", "b"])) for part in parts])
        assert two["b"].is_("x").tolist() == [True, False, False, True]


def test_texts_are_chosen_by_what_holds_of_their_names() -> None:
    lanes = Named(("compute", "gpu->host"), np.array([0, 1, -1]))
    assert lanes.where("->" in name for name in lanes.names).tolist() == [False, True, False]


def test_rows_are_taken_in_any_order() -> None:
    table = pa.table({"a": column([1, 2, 3], pa.int64())})
    assert rows_at(table, np.array([2, 0]))["a"].to_pylist() == [3, 1]


@pytest.mark.parametrize(
    "words", [(), ("replicas=2", "router=round_robin"), ("training=random", "policy=time_shared")]
)
def test_metrics_of_files_are_those_of_frames(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a file has many groups of rows; means over time up to the order of the sum."""
    monkeypatch.chdir(tmp_path)
    run = ["run", "model=micro_llama", "limit=10", *words]
    assert main([*run, "hydra.run.dir=whole"]) == 0
    rows = dict.fromkeys(TABLES, 97) | {"requests": 3, "training": 1}
    monkeypatch.setattr(schema, "GROUP", rows)
    assert main([*run, "hydra.run.dir=cut"]) == 0
    whole, cut = (summary(run_files(tmp_path / name)) for name in ("whole", "cut"))
    frames = [load(name) for name in ("whole", "cut")]
    assert whole == summary(frames[0])
    assert whole.keys() == cut.keys()
    for name, value in whole.items():
        assert cut[name] == (value if isinstance(value, str) else pytest.approx(value, rel=1e-12))
    for name in ("requests", "steps", "memory", "plans", "training"):
        one, other = (getattr(frame, name).astype(str) for frame in frames)
        assert one.equals(other), name
