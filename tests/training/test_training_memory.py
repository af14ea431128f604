"""Storages beside regions: none that stays, and workspaces as booked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from engine.contract.layout import Mode, lay_out
from engine.contract.regions import Kind
from models.training.shape import training_shape
from runtime.measure.tracker import StorageTracker
from runtime.training import optimizer
from runtime.training.store import RegionStore
from tests.training.training_runs import GPU, HOST, Hand, Task, by_size, by_unit, tiny
from traces.serving.request import TrainingJob
from traces.training.recipe import Recipe

COUNT_BYTES = 4  # of the scalar that tells a fused kernel the step
MODES = (Mode.OFFLOAD, Mode.RECOMPUTE, Mode.KEEP)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def tracked(task: Task, **settings: Any) -> tuple[Hand, dict[str, list[int]]]:
    """Runs a job by hand; peaks of its backwards and updates. Their results lie in the store."""
    peaks: dict[str, list[int]] = {"backward": [], "update": []}

    def run(work: Any, *args: Any) -> None:
        if work.__name__ not in peaks:
            work(*args)
            return
        with StorageTracker() as tracker:
            work(*args)
        stays = [stay for tier in (GPU, HOST) for stay in hand.store.stays(tier)]
        held = {storage._cdata for stay in stays for storage in stay.storages_held()}
        left = tracker._known.keys() - held
        assert not left, f"{work.__name__}{args} leaves memory in no region"
        peaks[work.__name__].append(tracker.peak_bytes)

    hand = Hand(task, RegionStore(), MODES, run=run, **settings)
    for _ in hand.operations():
        pass
    return hand, peaks


@pytest.mark.broad(6)
@pytest.mark.parametrize("chunks_of", [by_unit, by_size(3000)])
@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_backwards_results_lie_in_regions(
    family: str, dtype: str, microbatches: int, chunks_of: Any
) -> None:
    """Also the first gradient of a tied table, which waits for the second."""
    recipe = Recipe(dtype=dtype)
    for tied in (False, True):
        task = Task(tiny(family, tie_embeddings=tied), recipe, 2, microbatches)
        tracked(task, chunks_of=chunks_of)


def test_results_lie_in_regions_where_gradients_replace_weights() -> None:
    task = Task(tiny("gpt2", tie_embeddings=True), Recipe(dtype="bfloat16"))
    tracked(task, reuses=True)


def test_the_gradient_of_a_tied_table_waits_in_a_buffer() -> None:
    """From the second microbatch on; in the first the gradient waits in the sum itself."""
    task = Task(tiny("gpt2", tie_embeddings=True), Recipe(), 1, 2)
    hand, waiting = Hand(task, RegionStore(), (Mode.KEEP,)), []
    table_bytes = 4 * task.spec.vocab_size * task.spec.hidden_size
    for _ in hand.operations():
        buffers = hand.store.held((GPU, 0), [Kind.BUFFER])
        waiting.append(buffers >= table_bytes)
    backward = len(hand.units.parameters)  # operations of either direction
    first = 3 * backward  # B of the head in the second microbatch
    assert waiting == [first <= i < first + backward - 1 for i in range(len(waiting))]


def test_a_first_gradient_is_not_copied() -> None:
    """Autograd's own storage becomes that of the sum; later gradients are added there."""
    hand = Hand(Task(tiny(), Recipe(), 1, 2), RegionStore(), (Mode.KEEP,))
    seen: list[list[int]] = []

    def run(work: Any, *args: Any) -> None:
        region = hand.gradient(1, GPU).region
        is_there = getattr(work, "__name__", "") == "backward" and args[0] == 1
        before = pointers(hand, region) if is_there else []
        work(*args)
        if is_there:
            pairs = zip(before, pointers(hand, region), strict=True)
            seen.append([old == new for old, new in pairs])

    hand.run = run
    hand.finish()
    assert len(seen) == 2
    assert not any(seen[0]) and all(seen[1])


def pointers(hand: Hand, region: Any) -> list[int]:
    storages = hand.store.find(region, GPU, "a test", as_new=False).storages_held()
    return [storage._cdata for storage in storages]


@pytest.mark.broad(2)
@pytest.mark.parametrize("name", ["adamw", "sgd"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("pieces_of", [1 << 22, 64])
def test_an_update_takes_what_is_laid_out(
    dtype: str, name: str, pieces_of: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """16-bit gradients are widened one piece at a time, and no other storage is made."""
    monkeypatch.setattr(optimizer, "WIDENED", pieces_of)
    monkeypatch.setattr("engine.contract.layout.WIDENED", pieces_of)
    task = Task(tiny(), Recipe(optimizer=name, dtype=dtype), 1, 1)
    hand, peaks = tracked(task)
    job = TrainingJob(0, 0, hand.units.num_units, task.tokens, task.sequences, recipe=task.recipe)
    shape = training_shape(task.spec, job)
    layout = lay_out(shape, by_unit(task.build()), [Mode.KEEP] * hand.units.num_units)
    booked = [chunk.update_bytes for chunk in layout.chunks]
    count = COUNT_BYTES if name == "adamw" else 0
    assert peaks["update"] == [nbytes + count for nbytes in booked]
    assert (max(booked) > 0) is (dtype == "bfloat16")
