"""Cost models with other durations: scaled by ratios, or with slower copies to the host."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np

from engine.contract.executor import Launch
from engine.contract.plan import Collective, Compute, Copy
from engine.contract.regions import Tier
from sim.cost.contract import LaunchCost
from sim.cost.launch_shape import forward_shape

HOST = "host"  # the time of the host before a plan


class LaunchSize(NamedTuple):
    """What the ratio of a launch depends on beside its group.

    slices   of a serving launch; else 0
    load     tokens that a serving launch computes, bytes that a copy or a collective moves; else 0
    context  sum of the tokens in KV before a serving launch; else 0
    """

    slices: float = 0.0
    load: float = 0.0
    context: float = 0.0


@dataclass(frozen=True)
class DurationRatio:
    """Duration of a group of operations from a size on: ratio x predicted + added.

    group     prefill, decode, mixed, other; a copy's lane, such as gpu->host; a work of training,
              such as backward; a collective's pattern; or host
    ratio     factor on the predicted duration
    slices_from, load_from, context_from   the least size, see `LaunchSize`
    added_ns  what is added, where the prediction has no time at all
    """

    group: str
    ratio: float = 1.0
    slices_from: float = 0.0
    load_from: float = 0.0
    context_from: float = 0.0
    added_ns: float = 0.0

    def __post_init__(self) -> None:
        for name in ("ratio", "added_ns"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name}={getattr(self, name)}: it must be finite and at least 0")

    @property
    def from_size(self) -> LaunchSize:
        """The least size that it is for."""
        return LaunchSize(self.slices_from, self.load_from, self.context_from)


def kind_of(launch: Launch) -> tuple[str, LaunchSize]:
    """Group and size of a launch, as `DurationRatio` has them.

    Args:
        launch: any launch.

    Returns:
        The group's name, and the size (of training none: one ratio a work).
    """
    op = launch.op
    if isinstance(op, Copy):
        return op.lane[1], LaunchSize(load=launch.nbytes)
    if isinstance(op, Collective):
        return op.pattern.value, LaunchSize(load=launch.nbytes)
    if (work := _work(op)) is not None:
        return work, LaunchSize()
    tokens, contexts, _ = forward_shape(launch)
    decodes = sum([n == 1 and context > 0 for n, context in zip(tokens, contexts, strict=True)])
    computed = sum(tokens)
    group = "decode" if decodes else "other"
    if computed > decodes:
        group = "mixed" if decodes else "prefill"
    return group, LaunchSize(len(tokens), computed, sum(contexts))


def _work(op: Compute) -> str | None:
    """The work of a training launch; None where its first slice serves."""
    if op.slices[0].job.training is None:
        return None
    works = {"serve" if s.job.training is None else s.work.value for s in op.slices}
    if len(works) != 1:
        return "mixed"
    return "again" if op.again else works.pop()


class ScaledCost:
    """A cost model whose durations are scaled; all its other answers pass through."""

    def __init__(self, cost: LaunchCost, ratios: Sequence[DurationRatio]) -> None:
        """A cost with other durations.

        Args:
            cost: the cost model.
            ratios: factors. A launch takes one of its group: those of the most slices that it
                reaches, of these those of the greatest load, of these that of the greatest context;
                the first ones where it reaches none. Without its group the price stays.
        """
        self._cost = cost
        self._groups: dict[str, list[DurationRatio]] = {}
        for ratio in sorted(ratios, key=lambda ratio: (ratio.group, ratio.from_size)):
            self._groups.setdefault(ratio.group, []).append(ratio)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cost, name)

    @property
    def form(self) -> str:
        """The form of the cost model, and that it is scaled."""
        return f"{self._cost.form}, scaled"

    def _by_context(self, group: str, size: LaunchSize) -> list[DurationRatio]:
        """The ratios of a size by context; empty for a group without ratios."""
        found = self._groups.get(group, [])
        for part in (0, 1):
            at = bisect_right(found, size[part], key=lambda ratio: ratio.from_size[part]) - 1
            reached = found[max(0, at)].from_size[part] if found else 0.0
            found = [ratio for ratio in found if ratio.from_size[part] == reached]
        return found

    def _scaled(self, group: str, size: LaunchSize, ns: int) -> int:
        found = self._by_context(group, size)
        if not found:
            return ns
        at = bisect_right(found, size.context, key=lambda ratio: ratio.context_from) - 1
        ratio = found[max(0, at)]
        return round(ratio.ratio * ns + ratio.added_ns)

    def compute_ns(self, launch: Launch) -> int:
        """Scaled duration of a compute launch. See LaunchCost."""
        return self._scaled(*kind_of(launch), self._cost.compute_ns(launch))

    def copy_ns(self, launch: Launch, contended: bool = False) -> int:
        """Scaled duration of a copy. See LaunchCost."""
        return self._scaled(*kind_of(launch), self._cost.copy_ns(launch, contended))

    def collective_ns(self, launch: Launch) -> int:
        """Scaled duration of a collective. See LaunchCost."""
        return self._scaled(*kind_of(launch), self._cost.collective_ns(launch))

    def host_ns(self, launches: Sequence[Launch]) -> int:
        """Scaled host time of a plan. See LaunchCost."""
        return self._scaled(HOST, LaunchSize(), self._cost.host_ns(launches))

    def repeat_ns(self, launch: Launch, count: int) -> Any:
        """Scaled durations of a repeated launch, whose context grows with each. See LaunchCost."""
        durations = self._cost.repeat_ns(launch, count)
        if durations is None:
            return None
        group, size = kind_of(launch)
        found = self._by_context(group, size)
        if not found:
            return durations
        contexts = size.context + size.load * np.arange(count)
        at = np.searchsorted([r.context_from for r in found], contexts, side="right") - 1
        factors = np.array([(r.ratio, r.added_ns) for r in found])[np.maximum(0, at)]
        scaled = factors[:, 0] * np.asarray(durations) + factors[:, 1]
        return np.rint(scaled).astype(np.int64)


def scaled(cost: LaunchCost, ratios: Sequence[DurationRatio]) -> LaunchCost:
    """A cost with durations scaled by ratios.

    Args:
        cost: the cost model.
        ratios: factors by group and size; without any the cost itself is returned.

    Returns:
        The cost.
    """
    return cast(LaunchCost, ScaledCost(cost, ratios)) if ratios else cost


class SlowerCopies:
    """Another cost model with slower copies to the host; all other prices pass through.

    Where a step is bound by the link, units of equal size are fetched and sent in equal time. A
    tie then decides whether the place of the last unit is free when the next one arrives. A
    prediction that moves with slightly slower copies hangs on such a tie.
    """

    def __init__(self, cost: Any, share: float) -> None:
        """A slower copy of a cost model.

        Args:
            cost: a sim.cost.contract.LaunchCost.
            share: extra time of a copy to the host; 0.03 is 3 %.
        """
        self._cost, self._share = cost, share

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cost, name)

    def copy_ns(self, launch: Launch, contended: bool = False) -> int:
        """Duration of a copy, longer where it goes to the host.

        Args:
            launch: a Copy with its `nbytes`.
            contended: the other direction of the link is busy.

        Returns:
            Nanoseconds on the copy's lane.

        Raises:
            ValueError: the cost has no copies in that direction.
        """
        alone_ns: int = self._cost.copy_ns(launch, contended)
        is_out = isinstance(launch.op, Copy) and launch.op.dst.tier is Tier.HOST
        return alone_ns + int(self._share * alone_ns) if is_out else alone_ns
