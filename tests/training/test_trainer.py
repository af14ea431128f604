"""Training unit by unit, with everything else off the device, equals plain training to the bit."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from functools import lru_cache

import pytest
import torch

from engine.contract.layout import Mode
from engine.contract.regions import Kind
from runtime.training.store import RegionStore
from tests.training.training_runs import (
    GPU,
    HOST,
    Hand,
    Result,
    Task,
    assert_equal,
    by_size,
    by_unit,
    plainly,
    tiny,
)
from traces.training.recipe import Recipe

KEEP, RECOMPUTE, OFFLOAD = Mode.KEEP, Mode.RECOMPUTE, Mode.OFFLOAD
MIXED = (OFFLOAD, RECOMPUTE, KEEP)
FULL = Recipe(learning_rate=1e-2, dropout=0.1, clip_norm=0.5, schedule="linear", warmup_steps=1)
LORA = Recipe(lora_rank=4, learning_rate=1e-2, dropout=0.1, lora_dropout=0.1, clip_norm=0.1)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@lru_cache
def reference(task: Task) -> Result:
    return plainly(task)


def check(task: Task, modes: tuple[Mode, ...], **settings: object) -> Hand:
    hand = Hand(task, RegionStore(), modes, **settings)  # type: ignore[arg-type]
    assert_equal(hand.finish(), reference(task))
    store = hand.store
    assert store.held((GPU, 0)) == store.held((HOST, 0)) == 0, "all was given back"
    return hand


@pytest.mark.parametrize("mode", Mode)
def test_each_mode(mode: Mode) -> None:
    hand = check(Task(tiny("llama"), FULL, 3, 2), (mode,), updates_on=lambda chunk: HOST)
    assert hand.peak_state_bytes == 2 * max(hand.weight_bytes), "a chunk and its gradients"
    whole = 2 * sum(hand.weight_bytes) + sum(hand.optimizer_bytes)
    assert hand.peak_state_bytes < whole / 6


@pytest.mark.broad(4)
@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("microbatches", [1, 2, 4])
def test_tied_tables_add_both_gradients_as_autograd_does(mode: Mode, microbatches: int) -> None:
    check(Task(tiny("gpt2", tie_embeddings=True), FULL, 2, microbatches), (mode,))


@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3", "opt"])
def test_families(family: str) -> None:
    spec = tiny(family, tie_embeddings=family in ("qwen3", "opt"))
    check(Task(spec, FULL, sequences=3), MIXED, spills_inputs=True)


@pytest.mark.parametrize("elements", [1, 5000])
@pytest.mark.parametrize("mode", [KEEP, OFFLOAD])
def test_chunks_need_not_follow_units(elements: int, mode: Mode) -> None:
    task = Task(tiny("llama", tie_embeddings=True), FULL, 2, 2)
    check(task, (mode,), chunks_of=by_size(elements), is_exclusive=False, spills_inputs=True)


def test_chunks_may_be_longer_than_their_parameters() -> None:
    """PatrickStar's chunks are all of one size."""
    recipe = Recipe(dtype="bfloat16", learning_rate=1e-2)
    hand = check(Task(tiny(), recipe, 2, 2), MIXED, padding=77)
    assert hand.peak_bytes[Kind.WEIGHT] >= 2 * 77


@pytest.mark.parametrize("frozen", [1, 2])
def test_frozen_units_have_no_backward(frozen: int) -> None:
    recipe = Recipe(frozen_units=frozen, dropout=0.1, clip_norm=0.5)
    hand = check(Task(tiny("gpt2", tie_embeddings=True), recipe, 2, 2), MIXED)
    assert hand.units.first == frozen


def living(num_steps: int, recipe: Recipe) -> int:
    """Tensors that are alive behind a job of so many steps, which is kept, beyond those before."""
    gc.freeze()  # all that was there before: it is neither collected nor listed
    try:
        hand = Hand(Task(tiny("gpt2"), recipe, num_steps, 2), RegionStore(), MIXED)
        for _ in hand.operations():
            pass
        gc.collect()
        found = sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects())
    finally:
        gc.unfreeze()
    assert hand.trainer.loss(0) > 0
    return found


