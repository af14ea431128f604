"""`tandem plan` of several points: which of them fit, and the largest model among those that do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from policies.out_of_memory import DoesNotFit
from tandem.composed import Composed
from tandem.foresight import Foresight, foresee
from tandem.grid import Grid
from tandem.largest import Words, told_largest
from tandem.screen import shown_bytes, shown_seconds
from tandem.setting import spec_of


@dataclass(frozen=True, eq=False)
class Foreseen:
    """A point by what tells it from the others; `found` is None where it does not fit."""

    words: Words
    parameters: int
    found: Foresight | None
    refusal: str = ""

    @property
    def fits(self) -> bool:
        """Whether there is room for it."""
        return self.found is not None


def foreseen(points: Iterable[Composed], common: Sequence[str] = ()) -> Iterator[Foreseen]:
    """Foresees point by point; words of `common` tell none from another.

    ValueError where a configuration is wrong.
    """
    for point in points:
        words = tuple(word for word in point.overrides if word not in common)
        found, refusal = None, ""
        try:
            found = foresee(point)
        except DoesNotFit as error:
            refusal = str(error)
        yield Foreseen(words, spec_of(point).parameters, found, refusal)


def tell(grid: Grid) -> int:
    """Prints a line per point, and the largest models; 0 if any fits."""
    rows = []
    for row in foreseen(grid.points(), grid.fixed):
        print(told(row), flush=True)
        rows.append(row)
    print("\n".join(told_largest(rows, "fits")))
    return 0 if any(row.found for row in rows) else 1


def told(row: Foreseen) -> str:
    """One line: step time and peaks, or what is missing."""
    head = f"{' '.join(row.words)}: {row.parameters / 1e6:,.1f} M parameters"
    if row.found is None:
        return f"{head}, does not fit: {row.refusal.partition(';')[0]}"
    peaks = [
        f"{tier} {shown_bytes(row.found.peak_bytes(f'{tier}:{device}')['used'])}"
        for tier, device in row.found.setting.room.capacity_bytes
    ]
    return f"{head}, fits: step {shown_seconds(row.found.step_s)}, peaks {', '.join(peaks)}"
