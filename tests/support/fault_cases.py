"""Small random replays of every kind, to be carried out honestly or with one lie in them."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from engine.contract.adapters import AdapterSpec
from engine.contract.layout import Layout, Mode
from engine.contract.regions import SHARED_OWNER, Kind, PageSize, Place, Region, Tier
from engine.loop.completions import check_requests
from engine.loop.engine import Engine
from engine.loop.state import VirtualClock
from engine.memory.scoreboard import Journal
from engine.results.plan_log import LoggedPlan, encode
from engine.results.recorder import Recorder
from policies.composed import Composed
from policies.kv.max_reservation import MaxReservation
from policies.kv.paged_restart import PagedRestart
from policies.kv.paged_swap import PagedSwap
from policies.planners.unit_chunks import UnitChunks
from policies.routing.least_outstanding import LeastOutstanding
from policies.routing.round_robin import RoundRobin
from policies.scheduling.chunked_prefill import ChunkedPrefill
from policies.scheduling.continuous_batching import ContinuousBatching
from policies.scheduling.orca import Orca
from policies.scheduling.recorded import RecordedPlans
from policies.scheduling.static_batching import StaticBatching
from policies.scheduling.vllm_v1 import VllmV1
from policies.sharing.adapters import AdapterMemory
from policies.sharing.time_shared import DividedMemory, TakeTurns
from policies.training.training_order import TrainingOrder
from policies.training.zero3_offload import Zero3Offload
from sim.executor import SimExecutor
from tests.support.faults import Fault, Liar
from tests.support.jumps import Shaped
from tests.support.offload import MEMORIES, NO_PAGES, ROOMY, duration_ns, job_of, shape_of
from tests.support.replays import ToyExecutor, random_requests
from traces.serving.request import Request, TrainingJob
from traces.training.recipe import Recipe

PAGE = PageSize(tokens=4, nbytes=4000)
KINDS = ("serving", "prefix", "swap", "replicas", "shared", "training", "group", "playback")
KINDS += ("adapters",)
LIMIT_S = 20  # a replay that takes longer hangs
TRAINING_JOB = 1000


class Hung(Exception):
    """A replay took longer than any does."""


@dataclass(frozen=True)
class Case:
    """A replay and all that decides it."""

    kind: str
    seed: int
    policy: Callable[[], Any]
    work: Sequence[Request | TrainingJob]
    setting: dict[str, Any]
    capacity: dict[Any, int]
    page: PageSize
    layout: Layout
    is_toy: bool
    noise: float
    host_ns: int
    duration: Any
    bounded: int = 0

    def __str__(self) -> str:
        how = ", ".join(f"{k}={v}" for k, v in self.setting.items() if k != "router")
        return f"{self.kind} {self.seed} ({how})"

    def engine(
        self, policy: Any, fast_forward: bool | None = None, watched: bool = False
    ) -> Engine:
        """An engine over this case, with a policy of the caller's."""
        env, recorder = VirtualClock(), Recorder()
        if self.is_toy:
            given = {} if self.duration is None else {"duration": self.duration}
            executor: Any = ToyExecutor(env, self.noise, self.seed, self.host_ns, **given)
        else:
            executor = SimExecutor(env, Shaped(self.host_ns))
        setting = dict(self.setting)
        if fast_forward is not None:
            setting["fast_forward"] = fast_forward
        return Engine(
            env,
            policy,
            executor,
            self.capacity,
            self.page,
            layout=replace(  # of its own: a lie may write to it
                self.layout,
                places=dict(self.layout.places),
                training=dict(self.layout.training),
            ),
            recorder=recorder,
            journal=Journal(lambda: int(env.now)) if watched else None,
            **setting,
        )


