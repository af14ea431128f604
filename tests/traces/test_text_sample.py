"""The project's own text to train on: equal bytes each time, and a text that can be learnt."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from traces.importing import import_trace
from traces.serving.sample import SAMPLES
from traces.store import read_sidecar
from traces.training.text_sample import rows, sample_bytes
from traces.training.text_store import read_documents

SOURCE, SHIPPED = SAMPLES / "text_sample.jsonl", SAMPLES / "text_sample.parquet"


def test_the_generator_gives_equal_bytes() -> None:
    assert sample_bytes(rows()) == SOURCE.read_bytes()
    assert SOURCE.stat().st_size < 300_000


def test_the_shipped_documents_are_the_import_of_the_sample(tmp_path: Path) -> None:
    tokenizer = SAMPLES / "tokenizer"
    made = import_trace(SOURCE, tmp_path / SHIPPED.name, kind="text", tokenizer=tokenizer)
    ours, theirs = read_documents(tmp_path / SHIPPED.name), read_documents(SHIPPED)
    assert all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))
    # the bytes depend on pyarrow's version, the paths on the folder: all else is equal
    changing, kept = ("trace_sha256", "source", "tokenizer"), read_sidecar(SHIPPED)
    assert {k: v for k, v in made.items() if k not in changing} == {
        k: v for k, v in kept.items() if k not in changing
    }
    assert made["tokenizer"]["sha256"] == kept["tokenizer"]["sha256"]


def test_it_holds_awkward_rows() -> None:
    sidecar = read_sidecar(SHIPPED)
    assert sidecar["rows_dropped"] == {"empty text": 2, "no text field": 2}
    told = [json.loads(line) for line in SOURCE.read_text(encoding="utf-8").splitlines()]
    assert sidecar["rows_read"] == sidecar["documents"] + 4 == len(told)
    texts = [row.get("text") or "" for row in told]
    assert any(not text.isascii() for text in texts)


def test_it_can_be_learnt_from() -> None:
    """Words follow Zipf's law: their entropy is well below that of an even draw."""
    tokens, _ = read_documents(SHIPPED)
    counts = np.bincount(tokens)
    shares = counts[counts > 0] / len(tokens)
    entropy = -(shares * np.log(shares)).sum()
    assert entropy < 0.9 * np.log(len(shares)) and len(tokens) > 20_000
