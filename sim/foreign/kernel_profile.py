"""The cost model of LLMServingSim's kernel profiles, which time vLLM's layers one by one."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from engine.contract.executor import Launch
from models.spec import ModelSpec
from sim.cost.contract import FEW, ShapePriced
from sim.cost.launch_shape import Load, load_of, sizes
from sim.cost.piecewise import Lookup, Ragged, Table, Watch, check_times
from sim.foreign.measured import read_times

Bucket = tuple[int, ...]  # the class on each axis
EDGES = (  # upper ends of the classes; the profile's own nodes lie at or below them
    (0, 22, 45, 90, 181, 362, 724, 1448),  # prompt tokens: halfway between 16, 32, ... 2048
    (0, 1024, 4096),  # tokens in KV before the prompt slices
    (2, 4, 8, 16, 32, 64, 128),  # decodes
    (0.05, 0.15, 0.4, 0.7),  # shape: (mean - shortest) / (longest - shortest) of their contexts
    (1024, 4096, 16384),  # their longest context
)
MIXES = ("pc", "kp", "n", "nb", "kv_big")
TIMES = ("t_mean_us", "t_max_us", "t_skew_us")  # columns of skew.csv.gz


class Mix(NamedTuple):
    """The quantities that the cost of unequal contexts depends on."""

    prompt_tokens: float  # in the launch
    prompt_context: float  # tokens in KV before them
    decodes: float
    shape: float
    longest: float

    @property
    def bucket(self) -> Bucket:
        """The class on each axis."""
        return tuple(bisect_left(edges, x) for edges, x in zip(EDGES, self, strict=True))


@dataclass(frozen=True)
class Skew:
    """t = t(mean) + alpha * (t(longest) - t(mean)): alpha by bucket, else the default."""

    default: float = 0.0
    by_bucket: Mapping[Bucket, float] | None = None

    def alpha(self, mix: Mix) -> float:
        """The share of the way from the mean's time to the longest's."""
        return self.by_bucket.get(mix.bucket, self.default) if self.by_bucket else self.default


def fit_skew(rows: Any, per_bucket: bool) -> Skew:
    """Least squares of measured times, over all rows or per bucket.

    Times are sums of three runs, which cancels here. A batch of two lengths has the shape nb / n.
    Rows whose longest context takes as long as the mean add nothing.

    Args:
        rows: columns of skew.csv.gz, pc and kp (prompt tokens and context), n (decodes), nb
            (long ones among them), kv_big (context of the long ones), t_mean_us, t_max_us and
            t_skew_us.
        per_bucket: whether each bucket gets an alpha of its own.

    Returns:
        The fitted alphas.

    Raises:
        ValueError: a time is no finite number or below zero.
    """
    for name in TIMES:
        check_times(rows[name])
    reach, over = rows["t_max_us"] - rows["t_mean_us"], rows["t_skew_us"] - rows["t_mean_us"]
    all_xx = float((reach * reach).sum())
    default = float((reach * over).sum()) / all_xx if all_xx else 0.0
    if not per_bucket:
        return Skew(default)
    sums: dict[Bucket, tuple[float, float]] = {}
    axes = (rows["pc"], rows["kp"], rows["n"], rows["nb"] / rows["n"], rows["kv_big"])
    for *mix, x, y in zip(*(column.tolist() for column in (*axes, reach, over)), strict=True):
        key = Mix(*mix).bucket
        xy, xx = sums.get(key, (0.0, 0.0))
        sums[key] = xy + x * y, xx + x * x
    return Skew(default, {key: xy / xx for key, (xy, xx) in sums.items() if xx})


PER_LAYER = {
    "layernorm": 2,
    "qkv_proj": 1,
    "rotary_emb": 1,
    "o_proj": 1,
    "gate_up_proj": 1,
    "act_fn": 1,
    "down_proj": 1,
}
PER_STEP = ("embedding", "final_layernorm")
PER_SEQUENCE = ("lm_head", "sampler")
SKEWS = ("none", "default", "per_bucket")
ATTENTION = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")  # columns of attention.csv
AXES = ("prompt tokens", "their context", "decodes", "context")  # of attention
GRAPH_SIZES = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))  # vLLM's CUDA graphs, default


@dataclass(frozen=True)
class KernelProfileCost(ShapePriced):
    """Microseconds of one layer's kernels, summed over layers, embedding, head and sampler.

    dense         by new tokens of a launch, padded to the next of `padded_to` (CUDA graphs)
    head          by sampled rows
    attention     one kernel for all slices: prompt tokens, their context, decodes, mean context
    skew          extra time of decodes with unequal contexts
    step_ns       on the device per launch; given, not profiled
    host_ns_per_plan  on the host per plan; given, not profiled
    """

    dense: Table
    head: Table
    attention: Ragged
    skew: Skew
    model: ModelSpec
    source: str
    padded_to: tuple[int, ...] = ()
    step_ns: int = 0
    host_ns_per_plan: int = 0
    form: str = field(default="table", init=False)
    _dense: Lookup = field(init=False, repr=False, compare=False)
    _head: Lookup = field(init=False, repr=False, compare=False)
    _watch: Watch = field(init=False, repr=False, compare=False)
    _decode_rows: dict[int, list[tuple[Ragged, float]]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "_dense", Lookup("dense", self.dense))
        object.__setattr__(self, "_head", Lookup("head", self.head))
        object.__setattr__(self, "_watch", Watch("attention", self.attention, AXES))

    @classmethod
    def load(cls, folder: Path, model: ModelSpec, skew: str = "default", **given: Any) -> Any:
        """Reads dense.csv, per_sequence.csv, attention.csv and, for skew, skew.csv.gz."""
        if skew not in SKEWS:
            raise ValueError(f"skew is {skew!r}, must be one of {SKEWS}")
        dense = read_times(folder / "dense.csv", ("layer", "tokens"), ("time_us",))
        counts = {name: n * model.num_layers for name, n in PER_LAYER.items()}
        counts |= dict.fromkeys(PER_STEP, 1)
        points = read_times(folder / "attention.csv", ATTENTION, (*ATTENTION, "time_us"))
        rows = np.column_stack([points[name] for name in (*ATTENTION, "time_us")])
        attention = Ragged.of(rows.tolist())
        fitted = Skew()
        if skew != "none":
            unequal = read_times(folder / "skew.csv.gz", MIXES, (*MIXES, *TIMES))
            fitted = fit_skew(unequal, skew == "per_bucket")
        heads = read_times(folder / "per_sequence.csv", ("layer", "sequences"), ("time_us",))
        return cls(
            _summed(folder / "dense.csv", dense, "tokens", counts),
            _summed(
                folder / "per_sequence.csv", heads, "sequences", dict.fromkeys(PER_SEQUENCE, 1)
            ),
            attention,
            fitted,
            model,
            str(folder),
            **given,
        )

    @property
    def provenance(self) -> str:
        """The folder of the profile, and the options that it was read with."""
        skew = "per_bucket" if self.skew.by_bucket else "default" if self.skew.default else "none"
        parts = [f"kernel profile {self.source}, taken for {self.model.name}", f"skew {skew}"]
        parts += ["padded to graphs"] if self.padded_to else []
        parts += [f"{self.step_ns} ns a launch"] if self.step_ns else []
        parts += [f"{self.host_ns_per_plan} ns a plan"] if self.host_ns_per_plan else []
        return ", ".join(parts)

    @property
    def extrapolated(self) -> dict[str, int]:
        """Number of look-ups outside the profile, by table and axis; empty is good."""
        tables = {lookup.name: lookup.outside for lookup in (self._dense, self._head)}
        return {name: n for name, n in (tables | self._watch.outside).items() if n}

    def shape_ns(self, tokens: Sequence[int], contexts: Sequence[int], samples: int) -> int:
        """Duration of one serving launch by its kernels. See ShapeCost.shape_ns."""
        return self._ns(sum(tokens), Load.of(zip(tokens, contexts, strict=True)), samples)

    def served_ns(self, launch: Launch) -> int:
        """Duration of a serving launch; a decode batch enters by its sums and extremes alone."""
        tokens, samples = sizes(launch)
        return self._ns(tokens, load_of(launch, 0), samples)

    def _ns(self, tokens: int, load: Load, samples: int) -> int:
        busy = self._dense[self._padded(tokens)] + self.step_ns
        busy += self.model.num_layers * self._attention_us(load) * 1e3
        return round(busy + (self._head[samples] if samples else 0.0))

    def attention_us(self, tokens: Sequence[int], contexts: Sequence[int]) -> float:
        """One layer's attention over all slices."""
        return self._attention_us(Load.of(zip(tokens, contexts, strict=True)))

    def _attention_us(self, load: Load) -> float:
        prompt_tokens, prompt_context, decodes, past, longest, shortest = load
        self._watch.look((prompt_tokens, prompt_context, decodes, longest))
        if not decodes:
            return self.attention.value((prompt_tokens, prompt_context, 0, 0))
        rows, mean = self._rows(prompt_tokens, prompt_context, decodes), past / decodes
        at_mean = sum([weight * row.value((mean,)) for row, weight in rows])
        if longest == shortest:
            return at_mean
        shape = (mean - shortest) / (longest - shortest)
        alpha = self.skew.alpha(Mix(prompt_tokens, prompt_context, decodes, shape, longest))
        if not alpha:
            return at_mean
        reach = sum([weight * row.value((longest,)) for row, weight in rows]) - at_mean
        return at_mean + alpha * max(0.0, reach)

    def repeat_ns(self, launch: Launch, count: int) -> Any:
        """See ShapePriced.repeat_ns. Decodes take one pass over the table, equal to the bit.

        Prompts are priced step by step: each of their steps lies between other nodes.
        """
        tokens, samples = sizes(launch)
        prompt_tokens, _, decodes, past, longest, shortest = load_of(launch, 0)
        if prompt_tokens or count < FEW:
            return [self._ns(tokens, load_of(launch, step), samples) for step in range(count)]
        steps = np.arange(count)
        most: Any = longest + steps
        least: Any = shortest + steps
        self._watch.look_along((0, 0, decodes), most)
        mean = (past + decodes * steps) / decodes
        rows = self._rows(0, 0, decodes)
        us = at_mean = _weighted(rows, mean)
        if longest > shortest:
            alphas = self._alphas(decodes, (mean - least) / (most - least), most)
            us = at_mean + alphas * np.maximum(0.0, _weighted(rows, most) - at_mean)
        once = self._dense[self._padded(tokens)] + self.step_ns
        busy: Any = once + self.model.num_layers * us * 1e3
        return np.rint(busy + (self._head[samples] if samples else 0.0)).astype(np.int64)

    def _alphas(self, decodes: int, shapes: Any, most: Any) -> Any:
        if not self.skew.by_bucket:
            return self.skew.default
        mixes = zip(shapes.tolist(), most.tolist(), strict=True)
        return np.array([self.skew.alpha(Mix(0, 0, decodes, *mix)) for mix in mixes])

    def _rows(
        self, prompt_tokens: int, prompt_context: int, decodes: int
    ) -> list[tuple[Ragged, float]]:
        """Attention by context alone; remembered for launches without prompts."""
        if prompt_tokens:
            return self.attention.rows((prompt_tokens, prompt_context, decodes))
        if decodes not in self._decode_rows:
            self._decode_rows[decodes] = self.attention.rows((0, 0, decodes))
        return self._decode_rows[decodes]

    def transfer_ns(self, direction: str, nbytes: int, contended: bool = False) -> int:
        """Raises ValueError: the profile has no copies."""
        raise ValueError(f"{self.source} has no copies {direction}; take a policy that restarts")

    def plan_ns(self, items: int, prompts: int = 0) -> int:
        """The given host time of a plan."""
        return self.host_ns_per_plan

    def _padded(self, tokens: int) -> int:
        index = bisect_left(self.padded_to, tokens)
        return self.padded_to[index] if index < len(self.padded_to) else tokens


