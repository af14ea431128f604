"""ServeGen: requests drawn from the clients of a production service, in windows of ten minutes.

The windows have the columns client_id, window_start_s, rate_rps, iat_cv, iat_dist, shape and scale
(alibaba/ServeGen, Apache-2.0). A second file has the distribution of token lengths per client and
six hours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from traces.import_options import Options
from traces.records import NS_PER_S, Record, Unusable, records
from traces.serving.lengths import Limits, read_lengths
from traces.serving.recorded import RecordRows
from traces.store import sha256_of
from traces.tables import read_columns

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
FIELDS = ("input_tokens", "output_tokens")
HISTOGRAM = ("client_id", "window_start_s", "field", "value", "prob")
COLUMNS = (
    ("client_id",),
    ("window_start_s",),
    ("rate_rps",),
    ("iat_dist",),
    ("shape",),
    ("scale",),
)
WINDOW_S = 600.0  # where the file has one window only
OUTSIDE = "outside the wanted time"
MAX_REQUESTS = 5_000_000  # a larger draw is a mistake: the pools hold up to 1.4e9
Span = tuple[float, float]  # start and end in seconds of the recording; the end is outside


@dataclass(frozen=True, eq=False)
class Histogram:
    """Token lengths and their cumulative probabilities, valid from `start_s` on."""

    start_s: float
    values: Ints
    cumulative: Floats

    def draw(self, n: int, rng: np.random.Generator) -> Ints:
        """n independent lengths, in tokens."""
        at = np.searchsorted(self.cumulative, rng.random(n) * self.cumulative[-1], side="right")
        drawn: Ints = self.values[np.minimum(at, len(self.values) - 1)]
        return drawn


@dataclass(frozen=True, eq=False)
class ClientLengths:
    """Histograms by client and field, in order of time.

    Prompt and output of a pair come from one client and one window, which keeps the correlation
    between clients and over time. Within a window only the margins are published.
    """

    histograms: dict[tuple[int, str], list[Histogram]]
    seed: int
    described: dict[str, Any]

    def knows(self, client: int) -> bool:
        """Whether the client has lengths of prompts and of outputs."""
        return all((client, name) in self.histograms for name in FIELDS)

    def draw(self, client: int, at_s: float, n: int) -> Ints:
        """n pairs [n, 2] of a client: from the last histogram begun by `at_s`, else its first."""
        rng = np.random.default_rng((self.seed, client, int(at_s), 1))
        columns = [self._at(client, name, at_s).draw(n, rng) for name in FIELDS]
        return np.stack(columns, axis=1)

    def _at(self, client: int, name: str, at_s: float) -> Histogram:
        found = self.histograms[client, name]
        return next((h for h in reversed(found) if h.start_s <= at_s), found[0])


@dataclass(frozen=True, eq=False)
class PairLengths:
    """Pairs of a table, drawn with replacement for all clients."""

    pairs: Ints
    seed: int
    described: dict[str, Any]

    def knows(self, client: int) -> bool:
        """Always true: the table serves every client."""
        return True

    def draw(self, client: int, at_s: float, n: int) -> Ints:
        """n pairs [n, 2] of the table."""
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
        raise ValueError(f"{path}: line {table.malformed[0]} cannot be read; repair it")
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
        lengths = np.rint(value[first:end]).astype(np.int64)
        histogram = Histogram(float(start[first]), lengths, np.cumsum(prob[first:end]))
        found.setdefault((int(client[first]), FIELDS[field[first]]), []).append(histogram)
    return found


def _numbers(path: Path, name: str, cells: list[Any]) -> Floats:
    """A column as numbers. Raises ValueError: a dropped cell would change the histogram."""
    try:
        found = np.asarray(cells, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {name} is not a number everywhere ({error})") from error
    if not np.isfinite(found).all():
        raise ValueError(f"{path}: {name} is not a finite number everywhere")
    return found


@dataclass(frozen=True, slots=True)
class Window:
    """One client in one window: requests per second, and the gaps within its bursts."""

    line: int
    client: int
    start_s: float
    rate: float
    is_gamma: bool
    shape: float
    scale: float


def read_windows(path: Path) -> tuple[list[Window], RecordRows]:
    """The windows in order of time, and the account of the file's rows."""
    rows, windows = RecordRows(), []
    for line, record in records(path, COLUMNS):
        rows.rows_read += 1
        try:
            windows.append(_window(line, record))
        except Unusable as fault:
            rows.drop(str(fault), line)
    return sorted(windows, key=lambda w: (w.start_s, w.client)), rows


def times_s(window: Window, width_s: float, faster: float, seed: int) -> Floats:
    """Arrival times of one window: exactly rate x width requests (rounded by chance).

    Gaps are drawn from the fitted distribution. If together they are shorter than the window, the
    burst starts at a random place in it, else they are shrunk to it: so the rate is the recorded
    one and a burst stays a burst. `faster` multiplies the rate and divides the gaps.
    """
    rng = np.random.default_rng((seed, window.client, int(window.start_s)))
    n = int(window.rate * faster * width_s + rng.random())
    if n == 0:
        return np.empty(0)
    # n gaps: the last one reaches to the next request, which the window need not hold
    drawn = rng.gamma(window.shape, size=n) if window.is_gamma else rng.weibull(window.shape, n)
    gaps = drawn * (window.scale / faster)
    total = float(gaps.sum())
    if total > width_s:
        gaps, total = gaps * (width_s / total), width_s
    offset = (width_s - total) * rng.random()
    from_start_s: Floats = np.concatenate([[0.0], np.cumsum(gaps[:-1])])
    return window.start_s + offset + from_start_s


