"""Faults put into the state of a run or its policy: the checks of the laws must catch each.

They go through hooks that stay interpreted (a policy, an executor, a recorder), so that the
interpreted and the compiled form, with or without -O, run the same faults.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine.contract.executor import Launch, Span
from engine.contract.plan import Compute, Copy, Grow, Plan
from engine.contract.policy import traits_of
from engine.contract.regions import Tier, kv_place
from engine.contract.rules import BrokenLaw, ContractError
from engine.contract.view import View
from engine.laws.check_policy import WatchedPolicy
from engine.laws.check_replay import check_capacity, check_inputs
from engine.loop.engine import Engine, Stalled
from engine.loop.state import VirtualClock
from engine.memory.ledger import NOTHING
from engine.memory.scoreboard import Journal
from engine.results.recorder import Recorder
from policies.composed import Composed
from tests.support.replays import PAGE, Replay, ToyExecutor, composed, random_requests
from tests.support.states import POOL, decoding, job, view
from traces.serving.request import Request

CHUNKED = composed("chunked", "restart")
Corrupt = Callable[[Engine], Any]


class Saboteur:
    """Answers as a policy does; at some question it corrupts the engine's state, once it can."""

    def __init__(self, policy: Any, corrupt: Corrupt, at: int = 5, often: bool = False) -> None:
        self.traits = traits_of(policy)
        self._policy, self._corrupt, self._at, self._often = policy, corrupt, at, often
        self.engine: Any = None
        self.done = self._asked = 0

    def plan(self, view: View) -> Plan:
        self._asked += 1
        if self._asked > self._at and (self._often or not self.done):
            self.done += self._corrupt(self.engine) is not False
        return self._policy.plan(view)


def run(
    policy: Any,
    requests: list[Request],
    executor: Callable[..., Any] = ToyExecutor,
    recorder: Recorder | None = None,
    *,
    pages: int = 60,
    depth: int = 2,
    is_watched: bool = True,
    **how: Any,
) -> Replay:
    """A replay on toy hardware, with parts of the caller's."""
    env, recorder = VirtualClock(), recorder or Recorder()
    journal = Journal(lambda: int(env.now))
    capacity = {(Tier.GPU, 0): pages * PAGE.nbytes, (Tier.HOST, 0): 30 * PAGE.nbytes}
    engine = Engine(
        env,
        policy,
        executor(env, **how),
        capacity,
        PAGE,
        depth=depth,
        recorder=recorder,
        journal=journal if is_watched else None,
    )
    if isinstance(policy, Saboteur):
        policy.engine = engine
    engine.replay(requests)
    return Replay(engine, recorder, journal)


# ---- state
def lose_a_job(engine: Engine) -> Any:
    """A request falls out of the lists without an end."""
    jobs = engine.state.jobs.waiting
    if not jobs:
        return False
    found = jobs[-1]
    list.remove(jobs, found)
    del engine.state.jobs.jobs[found.job_id]
    return True


def lose_bytes(engine: Engine) -> Any:
    queue = engine.ledger._free_queues[Tier.GPU, 0]
    if queue.free_bytes < PAGE.nbytes:
        return False
    queue.free_bytes -= PAGE.nbytes
    return True


def find_bytes(engine: Engine) -> Any:
    engine.ledger._free_queues[Tier.GPU, 0].free_bytes += PAGE.nbytes


def lose_a_page(engine: Engine) -> Any:
    back = [r for r in engine.ledger._pools[Tier.GPU, 0]._returned if r.ids]
    return back[0].ids.pop() if back else False


def hold_a_page_twice(engine: Engine) -> Any:
    tables = [ids for ids in engine.ledger.pages.values() if ids]
    if len(tables) < 2:
        return False
    tables[0][-1] = tables[1][-1]
    return True


def forget_users(engine: Engine) -> Any:
    """A taker of bytes that operations still use waits for none of them."""
    ledger = engine.ledger
    for queue in ledger._free_queues.values():
        for owed in queue._entries:
            queue.busy_bytes -= owed.nbytes if owed.users else 0
            owed.users.clear()
    for pool in ledger._pools.values():
        for returned in pool._returned:
            returned.users.clear()


# ---- hooks
class AtOnce(ToyExecutor):
    """Runs what it is given at once, whatever its lane does."""

    def run(self, launch: Launch, done: Callable[[Span], None]) -> None:
        self._lanes._free_ns.clear()
        super().run(launch, done)


