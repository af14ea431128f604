"""Costs of training launches: flops against torch's own count, bytes, order, refusals."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from engine.contract.executor import Launch, Piece
from engine.contract.job import Job
from engine.contract.layout import Mode
from engine.contract.plan import HOST_LANE, Compute, Slice
from engine.contract.regions import Work
from models.operators import Operator, operators
from models.spec import ModelSpec
from sim.cost.policy_cost import PolicyCost
from sim.cost.roofline import Roofline
from sim.cost.training_launch import (
    AGAIN,
    BACKWARD,
    FORWARD,
    LIGHT,
    Trained,
    element_bytes,
    trained_of,
    unit_of,
    update_of,
)
from sim.cost.training_operators import ATTENTION_BACKWARD, training_operators
from tests.sim.test_sim_roofline import DEVICES, compute
from tests.training.training_jobs import TINY, device, job_of, launch, layout_of, train, trains
from traces.training.recipe import Recipe

F, B, U = Work.FORWARD, Work.BACKWARD, Work.UPDATE
GPT2 = ModelSpec(
    "g", "gpt2", 3, 128, 4, 4, 32, 512, 1000, 256, True, "float32", attention_bias=True
)
OPT = replace(GPT2, name="o", family="opt")
QWEN = replace(TINY, name="q", family="qwen3", tie_embeddings=True)
SPECS = [TINY, GPT2, OPT, QWEN]
LARGE = replace(TINY, name="l", hidden_size=2048, head_dim=256, intermediate_size=5632)
RECIPES = [Recipe(), Recipe(lora_rank=4), Recipe(frozen_units=2)]


def flops(spec: ModelSpec, found: Trained) -> int:
    return sum(op.repeats * op.flops for op in training_operators(spec, found))


def step_flops(spec: ModelSpec, recipe: Recipe, sequences: int, tokens: int) -> tuple[int, int]:
    """Flops of a forward and a backward through all units: products, attention."""
    job = job_of(spec, sequences, tokens, recipe)
    first = layout_of(spec, job).first
    kinds: Counter[str] = Counter()
    for u in range(job.num_units):
        for work in (FORWARD, BACKWARD) if u >= first else (FORWARD,):
            for op in training_operators(spec, unit_of(spec, job, u, work)):
                kinds["attention" if op.kind == "prefill" else "product"] += op.repeats * op.flops
    return kinds["product"], kinds["attention"]


@pytest.mark.broad(2)
@pytest.mark.parametrize("recipe", RECIPES, ids=["full", "lora", "frozen"])
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.family)
def test_flops_equal_torchs_count(spec: ModelSpec, recipe: Recipe) -> None:
    """torch.utils.flop_counter over Hugging Face's model (and peft's adapters), without dropout.

    It counts attention over the whole square, where causal pairs are just over half of it, and
    of a backward 5 products for 2. Frozen layers below all that trains have no backward, and the
    lowest adapters' no gradient of their layer's input.
    """
    sequences, tokens = 2, 24
    products, attention = step_flops(spec, recipe, sequences, tokens)
    counted, of_attention = torch_flops(spec, recipe, sequences, tokens)
    assert products == counted
    assert attention == round(of_attention * (tokens + 1) / (2 * tokens))


def torch_flops(spec: ModelSpec, recipe: Recipe, sequences: int, tokens: int) -> tuple[int, int]:
    import torch
    from peft import LoraConfig, inject_adapter_in_model
    from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count
    from transformers import AutoModelForCausalLM

    from runtime.serving.model import hf_config

    config = hf_config(spec)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = config.dropout = 0.0
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()
    if recipe.lora_rank is not None:
        how = {"r": recipe.lora_rank, "task_type": "CAUSAL_LM"}
        how |= {"fan_in_fan_out": spec.family == "gpt2"}  # its products lie transposed
        model = inject_adapter_in_model(LoraConfig(**how), model)
    layers = getattr(model.base_model, "decoder", model.base_model)
    if recipe.frozen_units:
        layers = layers.h if spec.family == "gpt2" else layers.layers
        of_embedding = [
            p for n, p in model.named_parameters() if "emb" in n or "wte" in n or "wpe" in n
        ]
        for parameter in (*of_embedding, *layers[0].parameters()):
            parameter.requires_grad_(False)
    ids = torch.randint(spec.vocab_size, (sequences, tokens))
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    back = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    known = {  # torch's counter lacks the CPU's kernels
        flash: lambda q, k, v, *rest, **more: sdpa_flop_count(q, k, v),
        back: lambda out, q, k, v, *rest, **more: sdpa_backward_flop_count(out, q, k, v),
    }
    with FlopCounterMode(display=False, custom_mapping=known) as counter:
        model(input_ids=ids, labels=ids).loss.backward()
    found = counter.get_flop_counts()["Global"]
    attention = sum(n for name, n in found.items() if "attention" in str(name))
    return sum(found.values()) - attention, attention


def test_a_layer_takes_six_flops_per_parameter_and_token_beside_attention() -> None:
    """Two forward and four backward for each number of its matrices, at this width all but 0.1 % of
    the layer's; attention 4 a pair and query number, and 2.5 times as much backward."""
    spec = replace(GPT2, hidden_size=4096, num_heads=16, num_kv_heads=16, head_dim=256)
    spec = replace(spec, intermediate_size=16384)
    job = job_of(spec, 4, 1024)
    found = sum(flops(spec, unit_of(spec, job, 1, work)) for work in (FORWARD, BACKWARD))
    pairs = 4 * 1024 * 1025 // 2
    attention = 4 * pairs * 4096 * (1 + ATTENTION_BACKWARD)
    assert found == pytest.approx(6 * spec.layer_parameters * 4096 + attention, rel=1e-3)
    light, again = (flops(spec, unit_of(spec, job, 1, work)) for work in (LIGHT, AGAIN))
    assert light == again == flops(spec, unit_of(spec, job, 1, FORWARD))


