"""The dry run of a plan, which books nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from engine.contract.adapter_check import is_publication
from engine.contract.plan import (
    Collective,
    Compute,
    Copy,
    Free,
    Grow,
    Op,
    Plan,
    Share,
)
from engine.contract.records import is_adoption
from engine.contract.regions import Kind, Place, Pool, Shortage, Tier, told
from engine.contract.rules import ContractError, Rule
from engine.contract.view import KeptPages

UNKNOWN = -1  # bytes of a place that was not looked at yet
NO_PAGES: Mapping[Pool, KeptPages] = MappingProxyType({})


class DryRun:
    """What pools and places would hold while a plan is applied, operation by operation.

    The ledger uses it to check a plan, the plan builder to write one. Neither is changed.

    Args:
        room_bytes: free and coming bytes of each pool.
        held_bytes: bytes of each place that is held.
        page_runs: dry runs on pages, for pools where jobs share them.
        page_nbytes: bytes of a KV page.
    """

    def __init__(
        self,
        room_bytes: Mapping[Pool, int],
        held_bytes: Mapping[Place, int],
        page_runs: Mapping[Pool, KeptPages] = NO_PAGES,
        page_nbytes: int = 0,
    ) -> None:
        self.room_bytes = dict(room_bytes)
        self._page_runs, self._page_nbytes = page_runs, page_nbytes
        self._held = held_bytes
        self._unentered: Sequence[Grow] = ()  # growth that `_known` lacks yet
        self._known = dict[Place, int | None]()  # places that were looked at; None: not held

    def held(self, place: Place) -> int | None:
        """Bytes at a place, None where nothing is."""
        if self._unentered:
            self._catch_up()
        found = self._known.get(place, UNKNOWN)
        if found == UNKNOWN:
            found = self._known[place] = self._held.get(place)
        return found

    def grow(self, place: Place, nbytes: int) -> None:
        """Takes bytes. Raises Shortage and changes nothing where they are not there."""
        _, tier, device = place
        pool = (tier, device)
        left = self.room_bytes[pool] - nbytes
        if left < 0:
            raise Shortage(place, -left)
        self.room_bytes[pool] = left
        before = self._known.get(place, UNKNOWN)
        if before == UNKNOWN:
            before = self._held.get(place)
        self._known[place] = (before or 0) + nbytes  # the unentered may be added behind
        if self._page_runs and (pages := self._page_runs.get(pool)):
            if place.region.kind is Kind.KV:
                pages.take(place, nbytes // self._page_nbytes)
            else:
                pages.lend(left)

    def grow_held(self, pool: Pool, grows: Sequence[Grow], nbytes: int) -> None:
        """Takes `nbytes` in all for held places of a pool; the caller has seen that they fit.

        The bytes of each place are added when a place is looked at: most plans look at none.
        """
        if self._page_runs:
            for op in grows:
                self.grow(op.place, op.nbytes)
            return
        if self._unentered:
            self._catch_up()
        self.room_bytes[pool] -= nbytes
        self._unentered = grows

    def _catch_up(self) -> None:
        grows, self._unentered = self._unentered, ()
        for place, nbytes in grows:
            before = self._known.get(place, UNKNOWN)
            if before == UNKNOWN:
                before = self._held.get(place)
            self._known[place] = (before or 0) + nbytes

    def share(self, op: Share) -> None:
        """Starts a place on pages; pages without a holder take room. Shortage as in `grow`."""
        place, pages = op.place, self._page_run(op.place)
        if pages is None:
            raise ContractError(
                Rule.SHARE, f"pages for {told(place)}: the policy has no prefix caching"
            )
        if self.held(place) is not None:
            raise ContractError(Rule.SHARE, f"pages for {told(place)}, which holds some")
        left = self.room_bytes[place.pool] - pages.idle(op.pages) * self._page_nbytes
        if left < 0:
            raise Shortage(place, -left)
        pages.share(place, op.pages)
        self.room_bytes[place.pool] = left
        self._known[place] = len(op.pages) * self._page_nbytes

    def free(self, place: Place) -> None:
        """Gives a place back."""
        nbytes = self.held(place)
        if nbytes is None:
            raise ContractError(Rule.HELD, f"free of {told(place)}, which is not held")
        pages = self._page_runs.get(place.pool) if self._page_runs else None
        is_kv = place.region.kind is Kind.KV
        if pages is not None and is_kv:
            nbytes = pages.free(place) * self._page_nbytes
        self.room_bytes[place.pool] += nbytes
        self._known[place] = None
        if pages is not None and not is_kv:
            pages.lend(self.room_bytes[place.pool])

    def copy(self, op: Copy) -> None:
        """Books a new destination. An existing one must have the size of the source."""
        nbytes = self.held(op.src)
        if nbytes is None:
            raise ContractError(Rule.HELD, f"copy of {told(op.src)}, which is not held")
        there = self.held(op.dst)
        is_same = op.src.region == op.dst.region or is_publication(op) or is_adoption(op)
        if there not in (None, nbytes) or not is_same:
            raise ContractError(Rule.COPY, f"copy of {nbytes} bytes onto {there} at {told(op.dst)}")
        if there is None:
            self.grow(op.dst, nbytes)

    def compute(self, op: Compute, lead: int = 0) -> None:
        """Checks that all places of a launch are held, and lie where it runs.

        The first `lead` places that it writes are known to be.
        """
        tier, device = (Tier.HOST, 0) if op.on == "cpu" else (Tier.GPU, op.device)
        held, known = self._held, self._known
        for place in (*op.reads, *op.writes[lead:]):
            nbytes = known.get(place, UNKNOWN)
            is_held = place in held if nbytes == UNKNOWN else nbytes is not None
            if not is_held:
                raise ContractError(Rule.HELD, f"launch touches {told(place)}, which is not held")
            if place[1] is not tier or (tier is Tier.GPU and place[2] != device):
                raise ContractError(Rule.TIER, f"launch on {op.lane} touches {told(place)}")
        for place in op.after:
            if self.held(place) is None:
                raise ContractError(Rule.HELD, f"launch waits for {told(place)}, which is not held")

    def collective(self, op: Collective) -> None:
        """Checks that all places of an exchange are held, and lie on its device."""
        for place in (*op.reads, *op.writes):
            if self.held(place) is None:
                raise ContractError(
                    Rule.HELD, f"{op.pattern} touches {told(place)}, which is not held"
                )
            if place.pool != (Tier.GPU, op.device):
                raise ContractError(Rule.TIER, f"{op.pattern} on {op.lane} touches {told(place)}")

    def _page_run(self, place: Place) -> KeptPages | None:
        return self._page_runs.get(place.pool) if place.region.kind is Kind.KV else None

    def apply(self, op: Op | Grow | Share | Free, lead: int = 0) -> None:
        """One operation of a plan, in order."""
        if isinstance(op, Free):
            self.free(op.place)
        elif isinstance(op, Grow):
            is_kv = op.place.region.kind is Kind.KV
            is_whole = op.nbytes >= 0 and not (is_kv and op.nbytes % self._page_nbytes)
            if not is_whole:
                what = f"{told(op.place)} takes {op.nbytes} bytes: below zero, or no whole pages"
                raise ContractError(Rule.BYTES, what)
            self.grow(op.place, op.nbytes)
        elif isinstance(op, Compute):
            self.compute(op, lead)
        elif isinstance(op, Copy):
            self.copy(op)
        elif isinstance(op, Collective):
            self.collective(op)
        else:
            assert isinstance(op, Share)
            self.share(op)

    def run(self, plan: Plan, lead: int = 0) -> None:
        """The whole plan. Raises Shortage where it does not fit. For `lead` see `compute`."""
        for op in plan.ops:
            self.apply(op, lead)
