"""The tokens of each microbatch of a training job, a function of seed and microbatch alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol

import numpy as np
import numpy.typing as npt

from traces.serving.request import Request, Sample, prompt_of

Tokens = npt.NDArray[np.int32]
Ids = npt.NDArray[np.int64]
ROWS_DROPPED = "rows dropped: "
# streams of a seed beside those of traces.serving.request and traces.serving.lengths
SHUFFLES, RANDOM, ORDER = 2, 3, 6


def pack(tokens: Tokens, block_tokens: int) -> Tokens:
    """Packs a text into blocks [n, block_tokens], in its order; a rest below a block is left out.

    `tokens` are joined documents, each with its end-of-sequence token, so a block may begin and end
    within a document. Raises ValueError where no block is full.
    """
    num_blocks = len(tokens) // block_tokens
    if not num_blocks:
        raise ValueError(
            f"sequence_tokens={block_tokens}: the text has {len(tokens)} tokens in all; "
            "take shorter sequences or more text"
        )
    return tokens[: num_blocks * block_tokens].reshape(num_blocks, block_tokens)


class Batches(Protocol):
    """The data of a training job, as a runtime reads it."""

    def ids(self, microbatch: int) -> Ids:
        """Token ids [sequences, sequence_tokens] of a microbatch, counted from 0 over the job."""
        ...

    def account(self) -> dict[str, int]:
        """Tokens of the text, read = used + dropped, and dropped rows as ROWS_DROPPED + reason.

        Empty where no text is read.
        """
        ...


@dataclass(frozen=True, eq=False)
class PackedBatches:
    """Blocks of text in seeded order; each epoch has an order of its own.

    `blocks` is [n, sequence_tokens], and `rest_tokens` of the text filled no block. Ids beyond the
    vocabulary are taken modulo it, as in prompts, because a stand-in model may have fewer. A
    microbatch may reach into the next epoch.
    """

    blocks: Tokens
    sequences: int
    vocabulary: int
    seed: int = 0
    rest_tokens: int = 0
    rows_dropped: Mapping[str, int] = field(default_factory=dict)  # by reason

    def ids(self, microbatch: int) -> Ids:
        """Token ids [sequences, sequence_tokens]; sequence i of the job is of epoch i // n."""
        first = microbatch * self.sequences
        chosen = [self._block(place) for place in range(first, first + self.sequences)]
        return self.blocks[chosen].astype(np.int64) % self.vocabulary

    def account(self) -> dict[str, int]:
        """Tokens read = used + dropped (the rest), used ids beyond the vocabulary, dropped rows."""
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
    # numpy pads seeds with zeros, so none ends in 0
    return np.random.default_rng((seed, SHUFFLES, epoch, 1)).permutation(num_blocks)


@dataclass(frozen=True)
class RandomBatches:
    """Ids uniform over the vocabulary, for studies of time and memory alone."""

    sequence_tokens: int
    sequences: int
    vocabulary: int
    seed: int = 0

    def ids(self, microbatch: int) -> Ids:
        """Token ids [sequences, sequence_tokens], drawn by seed and microbatch."""
        rng = np.random.default_rng((self.seed, RANDOM, microbatch, 1))
        return rng.integers(self.vocabulary, size=(self.sequences, self.sequence_tokens))

    def account(self) -> dict[str, int]:
        """Empty: no text is read."""
        return {}


@dataclass(frozen=True)
class ConversationBatches:
    """Prompts and answers; a prompt has the ids with which it would be served.

    A sample ends with the answer to its request, or within, and the request's prompt has what was
    said before. Ids of an answer are drawn by the number of its request, in whatever order samples
    come.

    `prompt_seed` draws the ids of prompts; None: `seed` does, as those of answers.
    """

    chosen: tuple[tuple[Request, Sample], ...]
    vocabulary: int
    seed: int = 0
    prompt_seed: int | None = None

    def ids(self, microbatch: int) -> Ids:
        """Token ids [1, tokens], those of its sample wherever that comes again."""
        number = microbatch % len(self.chosen)
        request, sample = self.chosen[number]
        rng = np.random.default_rng((self.seed, ORDER, request.request_id, 1))
        answer_tokens = max(0, sample.tokens - request.prompt_tokens)
        answer = rng.integers(self.vocabulary, size=answer_tokens)
        seed = self.seed if self.prompt_seed is None else self.prompt_seed
        prompt = np.asarray(prompt_of(request, self.vocabulary, seed), np.int64)
        return np.concatenate((prompt[: sample.tokens], answer))[None]

    def account(self) -> dict[str, int]:
        """Tokens with a loss, and those of prompts, which are read."""
        prompts = sum([sample.prompt_tokens for _, sample in self.chosen])
        prompts += sum([stop - start for _, s in self.chosen for start, stop in s.read])
        tokens = sum([sample.tokens for _, sample in self.chosen])
        return {"answer_tokens": tokens - prompts, "prompt_tokens": prompts}
