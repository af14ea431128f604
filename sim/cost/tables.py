"""The cost model of a profiled device: a launch costs a sum over operator tables."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from engine.contract.executor import Launch
from engine.contract.regions import PageSize
from models.spec import ModelSpec
from sim.cost.adapters import AdapterRows, adapter_terms
from sim.cost.contract import FEW, ShapeCost, ShapePriced
from sim.cost.launch_shape import forward_shape
from sim.cost.piecewise import Lookup, Table, check_nodes, check_times
from sim.cost.training_launch import Trained
from sim.cost.training_operators import Terms, is_of_training, likenesses, training_terms
from sim.cost.windows import WindowShape, back_terms, extra_terms
from traces.files import checked_text, seal, write_text

FORMAT = 1
LINEAR, HEAD, FIRST, DECODE = "linear", "head", "first", "decode"
PREFILL_SLICE = "chunk"  # the name that profiles on disk give this table
HOST, PROMPTS = "host", "prompts"
NEEDED = (LINEAR, HEAD, FIRST, PREFILL_SLICE, DECODE, HOST)
CONTENDED = " contended"  # suffix of a direction
UNITS = {  # of the axes, in the log
    LINEAR: ("tokens",),
    HEAD: ("sampled rows",),
    FIRST: ("tokens",),
    PREFILL_SLICE: ("new tokens", "tokens in KV"),
    DECODE: ("tokens in KV",),
}


@dataclass(frozen=True)
class TableCost(ShapePriced):
    """Sums of tables that were fitted to a calibration, in ns for the whole model.

    linear  by all new tokens of a launch: products of layers, norms, and the cost of any launch
    head    by sampled rows
    first   by tokens: attention of a slice with nothing in KV yet
    chunk   by (tokens, context): attention of a prefill slice behind a context
    decode  by context: attention of one token behind a context
    host    by slices and copies of a plan
    prompts by slices of several tokens among these: the host's extra time to admit them

    Copies have a table per direction such as gpu->host, alone and contended, by bytes. Training
    has tables of its own (sim/cost/training_operators.py). A profile has tables of serving, of
    training, or both.

    tables  by name
    model   the model that was calibrated
    page    the KV page of the calibration
    source  the profile, in words for results
    assumed prices adapters that no table was fitted to; None: there is no price
    """

    tables: Mapping[str, Table]
    model: ModelSpec
    page: PageSize
    source: str
    assumed: ShapeCost | None = field(default=None, compare=False)
    _lookups: dict[str, Lookup] = field(init=False, repr=False, compare=False)
    _assumed: Counter[str] = field(default_factory=Counter, init=False, repr=False, compare=False)
    form: str = field(default="table", init=False)

    def __post_init__(self) -> None:
        lookups = {
            name: Lookup(name, table, UNITS.get(name, ())) for name, table in self.tables.items()
        }
        object.__setattr__(self, "_lookups", lookups)

    @property
    def page_tokens(self) -> int:
        """Tokens in a page of the calibration's KV."""
        return self.page.tokens

    @property
    def provenance(self) -> str:
        """The profile behind the tables."""
        return f"tables fitted to {self.source} for {self.model.name}"

    @property
    def serves(self) -> bool:
        """Whether the profile was calibrated with serving, and not with training alone."""
        return LINEAR in self.tables

    @property
    def extrapolated(self) -> dict[str, int]:
        """Number of distinct points looked up outside the grid, by table; empty is good."""
        outside = {name: lookup.outside for name, lookup in self._lookups.items() if lookup.outside}
        return outside | {f"{name} (not fitted)": n for name, n in self._assumed.items()}

    def shape_ns(self, tokens: Sequence[int], contexts: Sequence[int], samples: int) -> int:
        """Duration of one serving launch: a sum over tables.

        Args:
            tokens: new tokens per slice.
            contexts: tokens in KV per slice, before the launch.
            samples: rows of the head.

        Returns:
            Nanoseconds.

        Raises:
            ValueError: the profile was calibrated with training alone.
        """
        lookups = self._lookups
        if not self.serves:
            raise ValueError(f"{self.source} was calibrated with training alone; serve by another")
        decode, first, later = lookups[DECODE], lookups[FIRST], lookups[PREFILL_SLICE]
        busy = lookups[LINEAR][sum(tokens)] + (lookups[HEAD][samples] if samples else 0.0)
        for n, context in zip(tokens, contexts, strict=True):
            if not context:
                busy += first[n]
            elif n == 1:
                busy += decode[context]
            else:
                busy += later[n, context]
        return round(busy)

    def repeat_ns(self, launch: Launch, count: int) -> Any:
        """See ShapePriced.repeat_ns: a row of steps for each slice, added in the slices' order."""
        tokens, contexts, samples = forward_shape(launch)
        if count < FEW or not self.serves:
            return super().repeat_ns(launch, count)
        lookups, steps = self._lookups, np.arange(count)
        rows = np.empty((1 + len(tokens), count))
        rows[0] = lookups[LINEAR][sum(tokens)] + (lookups[HEAD][samples] if samples else 0.0)
        pairs = list(zip(tokens, contexts, strict=True))
        are_decodes = np.array([n == 1 and context > 0 for n, context in pairs])
        behind = np.array(contexts)[are_decodes]
        rows[1:][are_decodes] = lookups[DECODE].values_of(behind[:, None] + steps)
        for at, (n, context) in enumerate(pairs, 1):
            if n > 1 or not context:
                rows[at] = [self._slice_ns(n, context + step * n) for step in range(count)]
        return np.rint(np.add.accumulate(rows)[-1]).astype(np.int64)

    def _slice_ns(self, tokens: int, context: int) -> float:
        """Attention of one slice."""
        if not context:
            return self._lookups[FIRST][tokens]
        if tokens == 1:
            return self._lookups[DECODE][context]
        return self._lookups[PREFILL_SLICE][tokens, context]

    def trained_ns(self, trained: Trained) -> int:
        """Duration of training work, by the nearest kind that was calibrated (`likenesses`).

        Args:
            trained: the shape of one unit's work, or of one chunk's update.

        Returns:
            Nanoseconds.

        Raises:
            ValueError: the profile has no such work.
        """
        for like in likenesses(trained):
            terms = training_terms(like)
            if terms[0][0] in self._lookups:
                return round(sum(self._lookups[name][point[0]] for name, point in terms))
        raise ValueError(
            f"{self.source} has no {trained.group} in {trained.dtype} ({trained.trains}); "
            "calibrate with a recipe like this one"
        )

    def extra_ns(self, window: WindowShape) -> int:
        """What a window forward costs beyond serving its tokens.

        Args:
            window: a window of a sample, forward.

        Returns:
            Nanoseconds.

        Raises:
            ValueError: the profile has no such windows.
        """
        return self._window_ns(extra_terms(window), window)

    def through_ns(self, rows: AdapterRows) -> int:
        """What the rows of one version of an adapter add to a launch.

        Args:
            rows: the shape of these rows.

        Returns:
            Nanoseconds; those of `assumed` where the profile has no such adapter.

        Raises:
            ValueError: neither has a price.
        """
        if rows.table not in self._lookups:
            if self.assumed is None:
                return super().through_ns(rows)
            self._assumed[rows.table] += 1
            return self.assumed.through_ns(rows)
        return round(sum(self._lookups[name][point[0]] for name, point in adapter_terms(rows)))

    def back_ns(self, window: WindowShape) -> int:
        """Duration of a window back.

        Args:
            window: a window of a sample, back.

        Returns:
            Nanoseconds.

        Raises:
            ValueError: the profile has no such windows.
        """
        return self._window_ns(back_terms(window), window)

    def _window_ns(self, terms: Terms, window: WindowShape) -> int:
        if lacking := [name for name, _ in terms if name not in self._lookups]:
            raise ValueError(
                f"{self.source} has no table {lacking[0]!r}: calibrate with a finetuning job like "
                "this one (tandem calibrate policy=coserve training=finetune)"
            )
        return round(sum(self._lookups[name][point[0]] for name, point in terms))

    def transfer_ns(self, direction: str, nbytes: int, contended: bool = False) -> int:
        """Duration of one copy.

        A contended copy costs as one alone where the profile has no contended ones.

        Args:
            direction: name of the copy lane, such as gpu->host.
            nbytes: bytes moved.
            contended: the other direction of the link is busy.

        Returns:
            Nanoseconds.

        Raises:
            ValueError: the profile has no copies in that direction.
        """
        name = direction + CONTENDED if contended else direction
        lookup = self._lookups.get(name if name in self._lookups else direction)
        if lookup is None:
            where = f"{self.source} has no copies {direction}"
            raise ValueError(f"{where}; calibrate with a policy that makes such copies")
        return round(lookup[nbytes])

    def plan_ns(self, items: int, prompts: int = 0) -> int:
        """Host time of one plan.

        Args:
            items: slices and copies of the plan.
            prompts: slices of several tokens among them.

        Returns:
            Nanoseconds.
        """
        host_ns = self._lookups[HOST][items]
        if prompts and PROMPTS in self._lookups:
            host_ns += self._lookups[PROMPTS][prompts]
        return round(host_ns)

    def scaled(self, factor: float, why: str) -> TableCost:
        """This cost for a device that runs slower, as drift probes found it.

        Copies keep their times: clocks and neighbours of a processor do not change the rate of a
        bus.

        Args:
            factor: multiplier of all other times.
            why: reason, for results.

        Returns:
            A new cost.
        """
        tables = {
            name: table if "->" in name else table.times(factor)
            for name, table in self.tables.items()
        }
        source = f"{self.source}, x{factor:.4f} ({why})"
        return replace(self, tables=tables, source=source)

    def as_deep_as(self, model: ModelSpec) -> TableCost:
        """This cost for another number of layers.

        Args:
            model: a model that differs in its name and number of layers alone.

        Returns:
            A cost of that model where tables are of single units, as a profile of training alone
            has them; this cost otherwise.
        """
        if self.serves:
            return self
        named = replace(self.model, name=model.name, num_layers=model.num_layers)
        return replace(self, model=named)

    def save(self, path: Path) -> None:
        """Writes one JSON file, whole or not at all, and seals its hash.

        Args:
            path: the file, in an existing folder.
        """
        content = {
            "format": FORMAT,
            "source": self.source,
            "model": asdict(self.model),
            "page": self.page._asdict(),
            "tables": {name: asdict(table) for name, table in self.tables.items()},
        }
        write_text(path, json.dumps(content, indent=1))
        seal(path.parent, path.name)

    @classmethod
    def load(cls, path: Path) -> TableCost:
        """Reads a file that `save` wrote.

        Args:
            path: the file.

        Returns:
            The cost.

        Raises:
            ValueError: the file is missing, damaged, or lacks a table.
        """
        try:
            content: Any = json.loads(checked_text(path))
        except (OSError, json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"{path} is no cost table ({error}); run tandem calibrate") from None
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise ValueError(f"{path} is no cost table of format {FORMAT}; run tandem calibrate")
        try:
            tables = {name: _read(path, name, table) for name, table in content["tables"].items()}
            model, page = ModelSpec(**content["model"]), PageSize(**content["page"])
            cost = cls(tables, model, page, content["source"])
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is damaged ({error!r}); run tandem calibrate") from error
        needed = (HOST,) if any(map(is_of_training, tables)) and LINEAR not in tables else NEEDED
        if missing := [name for name in needed if name not in tables]:
            raise ValueError(f"{path} has no table {', '.join(missing)}; run tandem calibrate")
        return cost


def _read(path: Path, name: str, table: Mapping[str, Any]) -> Table:
    try:
        found = Table(tuple(tuple(nodes) for nodes in table["axes"]), tuple(table["values"]))
        check_times(found.values)
        check_nodes(found.axes)
    except ValueError as error:
        raise ValueError(f"{path}, table {name}: {error}") from None
    if len(found.values) != prod(len(nodes) for nodes in found.axes):
        raise ValueError(f"{path}, table {name}: not a value for each point; run tandem calibrate")
    return found
