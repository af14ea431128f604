r"""A sharing policy from outside the project: it finetunes only while no request waits.

tandem run --config-dir examples/when_none_waits/conf policy=coserve scheduling=when_none_waits \
    training=finetune training.sequence_tokens=256 training.data.mean_tokens=128 limit=20
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.contract.plan import Slice
from engine.contract.policy import Scheduling, Traits, traits_of
from engine.contract.view import View
from policies.sharing.coserve import beside_windows, first_with_work
from policies.sharing.temporal import next_turn
from policies.sharing.time_shared import side_of


@dataclass(frozen=True)
class WhenNoneWaits:
    """A step serves; where no request waits, a window or one layer back joins it."""

    serving: Scheduling
    window_tokens: int = 128

    @property
    def traits(self) -> Traits:
        serving = traits_of(self.serving)
        return beside_windows(serving, serving.step_tokens + self.window_tokens)

    def batch(self, view: View) -> tuple[Slice, ...]:
        requests = side_of(view, trains=False)
        serves = tuple(self.serving.batch(requests))
        job = first_with_work(view)
        if job is None or requests.waiting:
            return serves
        return (*serves, *next_turn(job, view, self.window_tokens, backward_layers=1))
