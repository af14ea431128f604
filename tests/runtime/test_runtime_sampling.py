"""Sampling: greedy and cut-offs are exact, draws are uniform, and nothing depends on the batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.contract.regions import Tier
from runtime.serving.sampling import Sampling, choose, draws
from tests.support.hand_made import TINY, HandMade, make_prompts

WARM = Sampling(temperature=0.9, top_k=40, top_p=0.95, seed=11)
LENGTHS = (3, 21, 34)


def outputs(made: HandMade) -> list[list[int]]:
    return [made.machine.outputs(i) for i in made.jobs]


def test_a_sampled_answer_is_the_same_in_every_batch_and_after_a_restart_or_swap() -> None:
    prompts = make_prompts(LENGTHS, TINY.vocab_size)
    together = HandMade(TINY, prompts, WARM)
    together.finish(dict.fromkeys(prompts, 14))
    alone = [HandMade(TINY, {i: prompt}, WARM) for i, prompt in prompts.items()]
    for made in alone:
        made.finish(dict.fromkeys(made.jobs, 14), slice_tokens=5)
    moved = HandMade(TINY, prompts, WARM)
    first, second, third = prompts
    moved.finish({first: 2, second: 7, third: 9}, slice_tokens=16)
    moved.restart(third)
    moved.swap(second, Tier.GPU, Tier.HOST)
    moved.finish({first: 14, second: 7, third: 12})
    moved.swap(second, Tier.HOST, Tier.GPU)
    moved.finish(dict.fromkeys(prompts, 14))
    expected = outputs(together)
    assert [outputs(made)[0] for made in alone] == expected
    assert outputs(moved) == expected


def test_other_seeds_give_other_answers() -> None:
    prompts = make_prompts(LENGTHS, TINY.vocab_size)
    answers = []
    for seed in (1, 2):
        made = HandMade(TINY, prompts, Sampling(temperature=1.0, seed=seed))
        made.finish(dict.fromkeys(prompts, 10))
        answers.append(outputs(made))
    assert answers[0] != answers[1]


def test_the_end_of_a_sequence_is_reported() -> None:
    prompts = make_prompts(LENGTHS, TINY.vocab_size)
    greedy = HandMade(TINY, prompts)
    greedy.finish(dict.fromkeys(prompts, 6))
    job_id, answer = 10, greedy.machine.outputs(10)
    end = answer[3]
    made = HandMade(TINY, {job_id: prompts[job_id]}, eos_ids=[end])
    ended = [made.run((job_id, len(prompts[job_id])))]
    ended += [made.run((job_id, 1)) for _ in range(5)]
    assert ended == [(job_id,) if token == end else () for token in answer]


def test_draws_are_uniform_and_unlike_their_neighbours() -> None:
    n = 200
    grid = draws(3, [(job, at) for job in range(n) for at in range(n)]).reshape(n, n)
    assert grid.min() >= 0 and grid.max() < 1
    # Each of 16 equal bins is binomial(40000, 1/16): 5 standard errors are 242.
    counts = np.histogram(grid, bins=16, range=(0, 1))[0]
    assert np.abs(counts - n * n / 16).max() < 5 * np.sqrt(n * n / 16 * 15 / 16)
    for axis in (0, 1):  # neighbouring jobs, neighbouring positions: |r| < 5 / sqrt(39800)
        a, b = np.delete(grid, -1, axis), np.delete(grid, 0, axis)
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.025


def test_choices_follow_the_softmax() -> None:
    logits = torch.tensor([[2.0, 0.5, -1.0, 1.0]])
    n = 20_000
    uniform = torch.from_numpy(draws(9, [(0, i) for i in range(n)]))
    counts = torch.bincount(choose(logits.expand(n, -1), Sampling(1.5), uniform), minlength=4)
    shares = (logits[0] / 1.5).softmax(-1)
    # Binomial: 5 standard errors.
    assert (counts / n - shares).abs().le(5 * (shares * (1 - shares) / n).sqrt()).all()


def test_cut_offs_keep_the_smallest_set_that_is_asked_for() -> None:
    shares = torch.tensor([[0.05, 0.5, 0.3, 0.15]])
    n = 4000
    uniform = torch.from_numpy(draws(1, [(0, i) for i in range(n)]))
    logits = shares.log().expand(n, -1)
    kept = {
        (top_k, top_p): set(choose(logits, Sampling(1.0, top_k, top_p), uniform).tolist())
        for top_k, top_p in ((1, 1.0), (2, 1.0), (0, 0.49), (0, 0.6), (0, 0.9), (0, 1.0), (9, 1.0))
    }
    assert kept == {
        (1, 1.0): {1},
        (2, 1.0): {1, 2},
        (0, 0.49): {1},
        (0, 0.6): {1, 2},
        (0, 0.9): {1, 2, 3},
        (0, 1.0): {0, 1, 2, 3},
        (9, 1.0): {0, 1, 2, 3},
    }


@pytest.mark.parametrize("wrong", [{"temperature": -1}, {"top_k": -1}, {"top_p": 0}, {"top_p": 2}])
def test_settings_that_mean_nothing_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="sampling"):
        Sampling(**wrong)  # type: ignore[arg-type]
