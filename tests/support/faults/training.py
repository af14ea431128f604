"""Lies about training: the order of tasks, what they read, hold and free, and exchanges."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from engine.contract.plan import (
    HOST_LANE,
    Collective,
    Compute,
    Copy,
    Free,
    Grow,
    Op,
    Pattern,
    Plan,
    Relaid,
)
from engine.contract.regions import SHARED_OWNER, Kind, Place, Region, Tier, Work
from engine.contract.rules import Rule
from tests.support.faults.lying import (
    FOREIGN,
    Scene,
    ahead,
    changed,
    fault,
    pick,
    swapped,
    with_launch,
)

# ---- training
STATES = (Kind.WEIGHT, Kind.OPTIMIZER)
TRAINS = (Rule.TRAINING_ORDER, Rule.TRAINING_PLACES, Rule.TRAINING_CONTENTS)


def _task(scene: Scene, *works: Work) -> Any:
    """One of the plan's launches of training."""
    found = [
        op
        for op in scene.plan.ops
        if isinstance(op, Compute)
        and op.slices[0].job.training is not None
        and (not works or op.slices[0].work in works)
    ]
    return pick(scene, found)


def _trains(name: str, change: Callable[[Scene, Compute], Any], *rules: Rule, of: Any = ()) -> None:
    """A lie that puts other operations where a task was."""

    def make(scene: Scene) -> Any:
        op = _task(scene, *of)
        new = None if op is None else change(scene, op)
        return None if new is None else swapped(scene.plan, op, *new)

    fault(name, *rules)(make)


def _piece(op: Compute, **fields: Any) -> tuple[Compute]:
    return (changed(op, slices=(op.slices[0]._replace(**fields),)),)


def _part(op: Compute, by: int) -> tuple[Compute]:
    layers = op.slices[0].layers
    assert layers is not None
    return _piece(op, layers=range(layers.start + by, layers.stop + by))


def _without_one(name: str) -> Callable[[Scene, Compute], Any]:
    def change(scene: Scene, op: Compute) -> Any:
        places = getattr(op, name)
        if not places:
            return None
        i = scene.rng.randrange(len(places))
        piece, own = op.slices[0], places[i].region
        if piece.work is Work.UPDATE and piece.layers != range(own.part, own.part + 1):
            return None  # others' are named to be waited for
        left = (*places[:i], *places[i + 1 :])
        if places[i] in left or (name == "reads" and places[i] in op.writes):
            return None
        return (changed(op, **{name: left}),)

    return change


def _is_followed(plan: Plan, op: Compute) -> bool:
    """Whether a task of the same work on the same microbatch comes behind it in its plan: to leave
    out the last one, or an update, is to do less, which is legal."""
    tasks = [o for o in plan.ops if isinstance(o, Compute) and o.slices[0].job.training is not None]
    behind = tasks[tasks.index(op) + 1 :] if op in tasks else []
    own = op.slices[0]
    if not behind:
        return False
    following = behind[0].slices[0]
    return following.work is own.work and following.microbatch == own.microbatch


ORDER, PLACES = Rule.TRAINING_ORDER, Rule.TRAINING_PLACES
_trains("a bare training launch", lambda s, op: (changed(op, reads=(), writes=()),), PLACES)
_trains("a training launch that reads nothing", lambda s, op: (
    (changed(op, reads=()),) if {*op.reads} - {*op.writes} else None
), PLACES)  # fmt: skip
_trains("a training launch that writes nothing", lambda s, op: (
    (changed(op, writes=()),) if op.writes else None
), PLACES)  # fmt: skip
_trains("a place that is not read", _without_one("reads"), PLACES)
_trains("a place that is not written", _without_one("writes"), PLACES)
_trains("two tasks in a launch", lambda s, op: (changed(op, slices=op.slices * 2),), PLACES, ORDER)
_trains("a task of the unit above", lambda s, op: _part(op, 1), ORDER, PLACES)
_trains("a task of the unit below", lambda s, op: _part(op, -1), ORDER, PLACES)
_trains("a task of no unit", lambda s, op: _part(op, 1000), ORDER)
_trains("a task of the next microbatch", lambda s, op: _piece(
    op, microbatch=op.slices[0].microbatch + 1), ORDER)  # fmt: skip
