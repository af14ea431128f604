"""The cost model of Vidur on its own lookup tables, for comparisons on equal costs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, sqrt
from operator import attrgetter
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from engine.contract.executor import Contexts, Launch, Pieces
from engine.contract.plan import Compute
from models.spec import ModelSpec
from sim.cost.contract import ShapePriced
from sim.cost.launch_shape import forward_shape, shifted
from sim.cost.piecewise import warn_beyond
from sim.foreign.measured import check_measured

ONCE = ("attn_pre_proj", "attn_post_proj", "attn_rope", "mlp_up_proj", "mlp_act", "mlp_down_proj")
NORMS = ("input_layernorm", "post_attention_layernorm", "add")
BY_SHAPE = ("attn_kv_cache_save", "attn_prefill", "attn_decode")
PADDED_TO = 8  # tokens of a launch, for all dense operators
KV_STEP = 64  # tokens of context between two nodes
GQA_FACTOR = 1.1  # Vidur's constant for grouped heads where several sequences share a launch
REDUCE_LAUNCH_MS = 0.02


@dataclass(frozen=True)
class VidurCost(ShapePriced):
    """Milliseconds per layer by Vidur's rules (vidur@7d47513), times the layers of a model.

    Dense operators cost by the launch's tokens padded to 8. Decodes are one kernel at their mean
    context. Prompt slices are one kernel whose square is the sum of their squares. As in Vidur,
    embedding, head, sampler and host take no time. Outside a table the last node is scaled, and
    the log says so once.
    """

    tables: Mapping[str, Any]  # arrays of an npz in ../shared/data/peers/cost_tables
    model: ModelSpec
    source: str
    form: str = field(default="table", init=False)
    # all dense operators of a layer by padded tokens, entry i for i + 1 tokens
    _dense_ms: list[float] = field(init=False, repr=False, compare=False)
    _grouped: float = field(init=False, repr=False, compare=False)
    _once: dict[int, float] = field(default_factory=dict, init=False, repr=False, compare=False)
    # number of look-ups outside each table; empty is good
    _outside: dict[str, int] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        names = [f"{name}_ms" for name in (*ONCE, *NORMS)]
        total = sum([np.asarray(self.tables[name], float) for name in names])
        if "all_reduce_ms" in self.tables:
            total = total + 2 * (np.asarray(self.tables["all_reduce_ms"]) + REDUCE_LAUNCH_MS)
        is_grouped = self.model.num_kv_heads < self.model.num_heads
        object.__setattr__(self, "_dense_ms", np.asarray(total).tolist())
        object.__setattr__(self, "_grouped", GQA_FACTOR if is_grouped else 1.0)

    @classmethod
    def load(cls, path: Path, model: ModelSpec) -> VidurCost:
        """Reads one npz of lookup tables.

        ValueError for a file of another kind, a missing table, and a cell that is no time.
        """
        try:
            with path.open("rb") as file, np.load(file) as arrays:
                tables = {name: arrays[name].tolist() for name in arrays.files}
        except (OSError, ValueError, BadZipFile) as error:
            raise ValueError(f"{path} holds no Vidur tables ({error}); give one .npz") from None
        if missing := {f"{name}_ms" for name in (*ONCE, *NORMS, *BY_SHAPE)} - tables.keys():
            raise ValueError(f"{path} lacks {', '.join(sorted(missing))}; give a Vidur table")
        for name in filter(lambda name: name.endswith("_ms"), tables):
            check_measured(tables[name], f"{path}, table {name}")
        return cls(tables, model, str(path))

    @property
    def provenance(self) -> str:
        """The file of the tables."""
        return f"Vidur's tables in {self.source}, taken for {self.model.name}"

    @property
    def extrapolated(self) -> dict[str, int]:
        """Number of look-ups outside each table; empty is good."""
        return self._outside

    def served_ns(self, launch: Launch) -> int:
        """Duration of a serving launch; as in Vidur, the request tells whether a token decodes."""
        return self._ns(self._mix_ms(*_mix(launch))[0])

    def repeat_ns(self, launch: Launch, count: int) -> list[int]:
        """See ShapePriced.repeat_ns. Only entries that change from step to step are looked up."""
        decodes, past, cut = _mix(launch)
        if not cut:
            return self._decodes_ns(decodes, past, count)
        if count > 1 and any([n == 1 for n, _ in cut]):  # it becomes a decode
            tokens, contexts, _ = forward_shape(launch)
            assert isinstance(launch.op, Compute)
            prompts = [piece.job.prompt_tokens for piece in launch.op.slices]
            rows = (shifted(tokens, contexts, i) for i in range(count))
            return [self._ns(self.layer_ms(tokens, row, prompts)) for row in rows]
        return list(map(self._ns, self._mix_ms(decodes, past, cut, count)))

    def _decodes_ns(self, decodes: int, past: int, count: int) -> list[int]:
        """Decodes alone: their mean context rises by one a step, its node every KV_STEP."""
        once, mean = self._once_ms(decodes), past // decodes
        found: list[int] = []
        while len(found) < count:
            steps = min(count - len(found), KV_STEP - (mean + len(found) - 1) % KV_STEP)
            ms = self._decode_ms(decodes, past + len(found) * decodes)
            found += [self._ns(once + ms)] * steps
        return found

    def shape_ns(self, tokens: Sequence[int], contexts: Sequence[int], samples: int) -> int:
        """Duration of a launch in which one token behind a context decodes; the head is free."""
        return self._ns(self.layer_ms(tokens, contexts, [1] * len(tokens)))

    def _ns(self, layer_ms: float) -> int:
        return round(layer_ms * self.model.num_layers * 1e6)

    def layer_ms(
        self, tokens: Sequence[int], contexts: Sequence[int], prompts: Sequence[int]
    ) -> float:
        """Milliseconds of one layer by new tokens, tokens in KV and prompt tokens per slice."""
        return self._mix_ms(*_sorted(zip(tokens, contexts, prompts, strict=True)))[0]

    def _mix_ms(
        self, decodes: int, past: int, cut: Sequence[tuple[int, int]], count: int = 1
    ) -> list[float]:
        """Milliseconds of one layer at each of `count` steps.

        `past` is the sum of the decodes' contexts; `cut` has tokens and context per prompt slice.
        """
        tokens, squares = decodes, 0
        for n, _ in cut:
            tokens += n
            squares += n * n
        once = self._once_ms(tokens)
        if not cut:
            return [once + self._decode_ms(decodes, past + i * decodes) for i in range(count)]
        rows, side = self.tables["attn_prefill_ms"], round(sqrt(squares))
        grouped = self._grouped if len(cut) > 1 else 1.0
        found: list[float] = []
        for i in range(count):
            kv_nodes = 0
            for n, context in cut:
                kv_nodes += -(-(context + i * n) // KV_STEP)
            try:
                prompt = rows[kv_nodes][side - 1]  # neither is below zero
            except IndexError:
                prompt = self._beyond("attn_prefill_ms", kv_nodes, side - 1)
            found.append(once + self._decode_ms(decodes, past + i * decodes) + prompt * grouped)
        return found

    def _decode_ms(self, decodes: int, past: int) -> float:
        """Attention of all decodes at their mean context."""
        if not decodes:
            return 0.0
        node = -(-(past // decodes) // KV_STEP)
        try:
            ms: float = self.tables["attn_decode_ms"][decodes - 1][node]
        except IndexError:
            ms = self._beyond("attn_decode_ms", decodes - 1, node)
        return ms * self._grouped if decodes > 1 else ms

    def _once_ms(self, total: int) -> float:
        """Operators that depend on the tokens of a launch alone."""
        ms = self._once.get(total)
        if ms is None:
            ms = self._at("attn_kv_cache_save_ms", self.tables["attn_kv_cache_save_ms"], total - 1)
            ms += self._at("dense", self._dense_ms, ceil(total / PADDED_TO) * PADDED_TO - 1)
            self._once[total] = ms
        return ms

    def transfer_ns(self, direction: str, nbytes: int, contended: bool = False) -> int:
        """Raises ValueError: Vidur has no copies."""
        raise ValueError(f"Vidur has no copies {direction}; take a memory policy that restarts")

    def host_ns(self, launches: Sequence[Launch]) -> int:
        """Vidur's default leaves out the host."""
        return 0

    def plan_ns(self, items: int, prompts: int = 0) -> int:
        """No host time, see `host_ns`."""
        return 0

    def _at(self, name: str, values: Sequence[float], index: int) -> float:
        if index < len(values):
            return values[index]
        self._count(name, index)
        return values[-1] * (index + 1) / len(values)

    def _beyond(self, name: str, row: int, column: int) -> float:
        """A cell outside its table: the last one of its row, or of its column, is scaled."""
        rows, scale = self.tables[name], 1.0
        if row >= len(rows):
            self._count(name, row)
            scale, row = (row + 1) / len(rows), len(rows) - 1
        return scale * self._at(name, rows[row], column)

    def _count(self, name: str, index: int) -> None:
        if name not in self._outside:
            warn_beyond(name, index)
        self._outside[name] = self._outside.get(name, 0) + 1


