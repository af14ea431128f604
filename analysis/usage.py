"""Resources of a run: memory by kind, busy lanes and host, and operations by class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from analysis.columns import Block, block_of_frame, known_max
from analysis.metric_names import KINDS, PARTS
from analysis.run import Run, RunFacts

if TYPE_CHECKING:
    import pandas as pd

ADAPTERS = "adapter"  # of whose bytes a run without adapters has no column
OVERALL = ("used", "measured", "process")
AMOUNTS = (*PARTS, *OVERALL, "held")
DERIVED = ("used", "held", "pending")
READ = [
    *("at_ns", "tier", "device", "capacity_bytes", "free_bytes", "coming_bytes"),
    *(f"{kind}_bytes" for kind in KINDS if kind != ADAPTERS),
    *("measured_bytes", "process_bytes"),
]
Floats = NDArray[np.float64]


def pools(run: Run) -> dict[str, pd.DataFrame]:
    """Memory rows per pool, in time order, with the bytes of `_amounts`."""
    rows = _amounts(block_of_frame(run.memory[[n for n in _read_of(run) if n != "tier"]]))
    frame = run.memory.assign(
        **{f"{name}_bytes": rows[f"{name}_bytes"] for name in (*DERIVED, ADAPTERS)}
    )
    frame = frame.sort_values("at_ns", kind="stable")
    return {f"{tier}:{device}": part for (tier, device), part in frame.groupby(["tier", "device"])}


def _read_of(run: RunFacts) -> list[str]:
    """The columns of memory that a run has kept."""
    more = f"{ADAPTERS}_bytes"
    return [*READ, more] if run.keeps("memory", more) else READ


@dataclass
class TimeMean:
    """Mean of a step function over a window, from its first known value on.

    Of several values at one time the last holds.
    """

    start_ns: float
    end_ns: float
    _last: tuple[Floats, Floats] | None = None  # times and values that the next time ends
    _sum: float = 0.0
    _total_ns: float = 0.0

    def add(self, at_ns: Floats, values: Floats) -> None:
        """Later values, NaN where unknown."""
        known = ~np.isnan(values)
        at = np.clip(at_ns.astype(float)[known], self.start_ns, self.end_ns)
        if len(at):
            self._sum, self._total_ns = self._until(float(at[0]))
            self._last = (at, values.astype(float)[known])

    def _until(self, end_ns: float) -> tuple[float, float]:
        """The integral up to a time, and over how much time."""
        if self._last is None:
            return 0.0, 0.0
        at, values = self._last
        weights = np.diff(np.append(at, end_ns))
        return self._sum + float((values * weights).sum()), self._total_ns + float(weights.sum())

    @property
    def value(self) -> float:
        """The mean of all values; NaN without any."""
        if self._last is None:
            return float("nan")
        total, total_ns = self._until(self.end_ns)
        return total / total_ns if total_ns > 0 else float(self._last[1][-1])


@dataclass
class PoolUse:
    """Bytes of a pool by kind: peak, mean over time, and what it holds when it is first fullest."""

    start_ns: float
    end_ns: float
    peaks: dict[str, float] = field(default_factory=dict)  # of kinds of which a figure is known
    fullest: dict[str, int] = field(default_factory=dict)
    peak_kv: float = float("nan")  # share of the room for KV
    _means: dict[str, TimeMean] = field(default_factory=dict)

    def add(self, rows: Block) -> None:
        """Later rows of the pool, as `_amounts` has them."""
        for kind in AMOUNTS:
            if (peak := known_max(rows, f"{kind}_bytes")) == peak:
                self.peaks[kind] = max(peak, self.peaks.get(kind, peak))
            self._mean(kind).add(rows["at_ns"], rows[f"{kind}_bytes"])
        used = rows["used_bytes"]
        known = np.flatnonzero(~np.isnan(used))
        if len(known) and used[known].max() > self.fullest.get("used", -1):
            row = known[int(used[known].argmax())]
            parts = {part: rows[f"{part}_bytes"][row] for part in PARTS}
            held = {part: int(nbytes) for part, nbytes in parts.items() if nbytes > 0}
            self.fullest = {"used": int(used[row]), **held}
        room = rows["kv_bytes"] + rows["free_bytes"] + rows["coming_bytes"]
        share = rows["kv_bytes"] / np.where(room > 0, room, np.nan)
        self.peak_kv = float(np.fmax(self.peak_kv, np.fmax.reduce(share, initial=np.nan)))
        self._mean("kv share").add(rows["at_ns"], share)

    def _mean(self, name: str) -> TimeMean:
        return self._means.setdefault(name, TimeMean(self.start_ns, self.end_ns))

    @property
    def means(self) -> dict[str, float]:
        """Means over time, by kind and of the share of the room for KV (`kv share`)."""
        return {name: mean.value for name, mean in self._means.items()}


def _amounts(rows: Block) -> Block:
    """Rows of MEMORY with used, held and pending bytes, in the order of time.

    Used is capacity - free: held bytes of all kinds, and pending ones.
    """
    if f"{ADAPTERS}_bytes" not in rows:
        rows = rows | {f"{ADAPTERS}_bytes": np.zeros_like(rows["kv_bytes"])}
    used = rows["capacity_bytes"] - rows["free_bytes"]
    held = sum(np.nan_to_num(rows[f"{kind}_bytes"]) for kind in KINDS)
    pending = used - held
    return rows | {"used_bytes": used, "held_bytes": held, "pending_bytes": pending}


def pool_uses(run: RunFacts) -> dict[tuple[str, int], PoolUse]:
    """What each pool held, by tier and device, sorted."""
    window, found = working_ns(run), dict[tuple[str, int], PoolUse]()
    for block in run.blocks("memory", _read_of(run)):
        rows = _amounts({name: held for name, held in block.items() if name != "tier"})
        tiers = block["tier"]
        for pool in {*zip(tiers.chosen.tolist(), rows["device"].tolist(), strict=True)}:
            own = np.flatnonzero((tiers.chosen == pool[0]) & (rows["device"] == pool[1]))
            own = own[np.argsort(rows["at_ns"][own], kind="stable")]
            use = found.setdefault((tiers.names[pool[0]], int(pool[1])), PoolUse(*window))
            use.add({name: values[own] for name, values in rows.items()})
    return dict(sorted(found.items()))


def window_ns(run: RunFacts) -> tuple[float, float]:
    """First arrival and last finish of requests, the drain included as in vLLM; (nan, nan) without
    any."""
    rows = run.columns("requests", ("arrival_ns", "finish_ns", "status"))
    finish = rows["finish_ns"][rows["status"].is_("finished")]
    return _known_min(rows["arrival_ns"]), -_known_min(-finish)


def _known_min(values: Floats) -> float:
    """The smallest known number; NaN without any."""
    known = values[~np.isnan(values)]
    return float(known.min()) if len(known) else float("nan")


def working_ns(run: RunFacts) -> tuple[float, float]:
    """The window of means over time: `window_ns`, extended to the first and last training step."""
    first, last = window_ns(run)
    rows = run.columns("training", ("start_ns", "end_ns"))
    return (
        _known_min(np.array([first, _known_min(rows["start_ns"])])),
        -_known_min(-np.array([last, -_known_min(-rows["end_ns"])])),
    )


def use_rows(
    uses: Mapping[tuple[str, int], PoolUse], kinds: Sequence[str] = (*PARTS, *OVERALL)
) -> list[tuple[str, str, float, float, float | None]]:
    """Rows of `memory_use`."""
    rows: list[tuple[str, str, float, float, float | None]] = []
    for (tier, device), use in uses.items():
        means = use.means
        for kind in kinds:
            if use.peaks.get(kind, 0) > 0:
                then = use.fullest.get(kind, 0 if kind in PARTS else None)
                rows.append((f"{tier}:{device}", kind, use.peaks[kind], means[kind], then))
    return rows


def memory_use(run: RunFacts, kinds: Sequence[str] = (*PARTS, *OVERALL)) -> pd.DataFrame:
    """Bytes per pool and kind: columns pool, kind, peak, mean, fullest.

    `mean` is over time. `fullest` is the kind's bytes when the pool is fullest; those of PARTS add
    up to those of `used`. Kinds that the run never held are left out. `used` is the ledger's sum,
    `measured` the meter's persistent bytes, `process` the operating system's figure.
    """
    import pandas as pd

    columns = ["pool", "kind", "peak", "mean", "fullest"]
    return pd.DataFrame(use_rows(pool_uses(run), kinds), columns=columns).astype({"fullest": float})


def kv_usage(uses: Mapping[tuple[str, int], PoolUse]) -> dict[str, float]:
    """Share of the KV room in use on the GPU tier: peak and time-weighted mean, over all devices.

    The room is the bytes of KV, free bytes and coming ones. Weights do not count, as in vLLM's
    kv_cache_usage.
    """
    found = [*kv_usages(uses).values()]
    if not found:
        return {}
    return {
        "peak_kv_usage": max(peak for peak, _ in found),
        "mean_kv_usage": sum(mean for _, mean in found) / len(found),
    }


def kv_usages(uses: Mapping[tuple[str, int], PoolUse]) -> dict[int, tuple[float, float]]:
    """Peak and mean KV usage of each device with a known room."""
    found = {d: (use.peak_kv, use.means["kv share"]) for (t, d), use in uses.items() if t == "gpu"}
    return {device: use for device, use in found.items() if use[1] == use[1]}


def devices(run: Run) -> list[int]:
    """The devices of a run: all with memory, used or not."""
    return sorted(int(d) for d in run.memory.loc[run.memory["tier"].eq("gpu"), "device"].unique())


@dataclass(frozen=True)
class LaneTimes:
    """Time of a run from its first issue to its last end, and of what is busy in it."""

    span_ns: float  # the denominator of shares
    busy_ns: Mapping[str, float]  # by device and lane, sorted
    host_ns: int
    copied_bytes: int  # between tiers
    prefill_tokens: int
    peak_bytes: float  # of the workspace; NaN where it is unknown

    @property
    def lane_shares(self) -> dict[str, float]:
        """Busy share of each lane of each device over the run."""
        return (
            {lane: ns / self.span_ns for lane, ns in self.busy_ns.items()} if self.span_ns else {}
        )

    @property
    def host_share(self) -> float:
        """Share of the run that the host spent on deciding, booking and preparing plans."""
        return self.host_ns / self.span_ns if self.span_ns else 0.0


STEPS_READ = ["device", "lane", "issue_ns", "start_ns", "end_ns", "host_ns", "nbytes"]
STEPS_READ += ["prefill_tokens", "peak_bytes"]


def lane_times(run: RunFacts) -> LaneTimes:
    """The times of a run's operations."""
    busy: dict[tuple[int, str], int] = {}
    bounds, host_ns, copied, prefill, peak = list[float](), 0, 0, 0, float("nan")
    for rows in run.blocks("steps", STEPS_READ):
        lanes = rows["lane"]
        if not len(lanes.chosen):
            continue
        taken_ns, device = rows["end_ns"] - rows["start_ns"], rows["device"]
        for number in np.unique(device):
            for i, lane in enumerate(lanes.names):
                own = (device == number) & (lanes.chosen == i)
                if own.any():
                    key = (int(number), lane)
                    busy[key] = busy.get(key, 0) + int(taken_ns[own].sum())
        bounds += [float(rows["issue_ns"].min()), float(rows["end_ns"].max())]
        host_ns += int(rows["host_ns"].sum())
        copied += int(rows["nbytes"][lanes.where("->" in lane for lane in lanes.names)].sum())
        prefill += int(rows["prefill_tokens"].sum())
        peak = float(np.fmax(peak, known_max(rows, "peak_bytes")))
    span_ns = max(bounds[1::2]) - min(bounds[::2]) if bounds else 0.0
    by_lane = {f"{device}:{lane}": float(ns) for (device, lane), ns in sorted(busy.items())}
    return LaneTimes(span_ns, by_lane, host_ns, copied, prefill, peak)