_trains("a task of a microbatch below zero", lambda s, op: _piece(op, microbatch=-1), ORDER)
# A forward that is repeated moves nothing on: twice is a waste, and legal.
_trains("a task twice", lambda s, op: None if op.again else (op, changed(op)), ORDER)
_trains(
    "a task of half its tokens", lambda s, op: _piece(op, tokens=op.slices[0].tokens / 2), ORDER
)
_trains("a task without tokens", lambda s, op: _piece(op, tokens=0), ORDER)
_trains("a task of a token more", lambda s, op: _piece(op, tokens=op.slices[0].tokens + 1), ORDER)
_trains("a task of all units", lambda s, op: _piece(op, layers=None), ORDER, Rule.ANSWER)
_trains("a task of a later version", lambda s, op: _piece(op, version=1000), ORDER)
_trains("a backward for a forward", lambda s, op: _piece(op, work=Work.BACKWARD), ORDER,
        of=(Work.FORWARD,))  # fmt: skip
_trains("an update for a forward", lambda s, op: _piece(op, work=Work.UPDATE, tokens=1), ORDER,
        of=(Work.FORWARD,))  # fmt: skip
_trains("a forward for a backward", lambda s, op: _piece(op, work=Work.FORWARD), ORDER,
        of=(Work.BACKWARD,))  # fmt: skip
_trains("an update again", lambda s, op: (changed(op, again=True),), ORDER, of=(Work.UPDATE,))
_trains("a task left out", lambda s, op: () if _is_followed(s.plan, op) else None, *TRAINS,
        Rule.TRAINING_FREED, Rule.HELD, Rule.EXCHANGE,
        of=(Work.FORWARD, Work.BACKWARD))  # fmt: skip
_trains("a forward on the host", lambda s, op: (changed(op, on=HOST_LANE),), Rule.LANE, Rule.TIER,
        of=(Work.FORWARD, Work.BACKWARD))  # fmt: skip
_trains("training on a lane of its own", lambda s, op: (changed(op, on="compute2"),), Rule.LANE)
_trains("training on another device", lambda s, op: (changed(op, device=1),), Rule.DEVICE)


@fault("a task that reads what lies on the host", Rule.TIER)
def _(scene: Scene) -> Any:
    op, moved = _task(scene, Work.FORWARD, Work.BACKWARD), set[Place]()
    for other in scene.plan.ops:
        moved |= {other.place} if isinstance(other, Free) else set()
    there = [p for p in scene.view.held_bytes if p.tier is Tier.HOST and p not in moved]
    place = pick(scene, there)
    if op is None or place is None:
        return None
    return swapped(scene.plan, op, changed(op, reads=(*op.reads, place)))


@fault("a training job restarted", Rule.RESTART)
def _(scene: Scene) -> Any:
    job = pick(scene, scene.view.training)
    return None if job is None else replace(scene.plan, restart=(job,))


@fault("a layout that no planner has made", Rule.RELAID)
def _(scene: Scene) -> Any:
    job = pick(scene, scene.view.training)
    return None if job is None else replace(scene.plan, relaid=(Relaid(job, FOREIGN),))


@fault("a layout of a request", Rule.RELAID)
def _(scene: Scene) -> Any:
    job = pick(scene, scene.view.serving)
    return None if job is None else replace(scene.plan, relaid=(Relaid(job, 0),))


@fault("a byte less than a task needs", Rule.TRAINING_PLACES, Rule.COPY)
def _(scene: Scene) -> Any:
    named = {p for op in scene.plan.ops if isinstance(op, Compute) for p in (*op.reads, *op.writes)}
    grows = [
        op
        for op in scene.plan.ops
        if isinstance(op, Grow) and op.place in named and op.place.region.kind is not Kind.KV
    ]
    grow = pick(scene, [op for op in grows if op.nbytes > 1])
    return (
        None if grow is None else swapped(scene.plan, grow, grow._replace(nbytes=grow.nbytes - 1))
    )


