"""Policies that are legal up to a moment and then lie: one change to a plan for each way to lie."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import engine.contract.plan as vocabulary
from engine.contract.job import Job
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
    Share,
    Slice,
)
from engine.contract.policy import traits_of
from engine.contract.regions import SHARED_OWNER, Kind, Place, Region, Tier, Work, kv_place
from engine.contract.rules import Rule
from engine.contract.view import View

IS_COMPILED = not str(vocabulary.__file__).endswith(".py")
FOREIGN = 1_000_003  # no job has this number


@dataclass
class Scene:
    """One question, the honest answer to it, and what the liar remembers."""

    view: View
    plan: Plan
    rng: random.Random
    notes: dict[str, Any]

    @property
    def launch(self) -> Compute | None:
        """The launch of the honest answer that serves."""
        for op in reversed(self.plan.ops):
            if isinstance(op, Compute) and all(s.job.training is None for s in op.slices):
                return op
        return None

    @property
    def page(self) -> Any:
        return self.view.page

    def own(self, job: Job) -> Place:
        """The place of a job's KV on the device of the question."""
        return kv_place(job.job_id, Tier.GPU, self.view.device)

    def away(self, job: Job) -> Place:
        """The place of a job's KV on the host that the device can reach."""
        hosts = [d for tier, d in self.view.capacity_bytes if tier is Tier.HOST]
        device = self.view.device if self.view.device in hosts else 0
        return kv_place(job.job_id, Tier.HOST, device)

    def alive(self) -> list[Job]:
        """Jobs in service with KV on the device, that the honest answer neither gives up nor
        moves."""
        gone = {j.job_id for j in (*self.plan.restart, *self.plan.refuse)}
        gone |= {op.place.region.owner for op in self.plan.ops if isinstance(op, Free)}
        gone |= {op.src.region.owner for op in self.plan.ops if isinstance(op, Copy)}
        held = self.view.held_bytes
        return [
            j
            for j in self.view.serving
            if j.computed_tokens and self.own(j) in held and j.job_id not in gone
        ]

    def sliced(self) -> list[Job]:
        return [] if self.launch is None else [s.job for s in self.launch.slices]


Make = Callable[[Scene], Any]


@dataclass(frozen=True)
class Legal:
    """A change that prepares a lie and is none."""

    plan: Plan


@dataclass(frozen=True)
class Fault:
    """A way to lie. `rules`: those that may name it. `make` answers None where it does not apply,
    Legal where it only prepares."""

    name: str
    rules: tuple[Rule, ...]
    make: Make
    is_written: bool = False  # it writes to the view: the error comes out of the policy


FAULTS: dict[str, Fault] = {}


def fault(name: str, *rules: Rule, is_written: bool = False) -> Callable[[Make], Make]:
    """Registers a way to lie under its name, and the rules that may refuse it."""

    def register(make: Make) -> Make:
        assert name not in FAULTS, name
        FAULTS[name] = Fault(name, rules, make, is_written)
        return make

    return register


class Liar:
    """Answers as a policy does, but for one moment: from question `at` on, as soon as it can lie.

    With `is_stubborn` every answer from then on is a lie.
    """

    def __init__(
        self,
        policy: Any,
        lie: Fault,
        at: int = 0,
        seed: int = 0,
        before: Callable[[], None] = lambda: None,
        is_stubborn: bool = False,
    ) -> None:
        self.traits = traits_of(policy)
        self._policy, self._lie, self._at = policy, lie, at
        self._rng, self.notes = random.Random(seed), dict[str, Any]()
        self._before, self._is_stubborn = before, is_stubborn
        self.asked = self.lies = self.unbuilt = 0

    def plan(self, view: View) -> Any:
        number, self.asked = self.asked, self.asked + 1
        honest = self._policy.plan(view)
        self._remember(view)
        if number < self._at or (self.lies and not self._is_stubborn):
            return honest
        if self._lie.is_written:
            self._before()
            self.lies += 1  # taken back where there is nothing to write to
        try:
            found = self._lie.make(Scene(view, honest, self._rng, self.notes))
        except TypeError:
            if self._lie.is_written or not IS_COMPILED:
                raise
            self.unbuilt += 1  # records of the compiled form take no wrong types
            return honest
        if self._lie.is_written:
            if found is None:
                self.lies -= 1
            return honest
        if found is None:
            return honest
        if isinstance(found, Legal):
            return found.plan
        if not self.lies:
            self._before()
        self.lies += 1
        return None if found is NOTHING else found

    def _remember(self, view: View) -> None:
        jobs = self.notes.setdefault("jobs", {})
        for job in (*view.serving, *view.waiting, *view.training):
            jobs[job.job_id] = job


NOTHING = object()  # stands for the answer None


