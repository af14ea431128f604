"""Lies about jobs: rules JOB, ONCE, RESTART, REFUSE and TOKENS."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.contract.job import Job
from engine.contract.plan import Compute, Copy, Grow, Plan, Share, Slice
from engine.contract.regions import SHARED_OWNER, Kind, Place, Region, Tier, Work, kv_place
from engine.contract.rules import Rule
from tests.support.faults.lying import (
    FOREIGN,
    Make,
    Scene,
    ahead,
    behind,
    changed,
    fault,
    pick,
    with_launch,
    with_slice,
)


# ---- rules JOB and ONCE
def _slice_of(scene: Scene, job: Job) -> Plan | None:
    launch, plan = scene.launch, scene.plan
    if launch is None:
        return None
    piece, place = Slice(job, 1), scene.own(job)
    at = scene.rng.random() < 0.5
    base = next(op for op in plan.ops if isinstance(op, Compute) and op.slices is not None)
    if at:
        new = changed(base, slices=(*base.slices, piece), writes=(*base.writes, place))
    else:
        new = changed(base, slices=(*base.slices[:-1], piece), writes=(*base.writes[:-1], place))
    ops = [op for op in plan.ops if op is not base]
    grow = [] if place in scene.view.held_bytes else [Grow(place, scene.page.nbytes)]
    return replace(plan, ops=(*ops, *grow, new))


def _forged(job: Job) -> Job:
    return Job(job.job_id, job.arrival_ns, job.prompt_tokens, job.known_tokens, job.computed_tokens)


fault("a slice of a foreign job", Rule.JOB)(lambda s: _slice_of(s, Job(FOREIGN, 0, 5, 5)))


@fault("a slice of a job that has not arrived", Rule.JOB)
def _(scene: Scene) -> Any:
    coming = scene.notes.get("coming", ())
    known = scene.notes["jobs"]
    number = pick(scene, [i for i in coming if i not in known])
    return None if number is None else _slice_of(scene, Job(number, 0, 5, 5))


@fault("a slice of a job that has finished", Rule.JOB)
def _(scene: Scene) -> Any:
    here = {j.job_id for j in (*scene.view.serving, *scene.view.waiting, *scene.view.training)}
    gone = [j for i, j in scene.notes["jobs"].items() if i not in here and j.device in (None, 0)]
    job = pick(scene, gone)
    return None if job is None else _slice_of(scene, job)


@fault("slices of forged jobs", Rule.JOB)
def _(scene: Scene) -> Any:
    if scene.launch is None:
        return None
    return with_slice(scene, job=lambda piece: _forged(piece.job))


@fault("a slice of another replica's job", Rule.JOB, Rule.PLACE)
def _(scene: Scene) -> Any:
    others = [j for j in scene.notes["jobs"].values() if j.device not in (None, scene.view.device)]
    job = pick(scene, others)
    return None if job is None else _slice_of(scene, job)


@fault("KV for a stranger", Rule.JOB)
def _(scene: Scene) -> Any:
    return ahead(
        scene.plan, Grow(kv_place(FOREIGN, Tier.GPU, scene.view.device), scene.page.nbytes)
    )


@fault("two slices of one job", Rule.ONCE)
def _(scene: Scene) -> Any:
    launch = scene.launch
    if launch is None:
        return None
    i = scene.rng.randrange(len(launch.slices))
    return with_launch(
        scene,
        scene.plan,
        slices=(*launch.slices, launch.slices[i]),
        writes=(*launch.writes, launch.writes[i] if i < len(launch.writes) else launch.writes[0]),
    )


@fault("a prompt in two slices of a launch", Rule.ONCE)
def _(scene: Scene) -> Any:
    launch = scene.launch
    long = [i for i, p in enumerate(launch.slices) if p.tokens > 1] if launch else []
    i = pick(scene, long)
    if i is None:
        return None
    piece = launch.slices[i]
    halves = piece._replace(tokens=1), piece._replace(tokens=piece.tokens - 1)
    slices = (*launch.slices[:i], *halves, *launch.slices[i + 1 :])
    writes = (*launch.writes[: i + 1], *launch.writes[i:])
    return with_launch(scene, scene.plan, slices=slices, writes=writes)


def _bytes_of(owner: int) -> Make:
    """A byte for an owner that is no job."""

    def make(scene: Scene) -> Any:
        place = Place(Region(owner, Kind.BUFFER, 7), Tier.GPU, scene.view.device)
        return ahead(scene.plan, Grow(place, 1))

    return make


fault("bytes for a stranger", Rule.JOB)(_bytes_of(FOREIGN))
fault("bytes for no job", Rule.JOB)(_bytes_of(SHARED_OWNER))


@fault("a slice behind a last token", Rule.ONCE)
def _(scene: Scene) -> Any:
    """A second launch of the plan goes on with jobs that may have ended with the first."""
    plan, launch = scene.plan, scene.launch
    if launch is None or not isinstance(plan.ops[-1], Compute):
        return None
    if any(piece.tokens != piece.job.remaining_tokens for piece in launch.slices):
        return None
    room = scene.view.room((Tier.GPU, scene.view.device)) // scene.page.nbytes
    taken = sum(op.nbytes for op in plan.ops if isinstance(op, Grow)) // scene.page.nbytes
    if any(isinstance(op, Copy | Share) for op in plan.ops) or room < taken + len(launch.slices):
        return None
    more = [Grow(scene.own(piece.job), scene.page.nbytes) for piece in launch.slices]
    again = tuple(Slice(piece.job, 1) for piece in launch.slices)
    return behind(plan, *more, changed(launch, slices=again))


# ---- rules RESTART and REFUSE
@fault("restart of a waiting job", Rule.RESTART)
def _(scene: Scene) -> Any:
    sliced = scene.sliced()
    waits = [j for j in scene.view.waiting if j not in sliced and j.training is None]
    job = pick(scene, [j for j in waits if j not in scene.plan.restart])
    return None if job is None else replace(scene.plan, restart=(job,))


@fault("restart twice", Rule.RESTART)
def _(scene: Scene) -> Any:
    idle = [j for j in scene.view.serving if j not in scene.sliced()]
    job = pick(scene, idle)
    return None if job is None else replace(scene.plan, restart=(job, job))


@fault("restart with a slice", Rule.RESTART)
def _(scene: Scene) -> Any:
    job = pick(scene, [j for j in scene.sliced() if j in scene.view.serving])
    return None if job is None else replace(scene.plan, restart=(*scene.plan.restart, job))


@fault("restart of a forged job", Rule.RESTART)
def _(scene: Scene) -> Any:
    job = pick(scene, [j for j in scene.view.serving if j not in scene.sliced()])
    return None if job is None else replace(scene.plan, restart=(_forged(job),))


@fault("refuse twice", Rule.REFUSE)
def _(scene: Scene) -> Any:
    jobs = [*scene.view.serving, *scene.view.waiting]
    job = pick(scene, [j for j in jobs if j not in scene.sliced()])
    return None if job is None else replace(scene.plan, refuse=(job, job))


@fault("refuse and restart", Rule.REFUSE, Rule.RESTART)
def _(scene: Scene) -> Any:
    job = pick(scene, [j for j in scene.view.serving if j not in scene.sliced()])
    if job is None or job.computed_tokens == 0:
        return None
    return replace(scene.plan, refuse=(job,), restart=(job,))


@fault("refuse with a slice", Rule.REFUSE)
def _(scene: Scene) -> Any:
    job = pick(scene, scene.sliced())
    return None if job is None else replace(scene.plan, refuse=(job,))


@fault("refuse a foreign job", Rule.REFUSE)
def _(scene: Scene) -> Any:
    return replace(scene.plan, refuse=(Job(FOREIGN, 0, 5, 5),))


# ---- rule TOKENS
fault("no tokens", Rule.TOKENS)(lambda s: with_slice(s, tokens=0))
fault("tokens below zero", Rule.TOKENS)(lambda s: with_slice(s, tokens=-2))
fault("half a token more", Rule.TOKENS)(lambda s: with_slice(s, tokens=lambda p: p.tokens + 0.5))
fault("one token as a float", Rule.TOKENS)(
    lambda s: with_slice(s, tokens=lambda p: float(p.tokens))
)
fault("True for a token", Rule.TOKENS)(lambda s: with_slice(s, tokens=True))
fault("more tokens than remain", Rule.TOKENS)(
    lambda s: with_slice(s, tokens=lambda p: p.job.remaining_tokens + 1)
)
fault("huge tokens", Rule.TOKENS)(lambda s: with_slice(s, tokens=10**30))
fault("tokens in words", Rule.TOKENS, Rule.ANSWER)(lambda s: with_slice(s, tokens="all"))
fault("layers on a served slice", Rule.TOKENS)(lambda s: with_slice(s, layers=range(0, 1)))
fault("a served slice goes backward", Rule.TOKENS)(lambda s: with_slice(s, work=Work.BACKWARD))
fault("a microbatch of a served slice", Rule.TOKENS)(lambda s: with_slice(s, microbatch=1))
fault("again on a served slice", Rule.TOKENS)(lambda s: with_launch(s, again=True))
