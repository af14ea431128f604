"""Samples of a finetuning job: drawn lengths, documents of a text, and moments of their own."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from traces.serving.request import Sample
from traces.training.recipe import Recipe
from traces.training.samples import Finetuning, RandomSamples, TextSamples
from traces.training.text_store import write_documents

DOCUMENTS = ([7, 8, 9], [1], [300, 2, 3, 4, 5, 6], [11, 12])


@pytest.fixture
def path(tmp_path: Path) -> str:
    write_documents(tmp_path / "text.parquet", DOCUMENTS, {"source": "a test"})
    return str(tmp_path / "text.parquet")


def finetuning(tmp_path: Path, **given: Any) -> Any:
    given.setdefault("data", RandomSamples(count=400, mean_tokens=50.0))
    asked = Finetuning(sequence_tokens=256, recipe=Recipe(lora_rank=4, seed=3), **given)
    return asked.job(0, 6, "tiny", tmp_path)


def test_lengths_have_the_mean_that_is_asked_for(tmp_path: Path) -> None:
    source = RandomSamples(count=4000, mean_tokens=100.0, spread=0.6, prompt_share=0.25)
    found = source.samples(10_000, 0, tmp_path)
    lengths = np.array([sample.tokens for sample in found])
    # The standard error of the mean is 66 / sqrt(4000) = 1.04 tokens; four of them.
    assert abs(lengths.mean() - 100) < 4.2
    assert abs(np.log(lengths).std() - 0.6) < 0.6 * 4 / math.sqrt(2 * 4000)
    assert all([s.prompt_tokens == min(s.tokens - 1, int(s.tokens / 4)) for s in found])
    assert source.samples(10_000, 0, tmp_path) == found != source.samples(10_000, 1, tmp_path)
    cut = source.samples(60, 0, tmp_path)
    assert max([sample.tokens for sample in cut]) == 60 and min(cut).tokens >= 2


def test_samples_come_as_often_as_is_asked_for(tmp_path: Path) -> None:
    """Gaps are exponential: their mean and standard deviation are one over the rate."""
    job = finetuning(tmp_path, rate=20.0)
    at_s = np.array([sample.release_ns for sample in job.samples]) / 1e9
    gaps_s = np.diff(at_s, prepend=0.0)
    assert (gaps_s > 0).all()
    # Of 400 gaps the mean has a standard error of 5 %, the deviation one of 7 %; four of each.
    assert abs(gaps_s.mean() * 20 - 1) < 0.2 and abs(gaps_s.std() * 20 - 1) < 0.28
    assert {sample.release_ns for sample in finetuning(tmp_path).samples} == {0}


def test_documents_are_samples_in_an_order_of_the_seed(path: str, tmp_path: Path) -> None:
    source = TextSamples(path=path)
    found = source.samples(4, 0, tmp_path)
    assert sorted(found) == [Sample(2), Sample(3), Sample(4)], "one is cut, one is too short"
    assert len({source.samples(4, seed, tmp_path) for seed in range(8)}) > 1
    assert source.samples(4, 0, tmp_path)[:2] == TextSamples(path=path, limit=2).samples(
        4, 0, tmp_path
    )
    job = finetuning(tmp_path, data=source)
    batches = source.batches(job, 256, tmp_path)
    told = {tuple(batches.ids(k)[0].tolist()) for k in range(len(job.samples))}
    assert told == {(7, 8, 9), (44, 2, 3, 4, 5, 6), (11, 12)}, "ids are modulo the vocabulary"
    assert batches.ids(0).tolist() == batches.ids(len(job.samples)).tolist()
    account = batches.account()
    assert account["tokens_read"] == account["tokens_used"] + account["tokens_dropped"] == 12
    assert account["tokens_beyond_vocabulary"] == 1


def test_a_text_without_a_sample_is_told(tmp_path: Path) -> None:
    write_documents(tmp_path / "short.parquet", ([1], [2]), {"source": "a test"})
    with pytest.raises(ValueError, match="no document has 2 tokens or more"):
        TextSamples(path=str(tmp_path / "short.parquet")).samples(8, 0, tmp_path)
    with pytest.raises(ValueError, match=r"training\.data\.path=/nowhere: no such file"):
        TextSamples(path="/nowhere").samples(8, 0, tmp_path)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"count": 0}, "count=0"),
        ({"mean_tokens": 1.0}, "mean_tokens=1.0"),
        ({"mean_tokens": math.inf}, "mean_tokens=inf"),
        ({"spread": -0.1}, "spread=-0.1"),
        ({"prompt_share": 1.0}, "prompt_share=1.0"),
    ],
)
def test_wrong_lengths_are_told(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        RandomSamples(**given)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"rate": 0.0}, "training.rate=0.0: it must be above 0"),
        ({"rate": math.inf}, "training.rate=inf"),
        ({"num_steps": 0}, "training.num_steps=0: it must be at least 1"),
        ({"tenants": ("a", "a")}, r"training.tenants=\[a, a\]: a job for each"),
        ({"tenants": ("a",), "tenant": "b"}, "leave training.tenant out"),
        ({"publish_every": 0}, "publish_every=0"),
    ],
)
def test_wrong_jobs_are_told(given: dict[str, Any], told: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=told):
        finetuning(tmp_path, **given)
