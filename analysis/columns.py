"""Columns of a run as numpy arrays, by blocks of rows: what metrics are made of.

A block has numbers as arrays, with NaN where null, texts as Named and lists of numbers as Lists. A
run of a million requests is read block by block, so that it need not fit the memory at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from engine.results.schema import TABLES, values_of

if TYPE_CHECKING:
    import pandas as pd

LISTS = {field.name for schema in TABLES.values() for field in schema if field.type.num_fields}
Numbers: TypeAlias = NDArray[Any]
Mask: TypeAlias = NDArray[np.bool_]


class Named(NamedTuple):
    """Texts of rows: each row's place among the names, -1 where null."""

    names: tuple[str, ...]
    chosen: Numbers

    def is_(self, name: str) -> Mask:
        """Whether each row has this text."""
        found: Mask = self.chosen == (self.names.index(name) if name in self.names else -2)
        return found

    def where(self, holds: Iterable[bool]) -> Mask:
        """Whether each row has a text for which this holds, given by name."""
        found: Mask = np.array([*holds, False], bool)[self.chosen]
        return found


class Lists(NamedTuple):
    """Lists of rows: where each begins among all numbers, and the end of the last; the numbers."""

    starts: Numbers
    values: Numbers

    def gaps(self, kept: Mask) -> Numbers:
        """Differences of consecutive numbers of the lists that are kept, one behind the other."""
        is_kept = np.repeat(kept, np.diff(self.starts))
        is_kept[self.starts[:-1][np.diff(self.starts) > 0]] = False  # a first one has none before
        found: Numbers = np.diff(self.values, prepend=self.values[:1])[is_kept]
        return found

    def of(self, kept: Mask) -> Numbers:
        """The numbers of the lists that are kept."""
        found: Numbers = self.values[np.repeat(kept, np.diff(self.starts))]
        return found


Block = dict[str, Any]  # by name of the column: numbers, Named or Lists


def block_of(table: pa.Table) -> Block:
    """A table of Arrow."""
    return {name: _column(table.column(name)) for name in table.column_names}


def _column(column: pa.ChunkedArray) -> Any:
    if pa.types.is_string(column.type) or pa.types.is_dictionary(column.type):
        return _named(column)
    if pa.types.is_list(column.type):
        return _lists(column)
    values, known = values_of(column)
    return values if known.all() else np.where(known, values, np.nan)


def _named(column: pa.ChunkedArray) -> Named:
    places: dict[str, int] = {}
    found = [np.empty(0, np.int64)]
    is_encoded = pa.types.is_dictionary(column.type)
    for part in (column if is_encoded else pc.dictionary_encode(column)).chunks:
        own = [places.setdefault(name, len(places)) for name in part.dictionary.to_pylist()]
        chosen, known = values_of(pa.chunked_array([part.indices]))
        found.append(np.array([*own, -1])[np.where(known, chosen, -1)])
    return Named(tuple(places), np.concatenate(found))


def _lists(column: pa.ChunkedArray) -> Lists:
    starts, values, count = [np.zeros(1, np.int64)], [], 0
    for part in column.chunks:
        offsets, _ = values_of(pa.chunked_array([part.offsets]))
        values.append(values_of(pa.chunked_array([part.values]))[0][offsets[0] : offsets[-1]])
        starts.append(offsets[1:].astype(np.int64) - offsets[0] + count)
        count = int(starts[-1][-1]) if len(starts[-1]) else count
    return Lists(np.concatenate(starts), np.concatenate([*values, np.empty(0, np.int64)]))


def block_of_frame(frame: pd.DataFrame) -> Block:
    """A table of pandas, whose lists are arrays."""
    found: Block = {}
    for name, column in frame.items():
        if column.dtype != object and column.dtype.name not in ("category", "str", "string"):
            found[str(name)] = column.to_numpy()
        elif name in LISTS:
            parts = [np.asarray([] if part is None else part, np.int64) for part in column]
            starts = np.cumsum([0, *map(len, parts)])
            found[str(name)] = Lists(starts, np.concatenate([np.empty(0, np.int64), *parts]))
        else:
            values = column.tolist()
            names = [name for name in dict.fromkeys(values) if isinstance(name, str)]
            places = {name: i for i, name in enumerate(names)}
            chosen = np.array([places.get(value, -1) for value in values], np.int64)
            found[str(name)] = Named(tuple(names), chosen)
    return found


