"""Contiguous KV for the longest possible sequence, reserved when a job starts."""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.contract.plan import Slice
from engine.contract.policy import PlanBuilder, Traits
from engine.contract.rules import Remedy, SettingsConflict
from engine.contract.view import View
from policies.kv.paged_allocation import PagedAllocation


@dataclass(frozen=True)
class MaxReservation:
    """Each job holds `max_tokens` of KV from its first slice on (Orca's "Max" in vLLM, SOSP'23,
    section 6.2).

    No job is preempted. A job that outgrows its reservation is refused. Plans use coming bytes. No
    launch waits for a copy, because this policy makes none.

    Args:
        max_tokens: tokens of a reservation.
        prefix_caching: must be false; the name is there so that a user who sets it is told why.

    Raises:
        SettingsConflict: `prefix_caching` is set.
        ValueError: `max_tokens` is below 1.
    """

    max_tokens: int = 2048
    prefix_caching: bool = False

    def __post_init__(self) -> None:
        if self.prefix_caching:
            raise SettingsConflict(
                "reservation: prefix_caching shares pages, but a reservation is one stretch of its "
                "own",
                (Remedy.PAGED_MEMORY, Remedy.NO_PREFIX_CACHING),
            )
        if self.max_tokens < 1:
            raise ValueError(f"reservation: max_tokens is {self.max_tokens}, must be at least 1")

    @property
    def traits(self) -> Traits:
        """KV grows at the first slice of a job alone, until the job outgrows its reservation."""
        return Traits(kv_growth="reserved", reserved_tokens=self.max_tokens)

    def fit(self, batch: tuple[Slice, ...], view: View, plan: PlanBuilder) -> None:
        reserved = view.page.bytes_for(self.max_tokens)
        never = 1 + max(view.capacity_bytes.values())

        def demand(piece: Slice) -> int:
            return reserved if piece.job.known_tokens <= self.max_tokens else never

        alone = replace(view, running=None)  # running decodes would take pages one by one
        PagedAllocation(batch, alone, plan, demand).write()
