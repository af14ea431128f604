"""Lies in the form of an answer, and writes to the view: rules ANSWER and READ ONLY."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from engine.contract.plan import Grow, Plan
from engine.contract.regions import kv_place
from engine.contract.rules import Rule
from engine.contract.view import View
from tests.support.faults.lying import NOTHING, Scene, ahead, behind, fault, with_launch

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
