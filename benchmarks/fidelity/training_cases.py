"""Cases of the claims on training fidelity: recipes, and jobs in tight budgets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from runtime.measure.shapes import Microbatch, TrainingLimits, training_grid
from tandem.cli.plan_command import plan_run
from tandem.config.compose import composed
from tandem.wiring.profile import BEYOND

COMMON = ("trace=none", "training=random", "model=tiny_llama")
ROOMY = ("device.memory_bytes=8589934592", "device.host_bytes=8589934592")
CALIBRATED = Microbatch(4, 96)  # and up to twice as many rows
ADAMW = "adamw"
RECIPES = {  # by name: overrides of float32, all parameters, AdamW
    ADAMW: (),
    "lora": ("training/recipe=lora",),
    "sgd": ("training/recipe=sgd", "training.recipe.dropout=0.1", "training.recipe.clip_norm=1"),
    "bfloat16": ("training.recipe.dtype=bfloat16",),
}


@dataclass(frozen=True)
class TrainingCase:
    """A training job, in a share of the memory that it takes with all states on the device."""

    policy: str
    modes: str
    layers: int
    shape: Microbatch
    share: float
    microbatches: int = 1
    recipe: str = ADAMW

    @property
    def name(self) -> str:
        """Name in the table."""
        words = (self.policy, self.modes) + (() if self.recipe == ADAMW else (self.recipe,))
        return " ".join(words)

    @property
    def job(self) -> tuple[str, ...]:
        """Overrides of the job without policy and budget."""
        sequences, tokens = self.shape
        return (
            *common(self.recipe),
            f"planner.modes={self.modes}",
            f"model.num_layers={self.layers}",
            f"training.sequences={sequences}",
            f"training.sequence_tokens={tokens}",
            f"training.microbatches={self.microbatches}",
        )

    def settings(self, num_steps: int) -> tuple[str, ...]:
        """Overrides of the run; its budget is a share of the peak of a simulation without one."""
        found = plan_run(composed([*self.job, "policy=train_on_device", *ROOMY, "backend=sim"]))
        budget = int(self.share * found.peak_bytes("gpu:0")["used"])
        words = (*self.job, f"policy={self.policy}", f"budget.device_bytes={budget}")
        chunks = ("planner.chunk_elements=600000",) if self.policy == "patrickstar" else ()
        return (*words, *chunks, f"training.num_steps={num_steps}")


def common(recipe: str) -> tuple[str, ...]:
    """Overrides of every run of a recipe: calibrations, probes, cases."""
    return (*COMMON, *RECIPES[recipe])


def check_unseen(cases: Sequence[TrainingCase]) -> None:
    """Asserts that no judged microbatch is one of the calibration's."""
    known = training_grid(TrainingLimits(4096, BEYOND * CALIBRATED.rows))
    assert not {case.shape for case in cases} & {*known}
    assert max(case.shape.rows for case in cases) <= BEYOND * CALIBRATED.rows