class Early(ToyExecutor):
    """Says of all work that it began at the beginning of time."""

    def run(self, launch: Launch, done: Callable[[Span], None]) -> None:
        super().run(launch, lambda span: done(span._replace(start_ns=0)))


class Backward(ToyExecutor):
    """Says of all work that it ended before it began."""

    def run(self, launch: Launch, done: Callable[[Span], None]) -> None:
        super().run(launch, lambda span: done(span._replace(start_ns=span.end_ns + 1)))


class Forgetful(ToyExecutor):
    """Forgets what launches wait for."""

    def run(self, launch: Launch, done: Callable[[Span], None]) -> None:
        forgotten = Launch(
            launch.op, (), launch.pieces, launch.nbytes, launch.src_pages, launch.dst_pages
        )
        super().run(forgotten, done)


class Seedless(ToyExecutor):
    """Durations that no seed gives."""

    def _vary(self) -> float:
        return random.SystemRandom().uniform(0.6, 1.4)


class DropsTokens(Recorder):
    """Loses one delivery of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self._left = 4

    def delivered(self, device: int, pieces: Any, end_ns: int) -> None:
        self._left -= 1
        if self._left:
            super().delivered(device, pieces, end_ns)


class DropsAnEnd(Recorder):
    """Never hears of the end of request 2."""

    def ended(self, job_id: int, now_ns: int, status: str) -> None:
        if job_id != 2:
            super().ended(job_id, now_ns, status)


class AsksOnce:
    """A prompt that finds no room keeps running jobs from decoding."""

    def __init__(self, both: Composed) -> None:
        self._both = both

    def plan(self, view: View) -> Plan:
        both = self._both
        return both._fitted(view)


class ByTheClock:
    """Admits waiting jobs in odd microseconds only: decisions that durations change."""

    def plan(self, view: View) -> Plan:
        is_open = view.now_ns // 1000 % 2 or not view.serving
        return CHUNKED.plan(view if is_open else replace(view, waiting=()))


class Moody:
    """Answers as it likes."""

    def __init__(self) -> None:
        self._asked = 0

    def plan(self, view: View) -> Plan:
        self._asked += 1
        return CHUNKED.plan(view) if self._asked % 2 else Plan()


class Meddler:
    """Changes what it is shown, past all that guards it."""

    def __init__(self, meddle: Callable[[View], Any]) -> None:
        self._meddle = meddle

    def plan(self, view: View) -> Plan:
        self._meddle(view)
        return CHUNKED.plan(view)


class Patient:
    """Waits until all that is in flight has ended."""

    def plan(self, view: View) -> Plan:
        return Plan()


# ---- the faults
def caught(what: Callable[[], Any]) -> str:
    """The error of a law that something ends with; "" where it ends with none."""
    try:
        what()
    except (BrokenLaw, ContractError, Stalled) as error:
        return str(error)
    return ""


def _state(corrupt: Corrupt, **how: Any) -> Callable[[], str]:
    def told() -> str:
        policy = Saboteur(CHUNKED, corrupt)
        found = caught(lambda: run(policy, random_requests(3, 8), **how))
        return found if policy.done else ""

    return told


def _swapping(executor: Any = ToyExecutor, corrupt: Corrupt | None = None) -> Callable[[], str]:
    """Six traces that swap; each must be caught."""

    def told() -> str:
        found = ""
        for seed in range(6):
            policy: Any = composed("chunked", "swap")
            if corrupt is not None:
                policy = Saboteur(policy, corrupt, 0, often=True)

            def judge(policy: Any = policy, seed: int = seed) -> None:
                done = run(policy, random_requests(seed, 30), executor, pages=36)
                check_inputs(done.plans, done.spans)
                capacity = done.engine.ledger.capacity_bytes
                check_capacity(done.journal.lives, done.spans, capacity)

            if not (found := caught(judge)):
                return ""
        return found

    return told


def _checked(executor: Any, requests: list[Request]) -> Callable[[], str]:
    return lambda: caught(lambda: run(CHUNKED, requests, executor).check())


def _watched(meddle: Callable[[View], Any]) -> Callable[[], str]:
    policy = WatchedPolicy(Meddler(meddle))
    return lambda: caught(lambda: policy.plan(view([decoding(0, 9)], [job(1, 10)])))


def _half_a_plan() -> str:
    """Booked as if a dry run had seen that it fits."""
    from engine.memory.ledger import Ledger

    books = Ledger({POOL: 1000}, PAGE._replace(nbytes=100))
    plan = Plan((Grow(kv_place(0), 300), Grow(kv_place(1), 900)))
    books.expect(plan)
    return caught(lambda: books.book(plan))


def _clock() -> str:
    watched, state = WatchedPolicy(CHUNKED), view([], [job(0, 10)])
    watched.plan(replace(state, now_ns=5))
    return caught(lambda: watched.plan(replace(state, now_ns=4)))


def _unseeded() -> str:
    with tempfile.TemporaryDirectory() as folder:
        one, two = (
            run(CHUNKED, random_requests(3, 10), Seedless).files(Path(folder, name))
            for name in ("1", "2")
        )
    return "law 7: other files" if one["steps.parquet"] != two["steps.parquet"] else ""


def _idles() -> str:
    for seed in range(6):
        watched = WatchedPolicy(AsksOnce(composed("continuous", "restart")))
        found = caught(lambda: run(watched, random_requests(seed, 30, rate=1500), pages=40))  # noqa: B023
        if not found and not watched.idle_without_a_plan:
            return ""
    return "law 9: idle beside runnable work"


def _rests() -> str:
    watched, state = WatchedPolicy(Patient()), view([decoding(0, 9)], [])
    watched.plan(replace(state, in_flight=(Copy(kv_place(1), kv_place(1, Tier.HOST)),)))
    watched.plan(replace(state, now_ns=state.now_ns + 1))
    beside = WatchedPolicy(Patient())
    beside.plan(replace(state, in_flight=(Compute(()),)))
    beside.plan(replace(state, now_ns=state.now_ns + 1))
    is_told = watched.idle_without_a_plan == 1 and beside.idle_without_a_plan == 0
    return "law 9: it rests beside a copy" if is_told else ""


def _by_the_clock() -> str:
    logs = [run(ByTheClock(), random_requests(7, 30), noise=0.4, seed=s).log() for s in (1, 2)]
    return "law 11: other plans" if logs[0] != logs[1] else ""


FAULTS: dict[str, Callable[[], str]] = {
    "a lost request": _state(lose_a_job),
    "a lost request, unwatched": _state(lose_a_job, is_watched=False),
    "lost bytes": _state(lose_bytes),
    "lost bytes, unwatched": _state(lose_bytes, is_watched=False),
    "found bytes": _state(find_bytes),
    "found bytes, unwatched": _state(find_bytes, is_watched=False),
    "a lost page": _state(lose_a_page),
    "a lost page, unwatched": _state(lose_a_page, is_watched=False),
    "a page held twice": _state(hold_a_page_twice),
    "half a plan booked": _half_a_plan,
    "work before its arrival": _checked(Early, [Request(0, 900_000, 5, 1)]),
    "two operations at once": _checked(AtOnce, random_requests(3, 10)),
    "an end before its beginning": _checked(Backward, random_requests(3, 10)),
    "a clock that runs back": _clock,
    "a job changed": _watched(lambda v: v.serving[0]._advance(1, 1)),
    "the order of jobs changed": _watched(lambda v: list.append(v.serving, v.serving[0])),  # type: ignore[arg-type]
    "capacity changed": _watched(lambda v: v.capacity_bytes.update({POOL: 1})),  # type: ignore[attr-defined]
    "bytes changed": _watched(lambda v: v.free_bytes.update({POOL: 1})),  # type: ignore[attr-defined]
    "the layout changed": _watched(lambda v: v.layout.places.update({kv_place(7): 1})),  # type: ignore[attr-defined]
    "the profile changed": _watched(lambda v: v.profile.issued(Compute(()), 0, NOTHING)),  # type: ignore[attr-defined]
    "a policy that remembers": lambda: caught(
        lambda: WatchedPolicy(Moody()).plan(view([decoding(0, 9)], [job(1, 10)]))
    ),
    "durations without a seed": _unseeded,
    "a policy that asks once": _idles,
    "a policy that rests beside a copy": _rests,
    "plans by the clock": _by_the_clock,
    "forgotten waits": _swapping(Forgetful),
    "forgotten bytes to wait for": _swapping(corrupt=forget_users),
    "a token lost": lambda: caught(
        lambda: run(CHUNKED, random_requests(3, 8), recorder=DropsTokens())
    ),
    "an end lost": lambda: caught(
        lambda: run(CHUNKED, random_requests(3, 8), recorder=DropsAnEnd(), is_watched=False)
    ),
}
