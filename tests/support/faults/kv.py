"""Lies about keys and values, shared pages, records and adapters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from engine.contract.plan import Compute, Copy, Free, Grow, Share
from engine.contract.regions import Kind, Place, Tier
from engine.contract.rules import Rule
from tests.support.faults.lying import (
    Scene,
    ahead,
    behind,
    changed,
    fault,
    pick,
    swapped,
    with_launch,
)


# ---- rules of KV
@fault("no KV", Rule.OWN_KV, Rule.KV_CONTENTS, Rule.KV_PAGES)
def _(scene: Scene) -> Any:
    """Takes no pages at all, and names none."""
    if scene.launch is None:
        return None
    plan = scene.plan
    ops = tuple(
        changed(op, writes=()) if op is plan.ops[-1] and isinstance(op, Compute) else op
        for op in plan.ops
        if not isinstance(op, Grow)
    )
    found = replace(plan, ops=ops)
    return found if found.ops else None


@fault("a write left out", Rule.OWN_KV)
def _(scene: Scene) -> Any:
    launch = scene.launch
    if launch is None or not launch.writes:
        return None
    i = scene.rng.randrange(len(launch.writes))
    plan = scene.plan
    return with_launch(scene, plan, writes=(*launch.writes[:i], *launch.writes[i + 1 :]))


@fault("writes another job's KV", Rule.OWN_KV)
def _(scene: Scene) -> Any:
    launch = scene.launch
    others = [scene.own(j) for j in scene.alive() if j not in scene.sliced()]
    place = pick(scene, others)
    if launch is None or place is None:
        return None
    return with_launch(scene, scene.plan, writes=(*launch.writes, place))


@fault("writes another job's KV in its stead", Rule.OWN_KV)
def _(scene: Scene) -> Any:
    launch = scene.launch
    places = [scene.own(j) for j in scene.alive()]
    if launch is None or not launch.writes:
        return None
    i = scene.rng.randrange(len(launch.writes))
    place = pick(scene, [p for p in places if p not in launch.writes])
    if place is None:
        return None
    plan = scene.plan
    return with_launch(scene, plan, writes=(*launch.writes[:i], place, *launch.writes[i + 1 :]))


@fault("one page", Rule.KV_PAGES)
def _(scene: Scene) -> Any:
    """A prompt of several pages is computed into one."""
    launch, plan = scene.launch, scene.plan
    if launch is None:
        return None
    held = scene.view.held_bytes
    big = [
        op
        for op in plan.ops
        if isinstance(op, Grow)
        and op.place.region.kind is Kind.KV
        and op.nbytes > scene.page.nbytes
        and op.place in launch.writes
        and op.place not in held
    ]
    grow = pick(scene, big)
    if grow is None:
        return None
    piece = next(p for p in launch.slices if scene.own(p.job) == grow.place)
    started = any(isinstance(op, Share) and op.place == grow.place for op in plan.ops)
    if not started and piece.tokens <= scene.page.tokens:
        return None  # set aside for later
    if started:
        return None
    return swapped(plan, grow, grow._replace(nbytes=scene.page.nbytes))


@fault("a decode without its next page", Rule.KV_PAGES)
def _(scene: Scene) -> Any:
    launch, plan, size = scene.launch, scene.plan, scene.page.tokens
    full = [
        op
        for op in plan.ops
        if isinstance(op, Grow)
        and launch is not None
        and op.place in launch.writes
        and op.place in scene.view.held_bytes
        and any(
            scene.own(p.job) == op.place
            and p.job.computed_tokens + p.tokens
            > scene.view.held_bytes[op.place] // scene.page.nbytes * size
            for p in launch.slices
        )
    ]
    grow = pick(scene, full)
    return None if grow is None else swapped(plan, grow)


@fault("swapped and lost", Rule.KV_CONTENTS, Rule.KV_FREED)
def _(scene: Scene) -> Any:
    """What comes back from the host is never copied: new pages stand for it."""
    plan = scene.plan
    for op in plan.ops:
        is_back = isinstance(op, Copy) and (op.src.tier, op.dst.tier) == (Tier.HOST, Tier.GPU)
        if is_back and op.src.region.kind is Kind.KV:
            return swapped(plan, op, Grow(op.dst, scene.view.held_bytes[op.src]))
    return None


@fault("new pages for those on the host", Rule.KV_CONTENTS)
def _(scene: Scene) -> Any:
    """A decode goes to the host, and goes on at once on empty pages."""
    launch, plan = scene.launch, scene.plan
    moved = {op.place for op in plan.ops if isinstance(op, Grow | Free)}
    jobs = [j for j in scene.alive() if j in scene.sliced() and scene.own(j) not in moved]
    jobs = [j for j in jobs if scene.away(j) not in scene.view.held_bytes]
    job = pick(scene, jobs)
    if job is None or launch is None or any(isinstance(op, Copy) for op in plan.ops):
        return None
    own, away = scene.own(job), scene.away(job)
    nbytes = scene.view.held_bytes[own]
    if away.pool not in scene.view.free_bytes or scene.view.room(away.pool) < nbytes:
        return None
    if scene.view.kept_pages is not None:
        return None  # shared pages do not make room
    return ahead(plan, Copy(own, away), Free(own), Grow(own, nbytes))


@fault("freed alive", Rule.KV_FREED)
def _(scene: Scene) -> Any:
    job = pick(scene, [j for j in scene.alive() if j not in scene.sliced()])
    return None if job is None else ahead(scene.plan, Free(scene.own(job)))


@fault("freed alive behind its decode", Rule.KV_FREED)
def _(scene: Scene) -> Any:
    job = pick(scene, [j for j in scene.alive() if j in scene.sliced()])
    return None if job is None else behind(scene.plan, Free(scene.own(job)))


@fault("freed and taken anew", Rule.KV_FREED)
def _(scene: Scene) -> Any:
    jobs = [j for j in scene.alive() if j in scene.sliced()]
    job = pick(scene, jobs)
    if job is None or scene.view.kept_pages is not None:
        return None
    own = scene.own(job)
    return ahead(scene.plan, Free(own), Grow(own, scene.view.held_bytes[own]))


@fault("swapped and freed", Rule.KV_FREED)
def _(scene: Scene) -> Any:
    """Both copies are given back."""
    plan = scene.plan
    for op in plan.ops:
        is_out = isinstance(op, Copy) and (op.src.tier, op.dst.tier) == (Tier.GPU, Tier.HOST)
        if (
            is_out
            and op.src.region.kind is Kind.KV
            and op.src.region.owner not in {j.job_id for j in plan.restart}
        ):
            return (
                behind(plan, Free(op.dst))
                if Free not in map(type, plan.ops[-1:])
                else replace(plan, ops=(*plan.ops, Free(op.dst)))
            )
    return None


# ---- rule SHARE
def _shares(scene: Scene) -> Any:
    return pick(scene, [op for op in scene.plan.ops if isinstance(op, Share)])


def _shared(name: str, pages: Callable[[Scene, Share], Any], *rules: Rule) -> None:
    def make(scene: Scene) -> Any:
        share = _shares(scene)
        found = None if share is None else pages(scene, share)
        if found is None or found == share.pages:
            return None
        return swapped(scene.plan, share, Share(share.place, found))

    fault(name, Rule.SHARE, *rules)(make)


def _other_page(scene: Scene, share: Share) -> Any:
    count = scene.view.capacity_bytes[Tier.GPU, scene.view.device] // scene.page.nbytes
    page = pick(scene, [p for p in range(count) if p not in share.pages])
    i = scene.rng.randrange(len(share.pages))
    scene.notes["page"] = page
    return None if page is None else (*share.pages[:i], page, *share.pages[i + 1 :])


_shared("shares pages in another order", lambda s, x: x.pages[::-1])
_shared("shares a page twice", lambda s, x: (*x.pages, x.pages[-1]))
_shared("shares a page that is not there", lambda s, x: (*x.pages[:-1], 10**9), Rule.ANSWER)
_shared("shares a page below zero", lambda s, x: (*x.pages[:-1], -1), Rule.ANSWER)
_shared("shares all but the first page", lambda s, x: x.pages[1:] or None, Rule.KV_PAGES)
_shared("shares pages in words", lambda s, x: ("one",), Rule.ANSWER)
_shared("shares pages in a list", lambda s, x: [*x.pages], Rule.ANSWER)


@fault("shares a page with other contents", Rule.SHARE, Rule.ROOM)
def _(scene: Scene) -> Any:
    """A page of another running job whose prompt begins otherwise."""
    share = _shares(scene)
    if share is None:
        return None
    found = _other_page(scene, share)
    if found is None:
        return None
    holds = scene.notes.get("holds")  # asks the engine's own books, not the check
    if holds is not None and holds(share, found):
        return None
    return swapped(scene.plan, share, Share(share.place, found))


@fault("shares for a job that has begun", Rule.SHARE)
def _(scene: Scene) -> Any:
    job = pick(scene, [j for j in scene.alive() if j in scene.sliced()])
    return None if job is None else ahead(scene.plan, Share(scene.own(job), (0,)))


@fault("shares without prefix caching", Rule.SHARE)
def _(scene: Scene) -> Any:
    if scene.view.kept_pages is not None:
        return None
    waits = [j for j in scene.view.waiting if scene.own(j) not in scene.view.held_bytes]
    job = pick(scene, [j for j in waits if j not in scene.sliced() and j.training is None])
    return None if job is None else ahead(scene.plan, Share(scene.own(job), (0,)))


@fault("shares without a slice", Rule.SHARE)
def _(scene: Scene) -> Any:
    share, launch = _shares(scene), scene.launch
    if share is None or launch is None or len(launch.slices) < 2:
        return None
    keep = [i for i, p in enumerate(launch.slices) if scene.own(p.job) != share.place]
    ops = [op for op in scene.plan.ops if not (isinstance(op, Grow) and op.place == share.place)]
    new = changed(
        launch,
        slices=tuple(launch.slices[i] for i in keep),
        writes=tuple(launch.writes[i] for i in keep),
    )
    return replace(scene.plan, ops=tuple(new if op is launch else op for op in ops))


# ---- rule RECORD
@fault("a slice is recorded that no job learns from", Rule.RECORD)
def _recorded(scene: Scene) -> Any:
    launch = scene.launch
    if launch is None or launch.slices[0].job.training is not None:
        return None
    first = launch.slices[0]._replace(record=True)
    return swapped(scene.plan, launch, changed(launch, slices=(first, *launch.slices[1:])))


# ---- rule ADAPTER
def _adapter(scene: Scene) -> Place | None:
    """An adapter that the honest launch runs through."""
    reads = () if scene.launch is None else scene.launch.reads
    found: Place | None = pick(scene, [p for p in reads if p.region.kind is Kind.ADAPTER])
    return found


def _launched(name: str, change: Callable[[Compute, Place], Compute], *rules: Rule) -> None:
    """Registers a launch that does something else with an adapter."""

    def make(scene: Scene) -> Any:
        place, launch = _adapter(scene), scene.launch
        if place is None or launch is None:
            return None
        return swapped(scene.plan, launch, change(launch, place))

    fault(name, Rule.ADAPTER, *rules)(make)


def _other_version(place: Place) -> Place:
    return place._replace(region=place.region._replace(slot=place.region.slot + 1))


def _reads(launch: Compute, place: Place, *others: Place) -> Compute:
    return changed(launch, reads=(*[p for p in launch.reads if p != place], *others))


_launched("an adapter that is not read", _reads)
_launched("another version is read", lambda x, p: _reads(x, p, _other_version(p)), Rule.HELD)
_launched("an adapter is written", lambda x, p: changed(x, writes=(*x.writes, p)))


def _placed(name: str, make_op: Callable[[Place], Any], *rules: Rule) -> None:
    """Registers an operation on an adapter behind the launch that runs through it."""

    def make(scene: Scene) -> Any:
        place = _adapter(scene)
        return None if place is None else behind(scene.plan, make_op(place))

    fault(name, Rule.ADAPTER, *rules)(make)


def _at_home(place: Place) -> Place:
    return place._replace(tier=Tier.HOST)


_placed("an adapter copied onto its home", lambda place: Copy(place, _at_home(place)))
_placed("the home of an adapter freed", lambda place: Free(_at_home(place)), Rule.JOB)
_placed("bytes for an adapter", lambda place: Grow(place, 4), Rule.JOB)
_placed(
    "a version from nowhere",
    lambda place: Copy(place, _at_home(_other_version(place))),
    Rule.COPY,
)
