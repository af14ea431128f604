"""The claims on PatrickStar's published tables: counts, verdicts and the page."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.fidelity import reproduction
from benchmarks.scale import patrickstar_tables
from benchmarks.scale.patrickstar import (
    CHUNKS,
    Best,
    PublishedPoint,
    job_of,
    spec_of,
    step_s,
    tflops,
)
from benchmarks.scale.patrickstar_figures import (
    A100,
    DEEPS,
    LARGEST,
    MODELS,
    PSTAR,
    TOKENS,
    V100,
    WORDS,
    Published,
    parameters,
    published,
)
from benchmarks.scale.patrickstar_tables import PublishedRow, written, wrong_orders
from engine.contract.layout import Mode
from policies.planners.fixed_chunks import MEBI, FixedChunks, OversizeModule
from sim.devices.group import Group


def test_throughput_is_counted_as_the_page_counts_it() -> None:
    """Its pull request 269: 20B, 30.2 s a step on one A100, is 88.7 Tflops (at 16 sequences)."""
    point = PublishedPoint(PSTAR, A100, Group(1), "20B", 16, 288)
    assert tflops(point, 30.2) == pytest.approx(88.7, rel=0.005)
    assert tflops(replace(point, group=Group(4)), 30.2) == pytest.approx(4 * 88.7, rel=0.005)


@pytest.mark.parametrize("model", MODELS)
def test_models_are_as_large_as_their_names(model: str) -> None:
    billions = float(model.removesuffix("B"))
    assert parameters(model) == pytest.approx(billions * 1e9, rel=0.12)
    # The simulated decoder's head stands for pooler and classifier, but for their biases.
    width = MODELS[model][0]
    assert abs(spec_of(model).parameters - parameters(model)) <= 3 * width


@pytest.mark.parametrize("model", MODELS)
def test_chunks_are_as_many_as_those_of_the_pages_model(model: str) -> None:
    """BERT's modules in the order of their construction, each whole into the last chunk or a new
    one."""
    width, layers, _ = MODELS[model]
    product = width * width + width
    up, down = 4 * product, 4 * width * width + width
    layer = [product] * 4 + [2 * width, up, down, 2 * width]
    tables = [rows * width for rows in (WORDS, TOKENS, 2)]
    modules = [*tables, 2 * width, *layers * layer, product, 2 * width + 2]
    _, shape = job_of(spec_of(model), 4, 1, 8)
    for mebi in (*CHUNKS, 640):
        size, modes = mebi * MEBI, [Mode.KEEP] * (layers + 2)
        if max(modules) > size:
            with pytest.raises(OversizeModule):
                FixedChunks().laid_out(shape, size, modes)
            continue
        count, room = 0, 0
        for elements in modules:
            if elements > room:
                count, room = count + 1, size
            room -= elements
        chunks = FixedChunks().laid_out(shape, size, modes, ranks=8).chunks
        assert len(chunks) == count
        held = sum(chunk.weight_bytes for chunk in chunks)
        assert held == pytest.approx(-(-count // 8) * size * 2, rel=1e-6), "of the fullest owner"


@pytest.mark.slow
def test_the_largest_model_is_bounded_by_its_fullest_owner() -> None:
    """Eight A100 and chunks of 384 Mi: 68B are 25 chunks of a device, and 70B 27, which leave too
    little workspace."""
    point = PublishedPoint(PSTAR, A100, Group(8), "68B", 4, 384)
    assert step_s(point) is not None
    assert step_s(replace(point, model="70B")) is None
    assert step_s(replace(point, chunk_mebi=288)) is None, "its widest module has 324 Mi"


def test_figures_are_those_of_the_page() -> None:
    figures = list(published())
    assert len(figures) == 95
    assert len({(f.system, f.device, f.group, f.model) for f in figures}) == len(figures)
    assert LARGEST[PSTAR, V100, 8] == "18B" and LARGEST[PSTAR, A100, 8] == "68B"
    assert LARGEST[DEEPS, V100, 8] == "4B" and LARGEST[DEEPS, A100, 8] == "30B"


def row(system: str, figure: float, ours: float, devices: int = 4) -> PublishedRow:
    point = PublishedPoint(system, V100, Group(devices), "4B", 8)
    paper = Published(system, V100, Group(devices), "4B", figure)
    found = Best(point, ours) if ours else Best(None, float("nan"))
    return PublishedRow(paper, found, is_judged=devices > 1)


def test_orders_count_where_published_gaps_are_clear() -> None:
    assert wrong_orders([row(PSTAR, 120, 130), row(DEEPS, 100, 129)]) == []
    assert len(wrong_orders([row(PSTAR, 120, 130), row(DEEPS, 100, 131)])) == 1
    assert wrong_orders([row(PSTAR, 104, 130), row(DEEPS, 100, 131)]) == [], "4 %"
    assert wrong_orders([row(PSTAR, 120, 130), row(DEEPS, 100, 131, devices=8)]) == []
    assert len(wrong_orders([row(PSTAR, 120, 0), row(DEEPS, 100, 131)])) == 1, "does not fit"
    assert wrong_orders([row(PSTAR, 120, 131), row(DEEPS, 100, 0)]) == []


def test_a_model_that_does_not_fit_is_an_error_of_100_percent() -> None:
    assert row(PSTAR, 100, 0).error == -1
    assert row(PSTAR, 100, 90).error == pytest.approx(-0.1)


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(reproduction, "RESULTS", tmp_path)
    monkeypatch.setattr(reproduction, "PAGE", tmp_path / "REPRODUCTION.md")
    yield tmp_path


def test_the_page_accords_with_the_tables(results: Path) -> None:
    rows = [row(PSTAR, 100, 90), row(DEEPS, 100, 130), row(PSTAR, 50, 45, 1), row(DEEPS, 80, 0)]
    written(rows, results / "patrickstar_tables.csv")
    reproduction.write_page()
    page = (results / "REPRODUCTION.md").read_text()
    assert "3 rows of 2, 4 and 8 devices are judged: median error 30.0%" in page
    assert "the worst is V100 x4 deepspeed 4B (-100%)" in page
    assert "| patrickstar | 4B | 100 | 90 | -10.0% | 8 |  |" in page
    assert "V100 x1 (not judged)" in page and "does not fit" in page


def test_the_claims_are_found() -> None:
    from benchmarks.claims import scripts

    assert {"patrickstar_tables", "patrickstar_scale"} <= {path.stem for path in scripts()}
    assert patrickstar_tables.BAR == 0.15


def test_a_point_trains_and_a_small_memory_does_not() -> None:
    alone = PublishedPoint(PSTAR, V100, Group(1), "1B", 4, 256)
    took = step_s(alone)
    assert took is not None and 20 < tflops(alone, took) < 125, "below the peak"
    both = step_s(replace(alone, group=Group(2)))
    assert both is not None
    assert step_s(replace(alone, model="68B")) is None
    assert step_s(replace(alone, device=A100, model="20B")) is None, "its widest module has 268 M"


def test_the_baseline_trains_a_language_model() -> None:
    """Megatron's GPT-2 under DeepSpeed: equal layers, and a head over all words."""
    ours, theirs = spec_of("4B"), spec_of("4B", DEEPS)
    assert (ours.num_layers, ours.hidden_size) == (theirs.num_layers, theirs.hidden_size)
    assert theirs.vocab_size == 50_304 and ours.vocab_size == ours.hidden_size + 2


def test_ratios_of_protrain_are_on_the_page_with_their_errors(results: Path) -> None:
    head = "model,figure,value,published,batch,rival_batch,used\n"
    small = "GPT-2 10B on RTX 3090"
    lines = ["GPT-2 10B,ratio,1.344,1.28,8,64,0", f"{small},swaps,16,0,4,0,"]
    lines.append(f"{small},longer_without,0.0245,,4,0,")
    (results / "protrain_published.csv").write_text(head + "\n".join(lines) + "\n")
    reproduction.write_page()
    page = (results / "REPRODUCTION.md").read_text()
    assert "| GPT-2 10B | 1.28 | 1.34 | +5.0% | 8 | 64 |" in page
    assert "step takes without swaps: 16 at batch 4 (2.5%)." in page
