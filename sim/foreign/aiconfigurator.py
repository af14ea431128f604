"""The cost model of AIConfigurator's measured tables, less cells that beat the device's peaks."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from engine.contract.executor import Launch
from models.spec import ModelSpec
from sim.cost.contract import FEW, ShapePriced
from sim.cost.launch_shape import forward_shape
from sim.cost.piecewise import Lookup, Ragged, Table, Watch, hats
from sim.cost.roofline import Roofline
from sim.devices.device import Device
from sim.foreign.measured import read_frame

FUSED_KERNELS = 5  # per layer beside products and attention: two norms, rotation, activation, KV
PICKED = {"kv_cache_dtype": "bfloat16", "window_size": 0}
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class AiConfiguratorCost(ShapePriced):
    """Products by (rows, out, in), prompts one by one, decodes at their mean context.

    Projections of q/k/v and of gate/up are merged, as in serving engines. The tables lack
    elementwise kernels: these cost their bytes at the device's bandwidth, and its kernel_ns for
    FUSED_KERNELS a layer. A prompt slice behind a context costs a prompt of as many query-key
    pairs. Copies and the host cost what the device's roofline says.
    """

    products: tuple[Lookup, ...]  # of one layer, in ns by rows
    head: Lookup
    prompt: Lookup  # one layer's attention over one prompt by its length
    decode: Ragged  # and over decodes: how many, mean context; ms
    device: Device
    model: ModelSpec
    source: str
    form: str = field(default="table", init=False)

    @classmethod
    def load(cls, folder: Path, device: Device, model: ModelSpec) -> AiConfiguratorCost:
        """Reads gemm, context and generation attention tables of one device (parquet).

        ValueError where one is missing.
        """
        gemm = _rows(folder, "gemm")
        dtypes, gemm = set(gemm["gemm_dtype"]), gemm[gemm["gemm_dtype"] == model.dtype]
        if gemm.empty:
            there = ", ".join(sorted(dtypes))
            raise ValueError(
                f"{folder} has products in {there}, none in {model.dtype} as of {model.name}; "
                "set model.dtype, or take another model"
            )
        gemm = keep_sane(_gemm_work(gemm), device, model, "gemm")
        hidden, inner, item = model.hidden_size, model.intermediate_size, model.query_size
        shapes = [(item + 2 * model.kv_size, hidden), (hidden, item)]
        shapes += [(2 * inner, hidden), (hidden, inner)]
        tables = [Lookup(f"product {n}x{k}", product_table(gemm, n, k)) for n, k in shapes]
        head = Lookup("head", product_table(gemm, model.vocab_size, hidden))
        prompt, decode = _attention(folder, device, model)
        return cls(tuple(tables), head, prompt, decode, device, model, str(folder))

    @property
    def provenance(self) -> str:
        """The folder of the tables."""
        return f"AIConfigurator's tables in {self.source}, taken for {self.model.name}"

    @cached_property
    def _roofline(self) -> Roofline:
        return Roofline(self.device, self.model)

    @cached_property
    def _watch(self) -> Watch:
        return Watch("decode", self.decode, ("decodes", "mean context"))

    @property
    def extrapolated(self) -> dict[str, int]:
        """Look-ups outside the tables, by table and axis; empty is good."""
        lookups = (*self.products, self.head, self.prompt)
        tables = {lookup.name: lookup.outside for lookup in lookups}
        return {name: n for name, n in (tables | self._watch.outside).items() if n}

    def shape_ns(self, tokens: Sequence[int], contexts: Sequence[int], samples: int) -> int:
        """Duration of one serving launch by its kernels. See ShapeCost.shape_ns."""
        total = sum(tokens)
        layer = sum(table[total] for table in self.products) + self._elementwise_ns(total)
        past = [c for n, c in zip(tokens, contexts, strict=True) if n == 1 and c]
        for n, context in zip(tokens, contexts, strict=True):
            if n > 1 or not context:
                layer += self._prompt_ns(n, context)
        if past:
            point = (len(past), sum(past) / len(past))
            self._watch.look(point)
            layer += self.decode.value(point) * 1e6
        busy = layer * self.model.num_layers + (self.head[samples] if samples else 0.0)
        return round(busy)

    def repeat_ns(self, launch: Launch, count: int) -> Any:
        """See ShapePriced.repeat_ns. Decodes take one pass over the table, equal to the bit."""
        tokens, contexts, samples = forward_shape(launch)
        pairs = list(zip(tokens, contexts, strict=True))
        if count < FEW or any([n == 1 and not c for n, c in pairs]):  # it becomes a decode
            return super().repeat_ns(launch, count)
        total, steps = sum(tokens), np.arange(count)
        once = sum(table[total] for table in self.products) + self._elementwise_ns(total)
        layer: Any = np.full(count, once)
        for n, context in pairs:
            if n > 1:
                layer += [self._prompt_ns(n, context + step * n) for step in range(count)]
        if past := [c for n, c in pairs if n == 1]:
            means = (sum(past) + len(past) * steps) / len(past)
            self._watch.look_along((len(past),), means)
            layer += self.decode.values_at((len(past),), means) * 1e6
        busy: Any = layer * self.model.num_layers + (self.head[samples] if samples else 0.0)
        return np.rint(busy).astype(np.int64)

    def _prompt_ns(self, tokens: int, context: int) -> float:
        """Attention of a prompt slice: of the whole prompt with as many query-key pairs."""
        return self.prompt[round((tokens * (tokens + 1) + 2 * tokens * context) ** 0.5)]

    def transfer_ns(self, direction: str, nbytes: int, contended: bool = False) -> int:
        """The device's link."""
        return self._roofline.transfer_ns(direction, nbytes, contended)

    def plan_ns(self, items: int, prompts: int = 0) -> int:
        """The device's host."""
        return self._roofline.plan_ns(items)

    def _elementwise_ns(self, total: int) -> float:
        spec = self.model  # rows read and written by fused kernels
        widths = 8 * spec.hidden_size + 2 * spec.query_size + 6 * spec.kv_size
        nbytes = total * (widths + 3 * spec.intermediate_size) * spec.item_bytes
        streamed = nbytes / self.device.bandwidth_bytes_per_s * 1e9
        return streamed + FUSED_KERNELS * self.device.kernel_ns


