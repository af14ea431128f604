"""How fast this machine is beside that of the bars: bars in seconds then hold on any machine."""

from __future__ import annotations

import time

# CPU seconds of `_work` where the engine of commit 6655e13 serves 4,000 requests a CPU second:
# measured as 13.3 ms beside 4,326 requests.
BARS_S = 0.0144
RUNS = 20


def machine_speed() -> float:
    """Times as fast as the machine of the bars; by the fastest of RUNS pieces of plain Python."""
    return BARS_S / min(_work() for _ in range(RUNS))


def _work() -> float:
    """CPU seconds of a piece of work."""
    begun = time.process_time()
    counts: dict[int, int] = {}
    for i in range(200_000):
        key = i & 1023
        counts[key] = counts.get(key, 0) + len((i, key))
    return time.process_time() - begun
