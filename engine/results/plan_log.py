"""Plans and layouts as text and back: what makes a run repeatable on another backend."""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Mapping
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from engine.contract.job import Job
from engine.contract.kv_check import WHOLE
from engine.contract.layout import Layout, Mode, TrainingLayout
from engine.contract.plan import (
    Collective,
    Compute,
    Copy,
    Free,
    Grow,
    Op,
    Pattern,
    Plan,
    Relaid,
    Share,
    Slice,
)
from engine.contract.regions import Kind, Place, Region, Tier, Work
from engine.results.schema import OPS, read_table, whole_body
from traces.files import is_sealed


class Growing(Protocol):
    """A place that takes bytes."""

    @property
    def place(self) -> Place: ...
    @property
    def nbytes(self) -> int: ...


AnyOp = Op | Grow | Share | Free
RELAID = "relaid"  # the name of new layouts in a text, which is left out where there are none


class LoggedPlan(NamedTuple):
    """A plan of a log, and the finished jobs whose memory had come back before it was issued."""

    device: int
    returned: tuple[int, ...]
    body: str

    @property
    def job_ids(self) -> frozenset[int]:
        """The jobs that must have arrived before the plan can be issued."""
        content = json.loads(self.body)
        computed = (s[0] for op in content["ops"] if op[0] == "compute" for s in op[4])
        relaid = (job_id for job_id, _ in content.get(RELAID, ()))
        return frozenset((*computed, *content["restart"], *content["refuse"], *relaid))


def read_plans(path: Path) -> tuple[LoggedPlan, ...]:
    """The plan log of a run folder's plans.parquet.

    ValueError in one line with file and step for a row that holds no plan. A log that has its hash
    is as it was written, so that its rows are looked at where they are played back alone.
    """
    try:
        table = read_table(path)
        names = [*table.column_names] if "grows" in table.column_names else COLUMNS_OF_VERSION_4
        rows = table.select(names).to_pylist()
    except KeyError as error:
        raise ValueError(f"{path} lacks a column of a plan log ({error})") from error
    if not is_sealed(path.parent):
        for row in rows:
            _check_row(path, row)
    return tuple(LoggedPlan(row["device"], tuple(row["returned"]), _whole(row)) for row in rows)


COLUMNS_OF_VERSION_4 = ["step", "device", "returned", "body"]  # whose body holds all growth


def _whole(row: Mapping[str, Any]) -> str:
    return whole_body(row.get("grows", "[]"), row["body"])


class LoggedSlice(NamedTuple):
    """A slice of a log; its job is told by number."""

    job_id: int
    tokens: int
    work: Work
    layers: range | None
    microbatch: int
    record: bool


def launches_of_plans(path: Path) -> dict[int, list[list[LoggedSlice]]]:
    """The slices of each launch of a plan log, by the number of its plan; see `read_plans`."""
    found: dict[int, list[list[LoggedSlice]]] = {}
    for step, logged in enumerate(read_plans(path)):
        ops = json.loads(logged.body)["ops"]
        found[step] = [[_logged(row) for row in op[4]] for op in ops if op[0] == "compute"]
    return found


def _logged(row: list[Any]) -> LoggedSlice:
    job_id, tokens, work, layers, microbatch, _, record = row
    span = None if layers is None else range(*layers)
    return LoggedSlice(job_id, tokens, Work(work), span, microbatch, record)


def check_jobs(path: Path, log: Iterable[LoggedPlan], known: Container[int]) -> None:
    """ValueError with the number of the first plan that names a job which will never come."""
    for number, logged in enumerate(log):
        if odd := sorted(job_id for job_id in logged.job_ids if job_id not in known):
            raise ValueError(
                f"{path}, plan {number}: job {odd[0]} is none of this run; play it back on the "
                "trace, limit and training that it was made with"
            )


class _AnyJob(dict[int, Job]):
    """A job for every number, to see whether a row holds a plan at all."""

    def __missing__(self, job_id: object) -> Job:
        if not isinstance(job_id, int) or isinstance(job_id, bool):
            raise TypeError(f"{job_id!r} is no job")
        return Job(job_id, 0)


def _check_row(path: Path, row: Mapping[str, Any]) -> None:
    try:
        if not isinstance(row["device"], int):
            raise TypeError(f"{row['device']!r} is no device")
        tuple(row["returned"])
        _check_plan(decode(_whole(row), _AnyJob()))
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise ValueError(
            f"{path}, step {row.get('step')}: the row holds no plan ({reason}); take the log of a "
            "run of tandem"
        ) from error


ONE_STEP = (0, 0)  # behind each growth: the format tells when it comes, and again


def _check_plan(plan: Plan) -> None:
    """TypeError for what is no whole number where one belongs."""
    numbers: list[object] = []
    for op in plan.ops:
        match op:
            case Compute():
                numbers += [op.device, *(piece.tokens for piece in op.slices)]
            case Grow():
                numbers += [op.nbytes]
            case Collective():
                numbers += [op.device, op.nbytes]
            case Share():
                numbers += op.pages
            case _:
                continue
    for number in numbers:
        if not isinstance(number, int) or isinstance(number, bool):
            raise TypeError(f"{number!r} is no whole number")


