"""Token lengths per client: ServeGen's histograms, or any table of pairs for all clients."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from traces.lengths import read_lengths
from traces.store import sha256_of
from traces.tables import read_columns

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
FIELDS = ("input_tokens", "output_tokens")
HISTOGRAM = ("client_id", "window_start_s", "field", "value", "prob")


@dataclass(frozen=True, eq=False)
class Histogram:
    """Lengths and their cumulative probabilities, from `start_s` on."""

    start_s: float
    values: Ints
    cumulative: Floats

    def draw(self, n: int, rng: np.random.Generator) -> Ints:
        """n lengths, independent."""
        at = np.searchsorted(self.cumulative, rng.random(n) * self.cumulative[-1], side="right")
        drawn: Ints = self.values[np.minimum(at, len(self.values) - 1)]
        return drawn


@dataclass(frozen=True, eq=False)
class ClientLengths:
    """Histograms by client and field, in order of time.

    A client's prompts and outputs are drawn together from its own window, which keeps what they
    share (who asks, and when); within a window only the margins are published.
    """

    histograms: dict[tuple[int, str], list[Histogram]]
    seed: int
    described: dict[str, Any]

    def knows(self, client: int) -> bool:
        """Whether there are lengths of both kinds."""
        return all((client, name) in self.histograms for name in FIELDS)

    def draw(self, client: int, at_s: float, n: int) -> Ints:
        """n pairs [n, 2] of a client at a time: of the last histogram begun, else of its first."""
        rng = np.random.default_rng((self.seed, client, int(at_s), 1))
        columns = [self._at(client, name, at_s).draw(n, rng) for name in FIELDS]
        return np.stack(columns, axis=1)

    def _at(self, client: int, name: str, at_s: float) -> Histogram:
        found = self.histograms[client, name]
        return next((h for h in reversed(found) if h.start_s <= at_s), found[0])


@dataclass(frozen=True, eq=False)
class PairLengths:
    """Pairs of a table, drawn with replacement for every client alike."""

    pairs: Ints
    seed: int
    described: dict[str, Any]

    def knows(self, client: int) -> bool:
        """The table serves every client."""
        return True

    def draw(self, client: int, at_s: float, n: int) -> Ints:
        """n pairs [n, 2]."""
        rng = np.random.default_rng((self.seed, client, int(at_s), 1))
        drawn: Ints = self.pairs[rng.integers(len(self.pairs), size=n)]
        return drawn


def read_client_lengths(
    windows: Path, lengths: str | Path | None, seed: int
) -> ClientLengths | PairLengths:
    """The lengths in `lengths`, else in the histogram beside `windows` (..._length_hist)."""
    beside = windows.with_name(windows.name.replace("client_windows", "length_hist"))
    path = beside if lengths is None else Path(lengths)
    if not path.is_file() or path == windows:
        raise ValueError(
            f"{windows} has no token lengths beside it ({path}); give lengths=PATH, a ServeGen "
            "histogram or a table of prompt and output tokens"
        )
    table = read_columns(path, HISTOGRAM)
    per_client = len(table.cells) == len(HISTOGRAM)
    described = {"path": str(path), "sha256": sha256_of(path), "per_client": per_client}
    if not per_client:
        requests = read_lengths(path, keep_ids=False).requests
        pairs = np.asarray([(r.prompt_tokens, r.output_tokens) for r in requests], dtype=np.int64)
        if not len(pairs):
            raise ValueError(f"{path}: no usable pair of token lengths")
        return PairLengths(pairs, seed, described)
    if table.malformed:
        raise ValueError(f"{path}: line {table.malformed[0]} cannot be read; mend it")
    return ClientLengths(_histograms(path, table.cells), seed, described)


def _histograms(path: Path, cells: dict[str, list[Any]]) -> dict[tuple[int, str], list[Histogram]]:
    field = np.asarray([FIELDS.index(f) if f in FIELDS else -1 for f in cells["field"]])
    names = ("value", "window_start_s", "client_id", "prob")
    keys = [_numbers(path, name, cells[name]) for name in names]
    order = np.lexsort((keys[0], keys[1], field, keys[2]))
    order = order[field[order] >= 0]
    field = field[order]
    value, start, client, prob = (key[order] for key in keys)
    same = (np.diff(client) == 0) & (np.diff(field) == 0) & (np.diff(start) == 0)
    cuts = [0, *(np.flatnonzero(~same) + 1).tolist(), len(order)]
    found: dict[tuple[int, str], list[Histogram]] = {}
    for first, end in pairwise(cuts):
        if first == end:
            continue
        whole = np.rint(value[first:end]).astype(np.int64)
        histogram = Histogram(float(start[first]), whole, np.cumsum(prob[first:end]))
        found.setdefault((int(client[first]), FIELDS[field[first]]), []).append(histogram)
    return found


def _numbers(path: Path, name: str, cells: list[Any]) -> Floats:
    """A column as numbers. ValueError where one is none: without it the histogram is another."""
    try:
        found = np.asarray(cells, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {name} is not a number everywhere ({error})") from error
    if not np.isfinite(found).all():
        raise ValueError(f"{path}: {name} is not a finite number everywhere")
    return found
