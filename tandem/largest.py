"""The largest model among points, per choice of all else."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

Words = tuple[str, ...]


class Sized(Protocol):
    """A point by what tells it from the others, and how large a model it trains, if it fits."""

    @property
    def words(self) -> Words: ...
    @property
    def parameters(self) -> int: ...
    @property
    def fits(self) -> bool: ...


Row = TypeVar("Row", bound=Sized)


@dataclass(frozen=True)
class Tried:
    """A point that was run."""

    words: Words
    parameters: int
    fits: bool


def largest_of(rows: Iterable[Row]) -> Mapping[Words, Row | None]:
    """Per choice of all but the model the largest that fits; None where none does."""
    best: dict[Words, Row | None] = {}
    for row in rows:
        others = tuple(word for word in row.words if not _is_of_model(word))
        other = best.setdefault(others, None)
        if row.fits and (other is None or row.parameters > other.parameters):
            best[others] = row
    return best


def told_largest(rows: Iterable[Sized], verb: str) -> list[str]:
    """A line per choice of all else, such as: largest that fits with ..."""
    return [
        f"largest that {verb}{_with(others)}: {_size(best)}"
        for others, best in largest_of(rows).items()
    ]


def model_of(words: Words) -> Words:
    """Those of the words that choose the model."""
    return tuple(word for word in words if _is_of_model(word))


def _size(row: Sized | None) -> str:
    if row is None:
        return "none"
    return f"{row.parameters / 1e6:,.1f} M parameters ({' '.join(model_of(row.words))})"


def _is_of_model(word: str) -> bool:
    return word.lstrip("+~").partition("=")[0].partition(".")[0] == "model"


def _with(others: Words) -> str:
    return f" with {' '.join(others)}" if others else ""