@fault("new bytes for states on the host", Rule.TRAINING_CONTENTS)
def _(scene: Scene) -> Any:
    """Weights or optimizer states are not copied in: empty bytes stand for them."""
    named = {p for op in scene.plan.ops if isinstance(op, Compute) for p in (*op.reads, *op.writes)}
    copies = [
        op
        for op in scene.plan.ops
        if isinstance(op, Copy)
        and op.src.region.kind in STATES
        and op.dst in named
        and op.dst not in scene.view.held_bytes
    ]
    copy = pick(scene, [op for op in copies if op.src in scene.view.held_bytes])
    if copy is None:
        return None
    plan = swapped(scene.plan, copy, Grow(copy.dst, scene.view.held_bytes[copy.src]))
    gone = [op for op in plan.ops if isinstance(op, Free) and op.place == copy.src]
    for op in gone:  # else that is told first
        plan = swapped(plan, op)
    return plan


@fault("a copy of what was saved left out", *TRAINS, Rule.HELD, Rule.TRAINING_FREED)
def _(scene: Scene) -> Any:
    copies = [
        op for op in scene.plan.ops if isinstance(op, Copy) and op.src.region.kind is not Kind.KV
    ]
    copy = pick(scene, [op for op in copies if op.dst not in scene.view.held_bytes])
    if copy is None:
        return None
    touched = {
        p for op in ops_of(scene.plan) if not isinstance(op, Copy) for p in (*op.reads, *op.writes)
    }
    freed = {op.place for op in scene.plan.ops if isinstance(op, Free)}
    return swapped(scene.plan, copy) if copy.dst in touched or copy.src in freed else None


def _free_of(name: str, is_meant: Callable[[Scene, Place], bool], *rules: Rule) -> None:
    """What lies in one place only is given back, ahead of all that the plan does."""

    def make(scene: Scene) -> Any:
        held = scene.view.held_bytes
        copies: dict[Region, int] = {}
        for place in held:
            copies[place.region] = copies.get(place.region, 0) + 1
        meant = [
            p
            for p in held
            if copies[p.region] == 1 and is_meant(scene, p) and held[p] and p.region.owner >= 0
        ]
        place = pick(scene, meant)
        if place is None or not scene.view.training:
            return None
        rest = [op for op in scene.plan.ops if not (isinstance(op, Free) and op.place == place)]
        return replace(scene.plan, ops=(Free(place), *rest))

    fault(name, Rule.TRAINING_FREED, *rules)(make)


_free_of("the only weights freed", lambda s, p: p.region.kind is Kind.WEIGHT)
_free_of("the only optimizer states freed", lambda s, p: p.region.kind is Kind.OPTIMIZER)
_free_of("gradients freed before their update", lambda s, p: (
    p.region.kind is Kind.GRADIENT and s.view.written[p] > 0
))  # fmt: skip
_free_of("activations freed before their backward", lambda s, p: (
    p.region.kind is Kind.ACTIVATION and s.view.written[p] > 0
))  # fmt: skip


@fault("resident weights freed", Rule.TRAINING_FREED, Rule.HELD)
def _(scene: Scene) -> Any:
    """The weights that serving uses, and that outlive all jobs, are given back."""
    place = pick(scene, [p for p in scene.view.held_bytes if p.region.owner == SHARED_OWNER])
    return None if place is None else ahead(scene.plan, Free(place))


@fault("weights over others", Rule.COPY)
def _(scene: Scene) -> Any:
    held = [p for p in scene.view.held_bytes if p.region.kind is Kind.WEIGHT]
    one, other = pick(scene, held), pick(scene, held)
    if one is None or one.region == other.region:
        return None
    return ahead(scene.plan, Copy(one, other))


@fault("old weights over new ones", Rule.COPY, Rule.TRAINING_FREED)
def _(scene: Scene) -> Any:
    """What has just been copied home comes out again from the older place."""
    held, written = scene.view.held_bytes, scene.view.written
    by_region: dict[Region, list[Place]] = {}
    for place in held:
        by_region.setdefault(place.region, []).append(place)
    for places in by_region.values():
        if len(places) == 2 and written[places[0]] != written[places[1]]:
            old, new = sorted(places, key=written.__getitem__)
            if new.region.kind in STATES and written[old] > 0:
                return ahead(scene.plan, Copy(old, new))
    return None


