"""Lies about lanes, places and copies: LANE, DEVICE, PLACE, BYTES, ROOM, HELD, TIER, COPY,
OPERATION."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from engine.contract.job import Job
from engine.contract.plan import HOST_LANE, Compute, Copy, Free, Grow, Plan, Share
from engine.contract.regions import Kind, Place, Region, Tier, kv_place
from engine.contract.rules import Rule
from tests.support.faults.lying import (
    FAULTS,
    FOREIGN,
    Legal,
    Make,
    Scene,
    ahead,
    behind,
    fault,
    pick,
    swapped,
    with_launch,
)

# ---- rules LANE and DEVICE
for _lane in ("compute2", HOST_LANE, "net", "gpu->host", "", 5, "COMPUTE"):
    fault(f"a launch on lane {_lane!r}", Rule.LANE, Rule.ANSWER)(
        lambda s, lane=_lane: with_launch(s, on=lane)
    )
for _device in (1, 7, -1):
    fault(f"a launch on device {_device:+}", Rule.DEVICE)(
        lambda s, d=_device: with_launch(s, device=s.view.device + d)
    )
fault("a launch on device None", Rule.DEVICE, Rule.ANSWER)(lambda s: with_launch(s, device=None))


# ---- rules PLACE and BYTES
def _job(scene: Scene) -> Any:
    return pick(scene, scene.view.serving or scene.view.waiting)


def _grows(where: Callable[[Scene, Job], Place], nbytes: Callable[[Scene], Any]) -> Make:
    def make(scene: Scene) -> Any:
        job = _job(scene)
        if job is None or job.training is not None:
            return None
        return ahead(scene.plan, Grow(where(scene, job), nbytes(scene)))

    return make


_one = lambda s: s.page.nbytes  # noqa: E731
fault("KV on a disk that is not there", Rule.PLACE)(
    _grows(lambda s, j: kv_place(j.job_id, Tier.DISK), _one)
)
fault("KV on a device that is not there", Rule.PLACE)(
    _grows(lambda s, j: kv_place(j.job_id, Tier.GPU, 9), _one)
)
fault("KV on a device below zero", Rule.PLACE)(
    _grows(lambda s, j: kv_place(j.job_id, Tier.GPU, -1), _one)
)
fault("KV in a tier that is not there", Rule.PLACE)(
    _grows(lambda s, j: Place(Region(j.job_id, Kind.KV), "nvram"), _one)  # type: ignore[arg-type]
)
fault("a buffer on a disk that is not there", Rule.PLACE)(
    _grows(lambda s, j: Place(Region(j.job_id, Kind.BUFFER), Tier.DISK), _one)
)


fault("KV in another part", Rule.PLACE)(
    _grows(
        lambda s, j: Place(Region(j.job_id, Kind.KV, 3), Tier.GPU, s.view.device),
        lambda s: s.page.nbytes,
    )
)


@fault("a copy to a disk that is not there", Rule.PLACE)
def _(scene: Scene) -> Any:
    job = pick(scene, scene.alive())
    if job is None:
        return None
    return ahead(scene.plan, Copy(scene.own(job), kv_place(job.job_id, Tier.DISK)))


@fault("KV in another replica", Rule.PLACE)
def _(scene: Scene) -> Any:
    devices = {d for _, d in scene.view.capacity_bytes} - {scene.view.device}
    job, device = _job(scene), pick(scene, devices)
    if job is None or device is None or job.training is not None:
        return None
    if job.device is None:
        return None
    return ahead(scene.plan, Grow(kv_place(job.job_id, Tier.GPU, device), scene.page.nbytes))


_mine = lambda s, j: s.own(j)  # noqa: E731
fault("half a page", Rule.BYTES)(_grows(_mine, lambda s: s.page.nbytes // 2))
fault("bytes below zero", Rule.BYTES)(_grows(_mine, lambda s: -s.page.nbytes))
fault("bytes as a float", Rule.BYTES)(_grows(_mine, lambda s: float(s.page.nbytes)))
fault("True for bytes", Rule.BYTES)(_grows(_mine, lambda s: True))
fault("one byte more", Rule.BYTES)(_grows(_mine, lambda s: s.page.nbytes + 1))
fault("bytes in words", Rule.BYTES, Rule.ANSWER)(_grows(_mine, lambda s: "all"))
fault("a buffer below zero", Rule.BYTES)(
    _grows(lambda s, j: Place(Region(j.job_id, Kind.BUFFER), Tier.GPU, s.view.device), lambda s: -8)
)


@fault("an honest growth cut to half a page", Rule.BYTES)
def _(scene: Scene) -> Any:
    grow = pick(scene, [op for op in scene.plan.ops if isinstance(op, Grow)])
    if grow is None or grow.place.region.kind is not Kind.KV:
        return None
    return swapped(scene.plan, grow, grow._replace(nbytes=grow.nbytes - scene.page.nbytes // 2))


# ---- rule ROOM
fault("more pages than there are", Rule.ROOM)(
    _grows(
        _mine,
        lambda s: (
            (s.view.capacity_bytes[Tier.GPU, s.view.device] // s.page.nbytes + 1) * s.page.nbytes
        ),
    )
)
fault("pages beyond number", Rule.ROOM)(_grows(_mine, lambda s: s.page.nbytes * 10**30))


@fault("a page more than there is room", Rule.ROOM, Rule.KV_PAGES)
def _(scene: Scene) -> Any:
    launch = scene.launch
    if launch is None or scene.plan.restart:
        return None
    if any(isinstance(op, Free | Copy | Share) for op in scene.plan.ops):
        return None
    pages = scene.view.room((Tier.GPU, scene.view.device)) // scene.page.nbytes + 1
    grow = Grow(scene.own(launch.slices[-1].job), pages * scene.page.nbytes)
    return ahead(scene.plan, grow)


# ---- rules HELD and TIER
@fault("free of what is not held", Rule.HELD)
def _(scene: Scene) -> Any:
    waits = [j for j in scene.view.waiting if scene.own(j) not in scene.view.held_bytes]
    job = pick(scene, [j for j in waits if j not in scene.sliced()])
    return None if job is None else ahead(scene.plan, Free(scene.own(job)))


@fault("double free", Rule.HELD)
def _(scene: Scene) -> Any:
    idle = [j for j in scene.alive() if j not in scene.sliced()]
    job = pick(scene, idle)
    if job is None:
        return None
    plan, place = scene.plan, scene.own(job)
    plan = replace(plan, restart=(*plan.restart, job))
    return ahead(plan, Free(place), Free(place))


@fault("an honest free twice", Rule.HELD)
def _(scene: Scene) -> Any:
    free = pick(scene, [op for op in scene.plan.ops if isinstance(op, Free)])
    return None if free is None else swapped(scene.plan, free, free, Free(free.place))


@fault("copy from what is not held", Rule.HELD)
def _(scene: Scene) -> Any:
    jobs = [j for j in scene.view.serving if scene.away(j) not in scene.view.held_bytes]
    jobs = [j for j in jobs if Tier.HOST in {t for t, _ in scene.view.capacity_bytes}]
    moved = {op.src.region.owner for op in scene.plan.ops if isinstance(op, Copy)}
    job = pick(scene, [j for j in jobs if j.job_id not in moved])
    if job is None:
        return None
    return ahead(scene.plan, Copy(scene.away(job), scene.own(job)))


@fault("reads what is not held", Rule.HELD)
def _(scene: Scene) -> Any:
    place = kv_place(FOREIGN, Tier.GPU, scene.view.device)
    return with_launch(scene, scene.plan, reads=(place,))


@fault("waits for what is not held", Rule.HELD)
def _(scene: Scene) -> Any:
    return with_launch(scene, scene.plan, after=(kv_place(FOREIGN, Tier.HOST),))


@fault("reads what lies on the host", Rule.TIER)
def _(scene: Scene) -> Any:
    there = [p for p in scene.view.held_bytes if p.tier is Tier.HOST]
    moved = {op.place for op in scene.plan.ops if isinstance(op, Free)}
    place = pick(scene, [p for p in there if p not in moved])
    return None if place is None else with_launch(scene, scene.plan, reads=(place,))


@fault("reads what has just gone to the host", Rule.TIER)
def _(scene: Scene) -> Any:
    job = pick(scene, [j for j in scene.alive() if j not in scene.sliced()])
    plan, away = scene.plan, None if job is None else scene.away(job)
    if away is None or away in scene.view.held_bytes or scene.launch is None:
        return None
    nbytes = scene.view.held_bytes[scene.own(job)]
    taken = [op.dst for op in plan.ops if isinstance(op, Copy)]
    if scene.view.room(away.pool) < nbytes or any(p.tier is Tier.HOST for p in taken):
        return None
    plan = with_launch(scene, plan, reads=(away,))
    return ahead(plan, Copy(scene.own(job), away)) if plan else None


@fault("writes what lies on the host", Rule.TIER, Rule.OWN_KV)
def _(scene: Scene) -> Any:
    there = [p for p in scene.view.held_bytes if p.tier is Tier.HOST]
    moved = {op.place for op in scene.plan.ops if isinstance(op, Free)}
    place = pick(scene, [p for p in there if p not in moved])
    if place is None or scene.launch is None:
        return None
    return with_launch(scene, scene.plan, writes=(*scene.launch.writes, place))


# ---- rule COPY
@fault("another job's KV copied", Rule.COPY)
def _(scene: Scene) -> Any:
    jobs = scene.alive()
    if len(jobs) < 2:
        return None
    one, other = scene.rng.sample(jobs, 2)
    return ahead(scene.plan, Copy(scene.own(one), scene.own(other)))


@fault("another job's KV copied to the host as one's own", Rule.COPY)
def _(scene: Scene) -> Any:
    jobs = scene.alive()
    if len(jobs) < 2:
        return None
    one, other = scene.rng.sample(jobs, 2)
    return ahead(scene.plan, Copy(scene.own(one), scene.away(other)))


@fault("a copy onto itself", Rule.COPY)
def _(scene: Scene) -> Any:
    job = pick(scene, scene.alive())
    return None if job is None else ahead(scene.plan, Copy(scene.own(job), scene.own(job)))


@fault("a stale host copy over newer KV", Rule.COPY)
def _(scene: Scene) -> Any:
    """First a copy to the host, which is legal; when the job has gone on, it is copied back."""
    held, plan = scene.view.held_bytes, scene.plan
    kept: tuple[Job, int] | None = scene.notes.get("kept")
    if kept is None:
        jobs = [j for j in scene.alive() if scene.away(j) not in held]
        jobs = [j for j in jobs if scene.away(j).pool in scene.view.capacity_bytes]
        fits = [j for j in jobs if scene.view.room(scene.away(j).pool) >= held[scene.own(j)]]
        fits = [j for j in fits if not any(isinstance(op, Copy) for op in plan.ops)]
        job = pick(scene, fits)
        if job is None:
            return None
        scene.notes["kept"] = (job, job.computed_tokens)
        return Legal(ahead(plan, Copy(scene.own(job), scene.away(job))))
    job, tokens = kept
    own, away = scene.own(job), scene.away(job)
    if job.computed_tokens <= tokens or not {own, away} <= held.keys():
        if away not in held or job not in scene.view.serving:
            scene.notes.pop("kept")
        return None
    if job not in scene.alive() or held[own] != held[away]:
        return None
    return ahead(plan, Copy(away, own))


@fault("a stale host copy for freed KV", Rule.KV_FREED)
def _(scene: Scene) -> Any:
    """The copy on the host is older; the KV on the device is given back for it."""
    held, plan = scene.view.held_bytes, scene.plan
    kept: tuple[Job, int] | None = scene.notes.get("kept")
    if kept is None:
        return FAULTS["a stale host copy over newer KV"].make(scene)
    job, tokens = kept
    own, away = scene.own(job), scene.away(job)
    if job.computed_tokens <= tokens or not {own, away} <= held.keys():
        if away not in held or job not in scene.view.serving:
            scene.notes.pop("kept")
        return None
    if job not in scene.alive():
        return None
    return ahead(plan, Free(own), Copy(away, own))


@fault("copy onto another size", Rule.COPY)
def _(scene: Scene) -> Any:
    job = pick(scene, [j for j in scene.alive() if scene.away(j) not in scene.view.held_bytes])
    if job is None or any(isinstance(op, Copy) for op in scene.plan.ops):
        return None
    own, away = scene.own(job), scene.away(job)
    nbytes = scene.view.held_bytes[own] + scene.page.nbytes
    if away.pool not in scene.view.capacity_bytes or scene.view.room(away.pool) < nbytes:
        return None
    return ahead(scene.plan, Grow(away, nbytes), Copy(own, away))


@fault("KV copied into a buffer", Rule.COPY)
def _(scene: Scene) -> Any:
    job = pick(scene, scene.alive())
    if job is None:
        return None
    buffer = Place(Region(job.job_id, Kind.BUFFER), Tier.HOST, scene.away(job).device)
    return ahead(scene.plan, Copy(scene.own(job), buffer))


# ---- rule OPERATION
@fault("a launch that is in flight", Rule.OPERATION)
def _(scene: Scene) -> Any:
    old = pick(scene, [op for op in scene.view.in_flight if isinstance(op, Compute)])
    if old is None or old.device != scene.view.device:
        return None
    return Plan((old,))


@fault("its last launch, in flight, for the new one", Rule.OPERATION)
def _(scene: Scene) -> Any:
    old = [op for op in scene.view.in_flight if isinstance(op, Compute)]
    if not old or scene.launch is None or old[-1].device != scene.view.device:
        return None
    plan = scene.plan
    return replace(plan, ops=(*plan.ops[:-1], old[-1]))


@fault("a launch twice in a plan", Rule.OPERATION)
def _(scene: Scene) -> Any:
    plan = scene.plan
    launch = next((op for op in plan.ops if isinstance(op, Compute)), None)
    return None if launch is None else behind(plan, launch)


@fault("a copy twice in a plan", Rule.OPERATION)
def _(scene: Scene) -> Any:
    op = pick(scene, [op for op in scene.plan.ops if isinstance(op, Copy)])
    return None if op is None else swapped(scene.plan, op, op, op)


@fault("a copy that is in flight", Rule.OPERATION)
def _(scene: Scene) -> Any:
    old = pick(scene, [op for op in scene.view.in_flight if isinstance(op, Copy)])
    return None if old is None else ahead(scene.plan, old)
