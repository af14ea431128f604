"""The rows of a trace, requests and training jobs: the types that every layer knows."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from traces.training.recipe import Recipe


@dataclass(frozen=True, slots=True)
class Request:
    """One line of a trace: what a client asked for, and when.

    `output_tokens` is the ground truth: the engine enforces it and no View shows it. In a closed
    loop (`session` set, `turn` > 0) the request is released `think_ns` after the answer to the turn
    before it, and not before `arrival_ns`. `prefix_ids` names the blocks of `prefix_block_tokens`
    of the prompt, first block first: prompts with equal leading ids have equal leading tokens. The
    last block may be partial. `slo` is the name of an SLO class, "" for none. `tenant` is the name
    of the client's tenant, and `adapter` of the adapter that its tokens run through; "" is the one
    tenant of all, and the model without an adapter.
    """

    request_id: int
    arrival_ns: int
    prompt_tokens: int
    output_tokens: int
    session: int | None = None
    turn: int = 0
    think_ns: int = 0
    slo: str = ""
    prompt_ids: tuple[int, ...] | None = None
    prefix_ids: tuple[int, ...] | None = None
    prefix_block_tokens: int = 0
    tenant: str = ""
    adapter: str = ""

    def __post_init__(self) -> None:
        if min(self.request_id, self.arrival_ns, self.think_ns, self.turn) < 0:
            self._refuse_below(0, "request_id", "arrival_ns", "think_ns", "turn")
        if min(self.prompt_tokens, self.output_tokens) < 1:
            self._refuse_below(1, "prompt_tokens", "output_tokens")
        if self.prompt_ids is not None and len(self.prompt_ids) != self.prompt_tokens:
            raise ValueError(
                f"request {self.request_id}: {len(self.prompt_ids)} prompt ids, "
                f"but prompt_tokens is {self.prompt_tokens}"
            )
        if self.prefix_ids is not None:
            self._check_prefix(len(self.prefix_ids))

    def arriving(self, arrival_ns: int) -> Request:
        """The request with another arrival; in half the time of dataclasses.replace."""
        return Request(
            self.request_id,
            arrival_ns,
            self.prompt_tokens,
            self.output_tokens,
            self.session,
            self.turn,
            self.think_ns,
            self.slo,
            self.prompt_ids,
            self.prefix_ids,
            self.prefix_block_tokens,
            self.tenant,
            self.adapter,
        )

    def _refuse_below(self, least: int, *names: str) -> None:
        for name in names:
            if getattr(self, name) < least:
                raise ValueError(f"request {self.request_id}: {name} must be at least {least}")

    def _check_prefix(self, num_blocks: int) -> None:
        if self.prefix_block_tokens < 1:
            raise ValueError(f"request {self.request_id}: prefix_ids need prefix_block_tokens")
        if (num_blocks - 1) * self.prefix_block_tokens >= self.prompt_tokens:
            raise ValueError(
                f"request {self.request_id}: {num_blocks} prefix blocks of "
                f"{self.prefix_block_tokens} tokens are more than its {self.prompt_tokens} tokens"
            )


class Sample(NamedTuple):
    """A sequence of a finetuning job.

    The first `prompt_tokens` of its `tokens` are read and carry no loss, nor do those of the spans
    in `read`, [start, stop) each and in order behind them: later turns of a user. The sample is
    there `release_ns` after its job has arrived; one that is feedback on `request`, whose prompt
    and answer it has, so long after the answer.
    """

    tokens: int
    prompt_tokens: int = 0
    release_ns: int = 0
    request: int | None = None
    read: tuple[tuple[int, int], ...] = ()

    def labels(self, start: int, stop: int) -> int:
        """Tokens of a window whose next token carries a loss.

        Args:
            start: The first token of the window.
            stop: The token behind its last one.

        Returns:
            Labels of the window.
        """
        low, high = max(start, self.prompt_tokens - 1, 0), min(stop, self.tokens - 1)
        found = max(0, high - low)
        for first, end in self.read:  # the label of a token is the next one
            found -= max(0, min(high, end - 1) - max(low, first - 1))
        return found

    def loss_rows(self, start: int, stop: int) -> int:
        """Rows of a window that the head computes: from the first one with a label to the last.

        Args:
            start: The first token of the window.
            stop: The token behind its last one.

        Returns:
            Rows, the sample's last token among them; 0 where no token has a label.
        """
        if not self.labels(start, stop):
            return 0
        first = max(start, self.prompt_tokens - 1, 0)
        for low, end in self.read:
            if low - 1 <= first < end - 1:
                first = end - 1
        return stop - first


@dataclass(frozen=True, slots=True)
class TrainingJob:
    """One training job of a trace: what to train, on what, for how long, and by which recipe.

    `num_units` counts the units of the model's chain: unit 0 is the embedding, the layers follow,
    and the last unit is head and loss. A microbatch is `sequences` sequences of `sequence_tokens`.
    An update follows the gradients of `microbatches` of them, unless `has_update` is False. `ranks`
    devices train on microbatches of their own and share the update. `model` and `dataset` are
    names.

    A job with `samples` finetunes: a microbatch is one of them, in their order and from the first
    again, and goes through the units in windows of tokens. `sequence_tokens` is then the length of
    the longest that the job has memory for. With `until_served` the job ends when the last request
    of the trace has left. `tenant` is whose job it is, as of a Request. What it trains is published
    as a new version of the adapter `publish` behind every `publish_every`-th update; "": never.

    A job that `learns` has samples that are feedback on requests, in the order of the requests. It
    trains on each once, in the order in which they come. It may use a record of a request whose
    weights are up to `staleness` updates behind its own.

    A job that was resumed has `begun_steps` steps behind it, which count among `num_steps`.
    """

    job_id: int
    arrival_ns: int
    num_units: int
    sequence_tokens: int
    sequences: int = 1
    num_steps: int = 1
    microbatches: int = 1
    has_update: bool = True
    model: str = ""
    dataset: str = ""
    recipe: Recipe = field(default_factory=Recipe)
    ranks: int = 1
    samples: tuple[Sample, ...] = ()
    until_served: bool = False
    tenant: str = ""
    publish: str = ""
    publish_every: int = 1
    learns: bool = False
    staleness: int = 0
    begun_steps: int = 0

    def __post_init__(self) -> None:
        for name in ("job_id", "arrival_ns", "staleness", "begun_steps"):
            if getattr(self, name) < 0:
                raise ValueError(f"training job {self.job_id}: {name} must be at least 0")
        counts = ("num_units", "sequences", "num_steps", "microbatches", "ranks", "publish_every")
        for name in counts:
            if getattr(self, name) < 1:
                given = f"{name}={getattr(self, name)}"
                raise ValueError(f"training job {self.job_id}: {given}: it must be at least 1")
        if self.begun_steps >= self.num_steps:
            raise ValueError(
                f"training job {self.job_id}: {self.begun_steps} of {self.num_steps} steps are "
                "done: nothing is left to train"
            )
        if self.sequence_tokens < 2:
            raise ValueError(
                f"training job {self.job_id}: sequence_tokens must be at least 2: the loss is over "
                "tokens that have one before them"
            )
        if (lacking := self.recipe.min_units - self.num_units) > 0:
            frozen = self.recipe.frozen_units
            raise ValueError(
                f"training job {self.job_id}: recipe.frozen_units={frozen} leaves nothing to "
                f"train; freeze fewer than {frozen + 1 - lacking} of its {self.num_units} units"
            )
        if self.samples:
            self._check_samples()

    def _check_samples(self) -> None:
        where = f"training job {self.job_id}"
        if self.sequences != 1 or self.ranks != 1 or not self.has_update:
            raise ValueError(
                f"{where}: samples are trained one by one on one device, with updates; leave "
                "sequences and ranks at 1, and has_update true"
            )
        if self.learns and self.num_steps * self.microbatches > len(self.samples):
            raise ValueError(
                f"{where}: {self.num_steps} steps of {self.microbatches} samples, and feedback on "
                f"{len(self.samples)} requests, of which each is trained on once"
            )
        for number, sample in enumerate(self.samples):
            tokens, prompt_tokens, release_ns, request, read = sample
            if not 2 <= tokens <= self.sequence_tokens:
                raise ValueError(
                    f"{where}: sample {number} has {tokens} tokens; 2 to sequence_tokens="
                    f"{self.sequence_tokens} are possible"
                )
            if not 0 <= prompt_tokens < tokens:
                raise ValueError(
                    f"{where}: sample {number} has {prompt_tokens} prompt tokens of {tokens}; at "
                    "least one must carry a loss"
                )
            ends = [prompt_tokens, *[bound for span in read for bound in span], tokens]
            if any(low > high for low, high in pairwise(ends)) or not sample.labels(0, tokens):
                raise ValueError(
                    f"{where}: sample {number} of {tokens} tokens reads {list(read)} behind "
                    f"{prompt_tokens} of its prompt; spans [start, stop) come in order, and leave "
                    "a token with a loss"
                )
            if self.learns and request is None:
                raise ValueError(
                    f"{where}: sample {number} is no feedback on a request, as the samples of a "
                    "job that learns are"
                )
            before_ns = self.samples[number - 1].release_ns if number else 0
            if release_ns < before_ns and not self.learns:
                raise ValueError(
                    f"{where}: sample {number} is released at {release_ns} ns, and the one before "
                    f"it at {before_ns}; put samples in the order of their release"
                )

    @property
    def microbatch_tokens(self) -> int:
        """Tokens of a microbatch, all sequences together; of samples those of the longest."""
        return self.sequences * self.sequence_tokens

    @property
    def finetunes(self) -> bool:
        """Whether the job trains on samples, in windows of tokens."""
        return self.learns or bool(self.samples)

    def sample(self, microbatch: int) -> Sample:
        """The sample of a microbatch.

        Args:
            microbatch: Counted through the job, which finetunes.

        Returns:
            The samples in their order, and again from the first behind the last. Where the job
            learns, the spec of its progress has those that have come, and none comes again.
        """
        return self.samples[microbatch % len(self.samples)]

    def learned(self, sample: Sample) -> TrainingJob:
        """The job with one more sample that has come.

        Args:
            sample: One of the job's, which have been checked.

        Returns:
            A job that is equal but for its samples.
        """
        found = copy(self)
        object.__setattr__(found, "samples", (*self.samples, sample))
        return found

    def tokens_of(self, microbatch: int) -> int:
        """Tokens of a microbatch, which its frontiers count.

        Args:
            microbatch: Counted through the job.

        Returns:
            Those of its sample, or of all its sequences together.
        """
        return self.sample(microbatch).tokens if self.finetunes else self.microbatch_tokens


def prompt_of(request: Request, vocabulary: int, seed: int) -> Sequence[int]:
    """The token ids of a prompt: its own, or ids drawn by seed.

    Own ids beyond the vocabulary are taken modulo it, so equal beginnings stay equal. The ids of a
    prefix block depend on its name alone, so a partial block is the beginning of a full one. Tokens
    without a block are drawn for the request alone.

    Args:
        request: The request.
        vocabulary: Tokens of the model's vocabulary.
        seed: Seed of the drawn ids.

    Returns:
        `request.prompt_tokens` ids below `vocabulary`.
    """
    if request.prompt_ids is not None:
        return [token % vocabulary for token in request.prompt_ids]
    ids: list[int] = []
    for block in request.prefix_ids or ():
        # numpy pads seeds with zeros, so none ends in 0
        rng = np.random.default_rng((seed, 1, block, 1))
        ids += rng.integers(vocabulary, size=request.prefix_block_tokens).tolist()
    missing = request.prompt_tokens - len(ids)
    if missing > 0:
        rng = np.random.default_rng((seed, request.request_id))
        ids += rng.integers(vocabulary, size=missing).tolist()
    return ids[: request.prompt_tokens]
