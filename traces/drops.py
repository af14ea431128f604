"""An account of the rows of a file that come to nothing."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

NAMED_LINES = 5  # of each reason


@dataclass
class Drops:
    """How many rows are dropped for which reason; the first lines of each are remembered."""

    rows_read: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    named: dict[str, list[int]] = field(default_factory=dict)

    def drop(self, reason: str, *lines: int) -> None:
        """Lines (or rows, from 1) that will be nothing."""
        self.dropped[reason] += len(lines)
        first = self.named.setdefault(reason, [])
        first.extend(lines[: NAMED_LINES - len(first)])

    def account(self, num_kept: int) -> dict[str, Any]:
        """The part of the sidecar that says what became of the rows."""
        assert self.rows_read == num_kept + self.dropped.total()
        return {
            "rows_read": self.rows_read,
            "rows_kept": num_kept,
            "rows_dropped": dict(self.dropped),
            "first_lines_dropped": self.named,
        }
