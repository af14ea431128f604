"""A closed loop of clients: each sends its next request when it has its answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from traces.request import Request
from traces.think import Think, with_think


@dataclass(frozen=True, kw_only=True)
class Clients:
    """At most `clients` requests are under way at once: the load of a fixed concurrency.

    Requests are dealt out in order, as to a row of people. Unlike vLLM's `--max-concurrency` a
    client never takes over what another one was dealt, so towards the end fewer are busy.
    """

    clients: int = 8
    think_s: float = 0.0

    def __post_init__(self) -> None:
        if self.clients < 1:
            raise ValueError(f"arrival.clients={self.clients}: it must be at least 1")

    def seated(self, requests: Sequence[Request]) -> list[Request]:
        """The same requests, each a turn of its client. ValueError for turns of other sessions."""
        if any(request.session is not None for request in requests):
            raise ValueError(
                "arrival: the trace has sessions, a closed loop already; take arrival=all_at_once"
            )
        dealt = [
            replace(r, arrival_ns=0, session=i % self.clients, turn=i // self.clients)
            for i, r in enumerate(requests)
        ]
        return with_think(dealt, Think(mean_s=self.think_s))
