"""The search of ProTrain: all configurations, of which only those that could be best are timed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import nsmallest
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from policies.planners.blocks import Configuration
from policies.planners.step_memory import NEVER, Ints
from policies.planners.step_model import StepModel

AT_ONCE = 4096  # configurations that are timed together


class TimedConfiguration(NamedTuple):
    """A configuration with what the model of a step says of it.

    Attributes:
        knobs: the configuration.
        step_ns: of a step in the middle of training.
        peak_bytes: of the device, the least with which it runs.
        host_bytes: of the host.
    """

    knobs: Configuration
    step_ns: int
    peak_bytes: int
    host_bytes: int


class Search(NamedTuple):
    """The result of a search.

    Attributes:
        found: the fastest configurations that fit, the best one first.
        lacks: where none fits, what the one that lacks least lacks.
        num_fitting: how many fit.
        num_all: how many there are.
    """

    found: tuple[TimedConfiguration, ...]
    lacks: TierBytes
    num_fitting: int
    num_all: int


class TierBytes(NamedTuple):
    """Bytes of the device and of the host.

    Attributes:
        device_bytes: of the device.
        host_bytes: of the host.
    """

    device_bytes: int
    host_bytes: int


UNPRICED = (
    "chunks that do not persist are updated on the host, whose memory has no known rate: set "
    "device.host_bandwidth_bytes_per_s"
)


@dataclass(frozen=True)
class Space:
    """All configurations that the knobs allow: placements times pairs of persistent and buffers.

    Args:
        model: of a step.
        persistent: numbers of chunks that persist, to choose from.
        buffers: numbers of buffers to choose from.
        updates_on_host: whether the host can update: else all that trains persists.
    """

    model: StepModel
    persistent: Sequence[int]
    buffers: Sequence[int]
    updates_on_host: bool = True

    def pairs(self) -> tuple[Ints, Ints]:
        """Persistent chunks and buffers: as many buffers as there are other chunks at the most."""
        count = len(self.model.blocks.chunks)
        found = list[tuple[int, int]]()
        for p in self.persistent:
            if p < count and not self.updates_on_host and self._trains():
                continue
            most = count - p
            own = sorted({min(b, most) for b in self.buffers if b or not most})
            found += [(p, b) for b in own]
        if not found:
            raise ValueError(f"protrain: {UNPRICED}, or leave out planner.persistent")
        persistent, buffers = (np.array([pair[i] for pair in found], np.int64) for i in (0, 1))
        return persistent, buffers

    def _trains(self) -> bool:
        layout = self.model.quotes.layout
        return any([layout.chunks[c].trains for c in self.model.blocks.chunks])

    def timed(self, persistent: Ints, buffers: Ints, placement: Ints) -> list[TimedConfiguration]:
        """Times configurations.

        Args:
            persistent: chunks that persist.
            buffers: other chunks on the device.
            placement: indices into the placements of the model.

        Returns:
            One per element of the arguments.
        """
        model, found = self.model, list[TimedConfiguration]()
        times = model.step_ns(persistent, buffers, placement)
        peaks = model.peak_bytes(persistent, buffers, placement)
        hosts = model.host_states_bytes(persistent) + model.host_activation_bytes[placement]
        rows = zip(persistent, buffers, placement, times, peaks, hosts, strict=True)
        for p, b, at, ns, peak, host in rows:
            knobs = Configuration(int(p), int(b), *model.placements.pairs[int(at)])
            found.append(TimedConfiguration(knobs, int(ns), int(peak), int(host)))
        return found

    def everything(self) -> list[TimedConfiguration]:
        """Times every configuration: the surface over all knobs.

        Returns:
            The best one first, see `rank`.

        Raises:
            ValueError: the host cannot update what does not persist.
        """
        persistent, buffers = self.pairs()
        count = len(self.model.placements.pairs)
        placement, pair = np.divmod(np.arange(count * len(persistent)), len(persistent))
        return sorted(self.timed(persistent[pair], buffers[pair], placement), key=rank)

    def lanes(self, knobs: Configuration) -> dict[str, int]:
        """What each lane does in a step of a configuration, at the least.

        Args:
            knobs: one of the configurations.

        Returns:
            Nanoseconds by the name of the lane.
        """
        at = self.model.placements.pairs.index((knobs.swaps, knobs.checkpoints))
        one = np.array([knobs.persistent], np.int64), np.array([knobs.buffers], np.int64)
        return {name: int(ns[at, 0]) for name, ns in self.model.lanes_ns(*one).items()}

    def search(self, room: TierBytes, count: int = 1) -> Search:
        """The fastest configurations that fit; of equally fast ones the first in `rank`.

        Args:
            room: what there is.
            count: how many.

        Returns:
            These, the best one first, and what the configuration that lacks least lacks.
        """
        persistent, buffers = self.pairs()
        model = self.model
        hosts = model.host_states_bytes(persistent)
        lacks = model.all_peak_bytes(persistent, buffers) - room.device_bytes
        away = model.host_activation_bytes[:, None] + hosts[None, :] - room.host_bytes
        fits = (lacks <= 0) & (away <= 0)
        if not fits.any():
            return Search((), _smallest_deficit(lacks, away), 0, fits.size)
        bounds = np.where(fits, model.bounds_ns(persistent, buffers), NEVER)
        found = self._fastest(bounds, persistent, buffers, count)
        return Search(tuple(found), TierBytes(0, 0), int(fits.sum()), fits.size)

    def _fastest(
        self, bounds: Ints, persistent: Ints, buffers: Ints, count: int
    ) -> list[TimedConfiguration]:
        """Times configurations by rising lower bound, until no other could be faster."""
        flat, best = bounds.ravel(), list[TimedConfiguration]()
        left = np.flatnonzero(flat < NEVER)
        while len(left):
            if len(left) > AT_ONCE:
                order = np.argpartition(flat[left], AT_ONCE)
                now, left = left[order[:AT_ONCE]], left[order[AT_ONCE:]]
            else:
                now, left = left, left[:0]
            placement, pair = np.divmod(now, bounds.shape[1])
            best += self.timed(persistent[pair], buffers[pair], placement)
            best = nsmallest(count, best, key=rank)
            if len(best) == count:
                left = left[flat[left] <= best[-1].step_ns]
        return best


def rank(one: TimedConfiguration) -> tuple[int, ...]:
    """A total order: the faster, then the smaller, then the one that moves and repeats less.

    Args:
        one: a configuration.

    Returns:
        What the first has the least of.
    """
    knobs = one.knobs
    return (one.step_ns, one.peak_bytes, knobs.swaps, knobs.checkpoints, knobs.buffers,
            knobs.persistent)  # fmt: skip


def _smallest_deficit(lacks: npt.NDArray[np.int64], away: npt.NDArray[np.int64]) -> TierBytes:
    """What the configuration lacks that lacks least: on the device, or where that does, there."""
    total = np.maximum(lacks, 0) + np.maximum(away, 0)
    at = np.unravel_index(int(total.argmin()), total.shape)
    return TierBytes(max(0, int(lacks[at])), max(0, int(away[at])))
