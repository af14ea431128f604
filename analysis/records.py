"""Records of served prompts in one run: how many were used, how old, and what the rest took."""

from __future__ import annotations

from analysis.run import RunFacts


def record_summary(run: RunFacts) -> dict[str, float | int]:
    """Flat scalars of records; empty where none was made.

    A hit is a record that a sample has used. Its age is the time from its begin to that use, and
    the updates of the weights meanwhile. What was kept for no sample is wasted.
    """
    if not run.rows("records"):
        return {}
    names = ("tokens", "kept_bytes", "made_ns", "status", "used_ns", "used_tokens")
    rows = run.columns("records", (*names, "updates_behind"))
    used = rows["status"].is_("used") | rows["status"].is_("lost")
    kept = rows["kept_bytes"].astype(float)
    out: dict[str, float | int] = {
        "records": len(used),
        "record_hit_rate": float(used.mean()),
        "recorded_tokens": int(rows["tokens"].sum()),
        "reused_tokens": int(rows["used_tokens"].sum()),
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
