"""The seam of every cost model: prices of launches, asked by launch or by shape."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt

from engine.contract.executor import Launch, ServedLaunches
from engine.contract.plan import HOST_LANE, Collective, Compute, Copy, Pattern, Slice
from engine.contract.regions import Tier, Work
from models.spec import ModelSpec
from sim.cost.adapters import AdapterRows, adapters_in, recorded_in
from sim.cost.launch_shape import (
    compute_of,
    context_in,
    finetunes,
    forward_shape,
    prompts_of,
    served_part,
    shifted,
    training_slices,
)
from sim.cost.training_launch import Trained, loss_workspace, workspace_of
from sim.cost.training_operators import Prices
from sim.cost.windows import WindowShape, window_of

_TAKE_ROOFLINE = (
    "take the device's roofline (profile=null) or a profile that was calibrated with training"
)
FEW = 4  # steps that are priced one by one faster than together


class LaunchCost(Protocol):
    """Predicted durations of launches, in integer nanoseconds, as SimExecutor asks for them.

    `form` is "table" or "roofline" and goes into results. A body is a default.
    """

    @property
    @abstractmethod
    def form(self) -> str:
        """The kind of the cost, in one word for results."""

    @property
    @abstractmethod
    def provenance(self) -> str:
        """Source of the numbers, in one line for results."""

    @property
    def serves(self) -> bool:
        """Whether there are prices for what is served."""
        return True

    @property
    def extrapolated(self) -> Mapping[str, int]:
        """Look-ups outside what was measured, by table; empty is good."""
        return {}

    @property
    def host_bandwidth_bytes_per_s(self) -> float | None:
        """Rate of the host's memory, which concurrent launches share; None: without a limit."""
        return None

    @property
    def copy_share(self) -> float:
        """Of its rate, what a copy to or from the host keeps beside a collective of its device."""
        return 1.0

    def host_traffic(self, launch: Launch) -> int:
        """Traffic of a launch in the host's memory: bytes that it reads and writes there."""
        return 0

    def repeat_ns(self, launch: Launch, count: int) -> Any:
        """Durations of a serving launch that is repeated.

        Args:
            launch: the first launch. Each later one finds the tokens of all earlier ones in KV.
            count: number of launches.

        Returns:
            `count` durations in nanoseconds: a list, or an int64 array. None where durations are
            not known beforehand: a cost that draws noise must not draw it twice.

        Raises:
            ValueError: the cost was not made for serving.
        """
        return None

    @abstractmethod
    def compute_ns(self, launch: Launch) -> int:
        """Duration of a compute launch.

        Args:
            launch: a Compute with its pieces (new tokens, tokens in KV, sampled rows).

        Returns:
            Nanoseconds on the launch's lane.

        Raises:
            ValueError: the cost has no price for work of this kind.
        """

    @abstractmethod
    def copy_ns(self, launch: Launch, contended: bool = False) -> int:
        """Duration of a copy.

        Args:
            launch: a Copy with its `nbytes`.
            contended: the other direction of the link is busy.

        Returns:
            Nanoseconds on the copy's lane.

        Raises:
            ValueError: the cost has no copies in that direction.
        """

    def collective_ns(self, launch: Launch) -> int:
        """Duration of a collective of the device's group.

        Args:
            launch: a Collective with its `nbytes`, the whole tensor's.

        Returns:
            Nanoseconds on the collective's lane.

        Raises:
            ValueError: the cost knows no groups, as here, or the device no link to its peers.
        """
        raise ValueError(f"{self.provenance} knows no groups of devices; set group.devices=1")

    @abstractmethod
    def host_ns(self, launches: Sequence[Launch]) -> int:
        """Host time of one plan: deciding and preparing it.

        Args:
            launches: all launches of the plan.

        Returns:
            Nanoseconds before the first launch is issued.
        """

    @abstractmethod
    def peak_bytes(self, launch: Launch) -> int | None:
        """Workspace at the peak of a launch.

        Args:
            launch: any launch.

        Returns:
            Bytes; None where they are unknown.
        """

    def served_peaks(self, launches: ServedLaunches) -> npt.NDArray[np.int64] | None:
        """`peak_bytes` of many launches that only serve; None: each is to be asked for by itself.

        Args:
            launches: their shapes.

        Returns:
            Bytes of each.
        """
        return None


