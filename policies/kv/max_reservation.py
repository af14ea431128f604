"""Contiguous KV for the longest possible sequence, taken when a job starts."""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.contract.plan import Slice
from engine.contract.policy import PlanBuilder, Traits
from engine.contract.view import View
from policies.kv.paged_allocation import PagedAllocation


@dataclass(frozen=True)
class MaxReservation:
    """Each job holds `max_tokens` of KV from its first slice on (Orca's "Max", vLLM section 6.2).

    Nothing is ever preempted; a job that outgrows its reservation is refused. Takes bytes that are
    coming, but never waits for a copy, since it makes none.
    """

    max_tokens: int = 2048
    prefix_caching: bool = False

    def __post_init__(self) -> None:
        if self.prefix_caching:
            raise ValueError(
                "reservation: prefix_caching shares pages, but a reservation is one stretch of its "
                "own; take a paged memory policy or leave it out"
            )
        if self.max_tokens < 1:
            raise ValueError(f"reservation: max_tokens is {self.max_tokens}, must be at least 1")

    @property
    def traits(self) -> Traits:
        """No KV grows behind a job's first slice, until it outgrows its reservation."""
        return Traits(kv_growth="reserved", reserved_tokens=self.max_tokens)

    def fit(self, batch: tuple[Slice, ...], view: View, plan: PlanBuilder) -> None:
        reserved = view.page.bytes_for(self.max_tokens)
        never = 1 + max(view.capacity_bytes.values())

        def demand(piece: Slice) -> int:
            return reserved if piece.job.known_tokens <= self.max_tokens else never

        alone = replace(view, running=None)  # no job takes a page when its pages are full
        PagedAllocation(batch, alone, plan, demand).write()