def _weighted(rows: list[tuple[Ragged, float]], points: Any) -> Any:
    """Sums of rows at many points of their only axis."""
    return sum([weight * row.values(points) for row, weight in rows])


def _summed(path: Path, rows: Any, axis: str, counts: dict[str, int]) -> Table:
    """One table in ns: the sum of the named layers, each times its count. ValueError where a layer
    is missing, or lacks a time that another layer has."""
    times: dict[str, dict[int, float]] = {name: {} for name in counts}
    columns = [rows[name].tolist() for name in ("layer", axis, "time_us")]
    for layer, point, us in zip(*columns, strict=True):
        of_layer = times.setdefault(layer, {})
        if point in of_layer:
            raise ValueError(f"{path}: a layer has two times, {layer} at {axis}={point}")
        of_layer[point] = us
    if missing := [name for name in counts if not times[name]]:
        raise ValueError(f"{path} lacks layer {', '.join(sorted(missing))}; profile them too")
    points = sorted({point for of_layer in times.values() for point in of_layer})
    for name in counts:
        if empty := [point for point in points if point not in times[name]]:
            raise ValueError(f"{path}: no time of {name} at {axis}={empty[0]}; profile it too")
    total: Any = 0.0
    for name, count in counts.items():
        total = total + np.array([times[name][point] for point in points]) * count
    return Table((tuple([int(x) for x in points]),), tuple((total * 1e3).tolist()))
