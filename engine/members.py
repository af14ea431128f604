"""Members of enums that are looked up at every step."""

from __future__ import annotations

from enum import StrEnum


def plain(*enums: type[StrEnum]) -> None:
    """Makes members plain attributes, as from Python 3.12 on: 3.11 calls Python for each."""
    for words in enums:
        for member in words:
            type.__setattr__(words, member.name, member)
