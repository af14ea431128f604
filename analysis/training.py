"""Training in one run, or in two side by side: steps, losses, copies and shares of time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from analysis.metric_names import TIMES, WAITING
from analysis.run import Run, RunFacts
from analysis.usage import window_ns

DEVICE_LANES = ("compute", "compute_2")  # on which a device computes
STEP = "mean_train_step_s"
MEAN_STEP = "mean step after the first"
UNITS = {  # compared metrics
    STEP: "s",
    "first_train_step_s": "s",
    "train_tokens_per_s": "tok/s",
    "finetune_tokens_per_s": "tok/s",
    "finetune_trained_tokens_per_s": "tok/s",
    "max_itl_s": "s",
}
LABELS = {  # of these metrics, in tables
    STEP: MEAN_STEP,
    "first_train_step_s": "first step, which warms up",
    "train_tokens_per_s": "tokens/s after the first",
    "finetune_tokens_per_s": "finetuned, forward",
    "finetune_trained_tokens_per_s": "finetuned, samples that are through",
    "max_itl_s": "largest gap between tokens",
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
    """`training_steps` without the first step of each job, which warms up, unless it is the only
    one."""
    rows = training_steps(run)
    several = rows.groupby("job_id")["step"].transform("size") > 1
    return rows[~(several & rows["step"].eq(0))]


def training_summary(run: Run) -> dict[str, float | int]:
    """Flat scalars; empty without training. Rates leave out each job's first step."""
    rows = training_steps(run)
    if rows.empty:
        return {}
    settled = settled_steps(run)
    by_job = settled.groupby("job_id")[["tokens", "step_s"]].sum()
    asked = run.provenance.get("train_steps_asked")  # absent in older runs
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


def finetuning_summary(run: RunFacts) -> dict[str, float | int]:
    """Flat scalars of finetuning on samples; empty without.

    Tokens per second are those that went forward, unfinished samples included, over the time from
    the first arrival or launch to the last finish (FlexLLM's scripts). Where the configuration has
    the rate of finetuning alone, `finetune_share` is the share of it. Tokens of finished samples
    per second are told beside, as a record spares samples a part of their forward, and the largest
    gap between two tokens of a request: a mean hides a stall. `finetune_ended_before_share` is the
    part of that time behind the last token of a sample: then rates are of less than the run.
    """
    if not run.rows("samples"):
        return {}
    names = ("tokens", "forward_tokens", "start_ns", "last_ns", "status", "restarts")
    rows = run.columns("samples", names)
    first_ns, last_ns = float(rows["start_ns"].min()), float(rows["last_ns"].max())
    out: dict[str, float | int] = {}
    if run.rows("requests"):
        served_ns = window_ns(run)
        first_ns, last_ns = min(first_ns, served_ns[0]), max(last_ns, served_ns[1])
        gaps_ns = _gaps_ns(run)
        out = {"max_itl_s": float(gaps_ns.max()) / 1e9} if len(gaps_ns) else {}
    tokens, is_whole = int(rows["forward_tokens"].sum()), rows["status"].is_("finished")
    rate, trained = (
        n / (last_ns - first_ns) * 1e9 for n in (tokens, rows["tokens"][is_whole].sum())
    )
    idle = max(0.0, last_ns - float(rows["last_ns"].max())) / (last_ns - first_ns)
    alone = run.config.get("finetune_alone")
    share = {} if alone is None else {"finetune_share": rate / float(alone)}
    return out | {
        "finetune_samples": int(is_whole.sum()),
        "finetune_tokens": tokens,
        "finetune_tokens_per_s": rate,
        "finetune_trained_tokens_per_s": float(trained),
        **share,
        "finetune_restarts": int(rows["restarts"].sum()),
        "finetune_ended_before_share": idle,
    }


