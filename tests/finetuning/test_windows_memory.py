"""What finetuning holds: kept bytes by their formula, frozen weights once, nothing of autograd."""

from __future__ import annotations

import gc
import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.contract import regions
from engine.contract.layout import Mode
from engine.contract.regions import Kind, Tier
from models.training import tape_known
from models.training.kept import kept_token_bytes
from models.training.tape_known import (
    BackwardBytes,
    known_backward_bytes,
    known_loss_bytes,
    undominated_terms,
)
from runtime.finetuning.finetuner import SampleWindow
from runtime.finetuning.model import FinetunedModel
from runtime.measure.tracker import StorageTracker, storage_bytes
from tests.finetuning.test_co_serving_runs import WINDOWS_BACK, run
from tests.finetuning.windows_by_hand import JOB, ByHand, cuts, recipe_of
from tests.support.hand_made import FAMILIES, own_model
from traces.serving.request import Sample
from traces.training.recipe import Recipe

pytestmark = pytest.mark.ci

KINDS = ("lora_all", "lora_attention", "lora_down", "full")


@pytest.mark.broad(3)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_keeps_the_bytes_of_the_formula(family: str, kind: str, dtype: str) -> None:
    made, done = ByHand(family, recipe_of(family, kind, dtype=dtype), [Sample(50)]), 0
    made.begin()
    nbytes = kept_token_bytes(made.spec, made.recipe)
    for start, count in cuts(random.Random(0), 50, 20):
        made.forward(0, start, count, *made.served.next_slices(dict.fromkeys(made.prompts, 9), 7))
        done += count
        for stay in made.store.stays(Tier.GPU):
            if stay.place.region.kind is Kind.ACTIVATION and stay.place.region.part:
                is_layer = stay.place.region.part <= made.spec.num_layers
                assert stay.nbytes == (done * nbytes if is_layer else 0)


def test_a_relu_keeps_bits_where_nothing_trains_behind_it() -> None:
    """A bit for each of its 96 numbers instead of four bytes, where adapters are on attention."""
    spec = FAMILIES["opt"]
    every, few = (
        kept_token_bytes(spec, recipe_of("opt", kind)) for kind in ("lora_all", "lora_attention")
    )
    narrow = 4 * 4 * 4  # four products fewer have adapters of rank 4
    assert every - few == narrow + spec.intermediate_size * 4 - spec.intermediate_size // 8


def test_a_layer_that_runs_again_keeps_its_input() -> None:
    made = ByHand("llama", recipe_of("llama", "lora_all"), [Sample(50)], modes=Mode.RECOMPUTE)
    made.begin()
    made.forward(0, 0, 50)
    (stay,) = [s for s in made.store.stays(Tier.GPU) if s.place == regions.kept(JOB, 2)]
    windows = made.layout.windows
    assert windows is not None
    assert stay.nbytes == 50 * windows.kept[2] == 50 * made.spec.hidden_size * 4


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_adapters_lie_over_the_weights_that_are_served(family: str) -> None:
    recipe = recipe_of(family, "lora_all")
    served = own_model(replace(FAMILIES[family], dtype=recipe.dtype))
    tracker = StorageTracker()
    with tracker:
        trainee = FinetunedModel.of(served, FAMILIES[family], recipe)
    named = dict(trainee.model.named_parameters())
    adapters = storage_bytes([p for name, p in named.items() if "lora_" in name])
    assert tracker.live_bytes == adapters
    frozen = {p.data_ptr() for name, p in named.items() if "lora_" not in name}
    assert frozen == {p.data_ptr() for p in served.parameters()}


@pytest.mark.broad(2)
@pytest.mark.parametrize("kind", ["lora_all", "full"])
def test_no_graph_outlives_a_launch(kind: str) -> None:
    made, before = ByHand("llama", recipe_of("llama", kind), [Sample(40)]), graphs()
    made.randomly(random.Random(3))
    assert graphs() == before


def graphs() -> int:
    """Tensors alive that autograd has made."""
    gc.collect()
    found = [t for t in gc.get_objects() if issubclass(type(t), torch.Tensor)]
    return len([t for t in found if t.grad_fn is not None])


@pytest.mark.parametrize(
    "words", [(), WINDOWS_BACK, ("training/recipe=sgd",), ("planner.modes=offload",)], ids=str
)
def test_the_meter_reads_what_is_booked(words: tuple[str, ...]) -> None:
    """To the byte, but for pages that a launch still reads, which are free already."""
    found = run("lockstep", "device.host_plan_ns=0", "device.host_slice_ns=0", *words)
    rows = [r for r in found.recorder.tables()["memory"].to_pylist() if r["tier"] == "gpu"]
    read = [r for r in rows if r["measured_bytes"] is not None]
    booked = [r["capacity_bytes"] - r["free_bytes"] - r["coming_bytes"] for r in read]
    off = [r["measured_bytes"] - nbytes for r, nbytes in zip(read, booked, strict=True)]
    page, longest = found.spec.page, found.spec.trainees[0].job.sequence_tokens
    assert off.count(0) > len(off) / 2
    assert {nbytes % page.nbytes for nbytes in off} == {0}
    assert max(off) <= page.bytes_for(longest)
    assert sum(off) <= 0.02 * sum(booked), "over the run"


WINDOWS = [(64, 0, 64), (16, 0, 64), (16, 32, 32), (16, 0, 16)]  # tokens forward; start, tokens


