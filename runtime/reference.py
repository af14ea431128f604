"""The service clock's yardstick: a fixed piece of work that tells how fast the thread is just now.

A shared machine changes its speed by a third within seconds, for whatever runs on it. A duration
counted in reference works instead of nanoseconds does not: both are slowed alike.
"""

from __future__ import annotations

import time
from collections import deque
from statistics import median

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention, silu

ROWS, WIDTH, INNER, KEYS = 8, 128, 352, 4096


class Reference:
    """Work like a small launch: products, gathers and attention, mostly dispatch; some 0.4 ms."""

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(0)
        self._rows = torch.randn(ROWS, WIDTH, generator=draw)
        self._up = torch.randn(WIDTH, INNER, generator=draw) / WIDTH**0.5
        self._down = torch.randn(INNER, WIDTH, generator=draw) / INNER**0.5
        self._keys = torch.randn(KEYS, 4, 32, generator=draw)
        self._index = torch.randint(KEYS, (ROWS, 200), generator=draw)

    @torch.no_grad()
    def work(self) -> Tensor:
        """Two layers over eight rows, each row attending to 200 scattered keys."""
        hidden = self._rows
        for _ in range(2):
            queries = hidden.view(ROWS, 4, 1, 32).unbind(0)
            outputs = []
            for query, index in zip(queries, self._index.unbind(0), strict=True):
                keys = self._keys.index_select(0, index).transpose(0, 1)
                outputs.append(scaled_dot_product_attention(query, keys, keys))
            hidden = hidden + torch.stack(outputs).reshape(ROWS, WIDTH)
            hidden = hidden + silu(hidden @ self._up) @ self._down
            hidden = hidden / hidden.norm(dim=-1, keepdim=True)
        return hidden


class Pace:
    """Turns thread time into time of a machine on which the reference work takes `nominal_ns`.

    The reference is timed after every `every_ns` of work, once; the median of the last `window`
    counts, so a single hiccup does not.
    """

    def __init__(self, nominal_ns: int, every_ns: int = 25_000_000, window: int = 7) -> None:
        if nominal_ns < 1:
            raise ValueError(f"the reference work's nominal time is {nominal_ns} ns: at least 1")
        self._nominal_ns, self._every_ns = nominal_ns, every_ns
        self._reference = Reference()
        self._times_ns: deque[int] = deque(maxlen=window)
        self._since_ns = 0
        for _ in range(3 * window):  # warms up; the last ones stay
            self.measure()

    @property
    def factor(self) -> float:
        """Above one on a machine faster than nominal."""
        return self._nominal_ns / median(self._times_ns)

    def measure(self) -> None:
        """Times the reference work once."""
        start = time.thread_time_ns()
        self._reference.work()
        self._times_ns.append(time.thread_time_ns() - start)
        self._since_ns = 0

    def is_due(self, worked_ns: int) -> bool:
        """Whether enough work has passed, with this much more, to look again."""
        self._since_ns += worked_ns
        return self._since_ns >= self._every_ns
