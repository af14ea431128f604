"""Checkpoints: a job that was killed goes on to the same losses and weights, bit for bit."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from analysis.run import load
from runtime.training.checkpoint import CheckpointWriter
from tandem.cli.errors import RunFailed
from tandem.config.compose import composed
from tandem.wiring.experiment import run_experiment
from tests.support.pressure import BF16, CLIP, DROPOUT, LORA, SGD, TIED, Words, pressing
from tests.training.trainings import SMALL, differing, plain
from traces.training.checkpoints import newest_checkpoint, read_checkpoint, step_folder

pytestmark = pytest.mark.usefixtures("short_probes")

STEPS = 5
JOB = (
    *SMALL,
    f"training.num_steps={STEPS}",
    "training.sequence_tokens=8",
    "training.sequences=1",
    "budget.host_bytes=200000000",
)
SAVES = ("training.checkpoint_every=1", "training.checkpoints_kept=9", "training.save_model=true")
POLICIES: dict[str, Words] = {
    "train_on_device": (),
    "zero_offload": ("planner.updates=eager",),
    "zero3_offload": (),
    "fsdp2_offload": (),
    "train_opt": (),
    "train_lru": (),
    "train_fifo": (),
    "patrickstar": ("planner.chunk_elements=15000", "planner.oversize=alone"),
    "protrain": ("planner.persistent=1", "planner.buffers=1", "planner.checkpoints=1"),
}
RECIPES: dict[str, Words] = {
    "full": (DROPOUT,),
    "bf16": (BF16, CLIP, "training.microbatches=2"),
    "lora": (LORA, DROPOUT),
    "sgd": (SGD, TIED),
}


def run(folder: Path, *words: str) -> Path:
    run_experiment(composed([*JOB, "backend=cpu", *words]), folder)
    return folder


def losses(folder: Path) -> list[float]:
    return [float(loss) for loss in load(folder).training["loss"]]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    (file,) = (folder / "model").glob("*.safetensors")
    return load_file(file)


def assert_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    assert all([torch.equal(one[name], other[name]) for name in one])


@pytest.mark.ci
@pytest.mark.broad(4)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_resumed_job_ends_as_if_it_had_never_stopped(
    policy: str, recipe: str, tmp_path: Path
) -> None:
    """Behind every step. What a checkpoint holds is what a run that is killed then leaves."""
    words = (f"policy={policy}", *POLICIES[policy], *RECIPES[recipe], *SAVES)
    whole = run(tmp_path / "whole", *words)
    expected = losses(whole)
    assert len(expected) == STEPS
    for step in range(1, STEPS):
        saved = step_folder(whole / "checkpoints", step)
        resumed = run(tmp_path / f"from_{step}", *words, f"training.resume={saved}")
        assert losses(resumed) == expected[step:]
        assert_equal(weights(resumed), weights(whole))


@pytest.mark.ci
def test_a_checkpoint_goes_on_under_another_policy_and_on_threads(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", "policy=patrickstar", DROPOUT, *SAVES,
                *POLICIES["patrickstar"])  # fmt: skip
    saved = step_folder(whole / "checkpoints", 2)
    words = ("policy=protrain", DROPOUT, *SAVES, f"training.resume={saved}", "backend.clock=wall")
    resumed = run(tmp_path / "resumed", *words)
    assert losses(resumed) == losses(whole)[2:]
    assert_equal(weights(resumed), weights(whole))


OVERLAPPED: dict[str, Words] = {
    "zero3_offload": ("memory.overlaps_updates=true",),
    "protrain": ("planner.persistent=0", "planner.buffers=1", "planner.checkpoints=0", CLIP),
    "patrickstar": POLICIES["patrickstar"],
}


@pytest.mark.ci
@pytest.mark.parametrize("policy", OVERLAPPED)
def test_what_a_checkpoint_copies_stays_while_other_lanes_go_on(
    policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On threads, with the next step under way while the copies are made: they take long here."""
    from runtime.training.model_states import ModelStates

    words = pressing(*JOB, f"policy={policy}", *OVERLAPPED[policy])[len(JOB) :]
    expected = run(tmp_path / "expected", *words, *SAVES)
    copies = ModelStates._copies

    def slowly(self: ModelStates, *given: Any) -> Any:
        time.sleep(0.01)
        return copies(self, *given)

    monkeypatch.setattr(ModelStates, "_copies", slowly)
    whole = run(tmp_path / "whole", *words, *SAVES, "backend.clock=wall")
    assert losses(whole) == losses(expected)
    for step in range(1, STEPS + 1):
        found, right = (
            load_file(step_folder(folder / "checkpoints", step) / "weights.safetensors")
            for folder in (whole, expected)
        )
        assert_equal(found, right)


