"""Profiles a model that trains, unit by unit: times, bytes and peaks of each unit alone.

A unit has weights only while it is measured, so a model may be many times as large as the device
(Yang et al., ProTrain, section 3.2: tensors on demand, dropped and made again). Weights are random
numbers of the usual size: zeros and denormal numbers would change the time of a product.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from models.spec import ModelSpec
from models.training.shape import STATE_BYTES, TrainingShape
from runtime.measure.tracker import StorageTracker, storage_bytes
from runtime.training.optimizer import Optimizer
from runtime.training.trainer import build_trainee
from runtime.training.units import Units
from traces.serving.request import TrainingJob

SPREAD = 0.02  # of random weights
REPEATS = 3  # of each measurement
LINK_BYTES = 64 << 20  # of a copy that measures a link


class UnitProfile(NamedTuple):
    """What one unit takes for one microbatch; times are medians.

    Attributes:
        unit: Its number: 0 embeds, the last one is head and loss.
        forward_ns: A forward that keeps what its backward needs.
        light_ns: A forward that keeps nothing.
        backward_ns: The backward; 0 where nothing trains in this unit or below.
        update_ns: The optimizer's update of its parameters on the device.
        host_update_ns: The update on the host.
        weight_bytes: Of its parameters.
        saved_bytes: What its forward keeps beside input, output and parameters.
        forward_bytes: Peak of a forward that keeps, beside input, output, kept and parameters.
        light_bytes: Peak of a forward that keeps nothing, beside input, output and parameters.
        backward_bytes: Peak of a backward, beside input, kept, parameters and the gradients of
            output and input.
        between_bytes: Of `saved_bytes`, what is made between leaf modules (sums, products,
            attention, the loss): hooks on modules do not see it.
        peak_bytes: All that the measurement held on the device, parameters and inputs included.
    """

    unit: int
    forward_ns: int
    light_ns: int
    backward_ns: int
    update_ns: int
    host_update_ns: int
    weight_bytes: int
    saved_bytes: int
    forward_bytes: int
    light_bytes: int
    backward_bytes: int
    between_bytes: int
    peak_bytes: int


class LinkRates(NamedTuple):
    """How fast the link between host and device is.

    Attributes:
        to_device_bytes_per_s: Alone.
        to_host_bytes_per_s: Alone.
        both_ways_bytes_per_s: Of each direction while the other one is busy; the slower one's.
    """

    to_device_bytes_per_s: float
    to_host_bytes_per_s: float
    both_ways_bytes_per_s: float


class _Times(NamedTuple):
    """Of each repeat, in nanoseconds: see UnitProfile."""

    forward: list[int]
    light: list[int]
    backward: list[int]
    update: list[int]
    host_update: list[int]


class ModuleTracker(StorageTracker):
    """Counts the storages that forwards of leaf modules make: what hooks on modules see."""

    def __init__(self) -> None:
        super().__init__()
        self._depth = 0
        self._hooks: list[Any] = []

    def __enter__(self) -> ModuleTracker:
        self._hooks = [
            register_module_forward_pre_hook(lambda module, _: self._moved(module, 1)),
            register_module_forward_hook(lambda module, *_: self._moved(module, -1)),
        ]
        super().__enter__()  # type: ignore[no-untyped-call]  # torch gives it no types
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # as above
        for hook in self._hooks:
            hook.remove()

    def has(self, tensor: Tensor) -> bool:
        """Whether a leaf module has made a tensor's storage."""
        return tensor.untyped_storage()._cdata in self._known

    def _moved(self, module: nn.Module, by: int) -> None:
        if not any(True for _ in module.children()):
            self._depth += by

    def _add(self, storage: UntypedStorage) -> None:
        if self._depth:
            super()._add(storage)


