"""The cost model that needs no profile: each kernel at the lower of two roofs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.contract.plan import HOST_LANE, Pattern
from models.operators import Operator, operators
from models.spec import ModelSpec
from sim.cost.contract import ShapePriced
from sim.cost.training_launch import Trained
from sim.cost.training_operators import training_operators
from sim.devices.device import Device, share
from sim.devices.group import ALONE, Group, exchange_ns


@dataclass(frozen=True)
class Roofline(ShapePriced):
    """Per kernel max(flops / reached rate, bytes / reached bandwidth) + overhead, summed.

    A launch never ends before the host has issued all its kernels.
    """

    device: Device
    model: ModelSpec
    page_tokens: int = 16
    group: Group = ALONE
    form: str = field(default="roofline", init=False)

    @property
    def provenance(self) -> str:
        """Device and model; the sources of the rates stand in conf/device."""
        return f"roofline of {self.device.name} for {self.model.name}, rates in conf/device"

    @property
    def host_bandwidth_bytes_per_s(self) -> float | None:
        """Of the host's memory, which copies and updates there share; None: nobody is slowed."""
        return self.device.host_bandwidth_bytes_per_s

    def split_ns(
        self, tokens: Sequence[int], contexts: Sequence[int], samples: int
    ) -> dict[str, float]:
        """Nanoseconds by kind of operator, overheads included but not the dispatch floor."""
        totals: dict[str, float] = {}
        for op in self._operators(tokens, contexts, samples):
            totals[op.kind] = totals.get(op.kind, 0.0) + op.repeats * self.kernel_ns(op)
        return totals

    def shape_ns(self, tokens: Sequence[int], contexts: Sequence[int], samples: int) -> int:
        """One launch by its shape: new tokens and tokens in KV per slice, rows of the head."""
        ops = self._operators(tokens, contexts, samples)
        attention = len(tokens) * self.device.sequence_kernels * self.model.num_layers
        return self._launch_ns(ops, self.model.dtype, attention)

    def trained_ns(self, trained: Trained) -> int:
        """One launch that trains. On the host's lane only bytes count: ValueError for products."""
        ops = training_operators(self.model, trained)
        if trained.lane != HOST_LANE:
            return self._launch_ns(ops, trained.dtype)
        if any(op.flops for op in ops):
            raise ValueError(f"no cost is known for a {trained.group} on the host's lane")
        return round(sum(op.repeats * op.nbytes for op in ops) / self.device.update_rate * 1e9)

    def transfer_ns(self, direction: str, nbytes: int, contended: bool = False) -> int:
        """Latency and bytes over the link's rate that way. ValueError where there is no link."""
        device = self.device
        rate = device.link_rate(direction)
        rate *= device.duplex if contended else 1.0
        return device.link_ns + round(nbytes / rate * 1e9)

    def exchange_ns(self, pattern: Pattern, nbytes: int) -> int:
        """A collective of the device's group. ValueError where it has no link to others."""
        return exchange_ns(self.device, self.group, pattern, nbytes)

    def plan_ns(self, items: int, prompts: int = 0) -> int:
        """A constant for the plan and one for each of its slices and copies."""
        return self.device.host_plan_ns + items * self.device.host_slice_ns

    def _operators(
        self, tokens: Sequence[int], contexts: Sequence[int], samples: int
    ) -> list[Operator]:
        fused = self.device.sequence_kernels == 0
        return operators(self.model, tokens, contexts, samples, fused_decode=fused)

    def _launch_ns(self, ops: Sequence[Operator], dtype: str, more_kernels: int = 0) -> int:
        """All kernels one behind the other; `more_kernels` take no time beside their overhead."""
        kernels = sum(op.repeats for op in ops) + more_kernels
        busy = sum(op.repeats * self.kernel_ns(op, dtype) for op in ops)
        busy += more_kernels * self.device.kernel_ns
        return round(max(busy, kernels * self.device.dispatch_ns))

    def kernel_ns(self, op: Operator, dtype: str = "") -> float:
        """One kernel: the lower roof and its overhead. `dtype`: the model's unless given."""
        device = self.device
        # Rows alone stream at the best rate: the curve's lower points are latency of products.
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
