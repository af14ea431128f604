"""Saved storages of graphs are read beside a backward on another thread, never while it runs."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event, Thread
from typing import Any

import pytest
import torch

from engine.contract.layout import Mode
from runtime.training import saved
from runtime.training.machine import TrainingMachine
from runtime.training.saved import Graph
from runtime.training.store import RegionStore
from tests.training.training_runs import GPU, Hand, Task, tiny

PATIENCE_S = 20.0  # for what happens at once
PAUSE_S = 0.2  # in which a backward that does not wait would be over


class Paused(torch.autograd.Function):
    """The identity; its backward waits in the middle of the graph for one of two events."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, reached: Event, goes_on: Event) -> torch.Tensor:
        ctx.reached, ctx.goes_on = reached, goes_on
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.reached.set()
        assert ctx.goes_on.wait(PATIENCE_S)
        return gradient, None, None


def on_a_thread(work: Callable[[], object]) -> Thread:
    thread = Thread(target=work, daemon=True)
    thread.start()
    return thread


def test_a_graph_shows_what_it_saves_until_its_backward_begins() -> None:
    x, reached, goes_on = torch.ones(1000, requires_grad=True), Event(), Event()
    exp = x.exp()
    graph = Graph.of(Paused.apply(exp, reached, goes_on).sin(), x, None)
    kept = {storage.nbytes() for storage in graph.saved()}
    assert kept == {4000}
    gradients: list[tuple[torch.Tensor, ...]] = []
    thread = on_a_thread(lambda: gradients.append(graph.gradients([x], torch.ones(1000))))
    assert reached.wait(PATIENCE_S)
    assert graph.saved() == [], "it is looked at while it runs"
    goes_on.set()
    thread.join(PATIENCE_S)
    assert graph.saved() == []
    expected = x.exp() * x.exp().cos()
    assert torch.equal(gradients[0][0], expected.detach())


def test_a_backward_waits_for_a_read_of_its_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """The meter has read half of a graph when a lane takes it."""
    hand = Hand(Task(tiny(), num_steps=1), RegionStore(), (Mode.KEEP,))
    machine = TrainingMachine({0: hand.trainer}, hand.store, {})
    names, seen = saved._names, []

    def look(node: Any) -> tuple[str, ...]:
        if node == root and not seen:
            lane.start()
            lane.join(PAUSE_S)
            seen.append(lane.is_alive())
        return names(node)

    def run(work: Any, *args: Any) -> None:
        nonlocal lane, root
        if work.__name__ != "backward" or seen:
            work(*args)
            return
        before = held_bytes(machine)
        kept = hand.store.find(hand.saved(args[0], args[1]).region, GPU, "a test").graph
        assert isinstance(kept, Graph)
        root = kept.edge.node
        lane = Thread(target=work, args=args, daemon=True)
        with monkeypatch.context() as patch:
            patch.setattr(saved, "_names", look)
            looked = held_bytes(machine)
        lane.join(PATIENCE_S)
        assert seen == [True], "a backward frees what is being looked at"
        assert looked <= before and held_bytes(machine) < before

    lane, root = Thread(), None
    hand.run = run
    hand.finish()
    assert len(seen) == 1


def held_bytes(machine: TrainingMachine) -> int:
    return sum({s._cdata: s.nbytes() for s in machine.held(GPU)}.values())
