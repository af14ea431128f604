"""The cost model that needs no profile: each kernel at the lower of two roofs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from engine.contract.executor import Contexts, Launch, Pieces
from engine.contract.plan import HOST_LANE, Pattern
from models.operators import Operator, decode_of, operators, prefill_operator
from models.spec import ModelSpec
from sim.cost.adapters import AdapterRows, adapter_operators
from sim.cost.contract import FEW, ShapePriced
from sim.cost.launch_shape import forward_shape, sizes
from sim.cost.training_launch import Trained
from sim.cost.training_operators import training_operators
from sim.cost.windows import WindowShape, backward_operators, extra_operators
from sim.devices.device import Device, share, shares
from sim.devices.group import ALONE, Group, exchange_ns

Floats: TypeAlias = npt.NDArray[np.float64]
BLOCK = 256  # contexts whose decodes are priced at once, when the first of them is met


class ServingMix(NamedTuple):
    """What the price of a serving launch depends on.

    tokens    new tokens of all slices
    samples   rows of the head
    prompts   new tokens and tokens in KV of each slice that is no decode
    decodes   slices of one token behind a context
    past      sum of their contexts
    contexts  the contexts one by one, of all decodes where each has kernels of its own
    """

    tokens: int
    samples: int
    prompts: list[tuple[int, int]]
    decodes: int
    past: int
    contexts: list[int]


class Dense(NamedTuple):
    """Kernels around those of attention: their sum before, the terms behind, and their number."""

    before_ns: float
    behind_ns: tuple[float, ...]
    kernels: int


class Priced(NamedTuple):
    """Durations that are known, in ns.

    decodes  by block of contexts, of a decode with kernels of its own
    dense    by tokens of a launch
    heads    by rows of the head
    windows  by window of a finetuning job
    through  by rows of an adapter
    """

    decodes: dict[int, Floats]
    dense: dict[int, Dense]
    heads: dict[int, float]
    windows: dict[WindowShape, int]
    through: dict[AdapterRows, int]


@dataclass(frozen=True)
class Roofline(ShapePriced):
    """Sum over kernels of max(flops / reached rate, bytes / reached bandwidth) + overhead.

    A launch never ends before the host has issued all its kernels. The roofline model is Williams
    et al., CACM 2009; the kernels of a launch are those of models.operators and
    sim.cost.training_operators.

    device       rates and overheads, as conf/device states them
    model        the model that is served or trained
    page_tokens  tokens in a page of KV
    group        the devices that collectives run over
    """

    device: Device
    model: ModelSpec
    page_tokens: int = 16
    group: Group = ALONE
    form: str = field(default="roofline", init=False)
    _priced: Priced = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        is_own = type(self) is Roofline  # a subclass may price by other rules
        priced = priced_on(self.device, self.model) if is_own else Priced({}, {}, {}, {}, {})
        object.__setattr__(self, "_priced", priced)

    @property
    def provenance(self) -> str:
        """Device and model; conf/device names the sources of the rates."""
        return f"roofline of {self.device.name} for {self.model.name}, rates in conf/device"

    @property
    def host_bandwidth_bytes_per_s(self) -> float | None:
        """Rate of the host's memory, which copies and updates there share; None: unlimited."""
        return self.device.host_bandwidth_bytes_per_s

    @property
    def copy_share(self) -> float:
        """See LaunchCost."""
        return self.device.copy_share

    def split_ns(
        self, tokens: Sequence[int], contexts: Sequence[int], samples: int
    ) -> dict[str, float]:
        """Times of a serving launch by kind of operator.

        Args:
            tokens: new tokens per slice.
            contexts: tokens in KV per slice.
            samples: rows of the head.

        Returns:
            Nanoseconds by kind, overheads included, the dispatch floor not.
        """
        totals: dict[str, float] = {}
        for op in self._operators(tokens, contexts, samples):
            totals[op.kind] = totals.get(op.kind, 0.0) + op.repeats * self.kernel_ns(op)
        return totals

    def shape_ns(self, tokens: Sequence[int], contexts: Sequence[int], samples: int) -> int:
        """Duration of one serving launch by its operators.

        Args:
            tokens: new tokens per slice.
            contexts: tokens in KV per slice, before the launch.
            samples: rows of the head.

        Returns:
            Nanoseconds.

        Raises:
            ValueError: the device has no rate for the model's dtype.
        """
        prompts, contexts = _split(tokens, contexts)
        mix = ServingMix(sum(tokens), samples, prompts, len(contexts), sum(contexts), contexts)
        return self._mix_ns(mix, 0)

    def served_ns(self, launch: Launch) -> int:
        """See ShapePriced.served_ns: fused decodes enter by their sums alone."""
        if self._is_own:
            return self._mix_ns(self._mix(launch), 0)
        return self.shape_ns(*forward_shape(launch))

    def repeat_ns(self, launch: Launch, count: int) -> Any:
        """See ShapePriced.repeat_ns: only attention is priced anew at each step.

        Kernels are added in the order of `operators`, so durations are equal to the bit.
        """
        if not self._is_own:
            return super().repeat_ns(launch, count)
        mix = self._mix(launch)
        if count > 1 and any([n == 1 for n, _ in mix.prompts]):  # it becomes a decode
            return super().repeat_ns(launch, count)
        if count < FEW:
            return [self._mix_ns(mix, step) for step in range(count)]
        dense = self._dense(mix.tokens, mix.samples)
        kernels, layers = dense.kernels, self.model.num_layers
        busy_ns: Any = np.full(count, dense.before_ns)
        for row in self._attention_ns(mix, count):
            busy_ns += layers * row
            kernels += layers
        for ns in dense.behind_ns:
            busy_ns += ns
        more = self._sequence_kernels(len(mix.prompts) + mix.decodes)
        busy_ns += more * self.device.kernel_ns
        floor_ns = (kernels + more) * self.device.dispatch_ns
        return np.rint(np.maximum(busy_ns, floor_ns)).astype(np.int64)

    @property
    def _is_own(self) -> bool:
        """Whether no subclass prices shapes by a rule of its own."""
        return type(self).shape_ns is Roofline.shape_ns

    def _mix(self, launch: Launch) -> ServingMix:
        """What a launch's price depends on."""
        tokens, samples = sizes(launch)
        pieces = launch.pieces
        if (
            isinstance(pieces, Pieces)
            and isinstance(pieces.contexts, Contexts)
            and not self.device.sequence_kernels
        ):
            behind, lead = pieces.contexts, pieces.contexts.lead
            prompts, contexts = _split(pieces.tokens[lead:], behind.tail)
            decodes, past = lead + len(contexts), behind.total + sum(contexts)
            return ServingMix(tokens, samples, prompts, decodes, past, contexts)
        prompts, contexts = _split(*forward_shape(launch)[:2])
        return ServingMix(tokens, samples, prompts, len(contexts), sum(contexts), contexts)

    def _dense(self, tokens: int, samples: int) -> Dense:
        """Kernels that depend on sums alone, remembered by either sum."""
        if (dense := self._priced.dense.get(tokens)) is None:
            *layers, _, embed = self._operators([tokens], [0], 0)  # no attention
            before = 0.0
            for op in layers:  # one by one: sum() of Python 3.12 compensates
                before += op.repeats * self.kernel_ns(op)
            kernels = sum([op.repeats for op in (*layers, embed)])
            dense = Dense(before, (embed.repeats * self.kernel_ns(embed),), kernels)
            self._priced.dense[tokens] = dense
        if not samples:
            return dense
        if (head := self._priced.heads.get(samples)) is None:
            *_, op, _ = self._operators([1], [0], samples)
            head = self._priced.heads[samples] = op.repeats * self.kernel_ns(op)
        return Dense(dense.before_ns, (head, *dense.behind_ns), dense.kernels + 1)

    def _mix_ns(self, mix: ServingMix, step: int) -> int:
        """Duration of a launch's repeat after so many steps."""
        dense = self._dense(mix.tokens, mix.samples)
        model, layers, kernels = self.model, self.model.num_layers, dense.kernels
        busy = dense.before_ns
        for n, context in mix.prompts:
            op = prefill_operator(model, layers, n, context + step * n)
            busy += layers * self.kernel_ns(op)
            kernels += layers
        if self.device.sequence_kernels:
            for context in mix.contexts:
                block, place = divmod(context + step, BLOCK)
                busy += layers * float(self._decode_ns(block)[place])
                kernels += layers
        elif mix.decodes:
            op = decode_of(model, mix.past + step * mix.decodes, mix.decodes)
            busy += layers * self.kernel_ns(op)
            kernels += layers
        for ns in dense.behind_ns:
            busy += ns
        more = self._sequence_kernels(len(mix.prompts) + mix.decodes)
        busy += more * self.device.kernel_ns
        return round(max(busy, (kernels + more) * self.device.dispatch_ns))

    def _attention_ns(self, mix: ServingMix, count: int) -> Iterator[Floats]:
        """Durations of each kernel of attention at each step, in the order of `operators`."""
        model, layers = self.model, self.model.num_layers
        for n, c in mix.prompts:
            steps = (prefill_operator(model, layers, n, c + i * n) for i in range(count))
            yield np.fromiter(map(self.kernel_ns, steps), np.float64, count)
        if self.device.sequence_kernels:
            for context in mix.contexts:
                first, last = context // BLOCK, (context + count - 1) // BLOCK
                blocks = [self._decode_ns(block) for block in range(first, last + 1)]
                row = blocks[0] if first == last else np.concatenate(blocks)
                yield row[context - first * BLOCK :][:count]
        elif mix.decodes:
            yield self._fused_ns(mix.past, mix.decodes, count)

    def _fused_ns(self, past: int, decodes: int, count: int) -> Floats:
        """Durations of the one kernel of all decodes at each step.

        To the bit as `kernel_ns` has them.
        """
        first, second = (decode_of(self.model, past + n * decodes, decodes) for n in (0, 1))
        steps, device = np.arange(count), self.device
        flops = first.flops + steps * (second.flops - first.flops)
        nbytes = first.nbytes + steps * (second.nbytes - first.nbytes)
        memory = np.array(shares(device.decode_memory, nbytes.tolist()))
        flops_s = flops / device.matrix_rate(self.model.dtype)
        bytes_s = nbytes / (device.bandwidth_bytes_per_s * memory)
        found: Floats = np.maximum(flops_s, bytes_s) * 1e9 + device.kernel_ns
        return found

    def _decode_ns(self, block: int) -> Floats:
        """Durations of a decode's own kernel, of BLOCK contexts in a row."""
        if (known := self._priced.decodes.get(block)) is None:
            contexts = range(block * BLOCK, (block + 1) * BLOCK)
            ops = (decode_of(self.model, context, 1) for context in contexts)
            known = np.fromiter(map(self.kernel_ns, ops), np.float64, BLOCK)
            self._priced.decodes[block] = known
        return known

    def _sequence_kernels(self, slices: int) -> int:
        """Kernels of attention that take no time beside their overhead."""
        return slices * self.device.sequence_kernels * self.model.num_layers

    def trained_ns(self, trained: Trained) -> int:
        """Duration of training work by its operators.

        On the host's lane only bytes count, at the device's update rate.

        Args:
            trained: the shape of one unit's work, or of one chunk's update.

        Returns:
            Nanoseconds.

        Raises:
            ValueError: matrix products on the host's lane, a host memory without a rate, or a
                device without one for the dtype.
        """
        ops = training_operators(self.model, trained)
        if trained.lane != HOST_LANE:
            return self._launch_ns(ops, trained.dtype)
        if any(op.flops for op in ops):
            raise ValueError(f"no cost is known for a {trained.group} on the host's lane")
        return round(sum(op.repeats * op.nbytes for op in ops) / self.device.update_rate * 1e9)

    def forward_ns(self, launch: Launch, labels: int) -> int:
        """See ShapePriced.forward_ns: decodes enter by their sums alone."""
        if not self._is_own:
            tokens, contexts, samples = forward_shape(launch)
            return self.shape_ns(tokens, contexts, samples + labels)
        mix = self._mix(launch)
        return self._mix_ns(mix._replace(samples=mix.samples + labels), 0)

    def extra_ns(self, window: WindowShape) -> int:
        """What a window forward costs beyond serving its tokens, by its operators.

        Args:
            window: a window of a sample, forward.

        Returns:
            Nanoseconds.
        """
        key = window._replace(context=0)
        if (ns := self._priced.windows.get(key)) is None:
            ns = round(self._busy_ns(extra_operators(self.model, window)))
            self._priced.windows[key] = ns
        return ns

    def through_ns(self, rows: AdapterRows) -> int:
        """What the rows of one version of an adapter add to a launch, by its operators.

        Args:
            rows: the shape of these rows.

        Returns:
            Nanoseconds.
        """
        if (ns := self._priced.through.get(rows)) is None:
            ns = round(self._busy_ns([*adapter_operators(self.model, rows)]))
            self._priced.through[rows] = ns
        return ns

    def back_ns(self, window: WindowShape) -> int:
        """Duration of a window back by its operators.

        Args:
            window: a window of a sample, back.

        Returns:
            Nanoseconds.
        """
        if (ns := self._priced.windows.get(window)) is None:
            ns = self._launch_ns(backward_operators(self.model, window), self.model.dtype)
            self._priced.windows[window] = ns
        return ns

    def transfer_ns(self, direction: str, nbytes: int, contended: bool = False) -> int:
        """Latency of a copy plus bytes over the link's rate.

        Args:
            direction: name of the copy lane, such as gpu->host.
            nbytes: bytes moved.
            contended: the other direction of the link is busy.

        Returns:
            Nanoseconds.

        Raises:
            ValueError: the copy goes to or from a peer, and the device has no link to its peers.
        """
        device = self.device
        rate = device.link_rate(direction)
        rate *= device.duplex if contended else 1.0
        return device.link_ns + round(nbytes / rate * 1e9)

    def exchange_ns(self, pattern: Pattern, nbytes: int) -> int:
        """Duration of a collective round a ring of the group.

        Args:
            pattern: all-gather, reduce-scatter or all-reduce.
            nbytes: bytes of the whole tensor.

        Returns:
            Nanoseconds; 0 for a single device.

        Raises:
            ValueError: the device names no link that the ring needs.
        """
        return exchange_ns(self.device, self.group, pattern, nbytes)

    def plan_ns(self, items: int, prompts: int = 0) -> int:
        """Host time of one plan: a constant, and another one per slice and copy.

        Args:
            items: slices and copies of the plan.
            prompts: slices of several tokens among them, which cost no more here.

        Returns:
            Nanoseconds.
        """
        return self.device.host_plan_ns + items * self.device.host_slice_ns

    def _operators(
        self, tokens: Sequence[int], contexts: Sequence[int], samples: int
    ) -> list[Operator]:
        fused = self.device.sequence_kernels == 0
        return operators(self.model, tokens, contexts, samples, fused_decode=fused)

    def _launch_ns(self, ops: Sequence[Operator], dtype: str) -> int:
        """All kernels in sequence."""
        floor_ns = sum(op.repeats for op in ops) * self.device.dispatch_ns
        return round(max(self._busy_ns(ops, dtype), floor_ns))

    def _busy_ns(self, ops: Sequence[Operator], dtype: str = "") -> float:
        busy = 0.0
        for op in ops:  # one by one: sum() of Python 3.12 compensates
            busy += op.repeats * self.kernel_ns(op, dtype)
        return busy

    def kernel_ns(self, op: Operator, dtype: str = "") -> float:
        """Duration of one kernel: the lower roof and its overhead.

        Args:
            op: the kernel's flops, bytes, kind and size.
            dtype: dtype of its products; the model's unless given.

        Returns:
            Nanoseconds.

        Raises:
            ValueError: the device has no rate for the dtype.
        """
        device = self.device
        # Elementwise kernels stream at the best rate: the curve's lower points are latency of
        # products.
        compute, memory = 1.0, device.linear_memory[-1][1]
        if op.kind in ("linear", "head"):
            compute = share(device.linear_compute, op.size)
            memory = share(device.linear_memory, op.nbytes)
        elif op.kind == "prefill":
            compute = share(device.prefill_compute, op.size)
        elif op.kind == "decode":
            memory = share(device.decode_memory, op.nbytes)
        flops_s = op.flops / (device.matrix_rate(dtype or self.model.dtype) * compute)
        bytes_s = op.nbytes / (device.bandwidth_bytes_per_s * memory)
        return max(flops_s, bytes_s) * 1e9 + device.kernel_ns


def _split(
    tokens: Sequence[int], contexts: Sequence[int]
) -> tuple[list[tuple[int, int]], list[int]]:
    """Prompt slices as (new tokens, tokens in KV), and the contexts of decodes."""
    pairs = list(zip(tokens, contexts, strict=True))
    return [(n, c) for n, c in pairs if n > 1 or not c], [c for n, c in pairs if n == 1 and c]


KNOWN = 8  # pairs of device and model whose prices are remembered
_known: list[tuple[Device, ModelSpec, Priced]] = []


def priced_on(device: Device, model: ModelSpec) -> Priced:
    """The durations that are known of a model on a device, which points of a sweep share.

    Args:
        device: where it runs.
        model: what runs.

    Returns:
        One object for equal arguments, of the newest KNOWN pairs.
    """
    for known, served, priced in _known:
        if known == device and served == model:
            return priced
    del _known[: max(0, len(_known) - KNOWN + 1)]
    priced = Priced({}, {}, {}, {}, {})
    _known.append((device, model, priced))
    return priced
