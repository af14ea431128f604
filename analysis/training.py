"""How training went: steps, tokens per second, losses, copies."""

from __future__ import annotations

import pandas as pd

from analysis.run import Run
from analysis.training_time import time_shares

STEP = "mean_train_step_s"
MEAN_STEP = "mean step after the first"
UNITS = {STEP: "s", "first_train_step_s": "s", "train_tokens_per_s": "tok/s"}  # what is compared
SAID = {  # what readers are told that such a figure is
    STEP: MEAN_STEP,
    "first_train_step_s": "first step, which warms up",
    "train_tokens_per_s": "tokens/s after the first",
}


def training_steps(run: Run) -> pd.DataFrame:
    """Per job and step: step_s, tokens, loss. A step lasts from the end of the one before it, the
    first from its own first issue."""
    rows = run.training.sort_values(["job_id", "step"])
    before = rows.groupby("job_id")["end_ns"].shift().fillna(rows["start_ns"])
    out = rows[["job_id", "step", "tokens", "loss"]].copy()
    out["step_s"] = (rows["end_ns"] - before) / 1e9
    return out.reset_index(drop=True)


def settled_steps(run: Run) -> pd.DataFrame:
    """The same without each job's first step, which warms up, where there are others."""
    rows = training_steps(run)
    several = rows.groupby("job_id")["step"].transform("size") > 1
    return rows[~(several & rows["step"].eq(0))]


def training_summary(run: Run) -> dict[str, float | int]:
    """Flat scalars; empty where nothing was trained. Rates are those behind the first step."""
    rows = training_steps(run)
    if rows.empty:
        return {}
    settled = settled_steps(run)
    by_job = settled.groupby("job_id")[["tokens", "step_s"]].sum()
    asked = run.provenance.get("train_steps_asked")  # runs of before do not say
    out: dict[str, float | int] = {
        **({} if asked is None else {"train_steps_asked": int(asked)}),
        "train_steps": len(rows),
        "train_tokens": int(rows["tokens"].sum()),
        "train_tokens_per_s": float((by_job["tokens"] / by_job["step_s"]).sum()),
        "mean_train_step_s": float(settled["step_s"].mean()),
        "first_train_step_s": float(rows["step_s"].iloc[0]),
    }
    out |= _settled_moves(run, len(settled))
    if rows["loss"].notna().all():
        out |= {
            "first_loss": float(rows["loss"].iloc[0]),
            "last_loss": float(rows["loss"].iloc[-1]),
        }
    return out | {f"train_{part}_share": share for part, share in time_shares(run).items()}


def _settled_moves(run: Run, num_steps: int) -> dict[str, float]:
    """Behind each job's first step, if there are others: bytes copied in a step, and the share of
    the updates that ran on the device."""
    ends = run.training.sort_values("step").groupby("job_id")["end_ns"]
    begins = ends.first().where(ends.size() > 1, -1)
    owner = run.steps["jobs"].map(lambda jobs: jobs[0] if len(jobs) else -1)
    rows = run.steps[run.steps["start_ns"] >= owner.map(begins)]
    copied = rows.loc[rows["lane"].str.contains("->"), "nbytes"].sum()
    out = {"train_step_copied_bytes": float(copied) / num_steps}
    updates = rows.loc[rows["work"].eq("update"), "lane"]
    if len(updates):
        out["device_update_share"] = float(updates.eq("compute").mean())
    return out