def blocks_of_file(path: Path, columns: Sequence[str]) -> Iterator[Block]:
    """The blocks of a table's file, at least one."""
    file = pq.ParquetFile(path)
    for group in range(file.num_row_groups):
        yield block_of(file.read_row_group(group, columns=[*columns], use_threads=False))
    if not file.num_row_groups:
        yield block_of(pa.Table.from_batches([], file.schema_arrow).select([*columns]))


def joined(blocks: Iterable[Block]) -> Block:
    """All rows of some blocks of numbers and texts."""
    parts = [*blocks]
    if len(parts) == 1:
        return parts[0]
    return {name: _joined([part[name] for part in parts]) for name in parts[0]}


def _joined(parts: Sequence[Any]) -> Any:
    if not isinstance(parts[0], Named):
        return np.concatenate(parts)
    places: dict[str, int] = {}
    found = []
    for names, chosen in parts:
        own = [places.setdefault(name, len(places)) for name in names]
        found.append(np.array([*own, -1])[chosen])
    return Named(tuple(places), np.concatenate(found))


def sorted_by(block: Block, name: str) -> Block:
    """The rows of a block of numbers and texts by a column."""
    order = np.argsort(block[name], kind="stable")
    return {
        key: Named(held.names, held.chosen[order]) if isinstance(held, Named) else held[order]
        for key, held in block.items()
    }


# ---- figures of many numbers
MERGED = 1 << 20  # numbers of several blocks, before equal ones are put together


class CountedNumbers:
    """Numbers in several blocks, of which equal ones are counted."""

    def __init__(self) -> None:
        self._parts = [(np.empty(0, np.int64), np.empty(0, np.int64))]  # numbers, how often each
        self._merged = 0  # numbers when they were put together last

    def add(self, values: Numbers) -> None:
        """More numbers."""
        self._parts.append(np.unique(values, return_counts=True))
        if sum(len(part) for part, _ in self._parts) > MERGED + 2 * self._merged:
            self._parts = [self.sorted()]
            self._merged = len(self._parts[0][0])

    def sorted(self) -> tuple[Numbers, Numbers]:
        """All numbers in order, and how often each comes."""
        values, counts = (np.concatenate(parts) for parts in zip(*self._parts, strict=True))
        order = np.argsort(values, kind="stable")
        values, counts = values[order], counts[order]
        is_first = np.diff(values, prepend=values[:1] - 1) != 0
        begins = np.flatnonzero(is_first)
        return values[begins], np.add.reduceat(counts, begins) if len(begins) else counts


def percentiles(values: Numbers, counts: Numbers, ranks: Sequence[float]) -> list[float]:
    """Percentiles of numbers in order that come so often each, by numpy's linear interpolation.

    Equal to the bit to `numpy.percentile` of all of them. ValueError without any.
    """
    ends = np.cumsum(counts)
    if not len(ends) or not ends[-1]:
        raise ValueError("no percentile of no numbers")
    found = []
    for rank in ranks:
        place = (ends[-1] - 1) * np.true_divide(rank, 100)
        below = np.floor(place)
        at = [min(below, ends[-1] - 1), min(below + 1, ends[-1] - 1)]
        low, high = values[np.searchsorted(ends, at, side="right")]
        share, step = place - below, high - low
        found.append(float(high - step * (1 - share) if share >= 0.5 else low + step * share))
    return found


def count_of(path: Path) -> int:
    """Rows of a table's file."""
    return int(pq.ParquetFile(path).metadata.num_rows)


def names_of(path: Path) -> list[str]:
    """The columns of a table's file."""
    names: list[str] = pq.ParquetFile(path).schema_arrow.names
    return names


def known_max(block: Mapping[str, Any], name: str) -> float:
    """The largest number of a column; NaN where none is known."""
    known = block[name][~np.isnan(block[name])]
    return float(known.max()) if len(known) else float("nan")
