"""The tokens of each microbatch of a training job, a function of its seed and number alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol

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


Ids = npt.NDArray[np.int64]
ROWS_DROPPED = "rows dropped: "
SHUFFLES, RANDOM = (
    2,
    3,
)  # streams of a seed; traces.serving.request and traces.serving.lengths have others


class Batches(Protocol):
    """What a runtime asks for the data of a training job."""

    def ids(self, microbatch: int) -> Ids:
        """Token ids [sequences, sequence_tokens] of a microbatch, counted through the whole job."""
        ...

    def account(self) -> dict[str, int]:
        """What became of the tokens of a text: read = used + dropped; and ROWS_DROPPED + the reason
        for rows of its file that nothing came of. Empty where none is read."""
        ...


@dataclass(frozen=True, eq=False)
class PackedBatches:
    """Blocks of text in seeded order; when all have been seen, again in another order.

    `blocks` is [n, sequence_tokens]; `rest_tokens` of the text filled no block. Ids beyond the
    vocabulary are taken modulo it, as those of prompts are: a stand-in model may know fewer. A
    microbatch may reach into the next epoch.
    """

    blocks: Tokens
    sequences: int
    vocabulary: int
    seed: int = 0
    rest_tokens: int = 0
    rows_dropped: Mapping[str, int] = field(default_factory=dict)  # by reason

    def ids(self, microbatch: int) -> Ids:
        """Token ids [sequences, sequence_tokens]; the i-th of all sequences is of epoch i // n."""
        first = microbatch * self.sequences
        chosen = [self._block(place) for place in range(first, first + self.sequences)]
        return self.blocks[chosen].astype(np.int64) % self.vocabulary

    def account(self) -> dict[str, int]:
        """Tokens read = used + dropped (the rest), how many of those used are beyond, and rows."""
        return {
            "tokens_read": self.blocks.size + self.rest_tokens,
            "tokens_used": self.blocks.size,
            "tokens_dropped": self.rest_tokens,
            "tokens_beyond_vocabulary": int((self.blocks >= self.vocabulary).sum()),
            **{ROWS_DROPPED + reason: count for reason, count in self.rows_dropped.items()},
        }

    def _block(self, place: int) -> int:
        epoch, at = divmod(place, len(self.blocks))
        return int(_order(self.seed, epoch, len(self.blocks))[at])


@lru_cache(maxsize=4)
def _order(seed: int, epoch: int, num_blocks: int) -> Ids:
    # seeds are padded with zeros: end in none
    return np.random.default_rng((seed, SHUFFLES, epoch, 1)).permutation(num_blocks)


@dataclass(frozen=True)
class RandomBatches:
    """Ids even over the vocabulary, as papers take where only time and memory matter."""

    sequence_tokens: int
    sequences: int
    vocabulary: int
    seed: int = 0

    def ids(self, microbatch: int) -> Ids:
        """Token ids [sequences, sequence_tokens]; no two microbatches are alike."""
        rng = np.random.default_rng((self.seed, RANDOM, microbatch, 1))
        return rng.integers(self.vocabulary, size=(self.sequences, self.sequence_tokens))

    def account(self) -> dict[str, int]:
        """Nothing is read."""
        return {}
