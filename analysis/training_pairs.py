"""Two runs that train the same job side by side: their steps, and if their losses are equal."""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

from analysis.run import Run
from analysis.training import training_steps

KEYS = ["job_id", "step"]


@dataclass(frozen=True)
class Losses:
    """Of steps that both runs have: how many have two losses, how many of them are not equal to the
    bit, and the largest difference."""

    compared: int
    differ: int
    largest: float

    @property
    def told(self) -> str:
        """In words: an ending of "the losses ..."."""
        if not self.compared:
            return "are not compared (a simulation computes none)"
        if not self.differ:
            return f"of {self.compared} steps are equal to the bit"
        return f"differ in {self.differ} of {self.compared} steps, by {self.largest:.3g} at most"


def check_same_training(a: Run, b: Run) -> None:
    """ValueError unless both runs trained the same steps of the same size."""
    left, right = (run.training.set_index(KEYS)["tokens"] for run in (a, b))
    if odd := sorted(set(left.index) ^ set(right.index)):
        job_id, step = odd[0]
        where = a.name if odd[0] in left.index else b.name
        raise ValueError(
            f"{a.name} and {b.name} train different jobs: {len(odd)} steps are in one only "
            f"(step {step} of job {job_id} in {where})"
        )
    if differ := [at for at in left.index if left[at] != right[at]]:
        job_id, step = differ[0]
        raise ValueError(
            f"{a.name} and {b.name} train different jobs: step {step} of job {job_id} has "
            f"{left[differ[0]]} tokens in one, {right[differ[0]]} in the other"
        )


def paired_steps(prediction: Run, measurement: Run) -> pd.DataFrame:
    """Per job and step: tokens, and of each run step_s and loss, such as `loss_prediction`."""
    left, right = (training_steps(run) for run in (prediction, measurement))
    keys = [*KEYS, "tokens"]
    return left.merge(right, on=keys, suffixes=("_prediction", "_measurement"))


def losses(steps: pd.DataFrame) -> Losses:
    """Of the rows of `paired_steps`. None where a run computes no losses; a loss that is no number
    equals only another."""
    left, right = steps["loss_prediction"], steps["loss_measurement"]
    if left.isna().all() or right.isna().all():
        return Losses(0, 0, 0.0)
    equal = left.eq(right) | (left.isna() & right.isna())
    apart = (left - right).abs()[~equal]
    return Losses(len(steps), int((~equal).sum()), float(apart.max()) if len(apart) else 0.0)
