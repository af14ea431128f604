"""Joined documents cut into blocks of equal length."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]


def pack(tokens: Tokens, block_tokens: int) -> Tokens:
    """Blocks [n, block_tokens] in the order of the text; a rest that fills none is left out.

    `tokens` are documents joined, each with its end: a block may begin and end within one.
    ValueError where not one block is full.
    """
    num_blocks = len(tokens) // block_tokens
    if not num_blocks:
        raise ValueError(
            f"sequence_tokens={block_tokens}: the text has {len(tokens)} tokens in all; "
            "take shorter sequences or more text"
        )
    return tokens[: num_blocks * block_tokens].reshape(num_blocks, block_tokens)