class UnitProfiler:
    """Measures the units of one model on one device, one after the other."""

    def __init__(
        self,
        spec: ModelSpec,
        job: TrainingJob,
        device: str = "cpu",
        clock: Callable[[], int] = time.thread_time_ns,
    ) -> None:
        """
        Args:
            spec: The model, in the dtype of the recipe.
            job: Its microbatch and recipe.
            device: Where units run: "cpu", or "cuda" and a number.
            clock: Nanoseconds on a CPU; a GPU is timed by its own events.
        """
        self._job, self._device, self._clock = job, torch.device(device), clock
        with torch.device("meta"):
            model = build_trainee(spec, job.recipe)
        body = (model.get_base_model() if hasattr(model, "get_base_model") else model).base_model
        if (rotary := getattr(body, "rotary_emb", None)) is not None:
            body.rotary_emb = type(rotary)(body.config).to(self._device)
        self._units = Units(model)
        rows = (job.sequences, job.sequence_tokens)
        self._ids = torch.randint(spec.vocab_size, rows, device=self._device)
        self._dtype: torch.dtype = getattr(torch, job.recipe.dtype)
        self._optimizer = Optimizer(job.recipe, num_steps=1)

    @property
    def num_units(self) -> int:
        """Embedding, layers and head."""
        return self._units.num_units

    def measure(self, unit: int, repeats: int = REPEATS) -> UnitProfile:
        """Measures a unit; its weights are gone afterwards.

        Args:
            unit: Its number.
            repeats: Measurements of which the median counts; one more warms up.

        Returns:
            Its times, bytes and peaks.
        """
        times = _Times([], [], [], [], [])
        if unit:  # positions and angles belong to no layer
            self._units.constants(self._hidden(unit), self._ids)
        with StorageTracker() as held:
            sizes = self._sizes(unit)
            self._update(unit, self._device, [])
        for _ in range(repeats):
            self._run_once(unit, times)
            self._update(unit, self._device, times.update)
            self._update(unit, torch.device("cpu"), times.host_update)
        forward, light, backward, update, host_update = [_median(ns) for ns in times]
        medians = (forward, light, backward, update, host_update)
        return UnitProfile(unit, *medians, *sizes, held.peak_bytes)

    # ---- tensors on demand
    def _modules(self, unit: int) -> list[nn.Module]:
        """All modules of a unit, each once."""
        parts = [part for module in self._units.modules(unit) for part in module.modules()]
        return [*dict.fromkeys(parts)]

    @contextmanager
    def _weights(self, unit: int) -> Iterator[Sequence[nn.Parameter]]:
        """The unit's parameters, which have memory meanwhile."""
        owners = [
            (module, name, parameter)
            for module in self._modules(unit)
            for name, parameter in module._parameters.items()
            if parameter is not None
        ]
        own = [self._made(name, parameter) for _, name, parameter in owners]
        for (module, name, _), parameter in zip(owners, own, strict=True):
            module._parameters[name] = parameter
        try:
            yield own
        finally:
            for module, name, parameter in owners:
                module._parameters[name] = parameter

    def _made(self, name: str, like: nn.Parameter) -> nn.Parameter:
        made = torch.empty(like.shape, dtype=like.dtype, device=self._device)
        is_norm = like.dim() == 1 and name == "weight"
        made = made.fill_(1.0) if is_norm else made.normal_(std=SPREAD)
        return nn.Parameter(made, requires_grad=like.requires_grad)

    def _hidden(self, unit: int) -> Tensor | None:
        """A random input of the unit; the embedding has none."""
        if not unit:
            return None
        shape = (*self._ids.shape, self._units.hidden_size)
        made = torch.empty(shape, dtype=self._dtype, device=self._device).normal_()
        return made.requires_grad_(unit > self._units.first)

    def _output_gradient(self, unit: int, out: Tensor) -> Tensor | None:
        """A random gradient of the output; a loss needs none."""
        return None if unit == self.num_units - 1 else torch.empty_like(out).normal_()

    def _forward(self, unit: int, hidden: Tensor | None) -> Tensor:
        out = self._units.run(unit, hidden, self._ids)
        if not unit:
            self._units.forget_constants()  # the embedding makes positions, as a model's own does
        return out / self._job.microbatches if unit == self.num_units - 1 else out

    def _records(self, unit: int) -> bool:
        return unit >= self._units.first

    # ---- bytes
    def _sizes(self, unit: int) -> tuple[int, int, int, int, int, int]:
        """Bytes of weights; of what is kept; workspace of a forward, of one that keeps nothing, of
        a backward; of what is kept between modules."""
        with self._weights(unit) as own:
            hidden = self._hidden(unit)
            with StorageTracker() as tracker, torch.no_grad():
                out = self._forward(unit, hidden)
            out_bytes = storage_bytes([out])
            light_bytes = tracker.peak_bytes - out_bytes
            gradient = self._output_gradient(unit, out)
            del out
            grad = torch.set_grad_enabled(self._records(unit))
            with ModuleTracker() as seen, StorageTracker() as tracker, grad:
                out = self._forward(unit, hidden)
                saved_bytes = tracker.live_bytes - out_bytes
                forward_bytes = tracker.peak_bytes - tracker.live_bytes
                between_bytes = saved_bytes - seen.live_bytes + seen.has(out) * out_bytes
                backward_bytes = 0
                if self._records(unit):
                    passed = _passed_down(hidden)
                    booked_bytes = tracker.live_bytes + storage_bytes(passed)
                    tracker.peak_bytes = tracker.live_bytes
                    torch.autograd.grad(out, [*_trained(own), *passed], gradient)
                    backward_bytes = max(0, tracker.peak_bytes - booked_bytes)
            peaks = (forward_bytes, light_bytes, backward_bytes)
            return storage_bytes(own), saved_bytes, *peaks, between_bytes

    # ---- times
    def _run_once(self, unit: int, times: _Times) -> None:
        with self._weights(unit) as own:
            hidden = self._hidden(unit)
            with torch.no_grad(), self._timed(times.light):
                out = self._forward(unit, hidden)
            gradient = self._output_gradient(unit, out)
            del out
            with torch.set_grad_enabled(self._records(unit)), self._timed(times.forward):
                out = self._forward(unit, hidden)
            if self._records(unit):
                with self._timed(times.backward):
                    torch.autograd.grad(out, [*_trained(own), *_passed_down(hidden)], gradient)

    def _update(self, unit: int, device: torch.device, all_ns: list[int]) -> None:
        """Updates all that trains, parameter by parameter: one has states at a time."""
        modules, parts_ns = self._modules(unit), list[int]()
        own = [p for module in modules for p in module._parameters.values() if p is not None]
        for parameter in _trained(own):
            self._update_one(parameter, device, parts_ns)
        if parts_ns:
            all_ns.append(sum(parts_ns))

    def _update_one(self, like: Tensor, device: torch.device, parts_ns: list[int]) -> None:
        def full(dtype: torch.dtype) -> Tensor:
            return torch.full((like.numel(),), SPREAD, dtype=dtype, device=device)

        states = [[full(torch.float32)] for _ in range(self._optimizer.num_sections)]
        weights, gradients = [full(like.dtype)], [full(like.dtype)]
        with torch.no_grad(), self._timed(parts_ns, device):
            self._optimizer.update(0, weights, gradients, states, None)

    @contextmanager
    def _timed(self, all_ns: list[int], device: torch.device | None = None) -> Iterator[None]:
        """Appends the time of a block."""
        if (device or self._device).type != "cuda":
            begin_ns = self._clock()
            yield
            all_ns.append(self._clock() - begin_ns)
            return
        begin, end = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        begin.record()
        yield
        end.record()
        end.synchronize()
        all_ns.append(round(begin.elapsed_time(end) * 1e6))