@pytest.mark.parametrize(
    "recipe", [FULL, LORA, Recipe(frozen_units=2, dropout=0.1)], ids=["full", "adapters", "frozen"]
)
def test_steps_leave_no_tensors_behind(recipe: Recipe) -> None:
    """Neither states of dropout below what trains, nor losses."""
    living(1, recipe)  # tensors that are made once
    assert living(1, recipe) == living(4, recipe) > 0


@pytest.mark.broad(3)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("mode", Mode)
def test_adapters(family: str, mode: Mode) -> None:
    task = Task(tiny(family), LORA, 3, 2)
    hand = check(task, (mode,))
    assert hand.units.first == 1
    weights = task.build().state_dict()
    trained = {name for name, weight in hand.result()[1].items() if not weight.equal(weights[name])}
    assert trained and all("lora" in name for name in trained)


def test_adapters_where_their_targets_are_named() -> None:
    recipe = Recipe(lora_rank=2, lora_targets=("down_proj", "o_proj"), frozen_units=2)
    hand = check(Task(tiny(), recipe), MIXED, chunks_of=by_size(300))
    assert hand.units.first == 2


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd(momentum: float) -> None:
    recipe = Recipe(optimizer="sgd", momentum=momentum, learning_rate=0.1, schedule="cosine")
    check(Task(tiny(), recipe, 3, 2), MIXED)


@pytest.mark.parametrize("reuses", [False, True])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_bfloat16_with_master_weights(optimizer: str, reuses: bool) -> None:
    """The reference keeps float32 masters and gives torch's optimizer widened gradients."""
    recipe = Recipe(optimizer=optimizer, dtype="bfloat16", dropout=0.1, clip_norm=0.5)
    task = Task(tiny("gpt2", tie_embeddings=True), recipe, 3, 1 if reuses else 2)
    hand = check(task, MIXED, reuses=reuses)
    assert bool(hand.peak_bytes[Kind.GRADIENT]) is not reuses


def test_adapters_in_bfloat16() -> None:
    recipe = Recipe(lora_rank=4, dtype="bfloat16", lora_dropout=0.1, clip_norm=0.1)
    check(Task(tiny(), recipe, 2, 2), MIXED)


def test_jobs_that_take_turns_are_each_alone() -> None:
    """Also in dropout: draws of another job in between change nothing."""
    first, second = Task(tiny("llama"), FULL, 2, 2), Task(tiny("gpt2"), FULL, 3, 1, seed=1)
    store = RegionStore()
    hands = [Hand(first, store, MIXED), Hand(second, store, (RECOMPUTE, OFFLOAD), job_id=1)]
    running = [hand.operations() for hand in hands]
    before = torch.get_rng_state()
    while running:
        running = [operations for operations in running if next(operations, True) is None]
    assert torch.equal(before, torch.get_rng_state()), "draws of other code are unchanged"
    for hand, task in zip(hands, (first, second), strict=True):
        assert_equal(hand.result(), reference(task))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gpt2", "opt"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("microbatches", [1, 2, 4])
@pytest.mark.parametrize("chunks_of", [by_unit, by_size(1), by_size(7000)])
def test_more_combinations_train_as_plain_torch(
    family: str, tied: bool, microbatches: int, chunks_of
) -> None:  # type: ignore[no-untyped-def]
    task = Task(tiny(family, tie_embeddings=tied), FULL, 2, microbatches, sequences=3)
    for i, modes in enumerate([(KEEP,), (RECOMPUTE,), (OFFLOAD,), MIXED]):
        check(task, modes, chunks_of=chunks_of, spills_inputs=i % 2 == 0, is_exclusive=i < 2)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gpt2", "opt"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("clip_norm", [None, 0.05])
def test_more_adapters(family: str, dtype: str, clip_norm: float | None) -> None:
    recipe = Recipe(lora_rank=3, lora_dropout=0.2, dtype=dtype, clip_norm=clip_norm)
    for microbatches in (1, 2, 4):
        check(Task(tiny(family), recipe, 2, microbatches), MIXED, chunks_of=by_size(500))
