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


SESSION = [  # number, session, turn, prompt and output tokens
    (0, 1, 0, 5, 3),
    (1, 2, 0, 9, 4),
    (2, 1, 1, 12, 6),
    (3, 1, 2, 18, 2),  # the user says nothing
    (4, 2, 1, 10, 7),  # its prompt lacks what was said before
    (5, None, 0, 30, 3),
]


@pytest.fixture
def sessions(tmp_path: Path) -> str:
    requests = [Request(i, 0, p, o, session=s, turn=t) for i, s, t, p, o in SESSION]
    write_trace(tmp_path / "sessions.parquet", requests, {"source": "a test"})
    return str(tmp_path / "sessions.parquet")


def test_the_turns_of_a_session_are_one_sample(sessions: str, tmp_path: Path) -> None:
    source = ConversationSamples(path=sessions, dialogues=True)
    found = source.samples(256, 0, tmp_path)
    dialogue = Sample(20, 5, read=((8, 12),))
    assert sorted(found) == sorted([dialogue, Sample(13, 9), Sample(17, 10), Sample(33, 30)])
    assert dialogue.labels(0, 20) == 3 + 6 + 2
    batches = source.batches(TrainingJob(9, 0, 4, 256, samples=found), 97, tmp_path)
    ids = batches.ids(found.index(dialogue))
    assert ids.shape == (1, 20)
    assert ids[0, :18].tolist() == list(prompt_of(Request(3, 0, 18, 2), 97, 0))
    assert batches.account() == {
        "answer_tokens": 11 + 4 + 7 + 3,
        "prompt_tokens": 5 + 4 + 9 + 10 + 30,
    }


@pytest.mark.parametrize(
    ("longest", "cut"), [(19, Sample(19, 5, read=((8, 12),))), (10, Sample(10, 5, read=((8, 10),)))]
)
def test_a_long_dialogue_is_cut(sessions: str, longest: int, cut: Sample, tmp_path: Path) -> None:
    source = ConversationSamples(path=sessions, dialogues=True)
    found = source.samples(longest, 0, tmp_path)
    assert cut in found
    batches = source.batches(TrainingJob(9, 0, 4, longest, samples=found), 97, tmp_path)
    assert [batches.ids(i).shape[1] for i in range(len(found))] == [s.tokens for s in found]


def test_prompts_that_fill_all_memory_are_told(path: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no request has a prompt below 4 tokens; raise training"):
        ConversationSamples(path=path).samples(4, 0, tmp_path)