def record_summary(run: RunFacts) -> dict[str, float | int]:
    """Flat scalars of records; empty where none was made.

    A hit is a record that a sample has used, and with which it went through: one is none that was
    lost with a sample which gave way. Its age is the time from its begin to that use, and the
    updates of the weights meanwhile. What was kept for no hit is wasted.
    """
    if not run.rows("records"):
        return {}
    names = ("tokens", "kept_bytes", "made_ns", "status", "used_ns", "used_tokens")
    rows = run.columns("records", (*names, "updates_behind"))
    used = rows["status"].is_("used")
    kept = rows["kept_bytes"].astype(float)
    out: dict[str, float | int] = {
        "records": len(used),
        "record_hit_rate": float(used.mean()),
        "recorded_tokens": int(rows["tokens"].sum()),
        "reused_tokens": int(rows["used_tokens"][used].sum()),
        "record_kept_bytes": int(kept.sum()),
        "record_wasted_bytes": int(kept[~used].sum()),
    }
    if used.any():
        ages_ns = rows["used_ns"][used].astype(float) - rows["made_ns"][used].astype(float)
        behind = rows["updates_behind"][used].astype(float)
        out |= {
            "mean_record_age_s": float(ages_ns.mean()) / 1e9,
            "mean_record_updates_behind": float(behind.mean()),
        }
    return out


def stall_shares(run: RunFacts) -> dict[str, float]:
    """Of the time from the first launch to the last, the share in which launches waited.

    A launch waits while its lane rests and the host is through with its plan: for a copy, or a
    launch on another lane. Launches that serve, a window beside them or not, are told apart from
    those that only train.
    """
    names = ("lane", "device", "issue_ns", "start_ns", "end_ns", "work", "step", "host_ns")
    rows = run.columns("steps", names)
    on_lane = np.logical_or.reduce([rows["lane"].is_(lane) for lane in DEVICE_LANES])
    if not on_lane.any():
        return {}
    _, plan = np.unique(rows["step"].astype(int), return_inverse=True)
    host_ns = np.zeros(plan.max() + 1)
    np.add.at(host_ns, plan, rows["host_ns"].astype(float))  # told with one row of a plan
    issue, start, end = (rows[name].astype(float)[on_lane] for name in names[2:5])
    issue += host_ns[plan[on_lane]]
    serves = (rows["work"].is_("serve") | rows["work"].is_("mixed"))[on_lane]
    second = rows["lane"].is_(DEVICE_LANES[1])[on_lane]
    device = rows["device"].astype(float)[on_lane]
    order = np.lexsort((start, second, device))
    issue, start, end, serves = (values[order] for values in (issue, start, end, serves))
    key = np.stack([device[order], second[order]])
    is_first = np.concatenate([[True], (key[:, 1:] != key[:, :-1]).any(axis=0)])
    before = np.concatenate([[-np.inf], end[:-1]])
    free = np.maximum(issue, np.where(is_first, -np.inf, before))
    waited = np.maximum(start - free, 0.0)
    total = float(end.max() - start.min())
    return {
        "serve_stalled_share": float(waited[serves].sum()) / total,
        "train_stalled_share": float(waited[~serves].sum()) / total,
    }


def _gaps_ns(run: RunFacts) -> np.ndarray:
    """Gaps between the tokens of each request."""
    found = [block["token_ns"] for block in run.blocks("requests", ("token_ns",))]
    gaps = [times.gaps(np.ones(len(times.starts) - 1, bool)) for times in found]
    return np.concatenate([np.empty(0), *gaps])


def _settled_moves(run: Run, num_steps: int) -> dict[str, float]:
    """Bytes copied per settled step, and the share of updates on the device, after first steps."""
    ends = run.training.sort_values("step").groupby("job_id")["end_ns"]
    begins = ends.first().where(ends.size() > 1, -1)
    owner = run.steps["jobs"].map(lambda jobs: jobs[0] if len(jobs) else -1)
    rows = run.steps[run.steps["start_ns"] >= owner.map(begins)]
    copied = rows.loc[rows["lane"].str.contains("->"), "nbytes"].sum()
    out = {"train_step_copied_bytes": float(copied) / num_steps}
    updates = rows.loc[rows["work"].eq("update"), "lane"]
    if len(updates):
        out["device_update_share"] = float(updates.isin(DEVICE_LANES).mean())
    return out


KEYS = ["job_id", "step"]


@dataclass(frozen=True)
class Losses:
    """Counts of steps with a loss in both runs and of those not equal to the bit, and the largest
    difference."""

    compared: int
    differ: int
    largest: float

    @property
    def text(self) -> str:
        """A sentence's end behind "the losses"."""
        if not self.compared:
            return "are not compared (a simulation computes none)"
        if not self.differ:
            return f"of {self.compared} steps are equal to the bit"
        return f"differ in {self.differ} of {self.compared} steps, by {self.largest:.3g} at most"


