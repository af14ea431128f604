"""One colour and one marker per policy, in every figure of every sweep."""

from __future__ import annotations

import hashlib

# Okabe and Ito's eight where policies are often seen together; paler kin for their relatives.
COLORS = {
    "static_reservation": "#E69F00",
    "static_restart": "#F2C46D",
    "static_swap": "#9C6B00",
    "continuous_reservation": "#7FCDB5",
    "continuous_restart": "#009E73",
    "continuous_swap": "#005C43",
    "chunked_reservation": "#8FBCE0",
    "chunked_restart": "#0072B2",
    "chunked_swap": "#00416B",
    "sarathi": "#56B4E9",
    "vllm_v0": "#D55E00",
    "vllm_v1": "#7A3600",
    "orca": "#CC79A7",
    "deadline_restart": "#8E44AD",
    "shortest_restart": "#222222",
    "recorded": "#B5B5B5",
    # of training; seen with one another, seldom with those above
    "train_on_device": "#4D4D4D",
    "zero_offload": "#E08214",
    "zero3_offload": "#B35806",
    "fsdp2_offload": "#FDB863",
    "train_lru": "#8073AC",
    "train_fifo": "#B2ABD2",
    "train_opt": "#542788",
    "patrickstar": "#1A9850",
    "time_shared": "#D6604D",
}
OTHERS = ("#1B9E77", "#B15928", "#6A3D9A", "#A6761D", "#E7298A", "#66A61E", "#4C72B0", "#937860")
MARKERS = {"swap": "s", "reservation": "^", "restart": "o"}


def policy_color(policy: str) -> str:
    """The colour of a policy; an unknown one's follows from its name, so it never changes."""
    if policy in COLORS:
        return COLORS[policy]
    return OTHERS[hashlib.sha256(policy.encode()).digest()[0] % len(OTHERS)]


def policy_marker(policy: str) -> str:
    """The marker of a policy: what it does when memory is short."""
    return next((mark for end, mark in MARKERS.items() if policy.endswith(end)), "D")
