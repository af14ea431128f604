"""The cost model that needs no profile: each kernel at the lower of two roofs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from engine.contract.executor import Launch
from engine.contract.plan import HOST_LANE, Pattern
from models.operators import Operator, decode_of, operators, prefill_operator
from models.spec import ModelSpec
from sim.cost.contract import FEW, ShapePriced, forward_shape
from sim.cost.training_launch import Trained
from sim.cost.training_operators import training_operators
from sim.devices.device import Device, share
from sim.devices.group import ALONE, Group, exchange_ns

Floats: TypeAlias = npt.NDArray[np.float64]
BLOCK = 256  # contexts whose decodes are priced at once, when the first of them is met


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
    _decodes_ns: dict[int, Floats] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def provenance(self) -> str:
        """Device and model; conf/device names the sources of the rates."""
        return f"roofline of {self.device.name} for {self.model.name}, rates in conf/device"

    @property
    def host_bandwidth_bytes_per_s(self) -> float | None:
        """Rate of the host's memory, which copies and updates there share; None: unlimited."""
        return self.device.host_bandwidth_bytes_per_s

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
        ops = self._operators(tokens, contexts, samples)
        return self._launch_ns(ops, self.model.dtype, self._sequence_kernels(len(tokens)))

    def repeat_ns(self, launch: Launch, count: int) -> Any:
        """See ShapePriced.repeat_ns: only attention is priced anew at each step.

        Kernels are added in the order of the definition, so durations are equal to the bit.
        """
        tokens, contexts, samples = forward_shape(launch)
        is_own = type(self).shape_ns is Roofline.shape_ns
        becomes_decode = any([n == 1 and not c for n, c in zip(tokens, contexts, strict=True)])
        if not is_own or count < FEW or becomes_decode:
            return super().repeat_ns(launch, count)
        ops = self._operators(tokens, contexts, samples)
        kernels = sum([op.repeats for op in ops]) + self._sequence_kernels(len(tokens))
        busy_ns: Any = np.zeros(count)
        attention = self._attention_ns(tokens, contexts, count)
        for op in ops:
            changes = op.kind in ("prefill", "decode")
            busy_ns += op.repeats * (next(attention) if changes else self.kernel_ns(op))
        busy_ns += self._sequence_kernels(len(tokens)) * self.device.kernel_ns
        return np.rint(np.maximum(busy_ns, kernels * self.device.dispatch_ns)).astype(np.int64)

    def _attention_ns(
        self, tokens: Sequence[int], contexts: Sequence[int], count: int
    ) -> Iterator[Floats]:
        """Durations of each kernel of attention at each step, in the order of `operators`."""
        pairs, layers = list(zip(tokens, contexts, strict=True)), self.model.num_layers
        for n, c in pairs:
            if n > 1:
                steps = (prefill_operator(self.model, layers, n, c + i * n) for i in range(count))
                yield np.fromiter(map(self.kernel_ns, steps), np.float64, count)
        decodes = [c for n, c in pairs if n == 1]
        if self.device.sequence_kernels:
            for context in decodes:
                first, last = context // BLOCK, (context + count - 1) // BLOCK
                blocks = [self._decode_ns(block) for block in range(first, last + 1)]
                row = blocks[0] if first == last else np.concatenate(blocks)
                yield row[context - first * BLOCK :][:count]
        elif decodes:
            past = (sum(decodes) + i * len(decodes) for i in range(count))
            ops = (decode_of(self.model, keys, len(decodes)) for keys in past)
            yield np.fromiter(map(self.kernel_ns, ops), np.float64, count)

    def _decode_ns(self, block: int) -> Floats:
        """Durations of a decode's own kernel, of BLOCK contexts in a row."""
        if (known := self._decodes_ns.get(block)) is None:
            contexts = range(block * BLOCK, (block + 1) * BLOCK)
            ops = (decode_of(self.model, context, 1) for context in contexts)
            known = np.fromiter(map(self.kernel_ns, ops), np.float64, BLOCK)
            self._decodes_ns[block] = known
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

    def _launch_ns(self, ops: Sequence[Operator], dtype: str, more_kernels: int = 0) -> int:
        """All kernels in sequence; `more_kernels` take no time beside their overhead."""
        kernels = sum(op.repeats for op in ops) + more_kernels
        busy = 0.0
        for op in ops:  # one by one: sum() of Python 3.12 compensates
            busy += op.repeats * self.kernel_ns(op, dtype)
        busy += more_kernels * self.device.kernel_ns
        return round(max(busy, kernels * self.device.dispatch_ns))

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
