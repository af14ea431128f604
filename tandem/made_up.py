"""Requests that profiles are measured with: of no published trace, but within their range."""

from __future__ import annotations

import numpy as np

from traces.request import Request

REQUESTS = 48  # of a replay: batches from so many down to one; of the fitted one at least
SESSIONS = 14  # of its ebb: batches from so many down to one
STREAMED = 150  # requests of a replay that arrive one by one
SHORTEST = 4  # tokens of a made-up prompt or output


def requests(max_positions: int, seed: int, count: int = REQUESTS) -> list[Request]:
    """Requests of lognormal lengths: of no published trace, but within their range.

    First `count` at once, those beyond REQUESTS half as long: all get in before the first are
    done, and soon end. Then closed sessions, the k-th of k short turns: they ebb from SESSIONS
    jobs down to one at any speed of the machine, so that launches of every small batch are seen
    in their places, between other launches and the host's work; prompts of any size among them.
    """
    rng = np.random.default_rng((seed, 1))
    room = min(max_positions, 2048) // 2
    prompts = _lognormal(rng, count, 4.6, 1.0, room)
    outputs = _lognormal(rng, count, 4.8, 0.7, room)
    for lengths in (prompts, outputs):
        lengths[REQUESTS:] = np.maximum(lengths[REQUESTS:] // 2, SHORTEST)
    burst = [
        Request(i, 0, int(p), int(o)) for i, (p, o) in enumerate(zip(prompts, outputs, strict=True))
    ]
    turns = [(k, turn) for k in range(SESSIONS) for turn in range(k + 1)]
    prompts = np.round(np.exp(rng.uniform(np.log(SHORTEST), np.log(room), len(turns)))).astype(int)
    outputs = _lognormal(rng, len(turns), 3.6, 0.7, room)
    ebb = [
        Request(count + i, 0, int(prompts[i]), int(outputs[i]), session=k, turn=turn)
        for i, (k, turn) in enumerate(turns)
    ]
    return burst + ebb


def stream(max_positions: int, seed: int) -> list[Request]:
    """STREAMED requests of lognormal lengths, for any arrivals; means as published of ShareGPT.

    161 prompt and 338 output tokens (vLLM paper, SOSP 2023, figure 11), before the clipping.
    """
    rng = np.random.default_rng((seed, 2))
    room = min(max_positions, 2048) // 2
    prompts = _lognormal(rng, STREAMED, 4.24, 1.3, room)
    outputs = _lognormal(rng, STREAMED, 5.54, 0.75, room)
    lengths = zip(prompts, outputs, strict=True)
    return [Request(i, 0, int(p), int(o)) for i, (p, o) in enumerate(lengths)]


def _lognormal(
    rng: np.random.Generator, count: int, mean: float, sigma: float, room: int
) -> np.ndarray:
    return np.clip(np.round(rng.lognormal(mean, sigma, count)), SHORTEST, room).astype(int)
