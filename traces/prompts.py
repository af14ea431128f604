"""Token ids for requests whose trace has lengths, or names of blocks, only."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from traces.request import Request


def prompt_of(request: Request, vocabulary: int, seed: int) -> Sequence[int]:
    """The prompt's own ids, else drawn ones: equal prefix blocks give equal ids, by seed.

    Own ids beyond the vocabulary are taken modulo it: what begins alike still does. A block's ids
    depend on its name alone, so a shorter last block is the beginning of a longer one. Tokens that
    no block names are the request's own.
    """
    if request.prompt_ids is not None:
        return [token % vocabulary for token in request.prompt_ids]
    ids: list[int] = []
    for block in request.prefix_ids or ():
        rng = np.random.default_rng((seed, 1, block, 1))  # seeds are padded with zeros: end in none
        ids += rng.integers(vocabulary, size=request.prefix_block_tokens).tolist()
    missing = request.prompt_tokens - len(ids)
    if missing > 0:
        rng = np.random.default_rng((seed, request.request_id))
        ids += rng.integers(vocabulary, size=missing).tolist()
    return ids[: request.prompt_tokens]
