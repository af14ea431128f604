"""A text trace is imported once, and again when anything that the import reads has changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tandem.config.compose import composed
from tandem.wiring.experiment import run_experiment
from tandem.wiring.workload import trace_file
from traces.serving.request import Request
from traces.store import read_trace, sidecar_path, write_trace


@pytest.fixture
def trace(tmp_path: Path) -> dict[str, Any]:
    """A text and a tokenizer; their contents are not read."""
    for name in ("text.json", "tokenizer.json"):
        (tmp_path / name).write_text("1")
    return {"path": str(tmp_path / "text.json"), "tokenizer": str(tmp_path / "tokenizer.json")}


@pytest.fixture
def imports(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """What was imported so far."""
    found: list[Path] = []

    def import_trace(source: Path, out: Path, **options: object) -> None:
        found.append(out)
        write_trace(out, [Request(0, 0, 3, 4)], {})

    monkeypatch.setattr("traces.importing.import_trace", import_trace)
    return found


@pytest.mark.parametrize("changed", ["text.json", "tokenizer.json"])
def test_changed_contents_are_imported_anew(
    changed: str, trace: dict[str, Any], imports: list[Path], tmp_path: Path
) -> None:
    first = trace_file(trace, tmp_path / "cache")
    assert trace_file(trace, tmp_path / "cache") == first and len(imports) == 1
    (tmp_path / changed).write_text("22")
    assert trace_file(trace, tmp_path / "cache") != first and len(imports) == 2


def test_an_import_that_was_killed_between_its_two_files_is_done_again(
    trace: dict[str, Any], imports: list[Path], tmp_path: Path
) -> None:
    kept = trace_file(trace, tmp_path / "cache")
    sidecar_path(kept).unlink()
    assert trace_file(trace, tmp_path / "cache") == kept and len(imports) == 2
    assert len(read_trace(kept)) == 1


def test_ids_beyond_the_models_vocabulary_name_what_prompts_share(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, short_probes: None
) -> None:
    """A tokenizer of 100,000 ids before a stand-in that knows 512: simulated and carried out."""
    begin = tuple(range(99_000, 99_040))
    requests = [Request(i, 0, 50, 4, prompt_ids=(*begin, *[i] * 10)) for i in range(6)]
    write_trace(tmp_path / "t.parquet", requests, {})
    words = ["model=micro_llama", "policy=vllm_v1", "trace=file", "arrival.rate=4"]
    words += [f"trace.path={tmp_path}/t.parquet"]

    def hits(backend: str) -> float:
        found = run_experiment(composed([*words, f"backend={backend}"]), tmp_path / backend)
        return float(found["prefix_hit_rate"])

    assert hits("sim") == pytest.approx(5 * 32 / 300)  # two full pages for all but the first
    assert not caplog.messages
    assert hits("lockstep") == pytest.approx(5 * 32 / 300)
    assert "go up to 99,039, model micro_llama knows 512: they are taken modulo" in caplog.text