def lane_shares(run: RunFacts) -> dict[str, float]:
    """Busy share of each lane of each device over the run."""
    return lane_times(run).lane_shares


def host_share(run: RunFacts) -> float:
    """Share of the run that the host spent on deciding, booking and preparing plans."""
    return lane_times(run).host_share


def copied_bytes(run: RunFacts) -> int:
    """Bytes moved between tiers."""
    return lane_times(run).copied_bytes


def operations(run: Run) -> pd.DataFrame:
    """The steps table with `duration_s`, `host_s`, `order` within step and lane, `group`.

    Groups of serving: decode (only), prefill (only), mixed, other (compute without tokens). The
    group of training is its work: forward, again, backward, update. A copy's group is its lane,
    such as gpu->host.
    """
    rows = run.steps.assign(
        duration_s=(run.steps["end_ns"] - run.steps["start_ns"]) / 1e9,
        host_s=run.steps["host_ns"] / 1e9,
        order=run.steps.groupby(["step", "device", "lane"]).cumcount(),
    )
    import pandas as pd

    prefill, decode = rows["prefill_tokens"] > 0, rows["decode_tokens"] > 0
    names = np.select([prefill & decode, prefill, decode], ["mixed", "prefill", "decode"], "other")
    groups = rows["work"].where(rows["part"].notna(), pd.Series(names, rows.index))
    return rows.assign(group=rows["lane"].where(rows["lane"].str.contains("->"), groups))