def _median(times_ns: Sequence[int]) -> int:
    return round(statistics.median(times_ns)) if times_ns else 0


def _trained(own: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    return [parameter for parameter in own if parameter.requires_grad]


def _passed_down(hidden: Tensor | None) -> list[Tensor]:
    """The input of a unit, where the unit below needs its gradient."""
    return [hidden] if hidden is not None and hidden.requires_grad else []


def needed_bytes(shape: TrainingShape, unit: int) -> int:
    """What the measurement of a unit holds on a device, at most.

    Args:
        shape: Of the model that trains.
        unit: The unit.

    Returns:
        Bytes of its weights, of input, output and the gradients of both, of what it keeps, and of
        the largest workspace; or of the largest parameter's update, where that is more.
    """
    own, last = shape.units[unit], len(shape.units) - 1
    parameters = [shape.parameters[p] for p in own.parameters]
    weights = sum([p.elements for p in parameters]) * shape.item_bytes
    out = shape.units[unit + 1].input_bytes if unit < last else 2 * shape.item_bytes
    work = max(own.forward_bytes, own.light_bytes, own.backward_bytes)
    most = max([p.elements for p in parameters if p.trains], default=0)
    widened = 0 if shape.item_bytes == STATE_BYTES else STATE_BYTES  # gradients, in float32
    each = 2 * shape.item_bytes + shape.optimizer_item_bytes + widened
    update = most * each + STATE_BYTES  # and the number of the step
    return max(weights + 2 * own.input_bytes + 2 * out + own.saved_bytes + work, update)


def missed_share(profiles: Sequence[UnitProfile], shape: TrainingShape) -> float:
    """Of the activations at the peak of a step in which all units keep, what hooks do not see.

    Hooks on modules see what modules make; ProTrain (section 3.2) measures between them, too, and
    says that hooks alone miss 17 % of the peak.

    Args:
        profiles: Of all units.
        shape: Of the model.

    Returns:
        The share of what is kept between modules in inputs and kept bytes of all units.
    """
    inputs = sum([unit.input_bytes for unit in shape.units])
    kept = sum([profile.saved_bytes for profile in profiles])
    between = sum([profile.between_bytes for profile in profiles])
    return between / max(1, inputs + kept)


def differing_units(profiles: Sequence[UnitProfile], shape: TrainingShape) -> list[int]:
    """The units whose measured bytes are not those that plans count with.

    Args:
        profiles: Of all units.
        shape: Of the model.

    Returns:
        Their numbers; none on a CPU.
    """
    names = ("saved_bytes", "forward_bytes", "light_bytes", "backward_bytes")
    return [
        measured.unit
        for measured, counted in zip(profiles, shape.units, strict=True)
        if any([getattr(measured, name) != getattr(counted, name) for name in names])
    ]


def link_rates(device: str, nbytes: int = LINK_BYTES) -> LinkRates:
    """Measures the link of a GPU with pinned memory: each way alone, then both at once.

    Args:
        device: "cuda" and a number.
        nbytes: Of a copy.

    Returns:
        The rates, of the fastest of five copies each.
    """
    own = torch.device(device)
    sides = [torch.empty(nbytes, dtype=torch.uint8, device=own) for _ in range(2)]
    hosts = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    pairs = ((sides[0], hosts[0]), (hosts[1], sides[1]))  # (to, from)
    streams = [torch.cuda.Stream(own) for _ in pairs]

    def seconds(chosen: Sequence[int]) -> float:
        events = []
        for i in chosen:
            with torch.cuda.stream(streams[i]):
                begin, end = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
                begin.record()
                pairs[i][0].copy_(pairs[i][1], non_blocking=True)
                end.record()
            events.append((begin, end))
        torch.cuda.synchronize(own)
        longest_ms: float = max([begin.elapsed_time(end) for begin, end in events])
        return longest_ms / 1e3

    fastest = [min([seconds(chosen) for _ in range(5)]) for chosen in ((0,), (1,), (0, 1))]
    return LinkRates(*[nbytes / took_s for took_s in fastest])
