"""Finetuning on the requests of a trace: prompts without a loss, answers with one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from traces.serving.request import Request, Sample, TrainingJob, prompt_of
from traces.store import write_trace
from traces.training.samples import ConversationSamples

ROWS = ((5, 3), (40, 10), (12, 100), (60, 2))  # prompt and output tokens


@pytest.fixture
def path(tmp_path: Path) -> str:
    requests = [Request(i, 0, prompt, output) for i, (prompt, output) in enumerate(ROWS)]
    write_trace(tmp_path / "trace.parquet", requests, {"source": "a test"})
    return str(tmp_path / "trace.parquet")


def test_a_request_becomes_a_sample_whose_prompt_carries_no_loss(path: str, tmp_path: Path) -> None:
    found = ConversationSamples(path=path).samples(256, 0, tmp_path)
    assert sorted(found) == sorted(Sample(p + o, p) for p, o in ROWS)
    others = [ConversationSamples(path=path).samples(256, seed, tmp_path) for seed in range(8)]
    assert len({*others}) > 1, "drawn by the seed"


def test_a_long_one_is_cut_and_one_without_an_answer_is_left_out(path: str, tmp_path: Path) -> None:
    found = ConversationSamples(path=path).samples(60, 0, tmp_path)
    assert sorted(found) == [Sample(8, 5), Sample(50, 40), Sample(60, 12)]
    assert len(ConversationSamples(path=path, limit=2).samples(60, 0, tmp_path)) == 2


def test_prompts_have_the_ids_with_which_they_are_served(path: str, tmp_path: Path) -> None:
    source = ConversationSamples(path=path)
    samples = source.samples(256, 0, tmp_path)
    job = TrainingJob(9, 0, 4, 256, samples=samples)
    batches = source.batches(job, 97, tmp_path)
    for microbatch, sample in enumerate(samples):
        ids = batches.ids(microbatch)
        assert ids.shape == (1, sample.tokens) and ids.min() >= 0 and ids.max() < 97
        number = next(i for i, row in enumerate(ROWS) if sum(row) == sample.tokens)
        request = Request(number, 0, *ROWS[number])
        assert ids[0, : sample.prompt_tokens].tolist() == list(prompt_of(request, 97, 0))
        assert np.array_equal(ids, batches.ids(microbatch + len(samples)))
    prompts = sum(p for p, _ in ROWS)
    assert batches.account() == {
        "answer_tokens": sum(o for _, o in ROWS),
        "prompt_tokens": prompts,
    }


def test_prompts_that_fill_all_memory_are_told(path: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no request has a prompt below 4 tokens; raise training"):
        ConversationSamples(path=path).samples(4, 0, tmp_path)
