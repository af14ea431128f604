"""A run with fast-forward and again step by step: law 15 compares the two."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from engine.contract.layout import Layout
from engine.contract.policy import Router
from engine.contract.regions import PageSize, Tier
from engine.fast_forward.fast_forward import FastForward
from engine.loop.engine import Engine
from engine.loop.state import VirtualClock
from engine.results.recorder import Recorder
from policies.composed import Composed
from sim.cost.contract import ShapePriced
from sim.executor import SimExecutor
from tests.support.replays import PAGE, Replay, replay
from traces.serving.request import Request, TrainingJob


class Shaped(ShapePriced):
    """A made-up cost by shape, with a workspace and, if asked for, a host."""

    form, provenance = "made up", "a test"

    def __init__(self, host_ns: int) -> None:
        self._host_ns, self.model = host_ns, self

    def shape_ns(self, tokens: Sequence[int], contexts: Sequence[int], samples: int) -> int:
        return 50_000 + 1_000 * sum(tokens) + 37 * sum(contexts) + 11 * samples

    def transfer_ns(self, direction: str, nbytes: int, contended: bool = False) -> int:
        return 20 * nbytes

    def plan_ns(self, items: int, prompts: int = 0) -> int:
        return self._host_ns * (1 + items + 3 * prompts)

    def workspace_bytes(
        self, tokens: Sequence[int], contexts: Sequence[int], samples: int, page_tokens: int
    ) -> int:
        return sum(tokens) + max(contexts) + page_tokens

    def workspaces_bytes(
        self, tokens: Any, contexts: Any, starts: Any, samples: Any, page_tokens: int
    ) -> Any:
        parts = [slice(*pair) for pair in pairwise(starts)]
        shapes = zip(parts, samples, strict=True)
        found = [
            self.workspace_bytes(tokens[part], contexts[part], count, page_tokens)
            for part, count in shapes
        ]
        return np.array(found, np.int64)


def simulated(
    policy: Composed,
    requests: Sequence[Request | TrainingJob],
    fast_forward: bool,
    cost: Any,
    pages: int,
    host_pages: int,
    depth: int,
    page: PageSize = PAGE,
    devices: int = 1,
    router: Router | None = None,
    recorder: Recorder | None = None,
    layout: Layout | None = None,
) -> Engine:
    """A run of the simulator; of each device so many pages, and of its host."""
    env = VirtualClock()
    capacity = {(Tier.GPU, d): pages * page.nbytes for d in range(devices)}
    capacity |= {(Tier.HOST, d): host_pages * page.nbytes for d in range(devices)}
    engine = Engine(
        env,
        policy,
        SimExecutor(env, cost),
        capacity,
        page,
        devices=devices,
        depth=depth,
        recorder=recorder or Recorder(),
        fast_forward=fast_forward,
        router=router,
        layout=layout,
    )
    engine.replay(requests)
    return engine


def both_replayed(
    policy: Composed, requests: Sequence[Request | TrainingJob], **setting: Any
) -> tuple[Replay, Replay]:
    """On any executor, repeated plans issued without a question, and asked for: equal tables."""
    fast, slow = (replay(policy, requests, fast_forward=f, **setting) for f in (True, False))
    assert fast.recorder.tables() == slow.recorder.tables()
    return fast, slow


def both_simulated(
    policy: Composed, requests: Sequence[Request | TrainingJob], cost: Any, **setting: Any
) -> tuple[Engine, Engine]:
    """In simulation, with many steps at once and one by one: not a byte differs, nor a page."""
    fast, slow = (simulated(policy, requests, f, cost, **setting) for f in (True, False))
    check_equal(fast, slow)
    return fast, slow


def check_equal(fast: Engine, slow: Engine) -> None:
    """Two runs have equal tables, clocks and page tables."""
    assert fast.recorder.tables() == slow.recorder.tables()
    assert (fast.steps, fast.state.env.now) == (slow.steps, slow.state.env.now)
    theirs = page_tables(slow)
    assert all(tables == theirs[step] for step, tables in page_tables(fast).items())
    reuse = fast.reuse
    assert isinstance(reuse, FastForward)
    if (jump := reuse.jump) is not None:
        frees = jump._frees
        left = [*frees._queues, *frees._expected, frees._given, jump._ends, jump._open]
        assert not any(left) and jump._barrier_ns is None, "a run leaves nothing behind"


def page_tables(engine: Engine) -> dict[int, list[list[int]]]:
    """Page ids of all jobs in each launch that was issued alone, as they were in the end.

    Launches of a run have no page tables, also those that settle alone at its end.
    """
    launches = ((row[0], row[-1].pieces) for row in engine.recorder._facts.steps)
    tables = ((step, [list(piece.pages) for piece in pieces]) for step, pieces in launches)
    return {step: ids for step, ids in tables if any(ids)}


def kept(engine: Engine) -> object:
    """Which pages hold what, and in which order equal ones would be found."""
    caches = [sharing.cache for sharing in engine.ledger.sharing.values()]
    return [(c._keys, {key: [*pages] for key, pages in c._pages.items()}) for c in caches]


def jumped_steps(engine: Engine) -> int:
    """Steps of an engine with fast-forward that were issued many at once."""
    reuse = engine.reuse
    assert isinstance(reuse, FastForward) and reuse.jump is not None
    return reuse.jump.steps