def encode(plan: Plan) -> str:
    """JSON that decodes to an equal plan; equal plans give equal text."""
    content: dict[str, Any] = {
        "ops": [_encode_op(op) for op in plan.ops],
        "restart": [job.job_id for job in plan.restart],
        "refuse": [job.job_id for job in plan.refuse],
    }
    if plan.relaid:
        content[RELAID] = _relaid(plan)
    return _text(content)


def _relaid(plan: Plan) -> list[list[int]]:
    return [[job.job_id, number] for job, number in plan.relaid]


def _text(content: object) -> str:
    return json.dumps(content, separators=(",", ":"))


WHOLE_TEXT = _text([*WHOLE])[1:]  # of a served slice, behind its job and tokens


class PlanTexts:
    """Texts of many plans, in two parts as PLANS has them; each part of a plan is written once."""

    def __init__(self) -> None:
        self._texts: dict[int, str] = {}  # by object: equal numbers may be of other types
        self._kept: list[object] = []  # these objects
        self._heads: dict[object, str] = {}

    def plan(self, plan: Plan) -> tuple[str, str]:
        """The growth that a plan begins with, and all behind it."""
        restart = _text([job.job_id for job in plan.restart])
        refuse = _text([job.job_id for job in plan.refuse])
        grows = [op for op in takewhile(_is_growth, plan.ops) if isinstance(op, Grow)]
        ops = [self._launch(op) if isinstance(op, Compute) else self._new(op) for op in plan.ops]
        body = ",".join(ops[len(grows) :])
        relaid = f',"{RELAID}":{_text(_relaid(plan))}' if plan.relaid else ""
        return self.grows(grows), f'{OPS}{body}],"restart":{restart},"refuse":{refuse}{relaid}}}'

    def grows(self, grows: Iterable[Growing]) -> str:
        """What grows, in order."""
        return self._list(grows)

    def launch(self, op: Compute) -> str:
        """The body of a plan that is growth and one launch."""
        return f'{OPS}{self._launch(op)}],"restart":[],"refuse":[]}}'

    def _launch(self, op: Compute) -> str:
        key = (op.device, op.on, op.again)
        if (head := self._heads.get(key)) is None:
            head = self._heads[key] = _text(["compute", *key])[:-1]
        after = f",{self._list(op.after)}" if op.after else ""
        sides = f"{self._list(op.reads)},{self._list(op.writes)}{after}"
        return f"{head},{self._list(op.slices)},{sides}]"

    def _list(self, items: Iterable[object]) -> str:
        known = self._texts.get
        return f"[{','.join([known(id(item)) or self._new(item) for item in items])}]"

    def _new(self, item: Any) -> str:
        if isinstance(item, Place):
            text = _text(_encode_place(item))
        elif isinstance(item, Slice):
            text = _slice_text(item)
        elif isinstance(item, Copy | Collective | Share | Free):
            text = _text(_encode_op(item))
        else:
            text = f'["grow",{self._list([item.place])[1:-1]},{item.nbytes},0,0]'
        self._texts[id(item)] = text
        self._kept.append(item)
        return text


def _is_growth(op: AnyOp) -> bool:
    return isinstance(op, Grow)


def _slice_text(piece: Slice) -> str:
    if piece[2:] != WHOLE or type(piece.tokens) is not int:
        return _text(_encode_slice(piece))
    return f"[{piece.job.job_id},{piece.tokens},{WHOLE_TEXT}"


def decode(body: str, jobs: Mapping[int, Job]) -> Plan:
    """The plan of a log over the jobs of this run. Raises KeyError for a job that is not there."""
    content = json.loads(body)
    if unknown := content.keys() - {"ops", "restart", "refuse", RELAID}:
        raise ValueError(f"plan log: a plan of one step has no {sorted(unknown)[0]!r}")
    return Plan(
        tuple(_decode_op(op, jobs) for op in content["ops"]),
        tuple(jobs[i] for i in content["restart"]),
        tuple(jobs[i] for i in content["refuse"]),
        relaid=tuple(Relaid(jobs[i], number) for i, number in content.get(RELAID, ())),
    )


def encode_layout(layout: Layout) -> dict[str, Any]:
    """What a planner has decided by memory and prices, as JSON takes it.

    Units and the order of tasks are left out: they follow from the job and its settings. Chunks
    are told by their bytes alone, since a planner may choose their size by the memory.
    """
    parts = {"training": {i: [one] for i, one in layout.training.items()}}
    parts["alternatives"] = {i: [*found] for i, found in layout.alternatives.items()}
    own = [(p, n) for p, n in layout.places.items() if p.region.owner in layout.training]
    told: dict[str, Any] = {"places": [[*_encode_place(p), n] for p, n in own]}
    for name, of_job in parts.items():
        told[name] = {str(i): [_choices(one) for one in found] for i, found in of_job.items()}
    return told