def check_same_training(a: Run, b: Run) -> None:
    """ValueError unless both runs trained the same steps of the same size.

    A job that ends with the last request (`until_served`) may get further in one of them.
    """
    left, right = (run.training.set_index(KEYS)["tokens"] for run in (a, b))
    ends_with_requests = all([_until_served(run) for run in (a, b)])
    odd = sorted(set(left.index) ^ set(right.index))
    if odd and not (ends_with_requests and _is_ahead(left.index, right.index)):
        job_id, step = odd[0]
        where = a.name if odd[0] in left.index else b.name
        raise ValueError(
            f"{a.name} and {b.name} train different jobs: {len(odd)} steps are in one only "
            f"(step {step} of job {job_id} in {where})"
        )
    both = left.index.intersection(right.index)
    if differ := [at for at in both if left[at] != right[at]]:
        job_id, step = differ[0]
        raise ValueError(
            f"{a.name} and {b.name} train different jobs: step {step} of job {job_id} has "
            f"{left[differ[0]]} tokens in one, {right[differ[0]]} in the other"
        )


def _until_served(run: Run) -> bool:
    return bool((run.config.get("training") or {}).get("until_served"))


def _is_ahead(left: pd.Index, right: pd.Index) -> bool:
    """Whether each job has, in one of the runs, the steps of the other one and no more than later
    ones."""
    jobs = {job_id for job_id, _ in (*left, *right)}
    for job_id in jobs:
        counts = [sorted(step for job, step in own if job == job_id) for own in (left, right)]
        shorter, longer = sorted(counts, key=len)
        if longer[: len(shorter)] != shorter:
            return False
    return True


def paired_steps(prediction: Run, measurement: Run) -> pd.DataFrame:
    """Per job and step: tokens, and step_s and loss of each run, such as `loss_prediction`."""
    left, right = (training_steps(run) for run in (prediction, measurement))
    keys = [*KEYS, "tokens"]
    return left.merge(right, on=keys, suffixes=("_prediction", "_measurement"))


def losses(steps: pd.DataFrame) -> Losses:
    """Compares losses in rows of `paired_steps`.

    Nothing is compared where a run computes no losses. NaN equals NaN.
    """
    left, right = steps["loss_prediction"], steps["loss_measurement"]
    if left.isna().all() or right.isna().all():
        return Losses(0, 0, 0.0)
    equal = left.eq(right) | (left.isna() & right.isna())
    apart = (left - right).abs()[~equal]
    return Losses(len(steps), int((~equal).sum()), float(apart.max()) if len(apart) else 0.0)


SERVED = {"serve": "serving"}  # a work of STEPS, and its name in tables


def time_shares(run: Run) -> dict[str, float]:
    """Shares of the time from the first issue to the last end of training, by TIMES; they sum to 1.

    Work on a compute lane counts as that work; of two at once, that which began first. Updates on
    the host count as `update` only while compute lanes rest: updates beside them add nothing to a
    step.
    """
    start, end = run.training["start_ns"].min(), run.training["end_ns"].max()
    rows = run.steps[run.steps["lane"].isin((*DEVICE_LANES, "cpu"))]
    rows = rows[rows["end_ns"].gt(start) & rows["start_ns"].lt(end)]
    rows = rows.assign(**{name: rows[name].clip(start, end) for name in ("start_ns", "end_ns")})
    device = rows[rows["lane"].isin(DEVICE_LANES)]
    busy_ns = alone_ns(device).groupby(device["work"]).sum()
    parts_ns = {SERVED.get(str(work), str(work)): float(ns) for work, ns in busy_ns.items()}
    host_ns = float(alone_ns(rows).sum() - alone_ns(device).sum())
    parts_ns["update"] = parts_ns.get("update", 0.0) + host_ns
    parts_ns[WAITING] = float(end - start) - sum(parts_ns.values())
    return {part: parts_ns[part] / float(end - start) for part in TIMES if parts_ns.get(part)}


def alone_ns(rows: pd.DataFrame) -> pd.Series:
    """Per operation, the time in which no earlier operation ran.

    By a device's clock an operation may begin a little before the previous one ends.
    """
    rows = rows.sort_values("start_ns")
    starts, ends = rows["start_ns"].to_numpy(float), rows["end_ns"].to_numpy(float)
    reached = np.maximum.accumulate(np.concatenate([[-np.inf], ends]))[:-1]
    return pd.Series(np.maximum(ends - np.maximum(starts, reached), 0.0), index=rows.index)
