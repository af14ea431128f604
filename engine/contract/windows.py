"""The footprint of a finetuning launch: the places that a window of a sample touches.

A sample goes forward through the units in windows of tokens, and its keys and values lie in pages.
Each unit keeps what its backward needs, token by token. The head makes its loss and the gradient of
its input with its forward. The backward goes down through the units, the whole sample at once or
one unit in windows from the last token to the first: a window's keys and values are read by all
later windows, so their gradients are summed in float32 until that window is reached (FlexLLM,
arXiv 2402.18789, token-level finetuning). Gradients of a sample go to the sum of the step when its
backward is complete, so that a sample can be begun anew until then.

A unit that offloads keeps each window in a place of its own. It is on the host from behind the
window's forward until the unit's backward begins.

A sample that starts behind a record has its first tokens from there: the places of the record are
the request's, on the device or the host, and go with the last window back of each unit.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple

from engine.contract.layout import Mode, TrainingLayout
from engine.contract.plan import Slice
from engine.contract.progress import start_of
from engine.contract.regions import (
    HIDDEN_GRADIENT,
    KV_GRADIENT,
    SAMPLE_GRADIENT,
    SHARED_OWNER,
    Kind,
    PageSize,
    Place,
    Tier,
    Work,
    gradient,
    hidden_gradient,
    kept,
    kv_gradient,
    kv_place,
    optimizer,
    sample_gradient,
    weight,
    workspace,
)
from engine.contract.training_progress import Record, TrainingProgress, layout_of
from models.training.shape import WindowBytes

Firsts = tuple[int, ...]  # of windows, their first tokens
UNRECORDED: tuple[int, Firsts] = (SHARED_OWNER, ())
FOOTPRINTS = 1 << 10  # that are cached: a plan asks for each twice, and samples have like windows


class WindowFootprint(NamedTuple):
    """The memory of a finetuning launch, before a memory policy adds it to a plan.

    Attributes:
        reads: places whose contents it needs.
        writes: places that it writes.
        sizes: the least bytes of places that the launch finds or grows.
        frees: places whose last use it is.
        comes: places that it reads, whose contents may be on the host until the first window back.
        goes: places that it writes, whose contents then go to the host.
    """

    reads: tuple[Place, ...]
    writes: tuple[Place, ...]
    sizes: tuple[tuple[Place, int], ...]
    frees: tuple[Place, ...]
    comes: tuple[Place, ...] = ()
    goes: tuple[Place, ...] = ()


def on_host(place: Place) -> Place:
    """Where the contents of a place of a device lie on its host.

    Args:
        place: a place on a device.

    Returns:
        Its region on the host.
    """
    return place._replace(tier=Tier.HOST)


def offloads(layout: TrainingLayout, unit: int) -> bool:
    """Whether what a unit keeps of a sample is on the host between its forward and its backward.

    Args:
        layout: the layout of a finetuning job.
        unit: the number of the unit.

    Returns:
        Whether the planner has chosen that, and the unit keeps anything.
    """
    if layout.units[unit].mode is not Mode.OFFLOAD:
        return False
    return unit >= layout.first and windows_of(layout).kept[unit] > 0


def kept_in(training: TrainingProgress, unit: int, device: int) -> tuple[Place, ...]:
    """The places of what a unit keeps of the sample under way, on the device.

    Args:
        training: the progress of a finetuning job, which has a layout.
        unit: the number of the unit.
        device: where it trains.

    Returns:
        One place; of a unit that offloads one for each window that has gone forward.
    """
    job_id, layout = training.spec.job_id, layout_of(training)
    return _kept_in(job_id, layout, unit, dict(_offloaded(training)), device)


def _kept_in(
    job_id: int, layout: TrainingLayout, unit: int, offloaded: Mapping[int, Firsts], device: int
) -> tuple[Place, ...]:
    if not offloads(layout, unit):
        return (kept(job_id, unit, device=device),)
    firsts = offloaded.get(unit, ())
    return tuple([kept(job_id, unit, device=device, first=first) for first in firsts])


def _recorded_in(
    layout: TrainingLayout, unit: int, recorded: tuple[int, Firsts], device: int
) -> list[Place]:
    """The places on the device of what a record has of a unit."""
    (request, firsts), own = recorded, windows_of(layout).kept
    if unit < layout.first or not own[unit]:
        return []
    return [kept(request, unit, device=device, first=first) for first in firsts]


def _offloaded(training: TrainingProgress) -> tuple[tuple[int, Firsts], ...]:
    """The windows of the sample under way that units have offloaded."""
    sample = training.sample
    if sample is None or not (away := _away(layout_of(training))):
        return ()
    return tuple([(unit, training.windows(sample, unit)) for unit in away])


@lru_cache(maxsize=FOOTPRINTS)
def _away(layout: TrainingLayout) -> tuple[int, ...]:
    """The units that offload."""
    return tuple([unit for unit in range(layout.num_units) if offloads(layout, unit)])


def windows_of(layout: TrainingLayout) -> WindowBytes:
    """The bytes per token of a finetuning job.

    Args:
        layout: the layout of the job.

    Returns:
        Its `windows`.

    Raises:
        ValueError: the planner has laid out whole microbatches.
    """
    if layout.windows is None:
        raise ValueError("a job that finetunes on samples needs a layout in windows")
    return layout.windows


def window_footprint(
    piece: Slice, training: TrainingProgress, page: PageSize, device: int
) -> WindowFootprint:
    """The footprint of a finetuning launch.

    Args:
        piece: a window forward or back, or the update of all chunks, that the order allows.
        training: the progress of its job, which has a layout.
        page: the page size of KV.
        device: where it runs.

    Returns:
        The places of the launch. The policy asks for them, and the check of its plan again.
    """
    assert piece.layers is not None, "a finetuning launch names its units or chunks"
    spec, start, away = training.spec, start_of(piece, training), tuple[tuple[int, Firsts], ...]()
    rows = 0
    if piece.work is Work.BACKWARD:
        away = _offloaded(training)
    elif piece.work is Work.FORWARD and piece.layers.stop == spec.num_units:
        rows = spec.sample(piece.microbatch).loss_rows(start, start + piece.tokens)
    total, is_alone = spec.tokens_of(piece.microbatch), spec.microbatches == 1
    recorded, before = UNRECORDED, 0
    if (record := record_behind(piece, training)) is not None:
        recorded, before = (record.request, record.firsts), record.tokens * (start >= record.stop)
    given = (piece.work, piece.layers, piece.tokens, start, total, rows, away)
    window = _Window(*given, recorded, before)
    layout = layout_of(training)
    footprint = _footprint(piece.job.job_id, layout, window, is_alone, page, device)
    if record is None or record.stash is None:
        return footprint
    return footprint._replace(reads=(*footprint.reads, record.stash.place(device)))


def record_behind(piece: Slice, training: TrainingProgress) -> Record | None:
    """What the sample of a slice uses of a record.

    Args:
        piece: a slice of a finetuning job that is not issued yet.
        training: the progress of the job.

    Returns:
        None where it uses none.
    """
    if piece.work is Work.UPDATE:
        return None
    found = training.adopted(piece.microbatch)
    return training.adoptable(piece.microbatch) if found is None and piece.record else found


def sample_places(training: TrainingProgress, device: int) -> tuple[Place, ...]:
    """All places that a sample may hold, which a job that begins it anew gives back.

    Args:
        training: the progress of a finetuning job, which has a layout.
        device: where it trains.

    Returns:
        Places, held or not: pages, kept activations, here or on the host, and gradients of the
        sample. What it uses of a record is among them.
    """
    spec, away, recorded = training.spec, _offloaded(training), UNRECORDED
    if training.sample is not None and (record := training.adopted(training.sample)) is not None:
        recorded = record.request, record.firsts
    is_alone = spec.microbatches == 1
    return _sample_places(spec.job_id, layout_of(training), is_alone, away, recorded, device)


@lru_cache(maxsize=FOOTPRINTS)
def _sample_places(
    job_id: int,
    layout: TrainingLayout,
    is_alone: bool,
    offloaded: tuple[tuple[int, Firsts], ...],
    recorded: tuple[int, Firsts],
    device: int,
) -> tuple[Place, ...]:
    units, chunks = range(layout.num_units), layout.trained_by
    sums = [sample_gradient(job_id, c, device) for c in chunks]
    if is_alone:
        sums = [gradient(job_id, c, device=device) for c in chunks]
    firsts = dict(offloaded)
    own = [place for u in units for place in _kept_in(job_id, layout, u, firsts, device)]
    away = [on_host(place) for place in own if offloads(layout, place.region.part)]
    recorded_on = [place for u in units for place in _recorded_in(layout, u, recorded, device)]
    return (
        kv_place(job_id, device=device),
        *own,
        *away,
        *recorded_on,
        *map(on_host, recorded_on),
        *[kv_gradient(job_id, u, device=device) for u in units],
        hidden_gradient(job_id, device=device),
        *sums,
    )


def sample_bytes(training: TrainingProgress, page: PageSize, device: int) -> Mapping[Place, int]:
    """Bytes of a job's longest sample, with static buffers (FlexLLM).

    Args:
        training: the progress of a finetuning job, which has a layout.
        page: the page size of KV.
        device: where it trains.

    Returns:
        By place: its pages, what its units keep on the device, and the gradient of hidden states.
    """
    spec = training.spec
    return _sample_bytes(spec.job_id, layout_of(training), spec.sequence_tokens, page, device)


@lru_cache(maxsize=FOOTPRINTS)
def _sample_bytes(
    job_id: int, layout: TrainingLayout, tokens: int, page: PageSize, device: int
) -> Mapping[Place, int]:
    found = {kv_place(job_id, device=device): page.bytes_for(tokens)}
    for unit, nbytes in enumerate(windows_of(layout).kept):
        if nbytes and unit >= layout.first and not offloads(layout, unit):
            found[kept(job_id, unit, device=device)] = tokens * nbytes
    found[hidden_gradient(job_id, device=device)] = tokens * windows_of(layout).hidden
    return MappingProxyType(found)


class _Window(NamedTuple):
    """What a footprint depends on: the slice, its first token, and the tokens of its sample.

    `rows` are those of the head; `offloaded` are windows of the sample that units have offloaded,
    and `recorded` are those of the record that it starts behind, with their request.
    """

    work: Work
    units: range
    tokens: int
    context: int
    total: int
    rows: int = 0
    offloaded: tuple[tuple[int, Firsts], ...] = ()
    recorded: tuple[int, Firsts] = UNRECORDED
    recorded_tokens: int = 0  # of that record, before this window


class _UnitPlaces(NamedTuple):
    """The places of units that are those of every window.

    `kept` has unit, bytes per token and place of what stays on the device; None: one per window.
    """

    kept: tuple[tuple[int, int, Place | None], ...]
    weights: tuple[Place, ...]
    summed: tuple[tuple[Place, int], ...]  # gradients of the sample that the launch adds to
    sums: tuple[Place, ...]  # where gradients of the sample are
    added: tuple[tuple[Place, int], ...]  # sums of the step, to which a complete sample is added


@lru_cache(maxsize=FOOTPRINTS)
def _unit_places(
    job_id: int, layout: TrainingLayout, units: range, is_forward: bool, is_alone: bool, device: int
) -> _UnitPlaces:
    """`is_alone`: a step has one sample, whose gradients go to the sum of the step at once."""
    own, chunks, kept_bytes = layout.units, layout.chunks, windows_of(layout).kept
    found = list[tuple[int, int, Place | None]]()
    for unit in units:
        if unit >= layout.first and (nbytes := kept_bytes[unit]):
            is_away = offloads(layout, unit)
            found.append((unit, nbytes, None if is_away else kept(job_id, unit, device=device)))
    read = dict.fromkeys([c for u in units for c in own[u].chunks])
    weights = tuple([weight(job_id, c, device=device) for c in read])
    step = {c: gradient(job_id, c, device=device) for c in layout.trained_by}
    sums = step if is_alone else {c: sample_gradient(job_id, c, device) for c in step}
    trains = (layout.num_units - 1,) if is_forward else units  # the head adds with its forward
    trained = dict.fromkeys([c for u in trains for c in own[u].trained])
    return _UnitPlaces(
        tuple(found),
        weights,
        tuple([(sums[c], chunks[c].gradient_bytes) for c in trained]),
        tuple(sums.values()),
        () if is_alone else tuple([(step[c], chunks[c].gradient_bytes) for c in step]),
    )


@lru_cache(maxsize=FOOTPRINTS)
def _footprint(
    job_id: int,
    layout: TrainingLayout,
    window: _Window,
    is_alone: bool,
    page: PageSize,
    device: int,
) -> WindowFootprint:
    """The footprint of a launch; policies ask for it, and the check of their plan again."""
    if window.work is Work.UPDATE:
        return _of_update(job_id, layout, window.units, is_alone, device)
    is_forward = window.work is Work.FORWARD
    places = _unit_places(job_id, layout, window.units, is_forward, is_alone, device)
    make = _of_forward if is_forward else _of_backward
    return make(job_id, layout, window, places, page, device)


def _of_forward(
    job_id: int,
    layout: TrainingLayout,
    window: _Window,
    places: _UnitPlaces,
    page: PageSize,
    device: int,
) -> WindowFootprint:
    """A window forward: its pages grow, and what the units keep; the head makes its loss."""
    own, context, tokens = windows_of(layout), window.context, window.tokens
    end, pages, goes = context + tokens, kv_place(job_id, device=device), list[Place]()
    sizes = [(pages, page.bytes_for(end))]
    own_tokens = end - window.recorded_tokens
    for unit, nbytes, place in places.kept:
        if place is None:
            goes.append(kept(job_id, unit, device=device, first=context))
            sizes.append((goes[-1], tokens * nbytes))
        else:
            sizes.append((place, own_tokens * nbytes))
    if window.units.stop == layout.num_units:
        sizes.append((hidden_gradient(job_id, device=device), end * own.hidden))
        sizes += places.summed
    frees = list[Place]()
    if window.rows:
        frees.append(workspace(job_id, device=device))
        sizes.append((frees[0], own.backward.of_loss(window.rows)))
    written = tuple([place for place, _ in sizes])
    reads = (*places.weights, pages) if context else places.weights
    return WindowFootprint(reads, written, tuple(sizes), tuple(frees), goes=tuple(goes))


def _of_backward(
    job_id: int,
    layout: TrainingLayout,
    window: _Window,
    places: _UnitPlaces,
    page: PageSize,
    device: int,
) -> WindowFootprint:
    """A window back: gradients of its units, and of the keys and values before it."""
    _, units, tokens, context, total, _, offloaded, recorded, _ = window
    is_first, is_last = context + tokens == total, context == 0
    firsts, own, comes = dict(offloaded), list[Place](), list[Place]()
    for unit, _, place in places.kept:
        comes += (found := _recorded_in(layout, unit, recorded, device))
        own += found
        if place is None:
            away = [kept(job_id, unit, device=device, first=at) for at in firsts.get(unit, ())]
            comes += away
            own += away
        else:
            own.append(place)
    passed, kv = hidden_gradient(job_id, device=device), kv_place(job_id, device=device)
    keys = page.count(total) * page.tokens
    work = workspace(job_id, device=device)
    sizes = [*places.summed, (work, windows_of(layout).backward.of(units, tokens, keys))]
    reads, frees = [*places.weights, *own, kv, passed], [work]
    if not (is_first and is_last):  # the sums of a unit begin with its first window
        sums = kv_gradient(job_id, units.start, device=device)
        sizes.append((sums, total * windows_of(layout).kv_gradient))
        reads += [] if is_first else [sums]
        frees += [sums] if is_last else []
    frees += own if is_last else []
    written = [place for place, _ in sizes] + [passed]
    if is_last and units.start == layout.first:
        frees += [kv, passed]
        sizes += places.added
        written += [place for place, _ in places.added]
        of_sample = places.sums if places.added else ()
        reads += [place for place in of_sample if place not in written]
        frees += of_sample
    made = (tuple(reads), tuple(written), tuple(sizes), tuple(frees))
    return WindowFootprint(*made, comes=tuple(comes))


def _of_update(
    job_id: int, layout: TrainingLayout, numbers: range, is_alone: bool, device: int
) -> WindowFootprint:
    """The update of all chunks: no launch finds some of them old."""
    sizes, sums, chunks = list[tuple[Place, int]](), list[Place](), layout.chunks
    for c in numbers:
        sums.append(gradient(job_id, c, device=device))
        sizes.append((weight(job_id, c, device=device), chunks[c].weight_bytes))
        if chunks[c].optimizer_bytes:
            sizes.append((optimizer(job_id, c, device=device), chunks[c].optimizer_bytes))
    work = workspace(job_id, device=device)
    work_bytes = max([chunks[c].update_bytes for c in numbers])
    frees = sums if is_alone else []  # else they stay, as states
    frees = [*frees, *([work] if work_bytes else [])]
    sizes += [(work, work_bytes)] if work_bytes else []
    written = tuple([place for place, _ in sizes])
    return WindowFootprint(tuple(sums), written, tuple(sizes), tuple(frees))


def last_use_in_sample(place: Place, training: TrainingProgress) -> str:
    """The last use of the contents of a finetuning job's place, in words for messages.

    Args:
        place: a place of the job that holds no state.
        training: the progress of the job.

    Returns:
        "" where the sample under way does not use the contents.
    """
    _, kind, part, slot = place.region
    if kind is Kind.GRADIENT:
        return _of_sum(part, training)
    microbatch = training.sample
    if microbatch is None:
        return ""
    total = training.spec.tokens_of(microbatch)
    forward, backward = training.frontier(microbatch)
    if not forward[0]:
        return ""
    if kind is Kind.ACTIVATION:
        return f"before the backward of unit {part}" if backward[part] < total else ""
    if kind is Kind.KV or slot == HIDDEN_GRADIENT:
        return "before the sample's backward is complete"
    if slot == KV_GRADIENT and 0 < backward[part] < total:
        return f"before the backward of unit {part} is complete"
    if slot == SAMPLE_GRADIENT and any([backward[u] for u in training.trained_by.get(part, ())]):
        return "before the sample's backward is complete"
    return ""


def _of_sum(chunk: int, training: TrainingProgress) -> str:
    """From the first sample of a step that is added to it until its update."""
    if chunk not in training.trained_by or training.updated[chunk] > training.step:
        return ""
    is_own = training.spec.microbatches == 1  # then it holds what the sample has added so far
    for microbatch in training.microbatches:
        done = training.frontier(microbatch)[1]
        is_begun = any([done[u] for u in training.trained_by[chunk]])
        if training.is_trained(microbatch) or (is_own and is_begun):
            return f"before the update of chunk {chunk}"
    return ""
