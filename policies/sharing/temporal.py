"""Temporal sharing: the device serves for some steps, and then trains for some."""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.contract.job import Job
from engine.contract.plan import Slice
from engine.contract.policy import Scheduling, Traits, traits_of
from engine.contract.records import forward_ahead
from engine.contract.regions import Work
from engine.contract.view import View
from policies.sharing.coserve import beside_windows, due_update, first_with_work, units_back
from policies.sharing.time_shared import side_of

TURNS = 2  # steps that train in a round: one forward, one back


@dataclass(frozen=True)
class Temporal:
    """FlexLLM's temporal sharing: after some steps that serve, two steps train and serve nothing.

    The first of these takes the sample forward whole, the second takes it back through all layers.
    A step trains, too, where nothing is there to serve, and serves where training finds no room.
    Three modes of flexflow-serve are settings of this rule: fixed (`every` alone), dynamic
    (`busy_every` as well), and limited (windows and layers as for co-serving, in steps that serve
    nothing).

    Args:
        serving: scheduling of the requests.
        every: steps in a round that serve, before two that train.
        busy_every: as `every`, while more requests wait than `queue`; None: always `every`.
        queue: waiting requests that are not too many.
        window_tokens: tokens of a window forward; None: the whole sample.
        backward_layers: layers that a step takes a backward down; None: all.

    Raises:
        ValueError: a number is below 1, or `queue` below 0.
    """

    serving: Scheduling
    every: int = 64
    busy_every: int | None = None
    queue: int = 0
    window_tokens: int | None = None
    backward_layers: int | None = None

    def __post_init__(self) -> None:
        for name in ("every", "busy_every", "window_tokens", "backward_layers"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"temporal sharing: {name} is {value}, must be at least 1")
        if self.queue < 0:
            raise ValueError(f"temporal sharing: queue is {self.queue}, must not be below 0")

    @property
    def traits(self) -> Traits:
        """What is told of serving, with the tokens of a window that goes forward by itself."""
        found = beside_windows(traits_of(self.serving), self.window_tokens or 0)
        return replace(found, whole_samples=self.window_tokens is None)

    def batch(self, view: View) -> tuple[Slice, ...]:
        job = first_with_work(view)
        serves = tuple(self.serving.batch(side_of(view, trains=False)))
        if job is None or (serves and not self._trains_now(view)):
            return serves
        turn = next_turn(job, view, self.window_tokens, self.backward_layers)
        return (*turn, *serves)  # serves where training finds no room

    def _trains_now(self, view: View) -> bool:
        """Whether it is the turn of training."""
        waiting = sum([job.training is None for job in view.waiting])
        is_busy = self.busy_every is not None and waiting > self.queue
        every = self.busy_every if is_busy and self.busy_every is not None else self.every
        return view.issued % (every + TURNS) >= every


def next_turn(
    job: Job,
    view: View,
    window_tokens: int | None = None,
    backward_layers: int | None = None,
) -> tuple[Slice, ...]:
    """What a job does when it is its turn: the update that is due, and a pass over its sample.

    Args:
        job: the finetuning job that goes on.
        view: what the policy was shown.
        window_tokens: tokens of a window forward; None: the whole sample.
        backward_layers: layers that a pass back goes down; None: all.

    Returns:
        Slices of the job, at most one of them forward or back.
    """
    training = job.training
    assert training is not None
    update, microbatch = due_update(job, view)
    if microbatch is None or not training.is_released(microbatch):
        return update
    total, units = training.spec.tokens_of(microbatch), training.spec.num_units
    ahead, is_behind = forward_ahead(training, microbatch)
    if ahead:
        tokens = min(ahead, window_tokens or ahead)
        window = Slice(job, tokens, Work.FORWARD, range(units), microbatch, record=is_behind)
        return (*update, window)
    back = units_back(training, microbatch, backward_layers or units)
    return (*update, Slice(job, total, Work.BACKWARD, back, microbatch))
