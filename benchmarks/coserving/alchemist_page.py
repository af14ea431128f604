"""Alchemist's published figures beside ours, for analysis/REPRODUCTION.md."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from benchmarks.coserving.flexllm_page import table

Line = Mapping[str, str]

HEAD = """# Alchemist

Made by `python -m benchmarks.coserving.alchemist_published` from
[alchemist_published.csv](../benchmarks/results/alchemist_published.csv). Published: the abstract
(../shared/papers/flexllm_alchemist.md, 4): a trainer apart computes again what serving has
computed, 30 to 42 % of its time; behind records it trains 1.26 to 1.72 times as fast, in 47 % less
memory, on up to twice the tokens. Ours: Llama-3-8B with LoRA on an A100, one update on all samples
once their feedback is there, simulated; samples are 64 dialogues of ShareGPT (a fifth of their
tokens is prompt), or 1,024 tokens of which a share is prompt. No constant was fitted.
"""
UNKNOWN = (
    (
        "1.26 to 1.72 times the training throughput",
        "model, device, batch and lengths of answers are not published; 1.72 = 1/(1 - 0.42), so "
        "the best case spares the whole forward, as where a sample is prompt alone",
    ),
    (
        "47 % less memory, up to twice the tokens",
        "of what batch and which memory is not published; ours are shares of a run that computes "
        "prompts again, as a trainer apart does",
    ),
    ("no visible change of latency", "`recording_cost` measures ours on a CPU"),
)


def alchemist_parts(lines: Sequence[Line]) -> Iterator[str]:
    """The section of the page.

    Args:
        lines: of alchemist_published.csv; empty where it was not run.

    Returns:
        Its paragraphs and tables.
    """
    if not lines:
        return
    yield HEAD
    found = dict[str, dict[str, float]]()
    for line in lines:
        found.setdefault(line["case"], {})[line["figure"]] = float(line["value"])
    rows = [
        (
            case,
            f"{own['forward_share']:.0%}",
            f"{own['redundant_share']:.0%}",
            f"{own['speed_up']:.2f}",
            f"{own['peak_activation_share'] - 1:+.0%}",
            f"{own['peak_device_share'] - 1:+.0%}",
            f"{1 / own['peak_activation_share']:.1f}",
            f"{own['record_bytes'] / 2**30:.1f} GiB",
        )
        for case, own in found.items()
    ]
    published = ("published", "", "30 to 42 %", "1.26 to 1.72", "-47 %", "", "up to 2", "")
    names = (
        *("samples", "forward", "redundant", "speed-up", "peak of activations", "of the device"),
        *("tokens in equal memory", "records"),
    )
    yield table(names, [*rows, published])
    yield (
        "Forward: share of the time of training without records. The peak is that of activations "
        "on the device while samples train, one at a time; records wait on the host. That of the "
        "device has weights and pages with it. Activations grow with the tokens of a sample, so as "
        "much memory holds that many times the tokens.\n"
    )
    yield "## What cannot be judged of Alchemist\n"
    yield table(("published", "why"), UNKNOWN)
