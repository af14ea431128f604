"""The workspace formula against what torch allocates, and what a budget reserves for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from analysis.run import load
from models.spec import ModelSpec
from runtime.measure.tracker import StorageTracker
from tandem.config.compose import composed
from tandem.wiring.experiment import run_experiment
from tandem.wiring.run_spec import run_spec_of
from tests.support.hand_made import FAMILIES, TINY, HandMade, make_prompts
from tests.support.published_configs import yaml_spec

PAGE_TOKENS = 16
LAUNCHES = {
    "decode": [(1, 200)] * 5 + [(1, 7), (1, 410)],
    "one decode": [(1, 300)],
    "prefill": [(300, 0)],
    "prefills": [(30, 0), (90, 0), (2, 0)],
    "slice with a past": [(100, 350)],
    "short slice with a long past": [(3, 460)],
    "slices with a past": [(64, 400), (64, 300), (40, 0)],
    "decodes and slices": [(1, 200)] * 8 + [(200, 250), (60, 0)],
    "long decodes beside a slice": [(16, 40), (1, 480), (1, 500)],
}
SPECS = {
    **FAMILIES,
    "narrow": replace(TINY, intermediate_size=32),  # rotation of q is the peak, not the MLP
    "one kv head": replace(TINY, num_kv_heads=1, intermediate_size=256),
    "large vocabulary": replace(TINY, vocab_size=20_000),
    "bfloat16": replace(TINY, dtype="bfloat16"),
    "qwen3 in bfloat16": replace(FAMILIES["qwen3"], dtype="bfloat16"),  # norms q in float32
}
# The formula leaves out a few numbers per row (variances of norms, token ids): fewer than 1 in 64
# of a row of these models, which are the smallest in use. Launches hold 5 rows of 64 numbers or
# more.
TOLERANCE = 0.02


def measured_bytes(spec: ModelSpec, shape: list[tuple[int, int]]) -> tuple[int, int]:
    """Peak bytes of a launch of (tokens, context) slices: measured, and by the formula."""
    spec = replace(spec, num_layers=2)  # one layer decides the peak
    prompts = make_prompts([n + c for n, c in shape], spec.vocab_size)
    box = HandMade(spec, prompts, num_pages=250, page_tokens=PAGE_TOKENS, rubbish=0.0)
    if earlier := [(i, c) for i, (_, c) in zip(prompts, shape, strict=True) if c]:
        box.run(*earlier)
    launch = box.launch(*[(i, n) for i, (n, _) in zip(prompts, shape, strict=True)])
    prepared = box.machine.prepare(launch)
    with StorageTracker() as tracker:
        box.machine.start(prepared)
    tokens, contexts = zip(*shape, strict=True)
    assert [(p.tokens, p.context_tokens) for p in launch.pieces] == shape
    samples = sum(piece.samples for piece in launch.pieces)
    return tracker.peak_bytes, spec.workspace_bytes(tokens, contexts, samples, PAGE_TOKENS)


@pytest.mark.broad(4)
@pytest.mark.parametrize("name", SPECS)
def test_the_formula_is_what_torch_allocates(name: str) -> None:
    for kind, shape in LAUNCHES.items():
        measured, predicted = measured_bytes(SPECS[name], shape)
        assert predicted == pytest.approx(measured, rel=TOLERANCE), kind


def test_the_formula_is_the_largest_of_its_moments() -> None:
    """Three peaks by hand: the logits, the MLP, and the keys and values gathered for a slice."""
    head = yaml_spec("gpt2").workspace_bytes([1] * 8, [10] * 8, samples=8)
    assert head == 8 * 4 * (768 + 768 + 50257)  # eight decodes
    spec = yaml_spec("tiny_llama")
    mlp = spec.workspace_bytes([512], [0], samples=0)
    assert mlp == 512 * 4 * (3 * 256 + 2 * 704 + 2 * 32)
    gather = spec.workspace_bytes([2], [4000], samples=0, page_tokens=32)
    # Input, q, k, v and the outputs of all; the slice's own output, its sums; cosines and sines.
    rows, mask = 2 * (256 + 256 + 2 * 128 + 256 + 256 + 8 + 2 * 32), 2 * 4002
    assert gather == 4 * (rows + mask + 2 * 128 * 4032)  # 4002 tokens lie in 126 pages of 32


@pytest.mark.broad(2)
@pytest.mark.parametrize("policy", ["chunked_restart", "continuous_restart", "static_restart"])
def test_a_budget_reserves_the_peak_of_any_step(policy: str, tmp_path: Path) -> None:
    pressed = [f"policy={policy}", "model=micro_llama", "limit=16", "budget.kv_pages=125"]
    point = composed([*pressed, "arrival=all_at_once", "backend=sim"])
    run_experiment(point, tmp_path / "run")
    peak = load(tmp_path / "run").steps["peak_bytes"].max()
    set_aside = run_spec_of(point).room.memory.activation
    assert peak <= set_aside
    # Whole prompts beside the longest request in full: more than happens, but of that order.
    assert set_aside < 4 * peak
