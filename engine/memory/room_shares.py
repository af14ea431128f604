"""What each share of the room of a plan has written, and the bytes that it has taken."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from itertools import compress
from typing import Any, Protocol

from engine.contract.plan import Share
from engine.contract.regions import Place, Pool
from engine.contract.view import KeptPages


class RoomShare(Protocol):
    """A share of the room: a builder that writes into another one's plan."""

    @property
    def around(self) -> tuple[RoomShare, ...]:
        """The share itself, and those that it was made within."""

    @property
    def share_bytes(self) -> Mapping[Pool, int]:
        """Bytes that it may take of each pool that is named."""

    @property
    def gives_way(self) -> Collection[Place]:
        """Places that may be freed for it."""

    @property
    def page_nbytes(self) -> int:
        """Bytes of a page of KV."""


def count_kept(
    share: RoomShare, op: object, pages: KeptPages | None, room_bytes: dict[Pool, int]
) -> None:
    """Adds to the room before an operation what it takes of places that give way to a share.

    A job that starts on their pages has these stay, and what the share was promised is less.
    """
    if pages is not None and isinstance(op, Share) and share.gives_way:
        more = pages.idle(op.pages, share.gives_way) - pages.idle(op.pages)
        room_bytes[op.place.pool] += more * share.page_nbytes


Parts = tuple[list[Any], ...]  # operations, restarts, refusals and new layouts of a plan
Writers = tuple[list["RoomShare | None"], ...]  # of each of these; None: of no share


class RoomShares:
    """Which share wrote each part of a plan, and the bytes that each share of the room has taken.

    Args:
        writers: of each operation, restart, refusal and new layout that is signed.
    """

    def __init__(self, writers: Writers) -> None:
        self._writers = writers
        self.taken_bytes = Counter[tuple[RoomShare, Pool]]()

    def sign(self, writer: RoomShare | None, parts: Parts) -> None:
        """Signs all that is not signed yet."""
        for part, writers in zip(parts, self._writers, strict=True):
            if count := len(part) - len(writers):
                writers.extend([writer] * count)

    def charge(
        self, writer: RoomShare, before: Mapping[Pool, int], after: Mapping[Pool, int]
    ) -> None:
        """Counts a change of room for a share and for those that it was made within."""
        for pool, nbytes in before.items():
            if taken := nbytes - after[pool]:
                for share in writer.around:
                    self.taken_bytes[share, pool] += taken

    def excess_bytes(self, writer: RoomShare) -> int:
        """By how much a share, or one that it was made within, is taken beyond its bytes."""
        over = [
            self.taken_bytes[share, pool] - nbytes
            for share in writer.around
            for pool, nbytes in share.share_bytes.items()
        ]
        return max(over, default=0)

    def forget(self, at: int) -> None:
        """The operation with this index is taken out."""
        del self._writers[0][at]

    def has_written(self, share: RoomShare) -> bool:
        """Whether a part of the plan is of a share, or of one within."""
        return any([w is not None and share in w.around for part in self._writers for w in part])

    def without(self, share: RoomShare, parts: Parts) -> tuple[Parts, Writers]:
        """The parts of a plan and their writers without those of a share."""
        stays = [[w is None or share not in w.around for w in part] for part in self._writers]
        kept = tuple([[*compress(*given)] for given in zip(parts, stays, strict=True)])
        left = tuple([[*compress(*given)] for given in zip(self._writers, stays, strict=True)])
        return kept, left
