"""Units measured alone: bytes against the tape's, memory within a budget, hooks by a count."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from models.training.shape import training_shape
from runtime.measure.unit_profile import (
    UnitProfile,
    UnitProfiler,
    missed_share,
    needed_bytes,
)
from tandem.cli.__main__ import main as tandem
from tests.support.hand_made import FAMILIES
from traces.serving.request import TrainingJob
from traces.training.recipe import Recipe

pytestmark = pytest.mark.usefixtures("one_thread")

RECIPES = {
    "full": Recipe(),
    "bf16 dropout": Recipe(dtype="bfloat16", dropout=0.1),
    "frozen": Recipe(frozen_units=2),
    "lora": Recipe(lora_rank=4, lora_dropout=0.2),
}
BYTES = ("saved_bytes", "forward_bytes", "light_bytes", "backward_bytes")
SMALL = ("model=micro_llama", "training=random", "training.sequence_tokens=64", "backend=cpu")


def profiled(family: str, recipe: Recipe) -> tuple[TrainingJob, list[UnitProfile]]:
    spec = FAMILIES[family]
    job = TrainingJob(0, 0, spec.num_layers + 2, 24, 2, microbatches=2, recipe=recipe)
    profiler = UnitProfiler(spec, job)
    return job, [profiler.measure(unit, 1) for unit in range(profiler.num_units)]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_bytes_are_those_of_the_tape(family: str, recipe: str) -> None:
    """The tape counts without torch; the profiler runs modules of Hugging Face and peft."""
    job, profiles = profiled(family, RECIPES[recipe])
    shape = training_shape(FAMILIES[family], job)
    for measured, counted in zip(profiles, shape.units, strict=True):
        for name in BYTES:
            assert getattr(measured, name) == getattr(counted, name), (measured.unit, name)
        assert measured.peak_bytes <= needed_bytes(shape, measured.unit)
        trains = [shape.parameters[p].trains for p in counted.parameters]
        assert (measured.update_ns > 0) == any(trains)
        assert measured.forward_ns > 0 and measured.light_ns > 0


def test_hooks_miss_what_no_module_makes() -> None:
    """Llama's layer in float32, per token: two sums of squares' roots are made in norms, and so on.

    Made between modules and kept: queries and keys that are turned, the result of attention with
    its sum per head, the product of gate and up, and the sum behind attention. What is made in
    modules: norms (normed twice and a root), values, the gate's product, its SiLU, and up.
    """
    job, profiles = profiled("llama", Recipe())
    hidden, heads, kv, inner = 64, 4, 32, 128
    rows = job.microbatch_tokens
    between = hidden + kv + (hidden + heads) + inner + hidden
    assert {one.between_bytes for one in profiles[1:-1]} == {rows * 4 * between}
    shape = training_shape(FAMILIES["llama"], job)
    assert 0 < missed_share(profiles, shape) < 1


def test_a_model_of_four_times_the_device_is_measured_inside_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    deep = ("model.num_layers=24", "training.sequences=1")
    words = ["calibrate", "--units", *SMALL, *deep, f"--out={tmp_path}"]
    assert tandem([*words, "budget.device_bytes=100"]) != 0
    told = capsys.readouterr().err
    least = int(told.partition("budget.device_bytes=")[2].partition(",")[0])
    assert tandem([*words, f"budget.device_bytes={least}"]) == 0
    assert "bytes are those that plans count with" in capsys.readouterr().out
    with (tmp_path / "units.csv").open(newline="") as file:
        rows = [*csv.DictReader(file)]
    states = 4 * sum([int(row["weight_bytes"]) for row in rows])  # weight, gradient, two moments
    assert len(rows) == 26 and states > 4 * least
    assert all([int(row["peak_bytes"]) <= least for row in rows])


def test_what_cannot_be_measured_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, complaint in (
        (["model=micro_llama", "backend=cpu"], "nothing to train"),
        ([*SMALL[:-1], "backend=sim"], "backend=sim measures no units"),
        ([*SMALL, "--stream"], "--units makes no replays"),
    ):
        assert tandem(["calibrate", "--units", *words, f"--out={tmp_path / 'new'}"]) != 0
        assert complaint in capsys.readouterr().err
    served = ["trace=sample", "trace.path=nowhere", "arrival.rate=3", "policy=time_shared"]
    own = ["training.sequence_tokens=8", f"--out={tmp_path / 'served'}"]
    assert tandem(["calibrate", "--units", *SMALL, *served, *own]) == 0, "trace and policy are left"
    (tmp_path / "units.csv").touch()
    assert tandem(["calibrate", "--units", *SMALL, f"--out={tmp_path}"]) != 0
    assert "is there already" in capsys.readouterr().err
