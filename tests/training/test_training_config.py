"""conf/training: each option composes into a Training, which makes the job and its tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tandem.cli.catalog import options
from tandem.cli.errors import Usage
from tandem.config.build import Builder
from tandem.config.compose import composed
from tandem.wiring.run_spec import run_spec_of
from traces.serving.request import TrainingJob
from traces.serving.sample import SAMPLES
from traces.training.job import Text, Training
from traces.training.recipe import Recipe
from traces.training.text_store import read_documents


def training(name: str, *overrides: str) -> Training:
    config = composed([f"training={name}", *overrides]).config
    built = Builder().build(config["training"], "training")
    assert isinstance(built, Training)
    return built


def test_every_option_has_a_line_on_it() -> None:
    found = {**options("training"), **options("training/recipe")}
    trains = {"none", "random", "sample", "text", "finetune", "feedback"}
    assert set(found) == trains | {"adamw", "lora", "sgd"}
    assert all(found.values())


def test_nothing_is_trained_unless_asked_for() -> None:
    assert composed([]).config["training"] == {"_target_": None}


@pytest.mark.parametrize("name", ["random", "sample"])
def test_job_and_tokens(name: str, tmp_path: Path) -> None:
    built = training(name, "training.arrival_s=1.5", "training.microbatches=2")
    job = built.job(3, 6, "tiny")
    shape = (built.sequences, built.sequence_tokens)
    assert job == TrainingJob(
        3,
        1_500_000_000,
        6,
        sequence_tokens=built.sequence_tokens,
        sequences=built.sequences,
        num_steps=built.num_steps,
        microbatches=2,
        model="tiny",
        dataset={"random": "random", "sample": "text_sample.parquet"}[name],
    )
    batches = built.batches(job, 300, tmp_path)
    for microbatch in range(job.num_steps * job.microbatches):
        ids = batches.ids(microbatch)
        assert ids.shape == shape and ids.dtype == np.int64 and 0 <= ids.min() < ids.max() < 300


def test_the_plain_recipe_is_the_default_one() -> None:
    assert training("random").recipe == Recipe()


def test_recipes_are_chosen_and_set(tmp_path: Path) -> None:
    lora = training("sample", "training/recipe=lora", "training.recipe.lora_targets=[q_proj]")
    assert lora.recipe == Recipe(lora_rank=8, lora_targets=("q_proj",))
    sgd = training("random", "training/recipe=sgd", "training.recipe.schedule=cosine", "seed=7")
    wanted = {"learning_rate": 0.01, "weight_decay": 0.0, "momentum": 0.9, "schedule": "cosine"}
    assert sgd.recipe == Recipe(optimizer="sgd", seed=7, **wanted)  # type: ignore[arg-type]


def test_the_runs_seed_orders_the_data(tmp_path: Path) -> None:
    def first(*words: str) -> Any:
        built = training("sample", *words)
        return built.batches(built.job(0, 3), 2048, tmp_path).ids(0)

    assert np.array_equal(first(), first("seed=0"))
    assert not np.array_equal(first(), first("seed=1"))


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["training.sequences=0"], "sequences=0: it must be at least 1"),
        (["training.recipe.lr=1"], "training.recipe.lr"),
        (["training.recipe.optimizer=adam"], "recipe.optimizer=adam: use one of"),
        (["training.recipe.betas=[0.9]"], "training.recipe.betas"),
        (["training.recipe.learning_rate=fast"], "training.recipe.learning_rate=fast"),
        (["training.recipe.frozen_units=9"], "leaves nothing to train"),
        (["training.sequence_tokens=100000"], "take shorter sequences or more text"),
        (["training.data.path=/no/such.parquet"], "/no/such.parquet: no such trace"),
        (["+training.data.limit=3"], "name its tokenizer with training.data.tokenizer"),
    ],
)
def test_mistakes_are_one_line(words: list[str], what: str, tmp_path: Path) -> None:
    with pytest.raises((ValueError, Usage), match=what) as caught:
        built = training("sample", *words)
        built.batches(built.job(0, 6), 300, tmp_path)
    assert "\n" not in str(caught.value)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "mine.jsonl"
    rows = [{"body": f"ko vu ba {'du ' * n}"} for n in range(20)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_users_text_is_imported_once(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [f"training.data.path={text}", "training.data.text_field=body"]
    built, cache = training("text", *words, "training.sequence_tokens=8"), tmp_path / "cache"
    assert isinstance(built.data, Text) and built.data.name == "mine.jsonl"
    job = built.job(0, 3)
    first = built.batches(job, 3000, cache).ids(0)
    kept = built.data.file(cache)
    assert kept.is_relative_to(cache) and len(read_documents(kept)[1]) == 20
    monkeypatch.setattr("traces.importing.import_trace", lambda *_, **__: pytest.fail("again"))
    assert np.array_equal(built.batches(job, 3000, cache).ids(0), first)
    account = built.batches(job, 3000, cache).account()
    assert account["tokens_read"] == account["tokens_used"] + account["tokens_dropped"]
    assert account["tokens_dropped"] < 8 and account["tokens_beyond_vocabulary"] == 0


def test_untrained_rows_are_reported(
    text: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text.write_text(text.read_text(encoding="utf-8") + '{"bad\n{"other": 1}\n', encoding="utf-8")
    words = ["trace=none", "policy=zero3_offload", "training=text", f"cache={tmp_path / 'cache'}"]
    words += [f"training.data.path={text}", "training.data.text_field=body"]
    run_spec_of(composed([*words, "training.sequence_tokens=8"]))
    told = [record.getMessage() for record in caplog.records]
    assert f"{text.name}: not trained on, of its rows: 1 (line is not JSON)" in told
    assert f"{text.name}: not trained on, of its rows: 1 (no body field)" in told


def test_no_import_is_reported_of_an_imported_text(
    caplog: pytest.LogCaptureFixture,
) -> None:
    run_spec_of(composed(["trace=none", "policy=zero3_offload", "training=sample"]))
    assert not caplog.records


@pytest.mark.parametrize(
    ("warmup", "steps", "most"), [(0, 1, None), (3, 4, None), (4, 4, 0.75e-3), (100, 20, 0.19e-3)]
)
def test_a_warm_up_that_outlasts_the_job_is_told(
    warmup: int, steps: int, most: float | None, caplog: pytest.LogCaptureFixture
) -> None:
    words = ["trace=none", "policy=zero3_offload", "training=random"]
    words += [f"training.recipe.warmup_steps={warmup}", f"training.num_steps={steps}"]
    job = run_spec_of(composed(words)).trainees[0].job
    rates = [job.recipe.learning_rate_at(step, steps) for step in range(steps)]
    told = [record.getMessage() for record in caplog.records]
    if most is None:
        assert max(rates) == job.recipe.learning_rate and not told
    else:
        assert max(rates) == pytest.approx(most)
        (line,) = told
        assert line.startswith(f"training.recipe.warmup_steps={warmup}, ")
        assert f"never comes to 0.001, it is {most:g} at most; take a shorter" in line


def test_a_text_file_is_no_imported_text(text: Path, tmp_path: Path) -> None:
    for path in (text, SAMPLES / "text_sample.jsonl"):
        with pytest.raises(ValueError, match=r"name its tokenizer with training\.data"):
            Text(path=str(path)).file(tmp_path)
    with pytest.raises(ValueError, match="no such file"):
        Text(path=str(tmp_path / "absent.txt"), tokenizer="any").file(tmp_path)
    with pytest.raises(ValueError, match="that is a folder; name a file in it"):
        Text(path=str(tmp_path), tokenizer="any").file(tmp_path)