class ShapeCost(Protocol):
    """Predicted durations by shape, as a table of steps records shapes."""

    def shape_ns(self, tokens: Sequence[int], contexts: Sequence[int], samples: int) -> int:
        """Duration of one serving launch.

        Args:
            tokens: new tokens per slice.
            contexts: tokens in KV per slice, before the launch.
            samples: rows of the head.

        Returns:
            Nanoseconds.

        Raises:
            ValueError: the cost was not made for serving.
        """

    def trained_ns(self, trained: Trained) -> int:
        """Duration of one unit's training work, or of the update of one chunk.

        Args:
            trained: the shape of the work.

        Returns:
            Nanoseconds.

        Raises:
            ValueError: the cost has no price for such work.
        """

    def extra_ns(self, window: WindowShape) -> int:
        """What a window forward costs beyond serving its tokens.

        Args:
            window: a window of a sample, forward.

        Returns:
            Nanoseconds.

        Raises:
            ValueError: the cost has no price for finetuning.
        """

    def back_ns(self, window: WindowShape) -> int:
        """Duration of a window back.

        Args:
            window: a window of a sample, back.

        Returns:
            Nanoseconds.

        Raises:
            ValueError: the cost has no price for finetuning.
        """

    def through_ns(self, rows: AdapterRows) -> int:
        """What the rows of one version of an adapter add to a launch.

        Args:
            rows: the shape of these rows.

        Returns:
            Nanoseconds.

        Raises:
            ValueError: the cost has no price for adapters.
        """

    def transfer_ns(self, direction: str, nbytes: int, contended: bool = False) -> int:
        """Duration of one copy.

        Args:
            direction: name of the copy lane, such as gpu->host.
            nbytes: bytes moved.
            contended: the other direction of the link is busy.

        Returns:
            Nanoseconds.

        Raises:
            ValueError: the cost has no copies in that direction.
        """

    def exchange_ns(self, pattern: Pattern, nbytes: int) -> int:
        """Duration of one collective of the device's group.

        Args:
            pattern: all-gather, reduce-scatter or all-reduce.
            nbytes: bytes of the whole tensor.

        Returns:
            Nanoseconds.

        Raises:
            ValueError: the cost knows no groups, or the device no link to its peers.
        """

    def plan_ns(self, items: int, prompts: int = 0) -> int:
        """Host time of one plan.

        Args:
            items: slices and copies of the plan.
            prompts: slices of several tokens among them.

        Returns:
            Nanoseconds.
        """