# ---- plans, changed
def with_launch(scene: Scene, plan: Plan | None = None, **fields: Any) -> Plan | None:
    """The honest answer, its serving launch with other fields."""
    launch, plan = scene.launch, plan or scene.plan
    if launch is None:
        return None
    if launch not in plan.ops:
        launch = next((op for op in reversed(plan.ops) if isinstance(op, Compute)), None)
        if launch is None:
            return None
    return swapped(plan, launch, changed(launch, **fields))


def changed(launch: Compute, **fields: Any) -> Compute:
    names = ("slices", "reads", "writes", "device", "on", "again", "after")
    values = {name: getattr(launch, name) for name in names} | fields
    return Compute(**values)


def swapped(plan: Plan, old: Any, *new: Any) -> Plan:
    """A plan with other operations in the place of one."""
    ops = list[Any]()
    for op in plan.ops:
        ops += new if op is old else [op]
    return replace(plan, ops=tuple(ops))


def ahead(plan: Plan, *ops: Any) -> Plan:
    """A plan with more operations before the others."""
    return replace(plan, ops=(*ops, *plan.ops))


def behind(plan: Plan, *ops: Any) -> Plan:
    return replace(plan, ops=(*plan.ops, *ops))


def pick(scene: Scene, items: Any) -> Any:
    items = list(items)
    return scene.rng.choice(items) if items else None


def with_slice(scene: Scene, **fields: Any) -> Plan | None:
    """The honest answer with one slice changed."""
    launch, i = scene.launch, None
    if launch is not None and launch.slices:
        i = scene.rng.randrange(len(launch.slices))
    if i is None:
        return None
    plan = scene.plan
    slices = launch.slices
    piece = slices[i]
    given = {k: v(piece) if callable(v) else v for k, v in fields.items()}
    return with_launch(scene, plan, slices=(*slices[:i], piece._replace(**given), *slices[i + 1 :]))


# ---- rule ANSWER
fault("None for an answer", Rule.ANSWER)(lambda s: NOTHING)
fault("a generator for an answer", Rule.ANSWER)(lambda s: (op for op in s.plan.ops))
fault("a list for an answer", Rule.ANSWER)(lambda s: list(s.plan.ops))
fault("a text for an answer", Rule.ANSWER)(lambda s: "plan")
fault("slices for an answer", Rule.ANSWER)(lambda s: s.launch.slices if s.launch else None)
fault("operations in a list", Rule.ANSWER)(lambda s: replace(s.plan, ops=[*s.plan.ops]))
fault("restarts in a list", Rule.ANSWER)(
    lambda s: replace(s.plan, restart=[*s.view.serving[:1]]) if s.view.serving else None
)
fault("a plan in a plan", Rule.ANSWER)(lambda s: behind(s.plan, Plan()))
fault("an operation that is none", Rule.ANSWER)(lambda s: ahead(s.plan, 5))
fault("a job for an operation", Rule.ANSWER)(
    lambda s: ahead(s.plan, s.view.waiting[0]) if s.view.waiting else None
)
fault("slices in a list", Rule.ANSWER)(
    lambda s: with_launch(s, slices=[*s.launch.slices]) if s.launch else None
)
fault("writes in a list", Rule.ANSWER)(
    lambda s: with_launch(s, writes=[*s.launch.writes]) if s.launch else None
)
fault("bare tuples for slices", Rule.ANSWER)(
    lambda s: with_launch(s, slices=tuple(tuple(p) for p in s.launch.slices)) if s.launch else None
)
fault("numbers for jobs", Rule.ANSWER)(
    lambda s: (
        with_launch(s, slices=tuple(p._replace(job=p.job.job_id) for p in s.launch.slices))
        if s.launch
        else None
    )
)
fault("a text for a place", Rule.ANSWER, Rule.PLACE)(
    lambda s: ahead(s.plan, Grow("gpu", s.page.nbytes))
)
fault("a number for a restart", Rule.ANSWER, Rule.RESTART)(lambda s: replace(s.plan, restart=(3,)))
fault("a number for a refusal", Rule.ANSWER, Rule.REFUSE)(lambda s: replace(s.plan, refuse=(3,)))
fault("a number for a new layout", Rule.ANSWER)(lambda s: replace(s.plan, relaid=(3,)))
fault("a moment in seconds", Rule.ANSWER)(lambda s: replace(s.plan, wake_ns=s.view.now_ns + 1000.5))
fault("a moment in words", Rule.ANSWER)(lambda s: replace(s.plan, wake_ns="soon"))


# ---- rule READ_ONLY
def writes(name: str, reach: Callable[[View], Any], write: Callable[[Any], Any]) -> None:
    """A write to what is shown, where there is anything to be reached."""

    def make(scene: Scene) -> Any:
        found = reach(scene.view)
        if found is None:
            return None
        write(found)
        return True

    fault(name, Rule.READ_ONLY, is_written=True)(make)


