"""Random faults in legal plans of training, and an oracle of its own for what is wrong in a run."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from engine.contract.plan import Collective, Compute, Copy, Free, Grow, Plan
from engine.contract.regions import GATHERED, Kind, Place, Region, Tier, Work, optimizer, weight
from engine.contract.view import View
from tests.support.replays import Replay

FAULTS = ("drop", "swap", "move", "repeat", "place", "name", "slice", "free", "copy")


@dataclass
class Faulty:
    """A policy that puts one random fault into one of its plans."""

    policy: Any
    rng: random.Random
    rate: float  # of plans
    told: list[str] = field(default_factory=list)

    def plan(self, view: View) -> Plan:
        plan = self.policy.plan(view)
        if self.told or not plan.ops or self.rng.random() > self.rate:
            return plan
        name, ops = self.rng.choice(FAULTS), list(plan.ops)
        _put(name, ops, list(view.held_bytes), self.rng)
        if ops == [*plan.ops]:
            return plan
        self.told.append(name)
        return Plan(tuple(ops))


def _put(name: str, ops: list[Any], held: list[Place], rng: random.Random) -> None:
    i = rng.randrange(len(ops))
    op, place = ops[i], rng.choice(held)
    if name == "drop":
        del ops[i]
    elif name == "swap":
        ops[i : i + 2] = reversed(ops[i : i + 2])
    elif name == "move":
        ops.insert(rng.randrange(len(ops)), ops.pop(i))
    elif name == "repeat":
        ops.insert(rng.randint(i, len(ops)), _again(op))
    elif name == "free":
        ops.insert(i, Free(place))
    elif name == "copy":
        away = place._replace(tier=rng.choice([Tier.GPU, Tier.HOST]))
        ops.insert(i, Copy(place, rng.choice([away, away, rng.choice(held)])))
    elif name == "place":
        ops[i] = _elsewhere(op, place, rng)
    elif name == "name" and isinstance(op, Compute | Collective):
        which = rng.choice(["reads", "writes"])
        places = [*getattr(op, which)]
        if places and rng.random() < 0.6:
            del places[rng.randrange(len(places))]
        else:
            places.append(place)
        ops[i] = _again(op, **{which: tuple(places)})
    elif name == "slice" and isinstance(op, Compute):
        ops[i] = _other_slice(op, rng)


def _again(op: Any, **fields: Any) -> Any:
    """A new operation like another, but for some fields."""
    if isinstance(op, Grow):
        return op
    return type(op)(**{**{name: getattr(op, name) for name in op.__slots__}, **fields})


def _elsewhere(op: Any, place: Place, rng: random.Random) -> Any:
    if isinstance(op, Free):
        return Free(place)
    if isinstance(op, Copy):
        return rng.choice([Copy(place, op.dst), Copy(op.src, place)])
    if isinstance(op, Grow):
        fewer = max(0, op.nbytes - rng.randint(1, 3))
        return rng.choice([Grow(place, op.nbytes), Grow(op.place, fewer)])
    return op


def _other_slice(op: Compute, rng: random.Random) -> Compute:
    piece = op.slices[0]
    layers = (None, range(1), range(1, 3), range(2, 2), range(9, 10), range(-1, 0), (1,))
    fields: dict[str, Any] = {
        "tokens": rng.choice([0, 1, 4, -8, None]),
        "work": rng.choice([*Work, "forward"]),
        "layers": rng.choice(layers),
        "microbatch": piece.microbatch + rng.choice([-1, 1, 2]),
        "version": rng.choice([1, 5, -1]),
    }
    name = rng.choice([*fields, "again"])
    if name == "again":
        return _again(op, again=not op.again)
    return _again(op, slices=(piece._replace(**{name: fields[name]}),))


# ---- the oracle
def check_meaning(run: Replay) -> None:
    """All that plans read, read in their order, is there and the newest; each task runs once; no
    state is lost. Knows nothing of footprints."""
    newest, there = defaultdict[Region, int](int), dict[Place, int | None]()
    there.update(dict.fromkeys(run.engine.state.layout.places, 0))
    gathered, tasks = dict[Region, int](), set[Any]()
    for op in [op for plan in run.plans for op in plan.ops]:
        if isinstance(op, Copy):
            there[op.dst] = there[op.src]
        elif isinstance(op, Grow):
            there.setdefault(op.place, None)
        elif isinstance(op, Free):
            del there[op.place]
        else:
            if isinstance(op, Compute) and not op.again:
                task = op.slices[0][2:5]
                assert task not in tasks, f"{task} runs twice"
                tasks.add(task)
            for place in op.reads:
                region = place.region
                assert there[place] == newest[region], f"{op} reads old {place}"
                if _is_gathered(region) and isinstance(op, Compute):
                    assert gathered[region] == newest[_own(region)], f"{op} reads old {place}"
            for place in op.writes:
                newest[place.region] += 1
                there[place] = newest[place.region]
            for place in op.writes:
                if _is_gathered(place.region):
                    gathered[place.region] = newest[_own(place.region)]
    left = {place.region for place, n in there.items() if n == newest[place.region]}
    for job_id, layout in run.engine.state.layout.training.items():
        for c, chunk in enumerate(layout.chunks):
            assert weight(job_id, c).region in left, f"weights of chunk {c} are lost"
            if chunk.optimizer_bytes:
                assert optimizer(job_id, c).region in left, f"states of chunk {c} are lost"


def _is_gathered(region: Region) -> bool:
    return region.kind is Kind.BUFFER and region.slot == GATHERED


def _own(region: Region) -> Region:
    return region._replace(kind=Kind.WEIGHT, slot=0)