class ShapePriced(LaunchCost):
    """Makes a LaunchCost of a ShapeCost: reads the shape of each launch and prices that."""

    model: ModelSpec

    @property
    def page_tokens(self) -> int:
        """Tokens in a page of KV, on which workspace depends."""
        return 16

    def compute_ns(self: _Shapes, launch: Launch) -> int:
        """Duration of a launch: the sum of its training slices, then its serving slices as one.

        A window forward and the slices that it goes with are one launch, which reads weights once.

        Args:
            launch: a Compute with its pieces.

        Returns:
            Nanoseconds on the launch's lane.

        Raises:
            ValueError: the cost has no price for work of this kind.
        """
        training = training_slices(launch)
        if not training:
            ns = self.served_ns(launch)
            return ns + self.adapters_ns(launch) if compute_of(launch).reads else ns
        op = compute_of(launch)
        if finetunes(training) and training[0].work is not Work.UPDATE:
            return self.windows_ns(launch, training)
        ns = sum([self.prices.ns(op, piece) for piece in training]) + self.adapters_ns(launch)
        return ns + (0 if len(training) == len(op.slices) else self.served_ns(served_part(launch)))

    def windows_ns(self: _Shapes, launch: Launch, training: Sequence[Slice]) -> int:
        """Duration of windows, with what is served beside them.

        Args:
            launch: a Compute with its pieces.
            training: its finetuning slices, all of them forward or all back.

        Returns:
            Nanoseconds on the launch's lane.

        Raises:
            ValueError: the cost has no price for finetuning.
        """
        windows = [window_of(own, context_in(launch, own), self.model) for own in training]
        if training[0].work is Work.BACKWARD:
            return sum([self.back_ns(window) for window in windows])
        ns = self.forward_ns(launch, sum([window.labels for window in windows]))
        return ns + sum([self.extra_ns(w) for w in windows]) + self.adapters_ns(launch)

    def forward_ns(self: _Shapes, launch: Launch, labels: int) -> int:
        """Duration of serving a launch whose windows are more prompt slices.

        Args:
            launch: a Compute with its pieces.
            labels: of its windows forward, which are rows of the head.

        Returns:
            Nanoseconds.
        """
        tokens, contexts, samples = forward_shape(launch)
        return self.shape_ns(tokens, contexts, samples + labels)

    def extra_ns(self, window: WindowShape) -> int:
        """No price by default. See ShapeCost.

        Raises:
            ValueError: always, here.
        """
        raise ValueError(f"{self.provenance} has no finetuning; {_TAKE_ROOFLINE}")

    def back_ns(self, window: WindowShape) -> int:
        """No price by default. See ShapeCost.

        Raises:
            ValueError: always, here.
        """
        raise ValueError(f"{self.provenance} has no finetuning; {_TAKE_ROOFLINE}")

    def adapters_ns(self: _Shapes, launch: Launch) -> int:
        """What adapters of requests add to a launch: each version by its rows, and records.

        Args:
            launch: a Compute with its pieces.

        Returns:
            Nanoseconds; 0 where no job has an adapter.

        Raises:
            ValueError: the cost has no price for adapters.
        """
        recorded = sum([self.extra_ns(window) for window in recorded_in(launch, self.model)])
        return recorded + sum([self.through_ns(rows) for rows in adapters_in(launch, self.model)])

    def through_ns(self, rows: AdapterRows) -> int:
        """No price by default: ValueError. See ShapeCost."""
        raise ValueError(
            f"{self.provenance} has no adapters of requests; take profile=null, or calibrate"
        )

    def served_ns(self: _Shapes, launch: Launch) -> int:
        """Duration of a launch that only serves.

        Args:
            launch: a Compute without training slices.

        Returns:
            Nanoseconds.

        Raises:
            ValueError: the cost was not made for serving.
        """
        return self.shape_ns(*forward_shape(launch))

    def trained_ns(self, trained: Trained) -> int:
        """No price by default.

        Args:
            trained: the shape of one unit's training work, or of one chunk's update.

        Returns:
            Nanoseconds, where a cost with training overrides this method.

        Raises:
            ValueError: always, here.
        """
        raise ValueError(f"{self.provenance} has no training; {_TAKE_ROOFLINE}")

    @cached_property
    def prices(self) -> Prices:
        """Remembered prices of training slices."""
        return Prices(self.model, cast(ShapeCost, self).trained_ns)

    def repeat_ns(self, launch: Launch, count: int) -> Any:
        """Durations of a launch that is repeated, by shape. See LaunchCost.repeat_ns."""
        tokens, contexts, samples = forward_shape(launch)
        price = cast(ShapeCost, self).shape_ns
        return [price(tokens, shifted(tokens, contexts, i), samples) for i in range(count)]

    def copy_ns(self: _Shapes, launch: Launch, contended: bool = False) -> int:
        """See LaunchCost: by lane and bytes."""
        return self.transfer_ns(launch.op.lane[1], launch.nbytes, contended)

    def collective_ns(self, launch: Launch) -> int:
        """See LaunchCost: by pattern and bytes."""
        op = launch.op
        assert isinstance(op, Collective)
        return self.exchange_ns(op.pattern, launch.nbytes)

    def exchange_ns(self, pattern: Pattern, nbytes: int) -> int:
        """No price by default.

        Args:
            pattern: all-gather, reduce-scatter or all-reduce.
            nbytes: bytes of the whole tensor.

        Returns:
            Nanoseconds, where a cost with groups overrides this method.

        Raises:
            ValueError: always, here.
        """
        raise ValueError(
            f"{self.provenance} knows no groups; take the device's roofline "
            "(profile=null), or group.devices=1"
        )

    def host_traffic(self, launch: Launch) -> int:
        """Bytes of a copy from or to the host, or of a launch on the host's lane; else 0."""
        op = launch.op
        if isinstance(op, Copy):
            return launch.nbytes if Tier.HOST in (op.src.tier, op.dst.tier) else 0
        if isinstance(op, Collective) or op.on != HOST_LANE:
            return 0
        return sum([self.prices.moved_bytes(op, s) for s in op.slices])

    def host_ns(self: _Shapes, launches: Sequence[Launch]) -> int:
        """Host time of a plan by its slices, copies and prompts.

        Args:
            launches: all launches of the plan.

        Returns:
            Nanoseconds before the first launch is issued.
        """
        items = sum([len(launch.pieces) or 1 for launch in launches])
        return self.plan_ns(items, sum([prompts_of(launch) for launch in launches]))

    def peak_bytes(self: _Shapes, launch: Launch) -> int | None:
        """Workspace of a launch. See LaunchCost.peak_bytes.

        Serving slices take the model's formula, training slices what their layout says.

        Returns:
            Bytes; None for copies and collectives, and for training without a layout.
        """
        if not isinstance(launch.op, Compute):
            return None
        op, training = launch.op, training_slices(launch)
        if finetunes(training) and training[0].work is Work.FORWARD:
            tokens, contexts, samples = forward_shape(launch)
            at = op.slices.index(training[0])
            window = window_of(training[0], contexts[at], self.model)
            layers = self.model.workspace_bytes(tokens, contexts, samples, self.page_tokens)
            return max(layers, loss_workspace(training[0], window.labels))
        nbytes = [workspace_of(op, piece, self.page_tokens) for piece in training]
        if not training or len(training) < len(op.slices):
            shape = forward_shape(served_part(launch) if training else launch)
            nbytes.append(self.model.workspace_bytes(*shape, self.page_tokens))
        known = [n for n in nbytes if n is not None]
        return sum(known) if len(known) == len(nbytes) else None

    def served_peaks(self: _Shapes, launches: ServedLaunches) -> npt.NDArray[np.int64] | None:
        """`peak_bytes` of many launches that only serve, by the model's formula.

        None where a subclass has a formula of its own.
        """
        if cast(Any, type(self)).peak_bytes is not ShapePriced.peak_bytes:
            return None
        tokens, contexts, starts, samples = launches
        return self.model.workspaces_bytes(tokens, contexts, starts, samples, self.page_tokens)


class _Shapes(ShapeCost, Protocol):
    model: ModelSpec

    @property
    def page_tokens(self) -> int: ...

    @property
    def prices(self) -> Prices: ...

    def served_ns(self, launch: Launch) -> int: ...

    def windows_ns(self, launch: Launch, training: Sequence[Slice]) -> int: ...

    def forward_ns(self, launch: Launch, labels: int) -> int: ...

    def adapters_ns(self, launch: Launch) -> int: ...
