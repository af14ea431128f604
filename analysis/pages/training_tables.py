"""The tables of a report about training."""

from __future__ import annotations

from collections.abc import Mapping

from analysis import verdicts
from analysis.compare import Comparison
from analysis.metric_names import percents, shares_in
from analysis.pages.cells import Cell, HtmlTable, amount_cell, amount_cells
from analysis.training import LABELS, STEP, UNITS

TITLE = "Training"
NOTE = "Rates leave out each job's first step, which warms up."
TIMES_NOTE = (
    "Times add up to the whole of training: work of the device, updates on the host while the "
    "device rests, and waiting (for copies, or for plans to be made)."
)


COUNTS = {  # of jobs that finetune
    "finetune_samples": "samples that are through",
    "finetune_restarts": "samples begun anew, for requests to have their memory",
    "records": "records of prompts",
}
SHARES = {
    "finetune_share": "finetuned, of a run that finetunes alone",
    "record_hit_rate": "records that a sample has used",
    "serve_stalled_share": "launches that serve, waiting for copies or another lane",
    "train_stalled_share": "launches that only train, waiting",
}
AGES = {
    "mean_record_age_s": ("age of records when they were used, mean", "s"),
    "mean_record_updates_behind": ("updates that they were behind, mean", ""),
}
KEPT = {"record_kept_bytes": "kept by records", "record_wasted_bytes": "of that for no sample"}


def training_table(metrics: Mapping[str, float | int | str]) -> HtmlTable:
    """Steps, rate, losses and shares of time of one run; no rows without training."""
    if "train_steps" not in metrics and "finetune_tokens" not in metrics:
        return HtmlTable(TITLE, NOTE, [], [])
    rows = list[list[Cell]]()
    if (steps := metrics.get("train_steps")) is not None:
        rows += [
            [Cell("steps"), Cell(f"{steps} of {metrics.get('train_steps_asked', steps)}")],
            [Cell("tokens"), Cell(f"{metrics['train_tokens']:,}")],
        ]
    rows += [
        [Cell(LABELS[n]), amount_cell(metrics[n], unit)]
        for n, unit in UNITS.items()
        if n in metrics
    ]
    if (step_s := float(metrics.get(STEP, 0))) > 0:
        rows.append([Cell("steps per second"), Cell(f"{1 / step_s:.4g}")])
    rows += [[Cell(t), Cell(f"{metrics[n]:,}")] for n, t in COUNTS.items() if n in metrics]
    rows += [[Cell(t), amount_cell(metrics[n], "bytes")] for n, t in KEPT.items() if n in metrics]
    for name, (text, unit) in AGES.items():
        if name in metrics:
            age = float(metrics[name])
            rows.append([Cell(text), amount_cell(age, unit) if unit else Cell(f"{age:.3g}")])
    rows += [
        [Cell(t), Cell(f"{100 * float(metrics[n]):.1f} %")]
        for n, t in SHARES.items()
        if n in metrics
    ]
    for name in ("first_loss", "last_loss"):
        if name in metrics:
            rows.append([Cell(name.replace("_", " ")), Cell(f"{metrics[name]:.6f}")])
    if "train_step_copied_bytes" in metrics:
        copied = amount_cell(metrics["train_step_copied_bytes"], "bytes")
        rows.append([Cell("copied in a step"), copied])
    parts = percents(shares_in(metrics), decimals=1)
    rows += [[Cell(f"time of {part}"), Cell(f"{share} %")] for part, share in parts.items()]
    if "device_update_share" in metrics:
        share = 100 * float(metrics["device_update_share"])
        rows.append([Cell("updates on the device"), Cell(f"{share:.1f} %")])
    return HtmlTable(TITLE, f"{NOTE} {TIMES_NOTE}", ["what", "value"], rows)


def compared_training(comparison: Comparison) -> HtmlTable:
    """Step times and rate of both runs, and a note on their losses; no rows without training."""
    errors = comparison.errors[comparison.errors["metric"].isin(UNITS)]
    rows = []
    for row in errors.to_dict("records"):
        metric, error = str(row["metric"]), float(row["error"])
        cells = [Cell(LABELS[metric])]
        cells += amount_cells([row[r] for r in ("prediction", "measurement")], str(row["unit"]))
        mark = verdicts.verdict(metric, error)
        cells.append(Cell(verdicts.percent(error), abs(error), "" if mark == "undefined" else mark))
        rows.append(cells)
    note = f"{NOTE} The losses {comparison.losses.text}."
    return HtmlTable(TITLE, note, ["metric", "predicted", "measured", "error"], rows)
