"""The machine over the kernels: its tokens equal generate(), in graphs' buffers too."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest

from engine.contract.regions import Tier
from runtime.measure.tracker import StorageTracker, storage_bytes
from runtime.serving.gated import Merged
from runtime.serving.sampling import Sampling
from tests.support.hand_made import FAMILIES, HandMade, make_prompts
from tests.support.reference import compare, greedy

LENGTHS = (1, 9, 21)
OUTPUT_TOKENS = 5
SPECS = {name: replace(spec, num_layers=2) for name, spec in FAMILIES.items()}


def made_by_hand(family: str, device: str, **options: Any) -> HandMade:
    spec = SPECS[family]
    prompts = make_prompts(LENGTHS, spec.vocab_size)
    return HandMade(spec, prompts, device=device, kernels=True, **options)


def check(made: HandMade, family: str) -> None:
    spec = SPECS[family]
    prompts = make_prompts(LENGTHS, spec.vocab_size)
    expected = {i: greedy(spec, tuple(ids), OUTPUT_TOKENS) for i, ids in prompts.items()}
    outputs = {i: made.machine.outputs(i) for i in made.jobs}
    assert compare(outputs, expected) == (len(outputs), 0, [])


@pytest.mark.parametrize(("family", "graph_rows"), [*((name, 0) for name in SPECS), ("qwen3", 3)])
def test_tokens_equal_generate(family: str, graph_rows: int, device: str) -> None:
    """Prompts in slices beside decodes, then decodes alone; NaN wherever no job may read."""
    made = made_by_hand(family, device, graph_rows=graph_rows)
    made.finish(dict.fromkeys(made.jobs, 2), slice_tokens=12)
    made.restart(list(made.jobs)[1])
    made.finish(dict.fromkeys(made.jobs, OUTPUT_TOKENS))
    check(made, family)


def test_graphs_go_on_behind_a_swap_and_with_fewer_rows(device: str) -> None:
    made = made_by_hand("llama", device, graph_rows=2)
    first, *rest = made.jobs
    made.finish(dict.fromkeys(made.jobs, 2))
    for job_id in rest:
        made.swap(job_id, Tier.GPU, Tier.HOST)
    made.finish({first: OUTPUT_TOKENS, **dict.fromkeys(rest, 2)})
    for job_id in rest:
        made.swap(job_id, Tier.HOST, Tier.GPU)
    made.finish(dict.fromkeys(made.jobs, OUTPUT_TOKENS))
    check(made, "llama")


def test_tokens_in_flight_reach_the_next_replay(device: str) -> None:
    """Two steps are prepared before the first is carried out."""
    made = made_by_hand("llama", device, graph_rows=4)
    made.finish(dict.fromkeys(made.jobs, 1))
    box = made.machine
    steps = [made.launch(*((i, 1) for i in made.jobs)) for _ in range(OUTPUT_TOKENS - 1)]
    for pair in (steps[:2], steps[2:]):
        prepared = [box.prepare(step) for step in pair]
        for step in prepared:
            box.execute(step)
    check(made, "llama")


def test_seeded_draws_are_those_of_torchs_path(device: str) -> None:
    sampling = Sampling(temperature=1.0, top_k=20, top_p=0.9, seed=4)
    found = []
    for options in ({"kernels": False}, {"kernels": True}, {"kernels": True, "graph_rows": 4}):
        prompts = make_prompts(LENGTHS, SPECS["llama"].vocab_size)
        made = HandMade(SPECS["llama"], prompts, sampling, rubbish=0.0, device=device, **options)
        made.finish(dict.fromkeys(made.jobs, OUTPUT_TOKENS))
        found.append({i: made.machine.outputs(i) for i in made.jobs})
    assert found[0] == found[1] == found[2]


def test_q_k_v_and_gate_up_are_one_product_each(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over the modules' own weights: no byte is kept twice."""
    made = made_by_hand("qwen3", device)
    model, products = made.machine.decoder.model, list[int]()
    call = Merged.__call__
    monkeypatch.setattr(
        Merged, "__call__", lambda m, rows: products.append(m.weight.data_ptr()) or call(m, rows)
    )
    made.run(*((i, 1) for i in list(made.jobs)[:1]))
    parameters = dict(model.named_parameters())
    firsts = [
        parameters[f"model.layers.{n}.{name}.weight"].data_ptr()
        for n in range(SPECS["qwen3"].num_layers)
        for name in ("self_attn.q_proj", "mlp.gate_proj")
    ]
    assert products == firsts
    assert storage_bytes(model.parameters()) == SPECS["qwen3"].weight_bytes


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_launch_takes_no_more_than_the_formula_that_room_is_left_by(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels do not run: only memory is measured."""
    from runtime.kernels import norm, paged_attention, rotate

    kernels = {paged_attention: ("_split", "_join", "_tile"), norm: ("_rows", "_block")}
    for module, names in (*kernels.items(), (rotate, ("_row",))):
        for name in names:
            monkeypatch.setattr(module, name, defaultdict(lambda: lambda *_, **__: None))
    sizes = {"hidden_size": 128, "head_dim": 32, "intermediate_size": 448, "num_layers": 1}
    spec = replace(SPECS[family], **sizes)
    made = HandMade(spec, {0: [1] * 600}, num_pages=80, kernels=True)
    prepared = made.machine.prepare(made.launch((0, 512)))
    with StorageTracker() as tracker:
        made.machine.start(prepared)
    told = spec.workspace_bytes([512], page_tokens=made.page_tokens)
    assert told * 0.8 < tracker.peak_bytes <= told * 1.02
