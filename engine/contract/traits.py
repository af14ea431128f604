"""Traits: what a policy, or a half of one, promises about its answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any, Literal

from engine.contract.regions import Tier
from engine.contract.rules import at_caller
from engine.contract.view import ServiceWeights

KV_GROWTH = ("asked", "page", "reserved")


@dataclass(frozen=True, slots=True)
class Traits:
    """Promises of a policy, or of a half of one, about its answers.

    The defaults promise nothing: the engine then asks whenever an answer may differ from the last.
    A promise that does not hold breaks law 15: results would depend on how often the engine asks.

    Attributes:
        repeats: Of a scheduling: the next batch is this one's decodes in their order, then the
            prompt that the budget has cut, until a job arrives, ends, is admitted or finds room.
        appends: Of a scheduling: a prompt takes all that decodes and prompts before it, by
            admission and arrival, leave of `step_tokens`; complete, it decodes behind them.
        step_tokens: Of a scheduling: the most tokens of requests in a batch; 0: no bound.
        prompt_tokens: Of a scheduling: the most tokens of a batch with several prompts; a single
            prompt may be longer. 0 where there is no bound.
        max_jobs: Of a scheduling: the most requests in service; 0 where there is no bound. By
            these three a run sets memory aside for its largest step.
        trains_only: Of a scheduling: the batch never holds a request.
        whole_samples: Of a scheduling: a launch may take a finetuning sample whole, however many
            tokens that are.
        service: Of a scheduling: what tokens add to `View.service`; None: nothing is counted.
        kv_growth: Of a memory policy: how the KV of running jobs grows: by a `page` when the last
            one is full, never within a job's `reserved` tokens, or as `asked` at each plan. The
            first two also promise that free pages, less `spare_pages`, are all that decides which
            slices fit: a job that finds no room finds none until memory comes back. A policy that
            admits by anything else is `asked`.
        spare_pages: Of a memory policy: free pages without which a decode does not run. They are
            part of the promise `kv_growth`.
        reserved_tokens: Of a memory policy: tokens that a job's reservation holds, with `reserved`.
        swaps: Of a memory policy: a preempted job's KV may come back from the host.
        prefix_caching: Of a memory policy: full pages are kept, and jobs start on those that fit.
        states_in: Of a memory policy: tiers in which states of training may lie for good.
        reuses_gradients: Of a memory policy: gradients of training take the place of their weights.
        adapters: Of a memory policy: the adapters of a launch are brought to its device.
        two_lanes: Of a memory policy: finetuning computes on a lane beside that of serving.
        recurs: Of both: the policy reads no times, durations and numbers of plans. Of steps,
            microbatches and stamps it reads only which are equal and which come first. So a
            training step that begins like the step before is planned like it.

    Raises:
        ValueError: a trait has a value that it may not have.
    """

    repeats: bool = False
    appends: bool = False
    step_tokens: int = 0
    prompt_tokens: int = 0
    max_jobs: int = 0
    trains_only: bool = False
    whole_samples: bool = False
    service: ServiceWeights | None = None
    kv_growth: Literal["asked", "page", "reserved"] = "asked"
    spare_pages: int = 0
    reserved_tokens: int = 0
    swaps: bool = False
    prefix_caching: bool = False
    states_in: tuple[Tier, ...] = tuple(Tier)
    reuses_gradients: bool = False
    adapters: bool = False
    two_lanes: bool = False
    recurs: bool = False

    def __post_init__(self) -> None:
        values = tuple([getattr(self, name) for name in Traits.__slots__])
        try:
            told = _refused(values, tuple(map(type, (*values, *self.states_in))))
        except TypeError:  # a value that has no hash, or no members
            told = _refused.__wrapped__(values, ())
        if told:
            raise ValueError(at_caller(told))
        if self.kv_growth == "reserved" and not self.reserved_tokens:
            told = 'Traits(kv_growth="reserved"): reserved_tokens must be 1 or more, the tokens '
            raise ValueError(at_caller(f"{told}that each job's KV holds"))

    def with_memory(self, memory: Traits) -> Traits:
        """The traits of a scheduling together with a memory policy.

        Args:
            memory: the traits of the memory policy; these are the scheduling's.

        Returns:
            Each half's own promises; `recurs` where both promise it.
        """
        return replace(
            memory,
            repeats=self.repeats,
            appends=self.appends,
            step_tokens=self.step_tokens,
            prompt_tokens=self.prompt_tokens,
            max_jobs=self.max_jobs,
            trains_only=self.trains_only,
            whole_samples=self.whole_samples,
            service=self.service,
            recurs=self.recurs and memory.recurs,
        )

    def __str__(self) -> str:
        """The promises that differ from the defaults, for `tandem list`."""
        promises = list[str]()
        for field in fields(self):
            value = getattr(self, field.name)
            if value != field.default:
                named = "+".join(map(str, value)) if isinstance(value, tuple) else str(value)
                promises.append(field.name if value is True else f"{field.name}={named}")
        return ", ".join(promises)


@lru_cache(maxsize=256)  # a run looks at the traits of its policies many times
def _refused(values: tuple[object, ...], types: tuple[type, ...]) -> str:
    """What a trait may not be, in words; "" where all values may be.

    `types` are part of the key: True equals 1, and a Tier its text.
    """
    for field, value in zip(fields(Traits), values, strict=True):
        allowed, is_allowed = _allowed(field.name, field.default)
        if not is_allowed(value):
            return f"Traits({field.name}={value!r}): it must be {allowed}"
    return ""


def _allowed(name: str, default: object) -> tuple[str, Callable[[Any], bool]]:
    """What a trait may be, in words and as a test. True is no whole number here."""
    if name == "kv_growth":
        growths = " or ".join(f'"{growth}"' for growth in KV_GROWTH)
        return growths, lambda value: isinstance(value, str) and value in KV_GROWTH
    if isinstance(default, tuple):
        tiers = ", ".join(f"Tier.{tier.name}" for tier in Tier)
        return f"a tuple of {tiers}", lambda v: isinstance(v, tuple) and {*map(type, v)} <= {Tier}
    if isinstance(default, bool):
        return "True or False", lambda value: isinstance(value, bool)
    if default is None:
        return "a ServiceWeights or None", lambda v: isinstance(v, ServiceWeights | None)
    return "a whole number, 0 or more", lambda value: type(value) is int and value >= 0