def random_case(seed: int, kind: str | None = None) -> Case:
    """A legal configuration, and a trace that it can serve."""
    rng = random.Random(seed)
    kind = kind or rng.choice(KINDS)
    if kind in ("training", "group"):
        return _training(rng, seed, kind)
    setting: dict[str, Any] = {"depth": rng.randint(1, 3), "fast_forward": rng.random() < 0.6}
    pages = rng.randint(32, 70)
    gpus = {(Tier.GPU, 0): pages * PAGE.nbytes}
    hosts = {(Tier.HOST, 0): rng.randint(20, 60) * PAGE.nbytes}
    rate = rng.choice([None, 400.0, 2000.0])
    requests = random_requests(seed, rng.randint(5, 16), rate)
    weights = Place(Region(SHARED_OWNER, Kind.WEIGHT), Tier.GPU)
    layout = Layout({weights: PAGE.nbytes})
    if kind == "prefix":
        requests = alike(seed, rng.randint(6, 16), rate)
    scheduling, memory = _scheduling(rng), _memory(rng, kind)
    policy: Any = Composed(scheduling, memory)
    work: Sequence[Any] = requests
    if kind == "replicas":
        n = rng.randint(2, 3)
        gpus = {(Tier.GPU, d): pages * PAGE.nbytes for d in range(n)}
        hosts = {(Tier.HOST, d): 40 * PAGE.nbytes for d in range(n)}
        router = rng.choice([RoundRobin(), LeastOutstanding()])
        setting |= {"devices": n, "router": router}
    elif kind == "shared":
        shape = shape_of(random.Random(3), layers=rng.randint(1, 2), item_bytes=40)
        job = TrainingJob(TRAINING_JOB, 0, len(shape.units), 8, num_steps=2)
        room = {(Tier.GPU, 0): ROOMY, (Tier.HOST, 0): ROOMY}
        layout = UnitChunks().prepare({TRAINING_JOB: shape}, [job], room)
        policy = Composed(
            TakeTurns(
                ChunkedPrefill(token_budget=48, max_jobs=12), TrainingOrder(), rng.randint(2, 4)
            ),
            DividedMemory(rng.choice([PagedRestart(), PagedSwap()]), Zero3Offload(), 0.5),
        )
        work = [job, *requests]
        gpus = {(Tier.GPU, 0): 80 * PAGE.nbytes}
        hosts = {(Tier.HOST, 0): 60 * PAGE.nbytes}
    elif kind == "adapters":
        layout, work, policy = _adapted(rng, layout, hosts, requests)
    is_toy = kind in ("shared", "adapters") or rng.random() < 0.6
    noise = rng.choice([0.0, 0.4]) if is_toy else 0.0
    case = Case(
        kind,
        seed,
        lambda: policy,
        work,
        setting,
        gpus | hosts,
        PAGE,
        layout,
        is_toy,
        noise,
        rng.choice([0, 30_000]),
        None,
    )
    return case if kind != "playback" else _played(case)


def _adapted(
    rng: random.Random, layout: Layout, hosts: dict[Any, int], requests: Sequence[Request]
) -> tuple[Layout, Sequence[Request], Any]:
    """Requests through adapters, of which few fit on the device beside KV."""
    specs = [
        AdapterSpec(name, Recipe(lora_rank=4), rng.randint(1, 4 * PAGE.nbytes)) for name in "abcd"
    ]
    hosts[Tier.HOST, 0] += sum([spec.nbytes for spec in specs])
    work = [replace(request, adapter=rng.choice(("", *"abcd"))) for request in requests]
    memory = rng.choice([PagedRestart(), PagedSwap()])
    adapters = AdapterMemory(memory, rng.choice([None, 1, 2]))
    return layout.with_adapters(specs, hosts), work, Composed(_scheduling(rng), adapters)


def _played(case: Case) -> Case:
    """The plan log of a case, to be played back."""
    policy = case.policy()
    engine = case.engine(policy)
    engine.replay(case.work)
    log = tuple(
        LoggedPlan(device, back, encode(plan)) for _, device, _, back, plan in engine.recorder.plans
    )
    setting = {**case.setting, "returns_memory": False}
    return replace(case, policy=lambda: RecordedPlans(log), setting=setting)


def _training(rng: random.Random, seed: int, kind: str) -> Case:
    name = rng.choice([*MEMORIES])
    shape = shape_of(random.Random(rng.randrange(50)), rng.randint(1, 3), tied=rng.random() < 0.3)
    more: dict[str, Any] = {"num_steps": rng.randint(1, 3), "microbatches": rng.randint(1, 2)}
    if kind == "group":
        more["ranks"] = rng.randint(2, 4)
    job = job_of(shape, **more)
    room = {(Tier.GPU, 0): ROOMY, (Tier.HOST, 0): ROOMY}
    layout = UnitChunks(rng.choice([*Mode])).prepare({0: shape}, [job], room)
    policy = Composed(TrainingOrder(rng.choice([1, 1, 2, 3])), MEMORIES[name])
    setting = {"depth": rng.randint(1, 3), "fast_forward": rng.random() < 0.6}
    noise = rng.choice([0.0, 0.4])
    host_ns = rng.choice([0, 400])
    return Case(
        kind, seed, lambda: policy, [job], setting, room, NO_PAGES, layout, True, noise, host_ns,
        duration_ns,
    )  # fmt: skip


def _scheduling(rng: random.Random) -> Any:
    return rng.choice(
        [
            StaticBatching(max_jobs=6),
            ContinuousBatching(token_budget=128, max_jobs=12),
            ChunkedPrefill(token_budget=48, max_jobs=12),
            VllmV1(token_budget=48, max_jobs=12),
            Orca(max_jobs=8),
        ]
    )