@fault("serving beside training touches its weights", Rule.TRAINING_PLACES)
def _(scene: Scene) -> Any:
    launch = scene.launch
    here = [
        p
        for p in scene.view.held_bytes
        if p.region.kind is Kind.WEIGHT and p.pool == (Tier.GPU, scene.view.device)
    ]
    place = pick(scene, [p for p in here if p.region.owner >= 0])
    if launch is None or place is None:
        return None
    moved = {op.place for op in scene.plan.ops if isinstance(op, Free)}
    return (
        None if place in moved else with_launch(scene, scene.plan, writes=(*launch.writes, place))
    )


# ---- groups
def _exchanged(name: str, change: Callable[[Scene, Collective], Any], *rules: Rule) -> None:
    def make(scene: Scene) -> Any:
        op = pick(scene, [op for op in scene.plan.ops if isinstance(op, Collective)])
        new = None if op is None else change(scene, op)
        return None if new is None else swapped(scene.plan, op, *new)

    fault(name, Rule.EXCHANGE, *rules)(make)


def _other(op: Collective, **fields: Any) -> tuple[Collective]:
    names = ("pattern", "reads", "writes", "nbytes", "device")
    return (Collective(**({name: getattr(op, name) for name in names} | fields)),)


def _is_awaited(scene: Scene, op: Collective) -> bool:
    """Whether the plan itself needs it: what is gathered for a later one is no duty of this one."""
    read = {p for other in scene.plan.ops if isinstance(other, Compute) for p in other.reads}
    return op.pattern is not Pattern.ALL_GATHER or not read.isdisjoint(op.writes)


_exchanged("an exchange of a byte less", lambda s, op: _other(op, nbytes=op.nbytes - 1))
_exchanged("an exchange of twice the bytes", lambda s, op: _other(op, nbytes=2 * op.nbytes))
_exchanged("an exchange of no bytes", lambda s, op: _other(op, nbytes=0))
_exchanged("an exchange below zero", lambda s, op: _other(op, nbytes=-1), Rule.BYTES)
_exchanged("an exchange of half a byte", lambda s, op: _other(op, nbytes=0.5), Rule.BYTES)
_exchanged("another pattern", lambda s, op: _other(
    op, pattern=pick(s, [p for p in Pattern if p is not op.pattern])))  # fmt: skip
_exchanged("an exchange that reads nothing", lambda s, op: _other(op, reads=()))
_exchanged("an exchange that writes nothing", lambda s, op: _other(op, writes=()))
_exchanged("an exchange on another device", lambda s, op: _other(op, device=1), Rule.DEVICE)
_exchanged("a reduction twice", lambda s, op: (
    None if op.pattern is Pattern.ALL_GATHER else (op, *_other(op))
))  # fmt: skip
_exchanged(
    "an exchange left out",
    lambda s, op: () if _is_awaited(s, op) else None,
    Rule.TRAINING_CONTENTS,
    Rule.TRAINING_PLACES,
)


@fault("an exchange without a group", Rule.EXCHANGE)
def _(scene: Scene) -> Any:
    here = [p for p in scene.view.held_bytes if p.pool == (Tier.GPU, scene.view.device)]
    moved = {op.place for op in scene.plan.ops if isinstance(op, Free)}
    place = pick(scene, [p for p in here if p not in moved])
    if place is None:
        return None
    job = next((j for j in scene.view.training if j.training is not None), None)
    if job is not None and job.training is not None and job.training.spec.ranks > 1:
        return None
    op = Collective(Pattern.ALL_REDUCE, (place,), (place,), 8, scene.view.device)
    return ahead(scene.plan, op)


@fault("an exchange of nothing", Rule.EXCHANGE)
def _(scene: Scene) -> Any:
    return ahead(scene.plan, Collective(Pattern.ALL_REDUCE, (), (), 8, scene.view.device))


def ops_of(plan: Plan) -> Iterator[Op]:
    return (op for op in plan.ops if isinstance(op, Op))
