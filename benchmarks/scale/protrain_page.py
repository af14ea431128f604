"""ProTrain's published figures beside ours, for analysis/REPRODUCTION.md."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from benchmarks.coserving.flexllm_page import table

Line = Mapping[str, str]

HEAD = """# ProTrain

Made by `python -m benchmarks.scale.protrain_published` from
[protrain_published.csv](../benchmarks/results/protrain_published.csv). Published: MLSys'26, as
notes and a port quote it (../shared/papers/patrickstar_protrain.md, 6.3). Ours: one rank of four
A100 with sequences of 1,024 tokens, both policies at their best batch of 4 to 64; ZeRO-3 with
offload keeps or recomputes activations, as is better. No constant was fitted.
"""
UNKNOWN = (
    (
        "4 RTX 3090: 2,090 tokens/s; 1.77 to 2.71 times three baselines; n_swap 0",
        "batch, sequence length and host are not known; ours swaps where that is faster by the "
        "share of a step that is told above",
    ),
    (
        "4 A100, averages: 1.85 x DeepSpeed, 1.43 x Colossal-AI, 2.22 to 2.25 x FSDP",
        "the rows by model do not average to them: other batches or settings of offload",
    ),
    (
        "largest models: 34B (RTX 3090) and 75B (A100) on one device, 30B on four RTX 3090",
        "the memory of the hosts is not published, and decides",
    ),
    (
        "estimator: error below 4 % in time, peak up to 10 % too high",
        "of measurements; ours is within 3.9 % of them on a CPU, peaks equal (`protrain_measured`)",
    ),
    (
        "search: 0.06 s for GPT-2 of 20 G parameters",
        "of another machine; ours is 0.2 s (`protrain_search`)",
    ),
    (
        "profiler: 17 % of the peak missed by hooks of modules",
        "of which model is not known; of the activations that a step of GPT-2 keeps, ours finds 22 "
        "%, and 36 % of a Llama's (`tandem calibrate --units`)",
    ),
)


def protrain_parts(lines: Sequence[Line]) -> Iterator[str]:
    """The section of the page.

    Args:
        lines: of protrain_published.csv; empty where it was not run.

    Returns:
        Its paragraphs and tables.
    """
    if not lines:
        return
    yield HEAD
    rows = [
        (x["model"], x["published"], f"{float(x['value']):.2f}",
         f"{float(x['value']) / float(x['published']) - 1:+.1%}", x["batch"], x["rival_batch"])
        for x in lines if x["figure"] == "ratio"
    ]  # fmt: skip
    names = ("model", "published, x ZeRO-3", "ours", "error", "batch", "ZeRO-3's batch")
    yield table(names, rows)
    small = [x for x in lines if x["figure"] == "swaps"]
    if small:
        without = {x["batch"]: x["value"] for x in lines if x["figure"] == "longer_without"}
        told = ", ".join(
            [
                f"{float(x['value']):.0f} at batch {x['batch']} ({float(without[x['batch']]):.1%})"
                for x in small
            ]
        )
        yield (
            "Of 50 blocks of GPT-2 10B on four RTX 3090, those that swap, and how much longer a "
            f"step takes without swaps: {told}.\n"
        )
        rates = [x for x in lines if x["figure"] == "tokens_per_s"]
        told = ", ".join(f"{float(x['value']):,.0f} at batch {x['batch']}" for x in rates)
        largest = [x["batch"] for x in lines if x["figure"] == "largest_without"]
        yield (
            f"Tokens per second of all four: {told}. The largest batch that fits without swaps, of "
            f"those that were tried, is {', '.join(largest)}.\n"
        )
    yield "## What cannot be judged of ProTrain\n"
    yield table(("published", "why"), UNKNOWN)