def keep_sane(rows: Any, device: Device, model: ModelSpec, name: str) -> Any:
    """Rows with a finite latency that the device's peaks allow; the log counts the rest.

    `rows` has latency (ms), flops and nbytes. ValueError where no row is left.
    """
    seconds = rows["latency"] / 1e3
    floor = np.maximum(
        rows["flops"] / device.matrix_rate(model.dtype),
        rows["nbytes"] / device.bandwidth_bytes_per_s,
    )
    sane = np.isfinite(rows["latency"]) & (seconds > 0) & (seconds >= floor)
    if rejected := int((~sane).sum()):
        log.warning(
            "%s: %d of %d cells beat the device's peak or are no time; left out",
            name,
            rejected,
            len(rows),
        )
    if not sane.any():
        raise ValueError(
            f"{name}: all cells beat the peaks of {device.name} or are no time; take the device "
            "that they were measured on"
        )
    return rows[sane]


def product_table(rows: Any, outputs: int, inputs: int) -> Table:
    """Nanoseconds by rows of a product, interpolated between the (n, k) of the grid."""
    nodes_n, nodes_k = (tuple(sorted(set(rows[axis].tolist()))) for axis in ("n", "k"))
    total: Any = 0.0
    for i, at_n in hats(nodes_n, outputs):
        for j, at_k in hats(nodes_k, inputs):
            if not at_n * at_k:
                continue
            cell = rows[(rows["n"] == nodes_n[i]) & (rows["k"] == nodes_k[j])]
            total = total + at_n * at_k * cell.groupby("m")["latency"].median() * 1e6
    total = total.dropna()  # rows that every corner has
    if total.empty:
        raise ValueError(
            f"no product near {outputs} x {inputs} is among the cells that the device's peaks "
            "allow; take the device that they were measured on, or another model"
        )
    return Table((tuple(int(m) for m in total.index),), tuple(float(t) for t in total))


def _rows(folder: Path, table: str) -> Any:
    """The table in the file of that prefix. ValueError without such a file, or without times."""
    found = sorted(folder.glob(f"{table}*.parquet"))
    if not found:
        raise ValueError(f"{folder} has no {table}*.parquet; add that table of AIConfigurator's")
    return read_frame(found[0], ("latency",))


def _gemm_work(rows: Any) -> Any:
    m, n, k = (rows[axis].astype(float) for axis in ("m", "n", "k"))
    return rows.assign(flops=2 * m * n * k, nbytes=2 * (m * k + k * n + m * n))


def _attention(folder: Path, device: Device, model: ModelSpec) -> tuple[Lookup, Ragged]:
    prompts = _heads(_rows(folder, "context_attention"), model)
    prompts = prompts[prompts["batch_size"] == 1]
    isl, width = prompts["isl"].astype(float), float(model.query_size)
    moved = 2.0 * model.item_bytes * isl * (model.query_size + model.kv_size)
    prompts = prompts.assign(flops=2 * isl * (isl + 1) * width, nbytes=moved)
    prompts = keep_sane(prompts, device, model, "context attention")
    times = prompts.groupby("isl")["latency"].median() * 1e6
    prompt = Table((tuple(int(x) for x in times.index),), tuple(float(t) for t in times))
    decodes = _heads(_rows(folder, "generation_attention"), model)
    keys = decodes["batch_size"].astype(float) * (decodes["step"] + decodes["isl"])
    moved = 2.0 * model.item_bytes * keys * model.kv_size
    decodes = decodes.assign(flops=4.0 * keys * model.query_size, nbytes=moved)
    decodes = keep_sane(decodes, device, model, "generation attention")
    cells = decodes.groupby(["batch_size", "step"], as_index=False)["latency"].median()
    return Lookup("prompt", prompt), Ragged.of(cells.to_numpy().tolist())


def _heads(rows: Any, model: ModelSpec) -> Any:
    picked = {"num_heads": model.num_heads, "head_dim": model.head_dim, **PICKED}
    grouped = {model.num_kv_heads}
    if model.num_kv_heads == model.num_heads:
        grouped.add(0)  # some tables write 0 for heads that are not grouped
    for column, value in picked.items():
        rows = rows[rows[column] == value]
    rows = rows[rows["num_key_value_heads"].isin(grouped)]
    if rows.empty:
        raise ValueError(
            f"no attention of {model.num_heads}/{model.num_kv_heads} heads of {model.head_dim} is "
            f"in the table; take another model than {model.name}"
        )
    return rows
