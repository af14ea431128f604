"""Spatial sharing: the device serves and trains at once, by launches of their own."""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.contract.plan import Slice
from engine.contract.policy import Scheduling, Traits, traits_of
from engine.contract.view import View
from policies.sharing.coserve import beside_windows, first_with_work
from policies.sharing.temporal import next_turn
from policies.sharing.time_shared import side_of


@dataclass(frozen=True)
class Spatial:
    """FlexLLM's spatial sharing: each step serves, and takes a whole sample forward or back.

    The memory policy has both run on compute lanes of their own (`CoMemory` with `lanes=2`). A step
    is over when both are, so a sample takes two steps, and a token of a request as long as one of
    them: in FlexLLM's cells 5,495 tokens/s at 329 ms are 3,616 tokens in two steps.

    Limited spatial sharing is no rule of its own: it is `CoServe`, with its budget of tokens and
    layers, on two lanes (flexflow-serve, `SPATIAL_SHARING`).

    Args:
        serving: scheduling of the requests.
    """

    serving: Scheduling

    @property
    def traits(self) -> Traits:
        """What is told of serving, and a sample beside it."""
        return replace(beside_windows(traits_of(self.serving), 0), whole_samples=True)

    def batch(self, view: View) -> tuple[Slice, ...]:
        serves = tuple(self.serving.batch(side_of(view, trains=False)))
        job = first_with_work(view)
        return serves if job is None else (*serves, *next_turn(job, view))
