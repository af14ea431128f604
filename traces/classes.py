"""SLO classes drawn by share, for traces that name none."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np

from traces.request import Request

STREAM = 2  # of a seed: arrivals draw from the seed itself, lengths from its stream 1


def with_shares(
    requests: Sequence[Request], shares: Mapping[str, float], seed: int = 0
) -> list[Request]:
    """The requests, each in a class drawn by its share; all turns of a session are in one.

    Equal seeds give equal classes, and more requests leave those of the first as they are.
    ValueError where the shares do not make up 1.
    """
    if min(shares.values(), default=0) < 0 or abs(sum(shares.values()) - 1) > 1e-6:
        told = ", ".join(f"{name}: {share:g}" for name, share in shares.items())
        raise ValueError(f"slo.shares={{{told}}}: they must be at least 0 and make up 1")
    rng, names = np.random.default_rng((seed, STREAM)), list(shares)
    ends = list(accumulate(shares.values()))[:-1]
    of_session: dict[int, str] = {}
    classed = []
    for request in requests:
        slo = of_session.get(-1 if request.session is None else request.session)
        if slo is None:
            slo = names[bisect_right(ends, rng.random())]
            if request.session is not None:
                of_session[request.session] = slo
        classed.append(replace(request, slo=slo))
    return classed
