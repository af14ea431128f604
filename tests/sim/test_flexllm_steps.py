"""The cut of FlexLLM's log of steps into runs, and the fit, on rows made up here."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from benchmarks.coserving.flexllm_steps import FITTED, JUDGED, LOG, LoggedRun, fitted, runs_of

COLUMNS = (
    "step_us",
    "is_warmup_step",
    "num_prefilling_tokens",
    "num_decoding_tokens",
    "num_finetuning_fwd_tokens",
    "num_finetuning_bwd_tokens",
    "num_bwd_layers",
)
Row = tuple[int, bool, int, int, int, int, int]
START = (-1, False, 0, 0, 0, 0, 0)
WORK = (50, False, 0, 4, 0, 0, 0)


def window(tokens: int, warms: bool = False) -> Row:
    """A row with a window beside two decodes."""
    return (90, warms, 0, 2, tokens, 0, 0)


def back(layers: int) -> Row:
    """A row with a backward beside two decodes."""
    return (140, False, 0, 2, 0, 1024, layers)


def cut(*rows: Row) -> dict[int, LoggedRun]:
    """Runs of rows of one experiment."""
    return runs_of(pd.DataFrame(rows, columns=COLUMNS).assign(experiment="made_up"))


def test_a_run_begins_where_no_time_is_told() -> None:
    runs = cut(START, WORK, WORK, START, WORK)
    assert {number: len(run.steps) for number, run in runs.items()} == {1: 2, 2: 1}


def test_a_log_that_begins_amid_a_run_is_refused() -> None:
    with pytest.raises(ValueError, match="first row"):
        cut(WORK, START, WORK)


def test_the_first_row_of_a_run_has_no_time_even_if_it_works() -> None:
    assert [step.ns for step in cut((-1, False, 0, 4, 0, 0, 0), WORK)[1].steps] == [50_000]


def test_idle_and_warm_up_rows_are_dropped_and_no_others() -> None:
    idle, warm = (9_000_000, False, 0, 0, 0, 0, 0), (50, True, 128, 0, 0, 0, 0)
    stall = (3_000_000, False, 0, 1, 0, 0, 0)
    alone = [(70, False, 5, 0, 0, 0, 0), (70, False, 0, 0, 6, 0, 0), (70, False, 0, 0, 0, 1024, 1)]
    steps = cut(START, warm, idle, stall, *alone, idle)[1].steps
    assert [step.kind for step in steps] == ["serving", "serving", "forward", "backward"]
    assert steps[0].ns == 3_000_000_000


def test_context_is_what_went_forward_since_the_last_backward() -> None:
    rows = (START, window(100), WORK, window(28), back(4), back(4), window(60), window(4))
    windows = [step for step in cut(*rows)[1].steps if step.kind == "forward"]
    assert [step.context_tokens for step in windows] == [0, 100, 0, 60]


def test_context_does_not_pass_from_run_to_run() -> None:
    runs = cut(START, window(100), START, window(28))
    assert runs[2].steps[0].context_tokens == 0


def test_windows_of_warm_up_are_no_context() -> None:
    rows = (START, window(100, warms=True), window(28), window(4))
    assert [step.context_tokens for step in cut(*rows)[1].steps] == [0, 28]


def test_a_backward_alone_has_no_launch() -> None:
    alone = (90, False, 0, 0, 0, 1024, 16)
    steps = cut(START, alone, back(2))[1].steps
    assert [[name for name, _ in step.terms()] for step in steps] == [
        ["backward"],
        ["launch", "backward"],
    ]


def test_the_fit_finds_the_level_that_most_steps_of_a_shape_have() -> None:
    """A third of the launches cost half as much again; the median does not know of them."""
    rng = np.random.default_rng(7)
    rows = [
        (round(us * rng.normal(1, 0.002)), False, 0, decodes, 0, 0, 0)
        for decodes in (1, 4, 8)
        for us in (40_000, 40_000, 60_000) * 60
    ]
    steps = cut(START, *rows)[1].steps
    found = fitted(steps, absolute=True)["launch"]
    # noise of 0.2 % over 360 steps, and the pull of the upper level where errors count squared
    assert [found.value((n,)) for n in (1, 8)] == pytest.approx([40e6, 40e6], rel=0.005)
    squares = fitted(steps, absolute=False)["launch"]
    assert squares.value((8,)) > 41e6


@pytest.mark.slow
def test_the_published_log_has_the_runs_that_the_claim_names(shared: Path) -> None:
    runs = runs_of(pd.read_parquet(shared / LOG))
    assert list(runs) == list(range(1, 18))
    told = {runs[number].experiment for number in FITTED}
    assert {runs[number].experiment for number in JUDGED} <= told
    steps = [step for run in runs.values() for step in run.steps]
    ends = {step.context_tokens + step.window_tokens for step in steps}
    assert max(ends) == 1024, "each sample has 1,024 tokens: no context is carried too far"
