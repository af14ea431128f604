"""How much a batch of unequal contexts costs over one of equal contexts, from measured batches."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Bucket = tuple[bool, int, int]  # is mixed with a prompt, class of size, class of shape
SIZES = (2, 4, 8, 16, 32, 64, 128)  # decodes, upper ends
SHAPES = (0.05, 0.15, 0.4, 0.7)  # (mean - min) / (max - min) of contexts, upper ends


@dataclass(frozen=True)
class Skew:
    """t = t(mean) + alpha * (t(max) - t(mean)): alpha by bucket, else the default."""

    default: float = 0.0
    by_bucket: Mapping[Bucket, float] | None = None

    def alpha(self, is_mixed: bool, decodes: int, shape: float) -> float:
        """The share of the way from the mean's time to the maximum's."""
        if self.by_bucket is None:
            return self.default
        return self.by_bucket.get(bucket(is_mixed, decodes, shape), self.default)


def bucket(is_mixed: bool, decodes: int, shape: float) -> Bucket:
    """The class of a batch."""
    return is_mixed, bisect_left(SIZES, decodes), bisect_left(SHAPES, shape)


def fit_skew(rows: Any, per_bucket: bool) -> Skew:
    """Least squares of measured times, all rows as one or each bucket for itself.

    `rows`: a frame of skew.csv.gz: regime, n (decodes), nb (of them long), t_mean_us, t_max_us,
    t_skew_us. A long share of nb / n is the shape of a batch of two lengths.
    """
    reach, over = rows["t_max_us"] - rows["t_mean_us"], rows["t_skew_us"] - rows["t_mean_us"]
    default = float((reach * over).sum() / (reach * reach).sum())
    if not per_bucket:
        return Skew(default)
    sums: dict[Bucket, tuple[float, float]] = {}
    columns = (rows["regime"] == "mixed", rows["n"], rows["nb"] / rows["n"], reach, over)
    for is_mixed, n, shape, x, y in zip(*(c.tolist() for c in columns), strict=True):
        key = bucket(is_mixed, n, shape)
        xy, xx = sums.get(key, (0.0, 0.0))
        sums[key] = xy + x * y, xx + x * x
    return Skew(default, {key: xy / xx for key, (xy, xx) in sums.items()})
