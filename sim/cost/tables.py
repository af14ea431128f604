"""The cost model of a profiled device: a launch is a sum over operator tables."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

from engine.contract.regions import PageSize
from models.spec import ModelSpec
from sim.cost.contract import ShapePriced
from sim.cost.piecewise import Lookup, Table, check_nodes, check_times
from sim.cost.training_launch import Trained
from sim.cost.training_operators import is_of_training, likenesses, training_terms
from traces.files import checked_text, seal, write_text

FORMAT = 1
LINEAR, HEAD, FIRST, CHUNK, DECODE = "linear", "head", "first", "chunk", "decode"
HOST, PROMPTS = "host", "prompts"
NEEDED = (LINEAR, HEAD, FIRST, CHUNK, DECODE, HOST)
CONTENDED = " contended"  # suffix of a direction
UNITS = {  # of axes, as the log tells them
    LINEAR: ("tokens",),
    HEAD: ("sampled rows",),
    FIRST: ("tokens",),
    CHUNK: ("new tokens", "tokens in KV"),
    DECODE: ("tokens in KV",),
}


@dataclass(frozen=True)
class TableCost(ShapePriced):
    """Tables by name, in ns for the whole model:

    linear  by all new tokens of a launch: layers' products, norms, and what a launch always costs
    head    by sampled rows
    first   by tokens: attention of a slice with nothing in KV yet
    chunk   by (tokens, context): of a slice behind a context
    decode  by context: of one token behind a context
    host    by slices and copies of a plan
    prompts by slices of several tokens among these: what admitting them costs the host on top
    A direction such as gpu->host, alone and contended: by bytes.
    Training has tables of its own (sim/cost/training_operators.py); a profile has these, those, or
    both.
    """

    tables: Mapping[str, Table]
    model: ModelSpec
    page: PageSize
    source: str
    _lookups: dict[str, Lookup] = field(init=False, repr=False, compare=False)
    form: str = field(default="table", init=False)

    def __post_init__(self) -> None:
        lookups = {
            name: Lookup(name, table, UNITS.get(name, ())) for name, table in self.tables.items()
        }
        object.__setattr__(self, "_lookups", lookups)

    @property
    def page_tokens(self) -> int:
        return self.page.tokens

    @property
    def provenance(self) -> str:
        """The profile that the tables were fitted to."""
        return f"tables fitted to {self.source} for {self.model.name}"

    @property
    def serves(self) -> bool:
        """Whether it was calibrated with what serves, and not with training alone."""
        return LINEAR in self.tables

    @property
    def extrapolated(self) -> dict[str, int]:
        """Distinct points outside the grid that were asked for, by table; empty is good."""
        return {name: lookup.outside for name, lookup in self._lookups.items() if lookup.outside}

    def shape_ns(self, tokens: Sequence[int], contexts: Sequence[int], samples: int) -> int:
        """One launch by its shape: new tokens and tokens in KV per slice, rows of the head."""
        lookups = self._lookups
        if not self.serves:
            raise ValueError(f"{self.source} was calibrated with training alone; serve by another")
        decode, first, chunk = lookups[DECODE], lookups[FIRST], lookups[CHUNK]
        busy = lookups[LINEAR][sum(tokens)] + (lookups[HEAD][samples] if samples else 0.0)
        for n, context in zip(tokens, contexts, strict=True):
            if not context:
                busy += first[n]
            elif n == 1:
                busy += decode[context]
            else:
                busy += chunk[n, context]
        return round(busy)

    def trained_ns(self, trained: Trained) -> int:
        """One launch that trains. ValueError where the profile has none like it."""
        for like in likenesses(trained):
            terms = training_terms(like)
            if terms[0][0] in self._lookups:
                return round(sum(self._lookups[name][point[0]] for name, point in terms))
        raise ValueError(
            f"{self.source} has no {trained.group} in {trained.dtype} ({trained.trains}); "
            "calibrate with a recipe like this one"
        )

    def transfer_ns(self, direction: str, nbytes: int, contended: bool = False) -> int:
        """One copy. ValueError where the profile has none in that direction."""
        name = direction + CONTENDED if contended else direction
        lookup = self._lookups.get(name if name in self._lookups else direction)
        if lookup is None:
            where = f"{self.source} has no copies {direction}"
            raise ValueError(f"{where}; calibrate with a memory policy that swaps")
        return round(lookup[nbytes])

    def plan_ns(self, items: int, prompts: int = 0) -> int:
        """The host's part of a plan."""
        host_ns = self._lookups[HOST][items]
        if prompts and PROMPTS in self._lookups:
            host_ns += self._lookups[PROMPTS][prompts]
        return round(host_ns)

    def scaled(self, factor: float, why: str) -> TableCost:
        """The same device running slower by a factor, as drift probes found it. Links keep their
        pace: clocks and neighbours of a processor do not change what a bus carries."""
        tables = {
            name: table if "->" in name else table.times(factor)
            for name, table in self.tables.items()
        }
        source = f"{self.source}, x{factor:.4f} ({why})"
        return TableCost(tables, self.model, self.page, source)

    def as_deep_as(self, model: ModelSpec) -> TableCost:
        """The same for another number of layers, where tables are of single units: of training."""
        if self.serves:
            return self
        named = replace(self.model, name=model.name, num_layers=model.num_layers)
        return TableCost(self.tables, named, self.page, self.source)

    def save(self, path: Path) -> None:
        """Writes one JSON file, whole or not at all, and keeps its hash."""
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
        """Reads what `save` wrote. ValueError for anything else."""
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