def _first(items: Any) -> Any:
    return items[0] if len(items) else None


def _some(items: Any) -> Any:
    return items if len(items) else None


def _assign(name: str, value: Any) -> Callable[[Any], Any]:
    return lambda target: setattr(target, name, value)


def _iadd(items: Any) -> None:
    items += [items[0]]


def _store(items: Any) -> None:
    items[0] = items[-1]


def _drop(items: Any) -> None:
    del items[0]


def _pool(mapping: Any) -> Any:
    return next(iter(mapping), None)


def _set_first(mapping: Any) -> None:
    mapping[_pool(mapping)] = 1


def _any_job(view: View) -> Any:
    return _first([*view.serving, *view.waiting, *view.training])


writes("pops from waiting", lambda v: _some(v.waiting), lambda x: x.pop())
writes("pops from serving", lambda v: _some(v.serving), lambda x: x.pop(0))
writes("clears waiting", lambda v: _some(v.waiting), lambda x: x.clear())
writes("sorts waiting", lambda v: _some(v.waiting), lambda x: x.sort(key=lambda j: -j.job_id))
writes("reverses serving", lambda v: _some(v.serving), lambda x: x.reverse())
writes("appends to serving", lambda v: _some(v.waiting), lambda x: x.append(x[0]))
writes("removes from waiting", lambda v: _some(v.waiting), lambda x: x.remove(x[0]))
writes("inserts into waiting", lambda v: _some(v.waiting), lambda x: x.insert(0, x[0]))
writes("extends waiting", lambda v: _some(v.waiting), lambda x: x.extend([x[0]]))
writes("adds to waiting in place", lambda v: _some(v.waiting), _iadd)
writes("stores into serving", lambda v: _some(v.serving), _store)
writes("deletes from serving", lambda v: _some(v.serving), _drop)
writes("changes free bytes", lambda v: v.free_bytes, _set_first)
writes("changes coming bytes", lambda v: v.coming_bytes, _set_first)
writes("changes the capacity", lambda v: v.capacity_bytes, _set_first)
writes("pops from held bytes", lambda v: v.held_bytes, lambda x: x.pop(_pool(x), None))
writes("changes stamps of contents", lambda v: v.written, lambda x: x.update({kv_place(0): 9}))
writes("clears stamps of use", lambda v: v.used, lambda x: x.clear())
writes("sets the time", lambda v: v, _assign("now_ns", 5))
writes("shows itself another list", lambda v: v, _assign("waiting", []))
writes("sets a job's class", _any_job, _assign("slo", "mine"))
writes("sets a job's number", _any_job, _assign("job_id", 5))
writes("sets a job's prompt", lambda v: _first(v.waiting), _assign("prompt_tokens", 1))
writes("sets a job's device", _any_job, _assign("device", 3))
writes("sets what a job has computed", lambda v: _first(v.serving), _assign("computed_tokens", 1))
writes("sets what a job knows", lambda v: _first(v.serving), _assign("known_tokens", 1))
writes("sets a hidden count of a job", lambda v: _first(v.serving), _assign("_computed", 1))
writes("deletes a field of a job", _any_job, lambda j: delattr(j, "slo"))
writes("gives a job a new field", _any_job, _assign("rank", 1))
writes("sets a job's clock", lambda v: _first(v.serving), _assign("_clock", None))
writes("sets what is recorded of a job", lambda v: _first(v.serving), _assign("recorded_tokens", 9))
writes("sets a job's training", _any_job, _assign("training", None))
writes("gives the view a new field", lambda v: v, _assign("colour", 1))
writes("changes a launch in flight", lambda v: _first(v.in_flight), _assign("device", 1))
writes("changes a launch's lane", lambda v: _first(v.in_flight), _assign("on", "other"))
writes("changes the layout", lambda v: v.layout.places, lambda x: x.update({kv_place(7): 1}))
writes("changes layouts of training", lambda v: v.layout.training, lambda x: x.update({7: 1}))
writes("sets a field of the layout", lambda v: v.layout, _assign("buffers", 9))
writes("sets the size of a page", lambda v: v.page, _assign("tokens", 99))
writes("sets a field of the profile", lambda v: v.profile, _assign("mean_ns", None))


def _trained(view: View) -> Any:
    job = _first([j for j in (*view.training, *view.waiting) if j.training is not None])
    return None if job is None else job.training


writes("moves a training job on", _trained, _assign("step", 7))
writes("notes updates of a training job", _trained, lambda t: t.updated.update({0: 9}))
writes("sets the microbatches of a training job", _trained, lambda t: _assign("spec", None)(t))


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


def asleep(view: View) -> Plan:
    """Asks for a moment, and never for anything else."""
    return Plan(wake_ns=view.now_ns + 1000)