@pytest.mark.ci
def test_a_run_that_a_signal_ended_is_resumed(tmp_path: Path) -> None:
    words = (*JOB, "policy=zero3_offload", DROPOUT, "training.num_steps=100", "backend=cpu")
    folder = tmp_path / "killed"
    command = [sys.executable, "-m", "tandem.cli", "run", *words, "training.checkpoint_every=5"]
    child = subprocess.Popen([*command, f"hydra.run.dir={folder}"], stdout=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 120
        while not [*tmp_path.glob("killed*/checkpoints/step-*/checkpoint.json")]:
            assert child.poll() is None and time.monotonic() < until
            time.sleep(0.01)
    finally:
        child.kill()
        child.wait()
    resumed = run(tmp_path / "resumed", *words[len(JOB) :], f"training.resume={folder}")
    whole = run(tmp_path / "whole", *words[len(JOB) :])
    assert 0 < len(losses(resumed)) < 100
    assert losses(resumed) == losses(whole)[-len(losses(resumed)) :]


class Killed(Exception):
    """In the place of a signal."""


@pytest.mark.ci
def test_a_killed_run_is_resumed_by_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from runtime.training.trainer import Trainer

    words = ("policy=zero3_offload", DROPOUT, "training.checkpoint_every=2")
    whole = run(tmp_path / "whole", *words)
    forward = Trainer.forward

    def until_killed(self: Trainer, unit: int, microbatch: int, *rest: Any) -> None:
        if microbatch == 3 and unit == 2:
            raise Killed
        forward(self, unit, microbatch, *rest)

    monkeypatch.setattr(Trainer, "forward", until_killed)
    with pytest.raises(RunFailed, match="Killed"):
        run(tmp_path / "killed", *words)
    monkeypatch.undo()
    resumed = run(tmp_path / "resumed", *words, f"training.resume={tmp_path / 'killed'}")
    assert losses(resumed) == losses(whole)[2:]


def test_a_truncated_checkpoint_is_refused_and_the_one_before_it_is_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    words = ("policy=zero_offload", *SAVES)
    whole = run(tmp_path / "whole", *words)
    root = whole / "checkpoints"
    for step, name in ((5, "optimizer.safetensors"), (4, "weights.safetensors")):
        file = step_folder(root, step) / name
        file.write_bytes(file.read_bytes()[:-100])
    (step_folder(root, 3) / "draws.safetensors").unlink()
    with pytest.raises(ValueError, match="it was cut off"):
        read_checkpoint(step_folder(root, 5))
    with caplog.at_level(logging.WARNING):
        assert newest_checkpoint(whole).step == 2
    assert len(caplog.records) == 3
    resumed = run(tmp_path / "resumed", *words, f"training.resume={whole}")
    assert losses(resumed) == losses(whole)[2:]
    weights_file = step_folder(root, 2) / "weights.safetensors"
    content = bytearray(weights_file.read_bytes())
    content[-1] ^= 1
    weights_file.write_bytes(content)
    with pytest.raises(ValueError, match="is damaged"):
        read_checkpoint(step_folder(root, 2))
    (step_folder(root, 2) / "checkpoint.json").write_text("{}")
    with pytest.raises(ValueError, match=r"checkpoint\.json"):
        read_checkpoint(step_folder(root, 2))


def test_the_newest_checkpoints_stay(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", "policy=zero_offload", "training.checkpoint_every=2")
    names = sorted(path.name for path in (whole / "checkpoints").iterdir())
    assert names == ["step-00000002", "step-00000004"]


def test_weights_are_what_plain_torch_has_trained_and_from_pretrained_loads_them(
    tmp_path: Path,
) -> None:
    from transformers import AutoModelForCausalLM

    whole = run(tmp_path / "whole", "policy=protrain", "training.save_model=true")
    model = AutoModelForCausalLM.from_pretrained(whole / "model")
    found = dict(model.named_parameters(remove_duplicate=False))
    words = [word for word in JOB if not word.startswith("trace=")]
    expected = plain("policy=train_on_device", "trace=none", *words)
    assert not differing((losses(whole), {k: v.detach() for k, v in found.items()}), expected)


def test_adapters_are_saved_as_peft_saves_them(tmp_path: Path) -> None:
    from peft import PeftModel

    from runtime.training.trainer import build_trainee
    from tandem.wiring.run_spec import run_spec_of

    words = ("policy=zero3_offload", LORA, *SAVES)
    whole = run(tmp_path / "whole", *words)
    assert (whole / "model" / "adapter_config.json").is_file()
    (trainee,) = run_spec_of(composed([*JOB, *words])).trainees
    base = build_trainee(trainee.spec, trainee.job.recipe).unload()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft 0.21 asks transformers by an old name
        loaded = PeftModel.from_pretrained(base, whole / "model")
    own = {k: v for k, v in loaded.named_parameters() if "lora_" in k}
    saved = weights(whole)
    assert own and len(own) == len(saved)
    for name, value in saved.items():
        assert torch.equal(own[name.replace(".weight", ".default.weight")], value)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("training.sequences=2",), "sequences=1, and this one has 2"),
        (("training.recipe.learning_rate=0.5",), "recipe.learning_rate="),
        (("training.num_steps=2",), "has all 4 steps of the job"),
        (  # of equal sizes
            ("model.num_heads=2", "model.num_kv_heads=1", "model.head_dim=32"),
            r"model\.num_heads=4, and this one has 2|model\.num_kv_heads|model\.head_dim",
        ),
    ],
)
def test_another_job_is_not_resumed(words: Words, told: str, tmp_path: Path) -> None:
    own = ("policy=zero_offload", "training.checkpoint_every=2")
    whole = run(tmp_path / "whole", *own)
    with pytest.raises(ValueError, match=told):
        run(tmp_path / "other", *own, *words, f"training.resume={whole}")


