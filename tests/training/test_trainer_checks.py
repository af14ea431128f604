"""A trainer refuses work out of order, work on missing regions, and untrainable models."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch

from engine.contract.layout import Mode
from runtime.training.store import LostContents, RegionStore
from runtime.training.trainer import Trainer
from runtime.training.units import Units
from tests.training.training_runs import GPU, HOST, Hand, Task, assert_equal, by_unit, plainly, tiny
from traces.training.recipe import Recipe

TASK = Task(tiny(), Recipe(dropout=0.1, clip_norm=0.5), 2, 2)
MODES = (Mode.KEEP, Mode.OFFLOAD, Mode.RECOMPUTE)


def begun(work: int, **settings: object) -> Hand:
    """A job after so many operations; its weights are on the host."""
    hand = Hand(TASK, RegionStore(), MODES, **settings)  # type: ignore[arg-type]
    operations = hand.operations()
    for _ in range(work):
        next(operations)
    return hand


def test_a_forward_needs_weights_and_its_input() -> None:
    hand = begun(1)
    with pytest.raises(AssertionError, match=r"F\(1, 0\) of job 0 needs weight 1 of job 0 on gpu"):
        hand.trainer.forward(1, 0, Mode.KEEP)
    hand.fetch(2)
    with pytest.raises(AssertionError, match=r"F\(2, 0\) .* needs activation 7 .* it is nowhere"):
        hand.trainer.forward(2, 0, Mode.KEEP)


def test_a_backward_needs_what_its_forward_saved_and_room_for_gradients() -> None:
    hand = begun(6)  # all forwards and the head's backward; unit 2 recomputes
    hand.fetch(3)
    with pytest.raises(AssertionError, match=r"B\(3, 0\) of job 0 needs gradient 3"):
        hand.trainer.backward(3, 0)
    hand.fetch_gradient(3)
    hand.fetch(2)
    hand.fetch_gradient(2)
    with pytest.raises(AssertionError, match=r"B\(2, 0\) of job 0 needs buffer 3 slot 1"):
        hand.trainer.backward(2, 0)


def test_a_forward_needs_the_updates_of_the_steps_before() -> None:
    hand = begun(20)
    hand.fetch(0)
    hand.store.grow(hand.hidden(1, 2), 1)
    with pytest.raises(AssertionError, match="chunk 0 has had 0 updates of 1"):
        hand.trainer.forward(0, 2, Mode.KEEP)
    hand.move(hand.weight(0, GPU), HOST)
    hand.update(0, 0)
    with pytest.raises(AssertionError, match="step 0 behind 1 updates"):
        hand.trainer.update(0, 0, HOST)
    with pytest.raises(LostContents, match="gradient 1 of job 0 has not been used"):
        hand.store.free(hand.gradient(1, HOST))


def test_a_copy_from_before_the_update_is_out_of_date() -> None:
    hand = begun(20, is_exclusive=False, updates_on=lambda chunk: HOST)
    hand.fetch(0)
    hand.update(0, 0)
    with pytest.raises(
        AssertionError, match=r"needs weight 0 .* but it is on gpu .out of date. and host"
    ):
        hand.trainer.forward(0, 2, Mode.KEEP)


def test_an_update_needs_all_gradients() -> None:
    with pytest.raises(AssertionError, match="gradients of 9 parameters are not whole yet"):
        begun(10).trainer.update(1, 0, HOST)
    hand = begun(19)  # all but the embedding's
    with pytest.raises(AssertionError, match=r"needs buffer 0 slot 3 .* but it is nowhere"):
        hand.trainer.update(1, 0, HOST)


def test_dropout_draws_in_the_order_of_plain_training() -> None:
    hand = begun(2)
    hand.fetch(0)
    hand.store.grow(hand.hidden(1, 1), 1)
    hand.trainer.forward(0, 1, Mode.RECOMPUTE)
    hand.shed(0)
    hand.fetch(1)
    hand.store.grow(hand.hidden(2, 1), 1)
    hand.trainer.forward(1, 1, Mode.RECOMPUTE)
    hand.shed(1)
    hand.fetch(2)
    hand.store.grow(hand.hidden(3, 0), 1)
    with pytest.raises(AssertionError, match=r"F\(2, 0\) draws dropout behind F\(1, 1\)"):
        hand.trainer.forward(2, 0, Mode.RECOMPUTE)


@pytest.mark.parametrize(
    ("chunks", "why"),
    [
        ([[0], [1]], "must hold each of the"),
        ([[0, 0], *[[p] for p in range(1, 30)]], "must hold each of the 30 parameters once"),
        ([[], *[[p] for p in range(30)]], "chunk 0 must hold parameters"),
        ([[0, 1], *[[p] for p in range(2, 30)]], "chunk 0 must hold parameters, either frozen or"),
    ],
)
def test_chunks_are_a_partition_of_like_parameters(chunks: list[list[int]], why: str) -> None:
    task = Task(tiny(), Recipe(frozen_units=1))
    with pytest.raises(ValueError, match=why):
        Trainer(0, task.build(), chunks, task.recipe, task, RegionStore())


def test_gradients_replace_weights_only_where_master_weights_bring_them_back() -> None:
    for recipe, microbatches in ((Recipe(), 1), (Recipe(dtype="bfloat16"), 2)):
        task = Task(tiny(), recipe)
        model = task.build()
        with pytest.raises(ValueError, match="gradients can take the place of weights only where"):
            Trainer(0, model, by_unit(model), recipe, task, RegionStore(), 1, microbatches, True)


def test_overwritten_weights_are_not_computed_with() -> None:
    task = Task(tiny(), Recipe(dtype="bfloat16"))
    hand = Hand(task, RegionStore(), (Mode.KEEP,), reuses=True)
    operations = hand.operations()
    for _ in range(6):
        next(operations)
    hand.fetch(4)
    with pytest.raises(AssertionError, match="gradients lie in the place of 2 weights"):
        hand.trainer.forward(4, 0, Mode.KEEP)


def test_untrainable_models_are_refused() -> None:
    with pytest.raises(ValueError, match="no parameter of this model trains"):
        Task(tiny(), Recipe(frozen_units=5)).build()
    model = Task(tiny("opt"), Recipe()).build()
    model.config.layerdrop = 0.1
    with pytest.raises(ValueError, match="layerdrop"):
        Units(model)


def test_any_thread_may_do_any_operation() -> None:
    """Two threads take turns."""
    start = partial(torch.set_num_threads, 1)
    with (
        ThreadPoolExecutor(1, initializer=start) as a,
        ThreadPoolExecutor(1, initializer=start) as b,
    ):
        turns = [a, b]

        def run(work, *args) -> None:  # type: ignore[no-untyped-def]
            turns.reverse()
            turns[0].submit(work, *args).result()

        own = Hand(TASK, RegionStore(), MODES, run=run).finish()
        plain = a.submit(plainly, TASK).result()
    assert_equal(own, plain)


def test_chunks_are_updated_by_several_threads_at_once() -> None:
    hand = Hand(TASK, RegionStore(), MODES, updates_on=lambda chunk: HOST)
    operations = hand.operations()
    start = partial(torch.set_num_threads, 1)
    with ThreadPoolExecutor(4, initializer=start) as pool:
        for step in range(TASK.num_steps):
            for _ in range(20):  # all forwards and backwards
                pool.submit(next, operations).result()
            list(pool.map(lambda chunk, step=step: hand.update(chunk, step), hand.chunks))
            operations = hand.steps(step + 1)
        plain = pool.submit(plainly, TASK).result()
    assert_equal(hand.result(), plain)


def test_a_job_may_end_without_an_update() -> None:
    task = Task(tiny(), Recipe(dropout=0.1), 2, 2)
    hand = Hand(task, RegionStore(), MODES, has_update=False)
    before = {name: weight.clone() for name, weight in hand.trainer.state_dict().items()}
    losses, weights = hand.finish()
    assert all(weights[name].equal(weight) for name, weight in before.items())
    assert losses[:2] == plainly(task)[0][:2]
    assert hand.store.held((GPU, 0)) == hand.store.held((HOST, 0)) == 0
