"""The lies that no backend may believe: each told in the simulator, in lockstep and on the cpu."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import simpy

from engine.contract.plan import Plan
from engine.contract.regions import PageSize
from engine.loop.engine import Engine
from engine.loop.state import VirtualClock
from engine.results.recorder import Recorder
from policies.composed import Composed
from runtime.executors.lockstep import CpuExecutor, LockstepExecutor
from runtime.executors.wall import Link
from runtime.serving.machine import GPU, ServingMachine
from sim.executor import SimExecutor
from tandem.config.compose import composed
from tandem.wiring.backends import backend_of
from tandem.wiring.experiment import engine_of
from tandem.wiring.run_spec import run_spec_of
from tests.support.fault_cases import books_of, bounded, check_books
from tests.support.faults import FAULTS, Fault, Liar, fault
from tests.support.hand_made import FAMILIES, HOST, shared_model
from tests.support.jumps import Shaped
from tests.support.serving import (
    KEEPING,
    MEMORY,
    PAGE_TOKENS,
    SCHEDULING,
    shared_requests,
    short_requests,
)
from tests.training.trainings import SMALL
from traces.serving.request import Request

BACKENDS = ("sim", "lockstep", "cpu")
SPEC = replace(FAMILIES["llama"], name="tiny-flat", num_layers=1)
PAGE = PageSize.of(SPEC, PAGE_TOKENS)
PAGES = 26
LINKS = {name: Link(200e6, 20_000) for name in ("gpu->host", "host->gpu")}
LATE_NS = 1_000_000_000  # when the last request comes: behind the first questions anywhere

SERVED = (  # told under chunked prefill with paged swap
    "no KV",
    "one page",
    "a decode without its next page",
    "a write left out",
    "writes another job's KV",
    "writes another job's KV in its stead",
    "freed alive",
    "freed alive behind its decode",
    "freed and taken anew",
    "swapped and lost",
    "swapped and freed",
    "new pages for those on the host",
    "another job's KV copied",
    "another job's KV copied to the host as one's own",
    "a stale host copy over newer KV",
    "a stale host copy for freed KV",
    "copy onto another size",
    "KV copied into a buffer",
    "copy from what is not held",
    "free of what is not held",
    "double free",
    "a launch on lane 'compute2'",
    "a launch on lane 'cpu'",
    "a launch on device +1",
    "two slices of one job",
    "a prompt in two slices of a launch",
    "a slice of a foreign job",
    "a slice of a job that has finished",
    "a slice of a job that has not arrived",
    "slices of forged jobs",
    "KV for a stranger",
    "KV in another part",
    "bytes for a stranger",
    "bytes for no job",
    "a slice behind a last token",
    "no tokens",
    "tokens below zero",
    "half a token more",
    "one token as a float",
    "True for a token",
    "more tokens than remain",
    "huge tokens",
    "layers on a served slice",
    "again on a served slice",
    "restart of a waiting job",
    "restart twice",
    "restart with a slice",
    "refuse twice",
    "refuse and restart",
    "refuse with a slice",
    "a launch that is in flight",
    "a launch twice in a plan",
    "KV on a disk that is not there",
    "KV on a device that is not there",
    "half a page",
    "bytes below zero",
    "bytes as a float",
    "more pages than there are",
    "reads what lies on the host",
    "None for an answer",
    "a generator for an answer",
    "a list for an answer",
    "a moment in words",
    "pops from waiting",
    "pops from serving",
    "clears waiting",
    "sorts waiting",
    "changes free bytes",
    "changes the capacity",
    "pops from held bytes",
    "changes stamps of contents",
    "sets the time",
    "sets a job's class",
    "sets what a job has computed",
    "sets a hidden count of a job",
    "sets a job's clock",
    "gives the view a new field",
    "changes a launch's lane",
    "changes the layout",
    "sets the size of a page",
)
SHARED = (  # with prefix caching
    "shares a page with other contents",
    "shares pages in another order",
    "shares a page twice",
    "shares a page that is not there",
    "shares for a job that has begun",
)
TRAINED = (
    "a bare training launch",
    "a place that is not read",
    "a place that is not written",
    "a task twice",
    "a task of the unit above",
    "the only weights freed",
    "activations freed before their backward",
    "new bytes for states on the host",
    "a training job restarted",
    "notes updates of a training job",
)
TRAINING = ("policy=zero3_offload", "training.num_steps=2")


@fault("wakes for ever")
def _(scene: Any) -> Plan:
    return Plan(wake_ns=scene.view.now_ns + 500_000)


@dataclass(frozen=True)
class Refusal:
    """How a replay with a lie in it ended."""

    error: BaseException | None
    lies: int  # that were told
    differs: str  # what of the books is not as it was before the plan, or broken
    finished: int  # requests that were served to their end after the lie, or as if there was none
    engine: Engine


def requests_for(name: str) -> list[Request]:
    if name in SHARED:
        return shared_requests(6, SPEC.vocab_size)
    requests = short_requests(8, SPEC.vocab_size)
    return [*requests[:-1], replace(requests[-1], arrival_ns=LATE_NS)]


def policy_for(name: str) -> Any:
    memory = KEEPING["paged_swap"] if name in SHARED else MEMORY["paged_swap"]
    return Composed(SCHEDULING["chunked_prefill"], memory)


def executor_for(
    backend: str, env: simpy.Environment, requests: list[Request], device_pages: int = PAGES
) -> Any:
    """The real machine of a backend over a small arena; the simulator needs none."""
    predicted = SimExecutor(env, Shaped(40_000))
    if backend == "sim":
        return predicted
    prompts = {r.request_id: r.prompt_ids or () for r in requests}
    pages = {GPU: device_pages, HOST: 4 * PAGES}
    machine = ServingMachine(
        shared_model(SPEC), SPEC, PageSize.of(SPEC, PAGE_TOKENS), pages, prompts
    )
    if backend == "lockstep":
        return LockstepExecutor(machine, predicted)
    return CpuExecutor(env, machine, LINKS)


@contextmanager
def _served(name: str, backend: str, liar: Any) -> Iterator[tuple[Engine, list[Any]]]:
    env, requests = VirtualClock(), requests_for(name)
    capacity = {GPU: PAGES * PAGE.nbytes, HOST: 4 * PAGES * PAGE.nbytes}
    yield (
        Engine(
            env,
            liar,
            executor_for(backend, env, requests),
            capacity,
            PAGE,
            recorder=Recorder(),
        ),
        requests,
    )


@contextmanager
def _trained(name: str, backend: str, liar: Any) -> Iterator[tuple[Engine, list[Any]]]:
    point = composed([*SMALL, f"backend={backend}", *TRAINING])
    found = replace(run_spec_of(point), policy=liar)
    with backend_of(found, point.config["backend"]) as world:
        yield engine_of(found, world, Recorder(world.meter)), found.work


def tell(name: str, backend: str, at: int = 3, seed: int = 0) -> Refusal:
    """A replay that is legal up to a question and lies then, on a backend."""
    lie: Fault = FAULTS[name]
    trains = name in TRAINED
    held: dict[str, Any] = {}
    base = _policy_of_training() if trains else policy_for(name)
    liar = Liar(
        base,
        lie,
        at,
        seed,
        lambda: held.update(books_of(held["engine"])),
        is_stubborn=name == "wakes for ever",
    )
    with (_trained if trains else _served)(name, backend, liar) as (engine, work):
        held["engine"] = engine
        liar.notes["coming"] = [r.request_id for r in work if isinstance(r, Request)]
        liar.notes["left"] = engine._completions.tokens_left
        error: BaseException | None = None
        try:
            with bounded(60):
                engine.replay(work)
        except BaseException as caught:
            error = caught
        after = books_of(engine)
        differs = [key for key, value in after.items() if held.get(key) != value]
        try:
            check_books(engine)
        except BaseException as broken:
            differs.append(str(broken))
    outcomes = engine.recorder.outcomes.values()
    finished = sum(o.status == "finished" for o in outcomes)
    return Refusal(error, liar.lies, ", ".join(differs), finished, engine)


def _policy_of_training() -> Any:
    return run_spec_of(composed([*SMALL, "backend=sim", *TRAINING])).policy