def test_forwards_are_those_of_serving() -> None:
    """A prompt of as many tokens runs equal products and attention, layer by layer."""
    job = job_of(TINY, 1, 100)

    def work(ops: list[Operator]) -> dict[str, int]:
        return {
            k: sum(op.repeats * op.flops for op in ops if op.kind == k)
            for k in ("linear", "prefill")
        }

    served = work(operators(TINY, [100], [0], 1))
    trained = work(training_operators(TINY, unit_of(TINY, job, 1, FORWARD)))
    assert served == {kind: TINY.num_layers * n for kind, n in trained.items()}


@pytest.mark.parametrize("name", DEVICES)
def test_more_work_never_takes_less_on_any_device(name: str) -> None:
    """Rows, length at equal rows, and backwards over forwards; adapters between frozen and full."""
    cost = Roofline(device(name), LARGE)

    def ns(unit: int, work: str, sequences: int = 4, tokens: int = 512, **recipe: int) -> int:
        job = job_of(LARGE, sequences, tokens, Recipe(**recipe))
        return cost.trained_ns(unit_of(LARGE, job, unit, work))

    last = LARGE.num_layers + 1
    for unit in (0, 1, last):
        for work in (FORWARD, BACKWARD):
            by_rows = [ns(unit, work, sequences) for sequences in (1, 2, 8, 64)]
            assert by_rows == sorted(by_rows) and 0 < by_rows[0] < by_rows[-1]
            by_length = [ns(unit, work, 4096 // n, n) for n in (64, 512, 4096)]
            assert by_length == sorted(by_length)
        assert ns(unit, BACKWARD) > ns(unit, FORWARD)
    frozen, adapted = ns(2, BACKWARD, frozen_units=4), ns(2, BACKWARD, lora_rank=8)
    assert frozen < adapted < ns(2, BACKWARD)


@pytest.mark.parametrize(
    ("recipe", "nbytes"),
    [
        (Recipe(), 4 + 8 + 16),  # gradient; number and two moments, read and written
        (Recipe(dtype="bfloat16"), 2 + 8 + 16 + 2),  # master; its short form is only written
        (Recipe(clip_norm=1.0), 12 + 8 + 16),  # the gradient is scaled in place before
        (Recipe(optimizer="sgd"), 4 + 8),
        (Recipe(optimizer="sgd", momentum=0.9), 4 + 8 + 8),
        (Recipe(optimizer="sgd", dtype="bfloat16"), 2 + 8 + 2),
    ],
)
def test_an_update_takes_its_bytes_over_the_bandwidth_of_its_tier(
    recipe: Recipe, nbytes: int
) -> None:
    assert element_bytes(recipe) == nbytes
    job = job_of(LARGE, recipe=recipe)
    layout, h200 = layout_of(LARGE, job), device("h200")
    cost, moved = Roofline(h200, LARGE), nbytes * LARGE.layer_parameters
    here, there = (update_of(LARGE, job, layout, 1, lane) for lane in ("compute", HOST_LANE))
    seconds = moved / (h200.bandwidth_bytes_per_s * h200.linear_memory[-1][1])
    assert cost.trained_ns(here) == pytest.approx(seconds * 1e9 + h200.kernel_ns, abs=1)
    seconds = moved / (h200.host_bandwidth_bytes_per_s * h200.update_share)
    assert cost.trained_ns(there) == pytest.approx(seconds * 1e9, abs=1)


def test_only_trained_numbers_are_updated() -> None:
    job = job_of(TINY, recipe=Recipe(lora_rank=4))
    layout = layout_of(TINY, job)
    chunk = next(c for c, chunk in enumerate(layout.chunks) if chunk.trains)
    q_and_v = 4 * (2 * TINY.hidden_size + TINY.query_size + TINY.kv_size)
    assert update_of(TINY, job, layout, chunk, HOST_LANE).elements == q_and_v


def test_launches_have_the_groups_of_their_work() -> None:
    job = trains(job_of(TINY), layout_of(TINY, job_of(TINY)))
    found = [
        trained_of(given.op, given.op.slices[0], TINY)[0]
        for given in (
            launch(job, F, 0),
            launch(job, F, 1),
            launch(job, F, 1, light=True),
            launch(job, F, 1, again=True),
            launch(job, B, 5),
            launch(job, U, 2, on=HOST_LANE),
        )
    ]
    groups = ["embedding forward", "layer forward", "layer light", "layer again"]
    assert [t.group for t in found] == [*groups, "head backward", "update cpu"]
    assert {(t.sequences, t.tokens) for t in found[:5]} == {(2, 64)}


def test_equal_work_is_priced_once_for_all_microbatches() -> None:
    asked = []

    class Counting(Roofline):
        def trained_ns(self, trained: Trained) -> int:
            asked.append(trained)
            return super().trained_ns(trained)

    spec = job_of(TINY, num_steps=5, microbatches=2)
    layout = layout_of(TINY, spec, [Mode.KEEP, Mode.RECOMPUTE])
    run = train(Counting(device("cpu"), TINY), spec, layout)
    launches = [span for span in run.recorder.spans if isinstance(span.op, Compute)]
    units, recomputed, chunks = 6, 2, 6
    assert len(launches) == 10 * (2 * units + recomputed) + 5 * chunks
    assert len(asked) == 2 * units + recomputed + chunks
    train(Counting(device("cpu"), TINY), replace(spec, sequences=1), layout)
    assert len(asked) == 2 * (2 * units + recomputed + chunks), "another cost, another memory"


def test_another_job_with_an_equal_id_has_its_own_price() -> None:
    cost = Roofline(device("a100"), TINY)
    short, long = (trains(job_of(TINY, tokens=n)) for n in (64, 1024))
    first = cost.compute_ns(launch(short, B, 1))
    assert cost.compute_ns(launch(long, B, 1)) > first == cost.compute_ns(launch(short, B, 1))


def test_slices_that_train_and_serve_in_one_launch_cost_their_sum() -> None:
    cost, spec = Roofline(device("a100"), TINY), job_of(TINY)
    layout = layout_of(TINY, spec)
    alone = launch(trains(spec, layout), B, 1)
    served = compute((1, 30, True), (50, 0, False))
    both = Launch(
        Compute((*served.op.slices, *alone.op.slices)), pieces=(*served.pieces, *alone.pieces)
    )
    assert cost.compute_ns(both) == cost.compute_ns(alone) + cost.compute_ns(served)
    workspace = cost.peak_bytes(served)
    assert workspace is not None
    assert cost.peak_bytes(both) == workspace + layout.units[1].backward_bytes
    host = cost.host_ns([both])
    assert host == cost.plan_ns(3, prompts=1), "a microbatch is no prompt"


def test_workspace_is_that_of_the_layout() -> None:
    spec = job_of(TINY)
    layout = layout_of(TINY, spec)
    job, unit, cost = trains(spec, layout), layout.units[1], Roofline(device("cpu"), TINY)
    light, keeps = launch(job, F, 1, light=True), launch(job, F, 1)
    again, back = launch(job, F, 1, again=True), launch(job, B, 1)
    assert cost.peak_bytes(light) == unit.light_bytes
    assert cost.peak_bytes(keeps) == unit.forward_bytes
    # The output of a recompute is not booked, so it counts as workspace.
    assert cost.peak_bytes(again) == unit.forward_bytes + layout.units[2].input_bytes
    assert cost.peak_bytes(back) == unit.backward_bytes
    assert cost.peak_bytes(launch(job, U, 1)) == 0
    assert cost.peak_bytes(launch(trains(spec), B, 1)) is None, "a job without a layout"


def test_a_policys_quote_equals_the_cost_of_a_unit() -> None:
    cost, job = Roofline(device("a100"), TINY), trains(job_of(TINY))
    given = launch(job, B, 2)
    assert PolicyCost(cost, {}.__getitem__).op_ns(given.op) == cost.compute_ns(given)


def test_work_without_a_price_is_refused() -> None:
    cost, spec = Roofline(device("k80"), TINY), job_of(TINY)
    job = trains(spec)
    with pytest.raises(ValueError, match="k80 says nothing of its host's memory; set host_bandw"):
        cost.compute_ns(launch(job, U, 1, on=HOST_LANE))
    with pytest.raises(ValueError, match="no cost is known for a layer backward on the host's"):
        cost.compute_ns(launch(job, B, 1, on=HOST_LANE))
    piece = Slice(job, 5, F, range(1, 2))
    with pytest.raises(ValueError, match="5 of a microbatch's 128 tokens have no price yet"):
        cost.compute_ns(Launch(Compute((piece,)), pieces=(Piece(0, 5, 0, False, ()),)))
    with pytest.raises(ValueError, match="has 6 units, but g has 5: embedding, 3 layers and head"):
        Roofline(device("cpu"), GPT2).compute_ns(launch(job, F, 1))
    with pytest.raises(ValueError, match="single layers"):
        cost.compute_ns(Launch(Compute((Slice(Job(1, 0), 8, layers=range(2)),))))


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("mode", [Mode.KEEP, Mode.RECOMPUTE])
def test_a_job_trains_through_the_engine_at_its_price(mode: Mode, depth: int) -> None:
    """Two steps of two microbatches: the lane of the device is busy for the sum of the launches."""
    cost, spec = Roofline(device("a100"), TINY), job_of(TINY, num_steps=2, microbatches=2)
    layout = layout_of(TINY, spec, [mode])
    run = train(cost, spec, layout, depth=depth)
    busy = sum(s.end_ns - s.start_ns for s in run.recorder.spans if s.op.lane == (0, "compute"))
    works = {FORWARD: FORWARD, BACKWARD: BACKWARD}
    units = [unit_of(TINY, spec, u, w) for u in range(6) for w in works.values()]
    if mode is Mode.RECOMPUTE:
        units += [unit_of(TINY, spec, u, AGAIN) for u in range(5)]
    assert busy == 4 * sum(cost.trained_ns(t) for t in units)
    rows = run.rows("steps")
    peaks = {row["peak_bytes"] for row in rows if row["work"] == "backward" and row["part"] == 1}
    assert peaks == {layout.units[1].backward_bytes}