_prompt_tokens = attrgetter("job.prompt_tokens")  # of a slice
Mix = tuple[int, int, list[tuple[int, int]]]  # see VidurCost._mix_ms


def _mix(launch: Launch) -> Mix:
    """Decodes and prompt slices of a launch."""
    pieces = launch.pieces
    assert isinstance(launch.op, Compute)
    if isinstance(pieces, Pieces) and isinstance(pieces.contexts, Contexts):
        behind, lead = pieces.contexts, pieces.contexts.lead
        if behind.are_generated and not behind.tail:
            return lead, behind.total + lead, []
        if behind.are_generated:
            own = map(_prompt_tokens, launch.op.slices[lead:])
            rows = zip(pieces.tokens[lead:], behind.tail, own, strict=True)
            return _sorted(rows, lead, behind.total)
    tokens, contexts, _ = forward_shape(launch)
    prompts = [piece.job.prompt_tokens for piece in launch.op.slices]
    return _sorted(zip(tokens, contexts, prompts, strict=True))


def _sorted(rows: Iterable[tuple[int, int, int]], decodes: int = 0, behind: int = 0) -> Mix:
    """Sorts rows of (tokens, context, prompt tokens) into decodes and prompt slices.

    `decodes` and `behind`, the sum of their contexts, come before the rows. As in Vidur, a decode's
    context includes the token in hand.
    """
    past = behind + decodes
    cut: list[tuple[int, int]] = []
    for n, context, prompt in rows:
        if n == 1 and context >= prompt:
            decodes += 1
            past += context + 1
        else:
            cut.append((n, context))
    return decodes, past, cut