def _memory(rng: random.Random, kind: str) -> Any:
    if kind == "prefix":
        return rng.choice([PagedRestart(prefix_caching=True), PagedSwap(prefix_caching=True)])
    if kind == "swap":
        return PagedSwap()
    return rng.choice([PagedRestart(), PagedSwap(), MaxReservation(max_tokens=120)])


def alike(seed: int, count: int, rate: float | None) -> list[Request]:
    """Prompts that continue one of three beginnings, or one of the prompts before them."""
    rng, now_ns, requests = random.Random(seed), 0, list[Request]()
    begins = [tuple(rng.choices(range(3), k=n)) for n in (10, 24, 40)]
    for i in range(count):
        if rate:
            now_ns += int(rng.expovariate(rate) * 1e9)
        base = rng.choice([*begins, *[r.prompt_ids or () for r in requests[-4:]]])[:60]
        ids = base + tuple(rng.choices(range(3), k=rng.randint(1, 20)))
        requests.append(Request(i, now_ns, len(ids), rng.randint(1, 40), prompt_ids=ids))
    return requests


# ---- carrying out
@contextmanager
def bounded(seconds: int = LIMIT_S) -> Iterator[None]:
    """Raises Hung in what takes too long."""

    def stop(*_: Any) -> None:
        raise Hung(f"longer than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def books_of(engine: Engine) -> dict[str, Any]:
    """What a refused plan must not have changed."""
    ledger, listed = engine.ledger, engine.state.jobs
    lists = {"waiting": listed.waiting, "serving": listed.serving, "training": listed.training}
    jobs = {j.job_id: (j.known_tokens, j.computed_tokens) for j in listed}
    trains = {
        j.job_id: (j.training.step, dict(j.training.updated), repr(j.training._forward))
        for j in listed.training
        if j.training is not None
    }
    return {
        "free": ledger.free_bytes(),
        "coming": ledger.coming_bytes(),
        "held": dict(ledger.held_bytes),
        "pages": {place: list(ids) for place, ids in ledger.pages.items()},
        "stamps": {place: (m.written, m.used) for place, m in ledger.marks().items()}
        if hasattr(ledger, "marks")
        else dict(ledger.written),
        "steps": engine.steps,
        "open": len(ledger.open),
        "jobs": jobs,
        "trains": trains,
        **{name: [j.job_id for j in jobs] for name, jobs in lists.items()},
    }


def check_books(engine: Engine) -> None:
    """Laws 1 and 2, wherever a replay has ended."""
    engine.ledger.conserved()
    check_requests(engine.recorder.outcomes.values(), (*engine.state.jobs, *engine._completions))


@dataclass
class Told:
    """What became of a lie."""

    fault: Fault
    error: BaseException | None
    lies: int
    engine: Engine
    differs: str  # what of the books a refused plan has changed


def lie(case: Case, fault: Fault, at: int, seed: int, **how: Any) -> Told:
    """Carries a case out with a lie in it."""
    held: dict[str, Any] = {}
    liar = Liar(
        case.policy(), fault, at, seed, lambda: held.update(books_of(held["engine"])), **how
    )
    engine = held["engine"] = case.engine(liar)
    notes = liar.notes
    notes["coming"] = [r.request_id for r in case.work if isinstance(r, Request)]
    notes["left"] = engine._completions.tokens_left

    def holds(share: Any, pages: Any) -> bool:
        cache = engine.ledger.sharing[share.place.pool].cache
        job = engine.state.jobs.jobs[share.place.region.owner]
        keys = cache._chains[job.job_id].page_hashes(0, len(pages))
        return all(cache._keys.get(p) == k for p, k in zip(pages, keys, strict=True))

    notes["holds"] = holds
    error: BaseException | None = None
    try:
        with bounded():
            engine.replay(case.work)
    except BaseException as caught:
        error = caught
    if error is not None and not liar.lies:
        raise error  # not of a lie
    differs = ""
    if liar.lies:
        after = books_of(engine)
        changed = [k for k, v in after.items() if held.get(k) != v]
        differs = ", ".join(changed)
        try:
            check_books(engine)
        except BaseException as broken:
            differs += f"; {broken}"
    return Told(fault, error, liar.lies, engine, differs)


def tables(engine: Engine) -> dict[str, Any]:
    """The rows of all five; the error, where these cannot be made."""
    try:
        return {name: table.to_pylist() for name, table in engine.recorder.tables().items()}
    except Exception as error:
        return {"error": repr(error)}
