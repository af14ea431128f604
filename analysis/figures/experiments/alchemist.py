"""Figures of learning from what was served: training and latency over what decides on records."""

from __future__ import annotations

from analysis.figures.experiments.coserving import HITS, LATENCY, SAMPLES, beside
from analysis.figures.experiments.lines import FigureAxis

RECORD = "config.scheduling.record"
RECORDED = "recorded"
BESIDE = (
    "Left: tokens of samples that are through, per second. Right: mean TPOT of the requests. A "
    "line is what is recorded; with none, samples are computed again."
)
share = beside(
    "alchemist_share",
    "config.training.data.chance",
    RECORD,
    RECORDED,
    FigureAxis("chance", "share of the answers that get feedback"),
    ("Which prompts are recorded", BESIDE),
    (SAMPLES, LATENCY),
)
delay = beside(
    "alchemist_delay",
    "config.training.data.delay_s",
    RECORD,
    RECORDED,
    FigureAxis("delay_s", "mean delay of feedback, s", is_log=True),
    ("Feedback that comes later", BESIDE),
    (SAMPLES, LATENCY),
)
link = beside(
    "alchemist_link",
    "config.device.to_device_bytes_per_s",
    RECORD,
    RECORDED,
    FigureAxis("link_bytes_per_s", "host link, each way, GB/s", 1e9, is_log=True),
    ("Records over the host link", BESIDE),
    (SAMPLES, LATENCY),
)
staleness = beside(
    "alchemist_staleness",
    "config.training.staleness",
    "config.training.data.delay_s",
    "s of delay",
    FigureAxis("staleness", "updates that a record may be behind"),
    (
        "Records of older weights",
        "Left: tokens of samples that are through, per second. Right: records that a sample used. "
        "A line is a mean delay of feedback.",
    ),
    (SAMPLES, HITS),
)
burst = beside(
    "alchemist_burst",
    "config.arrival.burstiness",
    "config.memory.records.hedge",
    "of the device free",
    FigureAxis("burstiness", "burstiness of arrivals: 1 is Poisson, less is burstier"),
    (
        "Records under bursts",
        "Left: tokens of samples that are through, per second. Right: mean TPOT of the requests. A "
        "line is the share of the device that records keep free.",
    ),
    (SAMPLES, LATENCY),
)