def test_a_job_on_other_text_of_one_name_is_not_resumed(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        text = json.dumps({"text": f"{name} b c d e f " * 200})
        (tmp_path / name / "train.jsonl").write_text(text + "\n", encoding="utf-8")

    def on_text(name: str) -> Words:
        path = tmp_path / name / "train.jsonl"
        own = ("policy=zero_offload", "training.checkpoint_every=2", "training=text")
        return (*own, f"training.data.path={path}", f"cache={tmp_path / 'cache'}")

    whole = run(tmp_path / "whole", *on_text("a"))
    with pytest.raises(ValueError, match="ids of its first microbatch="):
        run(tmp_path / "other", *on_text("b"), f"training.resume={whole}")


def test_what_is_not_there_is_not_resumed(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no whole checkpoint there"):
        run(tmp_path / "run", "policy=zero_offload", f"training.resume={tmp_path / 'none'}")
    with pytest.raises(ValueError, match="nothing to save or to resume"):
        run(tmp_path / "other", "training.has_update=false", "training.checkpoint_every=1",
            "policy=zero_offload")  # fmt: skip


def test_a_simulation_trains_the_steps_that_are_left(tmp_path: Path) -> None:
    words = ("policy=zero3_offload", "training.checkpoint_every=2")
    whole = run(tmp_path / "whole", *words)
    resumed = tmp_path / "simulated"
    run_experiment(composed([*JOB, *words, f"training.resume={whole}"]), resumed)
    assert list(load(resumed).training["step"]) == [4]


@pytest.mark.ci
def test_the_time_of_a_checkpoint_is_none_of_an_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each checkpoint computes for half a second; an update of this model takes milliseconds."""
    writes = CheckpointWriter.write

    def slowly(self: CheckpointWriter, step: int, states: Any) -> None:
        until_ns = time.thread_time_ns() + 500_000_000
        while time.thread_time_ns() < until_ns:
            pass
        writes(self, step, states)

    monkeypatch.setattr(CheckpointWriter, "write", slowly)
    done = load(run(tmp_path / "run", "policy=zero_offload", "training.checkpoint_every=1"))
    took_ns = done.steps["end_ns"] - done.steps["start_ns"]
    assert len(done.training) == STEPS and took_ns.max() < 250_000_000
