"""What windows of finetuning cost: by the roofline, alone and beside requests."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.contract.executor import Launch, Piece
from engine.contract.job import Job
from engine.contract.plan import Compute, Slice
from engine.contract.regions import Work
from engine.contract.training_progress import TrainingProgress
from sim.cost.roofline import Roofline
from sim.cost.windows import WindowPart, WindowShape, backward_operators, extra_operators, shape_of
from sim.devices.device import Device
from tests.policies.finetuning_jobs import SPEC, finetuning_job
from tests.sim.test_sim_roofline import device
from traces.serving.request import Sample, TrainingJob
from traces.training.recipe import Recipe

FULL, ADAPTERS = Recipe(), Recipe(lora_rank=4)
LARGE = replace(SPEC, name="large", hidden_size=512, head_dim=256, intermediate_size=1024)
LAYERS = range(1, SPEC.num_layers + 1)
TOKENS = 256


@pytest.fixture
def cpu() -> Device:
    return device("cpu")


def job_of(recipe: Recipe, microbatches: int = 1) -> TrainingJob:
    samples = [Sample(TOKENS)] * microbatches
    return finetuning_job(9, samples, recipe=recipe, microbatches=microbatches)


def back(recipe: Recipe, units: range, tokens: int = TOKENS, context: int = 0) -> WindowShape:
    part = WindowPart(Work.BACKWARD, units, 0, tokens, context)
    return shape_of(part, job_of(recipe, 2), None, LARGE)


def forward(recipe: Recipe, tokens: int, context: int = 0) -> WindowShape:
    part = WindowPart(Work.FORWARD, range(SPEC.num_layers + 2), 0, tokens, context)
    return shape_of(part, job_of(recipe), None, LARGE)


def launched(recipe: Recipe, tokens: int, requests: int = 0) -> Launch:
    """A window at the beginning of its sample, behind so many decodes."""
    served = [
        Job(i, 0, prompt_tokens=40, known_tokens=41, computed_tokens=40) for i in range(requests)
    ]
    job = Job.trains(TrainingProgress(job_of(recipe), None), 0)
    units = range(SPEC.num_layers + 2)
    slices = (*[Slice(j, 1) for j in served], Slice(job, tokens, Work.FORWARD, units, 0))
    pieces = (*[Piece(j.job_id, 1, 40, True, ()) for j in served], Piece(9, tokens, 0, False, ()))
    return Launch(Compute(slices), pieces=pieces)


@pytest.mark.parametrize("recipe", [FULL, ADAPTERS], ids=["full", "adapters"])
def test_longer_windows_more_context_and_more_layers_cost_more(recipe: Recipe, cpu: Device) -> None:
    cost = Roofline(cpu, LARGE)
    by_tokens = [cost.back_ns(back(recipe, LAYERS[-1:], n, 64)) for n in (16, 64, 192)]
    by_context = [cost.back_ns(back(recipe, LAYERS[-1:], 16, n)) for n in (0, 64, 240)]
    by_layers = [cost.back_ns(back(recipe, LAYERS[-n:])) for n in (1, 2, 4)]
    by_labels = [cost.compute_ns(launched(recipe, n)) for n in (16, 64, 256)]
    for found in (by_tokens, by_context, by_layers, by_labels):
        assert found == sorted(set(found))


def test_training_all_costs_more_than_training_adapters(cpu: Device) -> None:
    cost = Roofline(cpu, LARGE)
    assert cost.back_ns(back(FULL, LAYERS)) > 1.5 * cost.back_ns(back(ADAPTERS, LAYERS))


def test_the_embedding_and_the_end_of_a_sample_have_a_price(cpu: Device) -> None:
    """A backward of the embedding alone, and the sums of a step of two samples."""
    cost = Roofline(cpu, LARGE)
    alone = back(FULL, range(1))
    assert alone.layers == 0 and alone.embedding == LARGE.vocab_size * LARGE.hidden_size
    table_bytes = 4 * alone.embedding
    assert cost.back_ns(alone) > table_bytes / cpu.bandwidth_bytes_per_s * 1e9
    parts = back(FULL, range(5)), back(FULL, LAYERS), alone
    assert [part.ending > 0 for part in parts] == [True, False, True]
    assert back(ADAPTERS, LAYERS).ending == 4 * 4 * sum(
        [inputs + outputs for inputs, outputs in back(ADAPTERS, LAYERS).adapted]
    )


def test_windows_back_sum_gradients_of_keys_and_values(cpu: Device) -> None:
    """The last window back has no context, and reads the sums of those behind it all the same."""
    whole, last = back(ADAPTERS, LAYERS[-1:]), back(ADAPTERS, LAYERS[-1:], 64, 0)
    assert not whole.is_part and last.is_part
    moved = [
        sum([op.repeats * op.nbytes for op in backward_operators(LARGE, w)])
        for w in (last, last._replace(is_part=False))
    ]
    assert moved[0] - moved[1] == 3 * 2 * LARGE.kv_size * 4 * 64


def test_labels_are_what_the_head_makes_a_loss_of() -> None:
    assert forward(ADAPTERS, TOKENS).labels == TOKENS, "the row of the last token, too"
    assert forward(ADAPTERS, 64).labels == 64
    kinds = [op.kind for op in extra_operators(LARGE, forward(FULL, 64))]
    assert kinds.count("head") == 1


@pytest.mark.parametrize("recipe", [ADAPTERS], ids=["adapters"])
def test_a_window_beside_requests_reads_weights_once(recipe: Recipe) -> None:
    """On an A100 a launch of a few rows takes as long as its weights: the joint one takes less."""
    cost = Roofline(device("a100"), LARGE)
    joint, alone = launched(recipe, 16, requests=8), launched(recipe, 16)
    served = Launch(Compute(joint.op.slices[:-1]), pieces=joint.pieces[:-1])  # type: ignore[union-attr]
    both = cost.compute_ns(alone) + cost.compute_ns(served)
    assert max(cost.compute_ns(alone), cost.compute_ns(served)) < cost.compute_ns(joint) < both


def test_two_windows_in_a_launch_both_have_their_price(cpu: Device) -> None:
    cost = Roofline(cpu, LARGE)
    one = launched(ADAPTERS, 64)
    other = replace(job_of(ADAPTERS), job_id=10)
    job = Job.trains(TrainingProgress(other, None), 0)
    (own,), (piece,) = one.op.slices, one.pieces  # type: ignore[union-attr]
    two = Launch(Compute((own, own._replace(job=job))), pieces=(piece, Piece(10, 64, 0, False, ())))
    extra = cost.extra_ns(forward(ADAPTERS, 64))
    assert cost.compute_ns(two) > cost.compute_ns(one) + 0.9 * extra