def draw(
    path: Path, options: Options, limits: Limits
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], dict[str, Any]]:
    """Arrival times in ns, sorted from 0, token pairs [n, 2], and the account for the sidecar.

    `options.rate` multiplies the rates of all clients by one factor that gives this mean over the
    chosen span. The clock of the recording stays.
    """
    windows, rows = read_windows(path)
    lengths = read_client_lengths(path, options.lengths, options.seed or 0)
    width_s = _width_s([w.start_s for w in windows])
    span = _span(windows, options, width_s)
    kept = _chosen(windows, rows, lengths, span, width_s)
    expected = sum(w.rate * _overlap_s(w, span, width_s) for w in kept)
    recorded = expected / (span[1] - span[0]) if kept else 0.0
    faster = options.rate / recorded if options.rate is not None and recorded else 1.0
    _check_size(path, expected * faster, options.limit)
    at_s, pairs, dropped = _drawn(kept, lengths, limits, options, span, width_s, faster)
    order = np.argsort(at_s, kind="stable")[: options.limit]
    at_ns = np.rint((at_s[order] - at_s[order][:1]) * NS_PER_S).astype(np.int64)
    account = {
        **rows.account(len(kept)),
        "requests_drawn": len(at_s) + sum(dropped.values()),
        "requests_dropped": dropped | _beyond(len(at_s), options.limit),
        "window_s": width_s,
        "recorded_rate": recorded,
        "rate_factor": faster,
        "seed": options.seed or 0,
        "lengths": lengths.described,
    }
    return at_ns, pairs[order], account


def _window(line: int, record: Record | None) -> Window:
    if record is None:
        raise Unusable("malformed line")
    client, start, rate, dist, *fit = record
    names = ("client_id", "window_start_s", "rate_rps", "shape", "scale")
    numbers = []
    for name, value in zip(names, (client, start, rate, *fit), strict=True):
        try:
            numbers.append(float(value))
        except (TypeError, ValueError, OverflowError) as error:
            raise Unusable(f"{name} is not a number") from error
        if not (0 <= numbers[-1] < float("inf")) or (numbers[-1] == 0 and name in names[2:]):
            raise Unusable(f"{name} is out of range")
    if dist not in ("Gamma", "Weibull"):
        raise Unusable("gaps are neither Gamma nor Weibull")
    start_s, per_s, shape, scale = numbers[1:]
    return Window(line, int(numbers[0]), start_s, per_s, dist == "Gamma", shape, scale)


def _span(windows: Sequence[Window], options: Options, width_s: float) -> Span:
    """The part of the recording that `start_s` and `duration_s` choose, at most to its end."""
    start_s = (windows[0].start_s if windows else 0.0) + options.start_s
    end_s = max((w.start_s for w in windows), default=0.0) + width_s
    if options.duration_s is not None:
        end_s = min(end_s, start_s + options.duration_s)
    return start_s, end_s


def _overlap_s(window: Window, span: Span, width_s: float) -> float:
    """Seconds of a window inside the span; 0 or less where it lies outside."""
    return min(window.start_s + width_s, span[1]) - max(window.start_s, span[0])


def _chosen(
    windows: Sequence[Window],
    rows: RecordRows,
    lengths: ClientLengths | PairLengths,
    span: Span,
    width_s: float,
) -> list[Window]:
    """The windows that overlap the span, of clients with known lengths."""
    kept = []
    for window in windows:
        if _overlap_s(window, span, width_s) <= 0:
            rows.drop(OUTSIDE, window.line)
        elif not lengths.knows(window.client):
            rows.drop("client without token lengths", window.line)
        else:
            kept.append(window)
    return kept


def _drawn(
    windows: Sequence[Window],
    lengths: ClientLengths | PairLengths,
    limits: Limits,
    options: Options,
    span: Span,
    width_s: float,
    faster: float,
) -> tuple[Floats, npt.NDArray[np.int64], dict[str, int]]:
    seed, found, pairs, dropped, num = options.seed or 0, [], [], dict[str, int](), 0
    for place, window in enumerate(windows):
        times = times_s(window, width_s, faster, seed)
        drawn = lengths.draw(window.client, window.start_s, len(times))
        # a window is drawn whole, so that a part of the recording equals that part of the whole
        faults = [
            limits.fault(int(prompt), int(output)) if span[0] <= at < span[1] else OUTSIDE
            for at, (prompt, output) in zip(times.tolist(), drawn, strict=True)
        ]
        for fault in filter(None, faults):
            dropped[fault] = dropped.get(fault, 0) + 1
        fits = np.asarray([fault is None for fault in faults], dtype=bool)
        found.append(times[fits])
        pairs.append(drawn[fits])
        num += len(found[-1])
        is_last = place + 1 == len(windows) or windows[place + 1].start_s > window.start_s
        if options.limit is not None and num >= options.limit and is_last:
            break  # later windows hold later requests only
    none = np.empty((0, 2), dtype=np.int64)
    return np.concatenate([np.empty(0), *found]), np.concatenate([none, *pairs]), dropped


def _width_s(starts: Sequence[float]) -> float:
    gaps = np.diff(np.unique(starts))
    return float(gaps.min()) if len(gaps) else WINDOW_S


def _beyond(n: int, limit: int | None) -> dict[str, int]:
    return (
        {} if limit is None or n <= limit else {f"beyond the limit of {limit} requests": n - limit}
    )


def _check_size(path: Path, expected: float, limit: int | None) -> None:
    if limit is None and expected > MAX_REQUESTS:
        raise ValueError(
            f"{path}: {expected:.3g} requests would be drawn; give limit, rate, or start_s and "
            "duration_s for a part"
        )