@pytest.mark.broad(3)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_backward_takes_the_workspace_of_the_tape(family: str, kind: str, dtype: str) -> None:
    for forward, start, tokens in WINDOWS:
        made = ByHand(family, recipe_of(family, kind, dtype=dtype), [Sample(64)])
        made.begin()
        for first in range(0, 64, forward):
            made.forward(0, first, forward)
        made.gradients()  # sums, which are booked, have their memory already
        made.finetuner._passing(64, "a test")
        made.backward(0, 48, 16, range(2, 3))
        tracker = StorageTracker()
        with tracker:
            made.backward(0, start, tokens, range(2, 3))
        keys, copied = start + tokens, forward < tokens
        peak = known_backward_bytes(made.spec, made.recipe, tokens, keys, copied)
        assert tracker.peak_bytes == peak
        booked = BackwardBytes(made.spec, made.recipe).of(range(2, 3), tokens, 64)
        assert tracker.peak_bytes <= booked


@pytest.mark.broad(3)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_that_runs_again_finds_its_workspace_booked(
    family: str, kind: str, dtype: str
) -> None:
    for forward, start, tokens in WINDOWS:
        made = ByHand(
            family, recipe_of(family, kind, dtype=dtype), [Sample(64)], modes=Mode.RECOMPUTE
        )
        made.begin()
        for first in range(0, 64, forward):
            made.forward(0, first, forward)
        made.gradients()
        made.finetuner._passing(64, "a test")
        made.backward(0, 48, 16, range(2, 3))
        tracker = StorageTracker()
        with tracker:
            made.backward(0, start, tokens, range(2, 3))
        booked = BackwardBytes(made.spec, made.recipe).of(range(2, 3), tokens, 64)
        assert tracker.peak_bytes <= booked, (forward, start, tokens)


@pytest.mark.parametrize("kind", ["lora_all", "full"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_backward_through_all_units_finds_its_workspace_booked(family: str, kind: str) -> None:
    made = ByHand(family, recipe_of(family, kind), [Sample(64)])
    made.begin()
    for start in range(0, 64, 16):
        made.forward(0, start, 16)
    made.gradients()
    made.finetuner._passing(64, "a test")
    units, tracker = range(made.trainee.first, made.job.num_units - 1), StorageTracker()
    with tracker:
        made.backward(0, 0, 64, units)
    booked = BackwardBytes(made.spec, made.recipe).of(units, 64, 64)
    assert 0.8 * booked < tracker.peak_bytes <= booked


@pytest.mark.broad(3)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["lora_all", "full"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_loss_takes_the_workspace_of_the_tape(family: str, kind: str, dtype: str) -> None:
    made = ByHand(family, recipe_of(family, kind, dtype=dtype), [Sample(64)])
    made.begin()
    made.forward(0, 0, 64)
    made.gradients()
    made.finetuner.ids(0, made.job.sample(0))
    for start, tokens in [(0, 64), (48, 16), (0, 16)]:
        window = SampleWindow(0, made.job.sample(0), start, tokens, torch.empty(0))
        hidden = torch.randn(1, tokens, made.spec.hidden_size, dtype=made.trainee.dtype)
        made.finetuner._so_far, tracker = torch.zeros(()), StorageTracker()
        with tracker:
            made.finetuner.finish(window, hidden)
        booked = (
            BackwardBytes(made.spec, made.recipe).of_loss(tokens) + hidden.nbytes
        )  # and "passed"
        views = 0 if window.stop == 64 else 8 * tokens  # labels before the last are not copied
        assert tracker.peak_bytes == booked - views


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt", "qwen3"])
@pytest.mark.parametrize("recipe", [Recipe(), Recipe(lora_rank=4, dtype="bfloat16")], ids=str)
def test_a_window_of_any_size_peaks_where_its_tape_does(name: str, recipe: Recipe) -> None:
    """Workspaces follow from the terms of a few windows, to the byte."""
    rng, spec = random.Random(0), FAMILIES[name]
    for _ in range(40):
        tokens = rng.choice([1, 2, rng.randint(1, 900)])
        keys = rng.choice([tokens, tokens + rng.randint(1, 15), rng.randint(tokens, 1000)])
        copied = rng.random() < 0.5
        found = tape_known.known_backward_bytes(spec, recipe, tokens, keys, copied)
        assert found == max(tape_known._played(spec, recipe, tokens, keys, copied))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_terms_of_workspace_are_the_tapes(family: str, kind: str) -> None:
    """What a policy is told at each step is what a tape finds, window by window."""
    spec, recipe = FAMILIES[family], recipe_of(family, kind)
    told = BackwardBytes(spec, recipe)
    for rows in (1, 2, 5, 16, 33, 300):
        assert told.of_loss(rows) == known_loss_bytes(spec, recipe, rows)
    assert told.of_loss(0) == 0
    passed = spec.hidden_size * 4  # of a token, in float32
    for tokens, keys in [(1, 1), (1, 64), (7, 64), (64, 64), (16, 400), (300, 304), (80, 64)]:
        found = max(keys * passed, known_backward_bytes(spec, recipe, tokens, keys))
        assert told.of(range(2, 3), tokens, keys) == found


def test_terms_that_are_never_the_largest_are_left_out() -> None:
    rng = random.Random(0)
    terms = np.array([[rng.randint(0, 9) for _ in range(4)] for _ in range(40)])
    kept = np.array(undominated_terms(terms))
    assert 0 < len(kept) < len(terms)
    for _ in range(500):
        counts = np.array([1, *[rng.randint(0, 50) for _ in range(3)]])
        assert (kept @ counts).max() == (terms @ counts).max()
