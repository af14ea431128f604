"""Time stamps that were rounded to a coarse clock: found, and drawn apart again."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

TimesNs = npt.NDArray[np.int64]
REPEATED = 0.5  # share of stamps that equal the one before
IN_STEP = 0.95  # share of the distinct stamps' gaps that are multiples of the bucket ...
OFF_STEP = 0.01  # ... to this much of it: published stamps wander by milliseconds in 3 s


def bucket_ns(times_ns: TimesNs) -> int | None:
    """The width of the buckets that sorted times were rounded to; None where they were not.

    Rounded stamps repeat, and lie apart by multiples of one width: their median gap. Needs three
    distinct stamps, and at least half of all stamps repeated.
    """
    gaps = np.diff(np.unique(times_ns))
    if len(gaps) < 2 or np.mean(np.diff(times_ns) == 0) < REPEATED:
        return None
    width = float(np.median(gaps))
    multiples = gaps / width
    is_in_step = np.abs(multiples - np.rint(multiples)) <= OFF_STEP * np.rint(multiples)
    return round(width) if np.mean(is_in_step) >= IN_STEP else None


def spread_inside(times_ns: TimesNs, width_ns: int, seed: int) -> TimesNs:
    """Sorted times, each stamp's requests uniformly inside [stamp, stamp + width), in their order.

    A stamp is taken for the start of its bucket; nothing passes the next stamp.
    """
    stamps, counts = np.unique(times_ns, return_counts=True)
    ends = np.minimum(stamps + width_ns, np.append(stamps[1:], stamps[-1] + width_ns))
    start, room = (np.repeat(values, counts) for values in (stamps, ends - stamps))
    drawn: TimesNs = start + (np.random.default_rng(seed).random(len(times_ns)) * room).astype(
        np.int64
    )
    drawn.sort()  # moves nothing out of its bucket, because these do not overlap
    return drawn
