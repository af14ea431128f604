"""The project's own sample: equal bytes each time, with ShareGPT's joint token lengths."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from scipy import stats

from traces.importing import import_trace
from traces.serving.joint_lengths import MAX_TOTAL_TOKENS, read_joint_lengths, summaries
from traces.serving.sample import SAMPLES, SEED, Writer, conversations, sample_bytes, train
from traces.serving.sharegpt import read_sharegpt
from traces.store import read_sidecar, read_trace
from traces.tokenizer import load_tokenizer

SAMPLE = SAMPLES / "sharegpt_sample.json"


@pytest.fixture(scope="module")
def talks() -> list[dict[str, Any]]:
    return conversations()


def test_the_generator_gives_equal_bytes(talks: list[dict[str, Any]]) -> None:
    assert sample_bytes(talks) == SAMPLE.read_bytes()
    assert SAMPLE.stat().st_size < 1_500_000


def test_another_process_gives_equal_bytes() -> None:
    code = (
        "import sys; from traces.serving.sample import conversations, sample_bytes;"
        "sys.stdout.buffer.write(sample_bytes(conversations()))"
    )
    env = {**os.environ, "PYTHONHASHSEED": "7"}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, env=env)
    assert ran.stdout == SAMPLE.read_bytes()


def test_the_tokenizer_is_trained_on_the_sample(talks: list[dict[str, Any]]) -> None:
    path = SAMPLES / "tokenizer" / "tokenizer.json"
    assert json.loads(train(talks)) == json.loads(path.read_text(encoding="utf-8"))
    assert path.stat().st_size < 200_000


def test_the_shipped_trace_is_the_import_of_the_sample(tmp_path: Path) -> None:
    shipped = SAMPLES / "sharegpt_sample.parquet"
    out = tmp_path / shipped.name
    made = import_trace(SAMPLE, out, tokenizer=SAMPLES / "tokenizer")
    assert read_trace(out) == read_trace(shipped)
    # the bytes depend on pyarrow's version, the paths on the folder: all else is equal
    changing = ("trace_sha256", "source", "tokenizer")
    kept = read_sidecar(shipped)
    assert {k: v for k, v in made.items() if k not in changing} == {
        k: v for k, v in kept.items() if k not in changing
    }
    assert made["tokenizer"]["sha256"] == kept["tokenizer"]["sha256"]


def test_every_word_is_one_token() -> None:
    rng = np.random.default_rng(SEED)
    writer = Writer(rng)
    tokenizer = load_tokenizer(SAMPLES / "tokenizer")
    assert {len(ids) for ids in tokenizer.encode(writer.vocabulary)} == {1}
    sizes = [1, 2, 3, 50, 400]
    assert [len(ids) for ids in tokenizer.encode([writer.text(n) for n in sizes])] == sizes


def test_the_sample_holds_awkward_conversations() -> None:
    held = read_sharegpt(SAMPLE)
    assert not held.dropped and len(held.conversations) == 300
    shapes = {c.roles for c in held.conversations}
    assert {(), ("human",), ("system", "human", "gpt")} <= shapes
    assert sum(roles[:1] == ("gpt",) for roles in shapes) >= 1
    texts = [text for c in held.conversations for text in c.texts]
    assert "" in texts and any(not text.isascii() for text in texts)


def test_the_length_summary_is_that_of_the_shared_tables(shared: Path) -> None:
    committed = read_joint_lengths(SAMPLES / "sharegpt_lengths.json")
    assert summaries(shared / "data") == committed


def real_lengths(shared: Path) -> np.ndarray:
    """The first pairs of ShareGPT that the summary is made of, [n, 2] tokens."""
    table = pq.read_table(shared / "data/lengths/sharegpt_v3_firstturn_llama2.parquet")
    real = np.stack([table.column(c).to_numpy() for c in table.column_names], axis=1) - 1
    return real[(real > 0).all(axis=1) & (real.sum(axis=1) <= MAX_TOTAL_TOKENS)]


def rank_correlation(pairs: np.ndarray) -> float:
    return float(stats.spearmanr(pairs[:, 0], pairs[:, 1]).statistic)


def test_the_summary_draws_sharegpts_joint_lengths(shared: Path) -> None:
    """Marginals, outputs given the prompt, and rank correlation of 20,000 drawn pairs.

    Two distributions that agree at 33 quantiles differ by 1/32 at most; on top comes the 1 %
    quantile of the two-sample Kolmogorov-Smirnov distance. ShareGPT's rank correlation is 0.15:
    3 standard errors are .021, so pairs drawn independently would fail by far.
    """
    real, n = real_lengths(shared), 20_000
    summary = read_joint_lengths(SAMPLES / "sharegpt_lengths.json")["first_turn"]
    drawn = summary.draw(n, np.random.default_rng(0))
    for column in (0, 1):
        assert_close(drawn[:, column], real[:, column])
    edges = np.quantile(real[:, 0], np.linspace(0, 1, 5))
    for low, high in pairwise(edges):
        parts = [x[(x[:, 0] > low) & (x[:, 0] <= high)][:, 1] for x in (drawn, real)]
        assert_close(*parts)
    independent = np.stack([drawn[:, 0], np.random.default_rng(1).permutation(drawn[:, 1])], axis=1)
    bound = 3 / np.sqrt(n - 1)
    assert abs(rank_correlation(drawn) - rank_correlation(real)) < bound
    assert abs(rank_correlation(independent) - rank_correlation(real)) > bound


def assert_close(ours: np.ndarray, real: np.ndarray) -> None:
    critical = 1.63 * np.sqrt(1 / len(ours) + 1 / len(real))
    assert stats.ks_2samp(ours, real).statistic < 1 / 32 + critical


def test_the_samples_first_turns_follow_sharegpt(shared: Path, talks: list[dict[str, Any]]) -> None:
    """Two-sample Kolmogorov-Smirnov at the 1 % level on both marginals of the shipped text.

    With 281 pairs the rank correlation has a standard error of .06: 3 of them are a weak test of
    dependence, which the summary's own test above makes strong.
    """
    ours, real = first_turns(talks), real_lengths(shared)
    assert len(ours) >= 280
    for column in (0, 1):
        assert stats.ks_2samp(ours[:, column], real[:, column]).pvalue > 0.01
    assert abs(rank_correlation(ours) - rank_correlation(real)) < 3 / np.sqrt(len(ours) - 1)


def first_turns(talks: list[dict[str, Any]]) -> np.ndarray:
    """Token lengths [n, 2] of first human-gpt pairs, the few foreign and empty ones left out."""
    tokenizer = load_tokenizer(SAMPLES / "tokenizer")
    pairs = [
        [len(ids) for ids in tokenizer.encode([m["value"] for m in c["conversations"][:2]])]
        for c in talks
        if [m["from"] for m in c["conversations"][:2]] == ["human", "gpt"]
        and all(m["value"] and m["value"].isascii() for m in c["conversations"][:2])
    ]
    return np.array(pairs)
