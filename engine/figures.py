"""What a pool holds at one moment."""

from __future__ import annotations

from typing import NamedTuple

from engine.plan import Pool


class Figures(NamedTuple):
    """Predicted by the ledger; in the order of the columns of MEMORY. Coming is what is freed and
    still used by an operation, free what nobody holds or uses: a View's free bytes may be fewer,
    since bytes come back in the order of issue."""

    pool: Pool
    capacity_bytes: int
    free_bytes: int
    coming_bytes: int
    kind_bytes: tuple[int, ...]  # in the order of Kind, KV first
    kv_pages: int

    def less(self, nbytes: int, pages: int) -> Figures:
        """The same before these bytes of KV were taken."""
        kv, *others = self.kind_bytes
        return self._replace(
            free_bytes=self.free_bytes + nbytes,
            kind_bytes=(kv - nbytes, *others),
            kv_pages=self.kv_pages - pages,
        )
