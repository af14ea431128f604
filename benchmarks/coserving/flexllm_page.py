"""FlexLLM's published figures beside ours, for analysis/REPRODUCTION.md.

Published: the authors' artifact (goliaro/flexllm, print_all_stats.ipynb) and the figures of its
plots, as read in ../shared/papers/flexllm_alchemist.md (1.5, 3.4 and 3.5). Ours: the CSV files of
flexllm_table.py and flexllm_steps.py, and bytes by formula.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from models.spec import ModelSpec
from models.training.kept import kept_token_bytes
from traces.training.recipe import Recipe

Line = Mapping[str, str]
LABELS = {
    "finetuned_per_s": "finetuning, tokens/s",
    "tpot_ms": "TPOT, mean, ms",
    "tpot_p99_ms": "TPOT, P99, ms",
    "outputs_per_s": "output, tokens/s",
    "queued_ms": "arrival to start, mean, ms",
    "first_token_ms": "start to first token, mean, ms",
}
JUDGED = {"finetuned_per_s": "10 %", "tpot_ms": "7 %"}
REPLICAS = 4  # of the published cluster
LLAMA_FACTORY = {"Llama-3.1-8B": 3810.5, "Qwen2.5-14B": 1049.0, "Qwen2.5-32B": 470.0}
SAMPLE_TOKENS = 3675  # from the temporal rows
Cells = Mapping[str, tuple[tuple[int, int], tuple[int, int]]]  # tokens/s, and TPOT in ms
SPATIAL: Cells = {
    "Llama-3.1-8B": ((5495, 5393), (329, 335)),
    "Qwen2.5-14B": ((4389, 4357), (424, 422)),
    "Qwen2.5-32B": ((4268, 4255), (437, 432)),
}
TEMPORAL: Cells = {
    "Llama-3.1-8B": ((5648, 5638), (643, 643)),
    "Qwen2.5-14B": ((4380, 4359), (841, 841)),
    "Qwen2.5-32B": ((4324, 4322), (849, 849)),
}
GIB = 1 << 30
FIG13_GB = 12.50  # LoRA with all of their savings, as the artifact's plot labels it
FIG13_BYTES_PER_GB = 15 / 16.11 * GIB  # the labels are larger than the analytic GiB by this
FIG13 = ModelSpec(
    *("fig13", "llama", 80, 8192, 64, 8, 128, 28672, 128_256, 131_072), dtype="bfloat16"
)
FIG13_TOKENS = 1024

UNJUDGED = (
    (
        "spatial_limited: 15 cells (1 to 5 requests/s; finetuning, tokens/s: 8B 2,109 to 1,691, "
        "14B 886 to 641, 32B 762 to 585; TPOT 36.0 to 39.3, 61.6 to 69.2, 57.7 to 62.9 ms)",
        "the time of kernels that share a GPU is not published; a cost that is fitted on these "
        "cells would be judged by them",
    ),
    (
        "temporal_limited: 15 cells (8B 2,507 to 2,049, 14B 999 to 782, 32B 875 to 696 tokens/s; "
        "TPOT 36.5 to 41.3, 66.2 to 78.0, 59.3 to 72.0 ms)",
        "the released source does not settle whether its windows run with requests; else as above",
    ),
    (
        "TPOT of spatial and of temporal at frequency 1",
        "a step is as long as a sample's forward or backward, a time that only these cells tell; "
        "what follows from it is in the table of other ways to share",
    ),
    (
        "temporal at 64, 128 and 512; attainment of the SLO (45, 75 and 75 ms)",
        "published as curves, without numbers",
    ),
    (
        "vLLM alone at 2 to 20 requests/s: TPOT 13.0 to 38.5 ms (8B), 15.9 to 49.3 (14B), 19.5 to "
        "50.9 (32B), TTFT up to 76, 117 and 119 s",
        "the machine's step times are not published; the repository has measured logs of vLLM "
        "instead (`vllm_logs`)",
    ),
    (
        "LLaMA-Factory alone: 3,810.5, 1,049.0 and 470.0 tokens/s",
        "a constant of the comparison above, taken as it is",
    ),
    (
        "fused against serial launches: TPOT 6 to 10 % lower, finetuning 5 to 12 % higher",
        "it follows from spatial_limited, above; with the share of a lane that is assumed the 8B "
        "model at 1 request/s is in these ranges (tests/policies/test_spatial.py)",
    ),
    (
        "step times under tensor parallelism, TP2 and TP4",
        "floating-point operations do not explain them: 33 ms by counting, 58 ms measured for 14B",
    ),
    (
        "the window of Fig. 13's token-level row",
        "not published; the table above has a whole sample of 1,024 tokens",
    ),
    (
        "Fig. 13 for adapters between layers and for IA3: 84.56 to 12.83 and 97.98 to 12.75 GB",
        "what is finetuned here is LoRA, or all parameters",
    ),
    (
        "activations down by up to 8 times, memory in all by up to 36 % (an earlier abstract)",
        "the model, batch and window that these are of are not published",
    ),
    (
        "the requests: BurstGPT, ten minutes drawn at random, scaled to each rate",
        "the slice of the trace is not published; arrivals here are Poisson",
    ),
)


def flexllm_parts(cells: Sequence[Line], steps: Sequence[Line]) -> Iterator[str]:
    """The sections on FlexLLM.

    Args:
        cells: rows of flexllm_table.csv.
        steps: rows of flexllm_steps.csv.

    Yields:
        Markdown, a paragraph or a table at a time.
    """
    yield "# FlexLLM\n"
    yield (
        "Published: the artifact of the authors (goliaro/flexllm) and plots of the paper (arXiv "
        "2402.18789), as read in ../shared/papers/flexllm_alchemist.md. Ours: "
        "`python -m benchmarks.coserving.flexllm_table` and `benchmarks.coserving.flexllm_steps`, "
        "which also write their rows here.\n"
    )
    if cells:
        yield from _cells(cells)
    yield from _other_ways()
    yield from _memory()
    if steps:
        yield from _steps(steps)
    yield "## What cannot be judged\n"
    yield table(("published", "why"), UNJUDGED)


def _cells(lines: Sequence[Line]) -> Iterator[str]:
    yield "## Co-serving: three models at 1 to 5 requests a second and replica\n"
    yield (
        "Two constants of each model come from its published TPOT at 1 and 5 requests a second. "
        "The rates between are judged: finetuning within 10 % each and 6 % in the mean, TPOT "
        "within 7 %. The scheduling rule makes the rest: nothing of finetuning is fitted. Rows "
        "without a bar are shown as found.\n"
    )
    rates = sorted({int(line["rate"]) for line in lines})
    names = ("model", "figure", "bar", *[f"{rate}/s" for rate in rates])
    rows = []
    for model in dict.fromkeys(line["model"] for line in lines):
        for figure, label in LABELS.items():
            own = {int(x["rate"]): x for x in lines if (x["model"], x["figure"]) == (model, figure)}
            told = [_cell(own[rate]) for rate in rates]
            rows.append((model, label, JUDGED.get(figure, ""), *told))
    yield table(names, rows)
    yield (
        "Waits are not reproduced: arrivals are Poisson here, and bursts of BurstGPT in the paper, "
        "of which the slice is not known.\n"
    )
    yield "### What the abstract and the plots make of these cells\n"
    found = {
        (x["model"], int(x["rate"])): (float(x["published"]), float(x["ours"]))
        for x in lines
        if x["figure"] == "finetuned_per_s"
    }
    rows = []
    for model, alone in LLAMA_FACTORY.items():
        light, heavy = found[model, rates[0]], found[model, rates[-1]]
        pairs = list(zip(light, heavy, strict=True))  # published, ours
        kept = [f"{high / low:.1%}" for low, high in pairs]
        times = REPLICAS / alone
        gains = [f"{low * times:.2f} and {high * times:.2f}" for low, high in pairs]
        rows.append((model, *kept, *gains))
    names = (
        *("model", "finetuning at 5/s over 1/s, published", "ours"),
        *("light and heavy load over separate devices, published", "ours"),
    )
    yield table(names, rows)
    yield (
        "Separate devices: three of four replicas serve, one finetunes with LLaMA-Factory at its "
        'published rate. The abstract tells the 8B model\'s share as "more than 76 % of peak".\n'
    )


def _cell(line: Line) -> str:
    return f"{line['published']} → {line['ours']} ({float(line['error']):+.1%})"


def _other_ways() -> Iterator[str]:
    """Finetuning of whole samples, from the step that is published with it."""
    yield "## Other ways to share\n"
    yield (
        "Under spatial sharing a sample takes two steps, one forward and one back; under temporal "
        "sharing at frequency 1 it takes one round of serving, forward and back, which is what a "
        f"token of a request takes. So finetuning is {SAMPLE_TOKENS:,} tokens in two published "
        "TPOT, or in one. Nothing is simulated here, and the length of a sample is that of the "
        "temporal rows: only the spatial ones judge. At 1 and 5 requests/s.\n"
    )
    rows = []
    for way, steps, cells in (("spatial", 2, SPATIAL), ("temporal, 1", 1, TEMPORAL)):
        for model, (rates, tpots_ms) in cells.items():
            pairs = zip(rates, tpots_ms, strict=True)
            own = [(rate, SAMPLE_TOKENS / (steps * ms) * 1e3) for rate, ms in pairs]
            told = [f"{rate:,} → {found:,.0f} ({found / rate - 1:+.1%})" for rate, found in own]
            rows.append((way, model, *told))
    yield table(("way", "model", "finetuning at 1/s, tokens/s", "at 5/s"), rows)


def _memory() -> Iterator[str]:
    yield "## What is kept for a backward (Fig. 13)\n"
    yield (
        "Llama of 70B, LoRA, 1,024 tokens, bytes of activations by formula. Published rows are "
        "analytic too: 84.56 without savings, 21.47 with pruning, 16.11 with rematerialization, "
        "12.50 with windows, in units that are 7 % larger than GiB. Ours count what a layer keeps "
        "(`models.training.kept`, tested to the byte), without the workspace of one launch. No "
        "bar: the published window is not known.\n"
    )
    recipe = Recipe(dtype="bfloat16", lora_rank=16, lora_targets=("down_proj",))
    everything = FIG13_TOKENS * FIG13.num_layers
    kept = everything * kept_token_bytes(FIG13, recipe) / GIB
    kv = everything * 2 * FIG13.kv_size * 2 / GIB
    hidden = everything * FIG13.hidden_size * 2 / GIB
    rows = [
        ("all that windows keep", f"{FIG13_GB * FIG13_BYTES_PER_GB / GIB:.2f}", f"{kept:.2f}"),
        ("keys and values, which lie in pages", "in the row above", f"{kv:.2f}"),
        ("`planner.modes=recompute`: a layer's input alone", "not published", f"{hidden:.2f}"),
    ]
    yield table(("LoRA on down_proj", "published, GiB", "ours, GiB"), rows)


def _steps(lines: Sequence[Line]) -> Iterator[str]:
    yield "## Steps of Llama-3.1-70B on four GPUs\n"
    yield (
        "A log of the authors' branch. The fit reads runs 8, 11, 13, 14 and 16; the others are "
        "judged by the median absolute error of a kind of step. Mean and 90th percentile show two "
        "levels of speed in the log that its columns do not tell apart.\n"
    )
    names = (
        "run",
        "kind",
        "rows",
        "bar",
        "median",
        "mean",
        "P90",
        "by least squares",
        "a constant",
    )
    columns = ("bar", "median", "mean", "p90", "least_squares", "constant")
    rows = [
        (x["run"], x["kind"], x["rows"], *[f"{float(x[name]):.1%}" for name in columns])
        for x in lines
    ]
    yield table(names, rows)


def table(names: Sequence[str], rows: object) -> str:
    """A table in Markdown.

    Args:
        names: of its columns.
        rows: an iterable of rows of cells.

    Returns:
        Its lines.
    """
    lines = [f"| {' | '.join(names)} |", "|" + "---|" * len(names)]
    lines += [f"| {' | '.join(str(cell) for cell in row)} |" for row in rows]  # type: ignore[attr-defined]
    return "\n".join(lines) + "\n"