def _choices(layout: TrainingLayout) -> dict[str, Any]:
    return {
        "modes": [unit.mode for unit in layout.units],
        "sends_input": [unit.sends_input for unit in layout.units],
        "weight_bytes": [chunk.weight_bytes for chunk in layout.chunks],
        "persistent": sorted(layout.persistent),
        "buffers": layout.buffers,
        "swaps_ahead": layout.swaps_ahead,
        "peak_bytes": layout.peak_bytes,
    }


def decode_layout(content: Mapping[str, Any], planned: Layout) -> Layout:
    """The layout of a log, over the chunks and units of a layout that is planned for this run.

    Raises:
        KeyError, TypeError, ValueError: the content is no layout, or one of other jobs and units.
    """

    def chosen(name: str) -> dict[int, tuple[TrainingLayout, ...]]:
        return {
            int(i): tuple([_with_choices(planned.training[int(i)], one) for one in found])
            for i, found in content[name].items()
        }

    places = {_decode_place(row): nbytes for *row, nbytes in content["places"]}
    training = {i: only for i, (only,) in chosen("training").items()}
    found = replace(planned, places=places, training=training, alternatives=chosen("alternatives"))
    if found.training.keys() != planned.training.keys():
        raise ValueError("a layout of other jobs")
    return found


def _with_choices(layout: TrainingLayout, told: Mapping[str, Any]) -> TrainingLayout:
    own = [chunk.weight_bytes for chunk in layout.chunks]
    if told.get("weight_bytes", own) != own:
        raise ValueError("chunks of other sizes, which the planner chose for another memory")
    pairs = zip(layout.units, told["modes"], told["sends_input"], strict=True)
    units = tuple([replace(unit, mode=Mode(m), sends_input=bool(s)) for unit, m, s in pairs])
    return replace(
        layout,
        units=units,
        persistent=frozenset(told["persistent"]),
        buffers=int(told["buffers"]),
        swaps_ahead=int(told["swaps_ahead"]),
        peak_bytes=int(told["peak_bytes"]),
    )


def _encode_place(place: Place) -> list[Any]:
    region = place.region
    return [region.owner, region.kind, region.part, region.slot, place.tier, place.device]


def _encode_slice(piece: Slice) -> list[Any]:
    layers = None if piece.layers is None else [piece.layers.start, piece.layers.stop]
    return [
        piece.job.job_id,
        piece.tokens,
        piece.work,
        layers,
        piece.microbatch,
        piece.version,
        piece.record,
    ]


def _encode_op(op: AnyOp) -> list[Any]:
    match op:
        case Compute():
            sides = (op.reads, op.writes, op.after) if op.after else (op.reads, op.writes)
            return [
                "compute",
                op.device,
                op.on,
                op.again,
                [_encode_slice(s) for s in op.slices],
                *([_encode_place(p) for p in side] for side in sides),
            ]
        case Copy():
            return ["copy", _encode_place(op.src), _encode_place(op.dst)]
        case Collective():
            places = ([_encode_place(p) for p in side] for side in (op.reads, op.writes))
            return ["collective", op.pattern, op.device, op.nbytes, *places]
        case Grow():
            return ["grow", _encode_place(op.place), op.nbytes, *ONE_STEP]
        case Share():
            return ["share", _encode_place(op.place), list(op.pages)]
        case Free():
            return ["free", _encode_place(op.place)]


def _decode_place(row: list[Any]) -> Place:
    owner, kind, part, slot, tier, device = row
    return Place(Region(owner, Kind(kind), part, slot), Tier(tier), device)


def _decode_slice(row: list[Any], jobs: Mapping[int, Job]) -> Slice:
    job_id, tokens, work, layers, microbatch, version, record = row
    span = None if layers is None else range(*layers)
    return Slice(jobs[job_id], tokens, Work(work), span, microbatch, version, record)


def _decode_slices(rows: Iterable[list[Any]], jobs: Mapping[int, Job]) -> tuple[Slice, ...]:
    return tuple(_decode_slice(row, jobs) for row in rows)


def _decode_places(rows: Iterable[list[Any]]) -> tuple[Place, ...]:
    return tuple(_decode_place(row) for row in rows)


def _decode_op(row: list[Any], jobs: Mapping[int, Job]) -> AnyOp:
    match row:
        case ["compute", device, on, again, slices, reads, writes, *rest]:
            pieces, after = _decode_slices(slices, jobs), _decode_places(rest[0]) if rest else ()
            sides = _decode_places(reads), _decode_places(writes)
            return Compute(pieces, *sides, device, on, again, after)
        case ["copy", src, dst]:
            return Copy(_decode_place(src), _decode_place(dst))
        case ["collective", pattern, device, nbytes, reads, writes]:
            sides = _decode_places(reads), _decode_places(writes)
            return Collective(Pattern(pattern), *sides, nbytes, device)
        case ["grow", place, nbytes, *when]:
            if tuple(when) != ONE_STEP:
                raise ValueError(f"plan log: growth at {when}, but a row holds a plan of one step")
            return Grow(_decode_place(place), nbytes)
        case ["share", place, pages]:
            return Share(_decode_place(place), tuple(pages))
        case ["free", place]:
            return Free(_decode_place(place))
    raise ValueError(f"plan log: unknown operation {row[:1]!r}")
