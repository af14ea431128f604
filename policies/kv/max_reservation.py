"""Contiguous KV for the longest possible sequence, taken when a job starts."""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.contract.plan import Compute, Plan, Slice
from engine.contract.view import View
from policies.kv.paged_allocation import Seating


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
                "own; take memory=paged_restart or leave it out"
            )
        if self.max_tokens < 1:
            raise ValueError(f"reservation: max_tokens is {self.max_tokens}, must be at least 1")

    def fit(self, batch: tuple[Slice, ...], view: View) -> Plan:
        reserved = view.page.bytes_for(self.max_tokens)
        never = 1 + max(view.capacity_bytes.values())

        def demand(piece: Slice) -> int:
            return reserved if piece.job.known_tokens <= self.max_tokens else never

        alone = replace(view, decodes=None)  # no job takes a page when its pages are full
        return Seating(batch, alone, demand).plan()

    def stretch(self, plan: Plan, view: View, count: int) -> Plan:
        """See Memory: nothing grows after the first step; ends where a job outgrows its place."""
        launch = plan.ops[-1]
        assert isinstance(launch, Compute)
        longest = max(piece.job.known_tokens for piece in launch.slices)
        return replace(plan, repeats=min(count, self.max_tokens - longest + 1))
