"""Training shapes against torch: saved bytes by autograd, workspaces by the tracker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile, record_function

from models.spec import GATED, ModelSpec
from models.training.shape import optimizer_item_bytes, training_shape
from tests.support.hand_made import FAMILIES
from tests.support.plain_units import PlainUnits
from tests.support.strategies import cases
from traces.serving.request import TrainingJob
from traces.training.recipe import Recipe

pytestmark = pytest.mark.usefixtures("one_thread")

RECIPES = {
    "full": Recipe(),
    "bf16": Recipe(dtype="bfloat16"),
    "dropout": Recipe(dropout=0.1),
    "bf16 dropout": Recipe(dtype="bfloat16", dropout=0.1),
    "frozen": Recipe(frozen_units=2),
    "lora": Recipe(lora_rank=4),
    "lora dropout": Recipe(lora_rank=4, lora_dropout=0.2, dropout=0.1),
    "lora bf16": Recipe(lora_rank=2, lora_dropout=0.2, dtype="bfloat16"),
}
SHAPES = [(1, 48), (3, 17)]  # sequences, tokens of each


def compare(spec: ModelSpec, job: TrainingJob) -> None:
    plain, shape = PlainUnits(spec, job), training_shape(spec, job)
    assert len(shape.units) == job.num_units
    for u in range(job.num_units):
        measured = plain.measure(u)
        predicted = shape.units[u]
        for name in measured._fields:
            assert getattr(predicted, name) == getattr(measured, name), (u, name)


def job_of(spec: ModelSpec, recipe: Recipe, sequences: int, tokens: int) -> TrainingJob:
    return TrainingJob(0, 0, spec.num_layers + 2, tokens, sequences, microbatches=2, recipe=recipe)


@pytest.mark.broad(6)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", FAMILIES)
def test_shapes_equal_what_torch_takes(name: str, recipe: str) -> None:
    for sequences, tokens in SHAPES:
        compare(FAMILIES[name], job_of(FAMILIES[name], RECIPES[recipe], sequences, tokens))


@pytest.mark.parametrize("family", ["gpt2", "opt", "llama"])
def test_one_head_needs_no_copy_into_a_batch(family: str) -> None:
    spec = ModelSpec(
        name="one head",
        family=family,
        num_layers=1,
        hidden_size=4,
        num_heads=1,
        num_kv_heads=1,
        head_dim=4,
        intermediate_size=6,
        vocab_size=5,
        max_positions=40,
        tie_embeddings=False,
        attention_bias=family != "llama",
    )
    compare(spec, job_of(spec, Recipe(dropout=0.3), sequences=2, tokens=3))


@given(data=st.data())
@cases(30)
def test_any_shape_of_any_model(data: st.DataObject) -> None:
    """Widths, heads, vocabulary, batch and recipe at random."""
    draw = data.draw
    family = draw(st.sampled_from([*GATED, "gpt2", "opt"]), "family")
    kv_heads, shared = draw(st.integers(1, 3), "KV heads"), draw(st.integers(1, 3), "shared by")
    if family not in GATED:
        shared = 1
    heads, head_dim = kv_heads * shared, 2 * draw(st.integers(1, 12), "half a head")
    # The narrowest model in use is half as wide as its heads together (the smallest Qwen3).
    min_width = max(2, head_dim // 2)
    width = heads * (draw(st.integers(min_width, 30), "width") if family in GATED else head_dim)
    spec = ModelSpec(
        name="random",
        family=family,
        num_layers=draw(st.integers(1, 2), "layers"),
        hidden_size=width,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=draw(st.integers(2, 99), "inner"),  # at 1 no copy is needed
        vocab_size=draw(st.integers(2, 99), "vocabulary"),
        max_positions=40,
        tie_embeddings=draw(st.booleans(), "tied"),
        attention_bias=family in ("qwen2", "gpt2", "opt")
        or (family != "mistral" and draw(st.booleans(), "bias")),
    )
    has_adapters = draw(st.booleans(), "adapters")
    recipe = Recipe(
        dtype=draw(st.sampled_from(["float32", "bfloat16"]), "dtype"),
        dropout=draw(st.sampled_from([0.0, 0.3]), "dropout"),
        frozen_units=draw(st.integers(0, spec.num_layers), "frozen"),
        lora_rank=draw(st.integers(1, 5), "rank") if has_adapters else None,
        lora_dropout=draw(st.sampled_from([0.0, 0.3]), "LoRA dropout") if has_adapters else 0.0,
    )
    sequences, tokens = draw(st.integers(1, 3), "sequences"), draw(st.integers(2, 40), "tokens")
    compare(spec, job_of(spec, recipe, sequences, tokens))


SCALARS = 64  # bytes: autograd keeps numbers that tensors were multiplied with, 8 bytes each


@pytest.mark.parametrize(
    ("name", "recipe"),
    [("llama", "full"), ("gpt2", "full"), ("llama", "dropout"), ("qwen3", "bf16"), ("opt", "lora")],
)
def test_peaks_are_those_of_the_allocator(name: str, recipe: str) -> None:
    """The profiler logs allocations without a dispatch mode, and those inside kernels."""
    spec = FAMILIES[name]
    job = job_of(spec, RECIPES[recipe], sequences=2, tokens=128)
    plain, shape = PlainUnits(spec, job), training_shape(spec, job)
    for u in (1, job.num_units - 1):
        unit, targets = shape.units[u], [p for p in plain.parameters(u) if p.requires_grad]
        hidden = torch.randn(plain.shape).to(plain.dtype).requires_grad_(plain.trains_below(u))
        targets += [hidden] if hidden.requires_grad else []
        is_head = u == job.num_units - 1
        gradient = None if is_head else torch.randn_like(hidden)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as log:
            output = plain.run(u, hidden)
            with record_function("backward"):
                torch.autograd.grad(output, targets, gradient)
        forward, backward = peaks(log)
        output_bytes = output.untyped_storage().nbytes()
        del output  # freed here, not while the next unit is logged
        gradient_bytes = unit.input_bytes if hidden.requires_grad else 0
        ours = unit.saved_bytes + unit.forward_bytes + output_bytes
        assert ours == pytest.approx(forward, abs=SCALARS)
        ours = unit.saved_bytes + unit.backward_bytes + gradient_bytes + output_bytes
        assert ours == pytest.approx(backward, abs=SCALARS)


def packed(events: Sequence[Any]) -> set[int]:
    """Numbers of the events by which a matrix product takes memory and frees it before it ends.

    They occur on CPUs that compute in bfloat16 natively: oneDNN packs the operands there, by rules
    of its own per shape, which the formulas do not count.
    """
    found, taken, end_ns = set[int](), dict[int, int](), 0
    for number, event in enumerate(events):
        if event.name() in ("aten::mm", "aten::addmm", "aten::bmm"):
            taken, end_ns = {}, event.start_ns() + event.duration_ns()
        elif event.name() == "[memory]" and event.start_ns() < end_ns:
            nbytes = event.nbytes()
            if -nbytes in taken:
                found |= {taken.pop(-nbytes), number}
            else:
                taken[nbytes] = number
    return found


def peaks(log: profile) -> tuple[int, int]:
    """Most bytes allocated from the start of the log on: before "backward", and behind it."""
    events = sorted(log.profiler.kineto_results.events(), key=lambda e: e.start_ns())
    within = packed(events)
    live, most = 0, [0]
    for number, event in enumerate(events):
        if event.name() == "backward":
            most.append(live)
        elif event.name() == "[memory]" and number not in within:
            live += event.nbytes()
            most[-1] = max(most[-1], live)
    forward, backward = most
    return forward, backward


def test_saved_bytes_equal_a_count_by_hand() -> None:
    """Numbers per token of Llama's layer in float32, and of the head."""
    spec = FAMILIES["llama"]
    shape = training_shape(spec, job_of(spec, Recipe(), sequences=3, tokens=20))
    hidden, heads, kv, inner = 64, 4, 32, 128
    norms = 2 * (hidden + hidden + 1)  # normed without and with its weight; 1 / deviation
    attention = hidden + 2 * kv + hidden + heads  # q, k, v, the result, a sum per head
    mlp = 4 * inner  # gate, its SiLU, up, their product
    layer = norms + attention + hidden + mlp  # and the sum after attention
    assert [unit.saved_bytes for unit in shape.units[1:4]] == [60 * 4 * layer] * 3
    head = 60 * (4 * (2 * hidden + 1 + 211) + 8) + 4  # log-probabilities; labels; their count
    assert shape.units[-1].saved_bytes == head
    assert shape.units[0].saved_bytes == 0
    assert [unit.input_bytes for unit in shape.units] == [0, *[60 * 4 * hidden] * 4]


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        (Recipe(), 8),
        (Recipe(dtype="bfloat16"), 12),
        (Recipe(optimizer="sgd", momentum=0.9), 4),
        (Recipe(optimizer="sgd", momentum=0.9, dtype="bfloat16"), 8),
        (Recipe(optimizer="sgd"), 0),
        (Recipe(optimizer="sgd", dtype="bfloat16"), 4),
    ],
)
def test_optimizer_states_per_number(recipe: Recipe, expected: int) -> None:
    assert optimizer_item_bytes(recipe) == expected


@pytest.mark.parametrize(
    ("units", "tokens", "complaint"),
    [(4, 20, "4 units, but tiny has 5"), (5, 513, "512 positions; shorten sequence_tokens")],
)
def test_a_job_that_does_not_fit_its_model_is_refused(
    units: int, tokens: int, complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint) as caught:
        training_shape(FAMILIES["llama"], TrainingJob(7, 0, units, tokens))
    assert "\n" not in str(caught.value) and "training job 7" in str(caught.value)
