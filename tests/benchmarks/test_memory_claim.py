"""The memory claim's judge: its count of settles outside the bound."""

from __future__ import annotations

from types import SimpleNamespace

import pandas as pd

from benchmarks.fidelity.memory_fidelity import excess, outside


def readings(*above: tuple[int, int]) -> pd.DataFrame:
    """Settles by (bytes above the ledger, coming bytes), and an issue without a reading."""
    rows = [
        {
            "cause": "settle",
            "weight_bytes": 500,
            "kv_bytes": 70,
            "measured_bytes": 570 + more,
            "coming_bytes": coming,
        }
        for more, coming in above
    ]
    issue = {"cause": "issue", "weight_bytes": 500, "kv_bytes": 99, "coming_bytes": 0}
    run = SimpleNamespace(memory=pd.DataFrame([issue, *rows]))
    return excess(run)  # type: ignore[arg-type]


def test_alone_in_flight_every_byte_counts() -> None:
    assert outside(readings((0, 0), (0, 64), (1, 64), (-1, 0)), has_more_in_flight=False) == 2


def test_with_more_in_flight_coming_bytes_may_still_be_held() -> None:
    assert outside(readings((0, 0), (64, 64), (65, 64), (-1, 64)), has_more_in_flight=True) == 2
