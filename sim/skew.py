"""How much a batch of unequal contexts costs over one of equal contexts, from measured batches."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from sim.table import check_times

Bucket = tuple[int, ...]  # the class on each axis
EDGES = (  # upper ends of the classes; the profile's own nodes lie at or below them
    (0, 22, 45, 90, 181, 362, 724, 1448),  # prompt tokens: halfway between 16, 32, ... 2048
    (0, 1024, 4096),  # tokens behind the prompt slices
    (2, 4, 8, 16, 32, 64, 128),  # decodes
    (0.05, 0.15, 0.4, 0.7),  # shape: (mean - least) / (most - least) of their contexts
    (1024, 4096, 16384),  # their longest context
)
MIXES = ("pc", "kp", "n", "nb", "kv_big")
TIMES = ("t_mean_us", "t_max_us", "t_skew_us")  # columns of skew.csv.gz


class Mix(NamedTuple):
    """What the cost of unequal contexts depends on."""

    chunk: float  # prompt tokens in the launch
    behind: float  # and tokens in KV before them
    decodes: float
    shape: float
    longest: float

    @property
    def bucket(self) -> Bucket:
        """The class on each axis."""
        return tuple(bisect_left(edges, x) for edges, x in zip(EDGES, self, strict=True))


@dataclass(frozen=True)
class Skew:
    """t = t(mean) + alpha * (t(longest) - t(mean)): alpha by bucket, else the default."""

    default: float = 0.0
    by_bucket: Mapping[Bucket, float] | None = None

    def alpha(self, mix: Mix) -> float:
        """The share of the way from the mean's time to the longest's."""
        return self.by_bucket.get(mix.bucket, self.default) if self.by_bucket else self.default


def fit_skew(rows: Any, per_bucket: bool) -> Skew:
    """Least squares of measured times, all rows as one or each bucket for itself.

    `rows`: a frame of skew.csv.gz with pc, kp (prompt and context), n (decodes), nb (of them long),
    kv_big (how long), t_mean_us, t_max_us, t_skew_us. Times are sums of three runs, which cancels
    here. A batch of two lengths has the shape nb / n. Rows whose longest context takes as long as
    the mean tell nothing. ValueError for what is no time.
    """
    for name in TIMES:
        check_times(rows[name])
    reach, over = rows["t_max_us"] - rows["t_mean_us"], rows["t_skew_us"] - rows["t_mean_us"]
    all_xx = float((reach * reach).sum())
    default = float((reach * over).sum()) / all_xx if all_xx else 0.0
    if not per_bucket:
        return Skew(default)
    sums: dict[Bucket, tuple[float, float]] = {}
    axes = (rows["pc"], rows["kp"], rows["n"], rows["nb"] / rows["n"], rows["kv_big"])
    for *mix, x, y in zip(*(column.tolist() for column in (*axes, reach, over)), strict=True):
        key = Mix(*mix).bucket
        xy, xx = sums.get(key, (0.0, 0.0))
        sums[key] = xy + x * y, xx + x * x
    return Skew(default, {key: xy / xx for key, (xy, xx) in sums.items() if xx})
