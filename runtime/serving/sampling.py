"""From logits to tokens: greedy, or seeded so that a draw does not depend on the batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # splitmix64 (Steele, Lea, Flood 2014): its three constants
FIRST, SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen. Temperature 0 is greedy; top_k 0 and top_p 1 cut nothing."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature < 0 or self.top_k < 0 or not 0 < self.top_p <= 1:
            raise ValueError(
                f"sampling: temperature {self.temperature} and top_k {self.top_k} must be at "
                f"least 0, top_p {self.top_p} in (0, 1]"
            )

    @property
    def is_greedy(self) -> bool:
        """Whether no draw is needed."""
        return self.temperature == 0


def draws(seed: int, places: Sequence[tuple[int, int]]) -> np.ndarray:
    """Uniform numbers in [0, 1), one per (job_id, position): hashes, so no batch changes them."""
    jobs, positions = np.array(places, dtype=np.uint64).reshape(-1, 2).T
    with np.errstate(over="ignore"):  # arithmetic modulo 2**64
        hashed = _mix(_mix(_mix(np.full_like(jobs, np.uint64(seed))) ^ jobs) ^ positions)
    return (hashed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(value: np.ndarray) -> np.ndarray:
    value = value + GOLDEN
    value = (value ^ (value >> np.uint64(30))) * FIRST
    value = (value ^ (value >> np.uint64(27))) * SECOND
    hashed: np.ndarray = value ^ (value >> np.uint64(31))
    return hashed


def choose(logits: Tensor, sampling: Sampling, drawn: Tensor | None) -> Tensor:
    """[R, vocab] -> [R] token ids. `drawn` holds one uniform number per row, None if greedy."""
    if drawn is None:
        return logits.argmax(-1)
    scaled = logits.float() / sampling.temperature
    scores, ids = scaled.sort(dim=-1, descending=True, stable=True)
    if 0 < sampling.top_k < scores.shape[-1]:
        scores[:, sampling.top_k :] = float("-inf")
    shares = scores.softmax(-1).double()
    reached = shares.cumsum(-1)
    if sampling.top_p < 1:
        # Keep the smallest set that reaches top_p: a token stays if less came before it.
        shares = shares.masked_fill(reached - shares >= sampling.top_p, 0.0)
        reached = shares.cumsum(-1)
    point = drawn[:, None] * reached[:, -1:]
    rank = torch.searchsorted(reached, point, right=True).clamp_(max=ids.shape[-1] - 1)
    return ids.gather(-1, rank)[:, 0]
