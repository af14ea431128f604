"""Finetuning as conf/training names it: samples of unequal length, there at once or one by one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from traces.files import absent
from traces.serving.recorded_times import UNITS_NS
from traces.serving.request import Request, Sample, TrainingJob
from traces.store import read_trace
from traces.training.batches import ORDER, Batches, ConversationBatches, Ids
from traces.training.feedback import FeedbackOfRun, FeedbackSamples
from traces.training.job import TrainingWork
from traces.training.text_store import read_documents

# streams of a seed, beside those of traces.training.batches
LENGTHS, RELEASES = 4, 5
FEWEST = 2  # tokens of a sample: a loss is over tokens that have one before them


def _check_limit(limit: int | None) -> None:
    if limit is not None and limit < 1:
        raise ValueError(f"training.data.limit={limit}: it must be at least 1, or null for all")


class Samples(Protocol):
    """The source of the samples of a finetuning job."""

    @property
    def name(self) -> str:
        """The name of the source in results."""
        ...

    def samples(self, longest: int, seed: int, cache: Path) -> tuple[Sample, ...]:
        """All samples, none longer than `longest` tokens; `cache` is the folder of imports."""
        ...

    def batches(self, job: TrainingJob, vocabulary: int, cache: Path) -> Batches:
        """The tokens of the job's microbatches, one sample each."""
        ...


@dataclass(frozen=True, kw_only=True)
class RandomSamples:
    """Samples of lognormal length with tokens drawn by the recipe's seed.

    `mean_tokens` is the mean before lengths are cut to those that the job has memory for, `spread`
    the standard deviation of their logarithm, 0 for equal lengths. The first `prompt_share` of each
    carries no loss.
    """

    count: int = 256
    mean_tokens: float = 1024.0
    spread: float = 0.6
    prompt_share: float = 0.0

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"training.data.count={self.count}: it must be at least 1")
        if not FEWEST <= self.mean_tokens < math.inf:
            raise ValueError(
                f"training.data.mean_tokens={self.mean_tokens}: it must be at least {FEWEST}"
            )
        if not 0 <= self.spread < math.inf or not 0 <= self.prompt_share < 1:
            raise ValueError(
                f"training.data.spread={self.spread}, prompt_share={self.prompt_share}: spread is "
                "at least 0, prompt_share in [0, 1)"
            )

    @property
    def name(self) -> str:
        """The name in results."""
        return "random"

    def samples(self, longest: int, seed: int, cache: Path) -> tuple[Sample, ...]:
        """See Samples; nothing is read."""
        rng = np.random.default_rng((seed, LENGTHS))
        middle = math.log(self.mean_tokens) - self.spread**2 / 2
        drawn = np.rint(np.exp(rng.normal(middle, self.spread, self.count)))
        lengths = np.clip(drawn, FEWEST, longest).astype(int).tolist()
        return tuple([Sample(n, min(n - 1, int(n * self.prompt_share))) for n in lengths])

    def batches(self, job: TrainingJob, vocabulary: int, cache: Path) -> RandomSampleBatches:
        """Ids below `vocabulary`; the cache is not used."""
        return RandomSampleBatches(job.samples, vocabulary, job.recipe.seed)


@dataclass(frozen=True, kw_only=True)
class TextSamples:
    """The documents of a text that `tandem trace import --kind text` has made, one to a sample.

    A longer document is cut behind what the job has memory for, and one of less than two tokens is
    left out. They come in an order that the recipe's seed draws; `limit` takes the first of them.
    """

    path: str
    limit: int | None = None

    def __post_init__(self) -> None:
        _check_limit(self.limit)

    @property
    def name(self) -> str:
        """The name of the file."""
        return Path(self.path).name

    def samples(self, longest: int, seed: int, cache: Path) -> tuple[Sample, ...]:
        """See Samples."""
        _, places = self._places(longest, seed)
        return tuple([Sample(int(stop - start)) for start, stop in places])

    def batches(self, job: TrainingJob, vocabulary: int, cache: Path) -> TextSampleBatches:
        """Ids of the documents, modulo `vocabulary`."""
        tokens, places = self._places(job.sequence_tokens, job.recipe.seed)
        return TextSampleBatches(tokens, places, vocabulary)

    def _places(self, longest: int, seed: int) -> tuple[npt.NDArray[np.int32], Ids]:
        """All tokens, and where each sample begins and ends among them."""
        path = Path(self.path).expanduser()
        if not path.is_file():
            raise ValueError(f"training.data.path={path}: {absent(path)}")
        tokens, ends = read_documents(path)
        starts = np.concatenate(([0], ends[:-1]))
        places = np.stack([starts, np.minimum(ends, starts + longest)], axis=1)
        places = places[places[:, 1] - places[:, 0] >= FEWEST]
        if not len(places):
            raise ValueError(f"training.data.path={path}: no document has {FEWEST} tokens or more")
        order = np.random.default_rng((seed, ORDER)).permutation(len(places))
        return tokens, places[order][: self.limit]


@dataclass(frozen=True, kw_only=True)
class ConversationSamples:
    """The requests of an imported trace as samples: a prompt, and an answer that carries the loss.

    With `dialogues` all turns of a session are one sample, whose answers carry the loss; a turn
    whose prompt is shorter than what was said before begins another one. The ids of an answer are
    drawn by the recipe's seed, and so are those of prompts that the trace has none of. A longer
    sample is cut behind what the job has memory for; where that leaves no answer it is left out.
    They come in an order that the seed draws; `limit` takes the first.
    """

    path: str
    limit: int | None = None
    dialogues: bool = False

    def __post_init__(self) -> None:
        _check_limit(self.limit)

    @property
    def name(self) -> str:
        """The name of the file."""
        return Path(self.path).name

    def samples(self, longest: int, seed: int, cache: Path) -> tuple[Sample, ...]:
        """See Samples."""
        return tuple([sample for _, sample in self._chosen(longest, seed)])

    def batches(self, job: TrainingJob, vocabulary: int, cache: Path) -> ConversationBatches:
        """Ids of prompts and answers, all below `vocabulary`."""
        chosen = self._chosen(job.sequence_tokens, job.recipe.seed)
        return ConversationBatches(tuple(chosen), vocabulary, job.recipe.seed)

    def _chosen(self, longest: int, seed: int) -> list[tuple[Request, Sample]]:
        """The last request of each sample, and the sample, in their order."""
        path = Path(self.path).expanduser()
        found = list[tuple[Request, Sample]]()
        for turns in _dialogues(read_trace(path), self.dialogues):
            if turns[0].prompt_tokens < min(_end(turns[0]), longest):
                found.append(_dialogue(turns, longest))
        if not found:
            raise ValueError(
                f"training.data.path={path}: no request has a prompt below {longest} tokens; raise "
                "training.sequence_tokens"
            )
        order = np.random.default_rng((seed, ORDER)).permutation(len(found))
        return [found[at] for at in order[: self.limit]]


def _end(request: Request) -> int:
    """Tokens of a prompt and its answer."""
    return request.prompt_tokens + request.output_tokens


def _dialogues(requests: Iterable[Request], joins: bool) -> Iterable[list[Request]]:
    """The turns of each sample in their order; every request by itself unless it joins sessions."""
    if not joins:
        return [[request] for request in requests]
    found, under_way = list[list[Request]](), dict[int, list[Request]]()
    for request in sorted(requests, key=lambda one: one.turn):
        turns = None if request.session is None else under_way.get(request.session)
        if turns is not None and request.prompt_tokens >= _end(turns[-1]):
            turns.append(request)
            continue
        found.append([request])
        if request.session is not None:
            under_way[request.session] = found[-1]
    return found


def _dialogue(turns: Sequence[Request], longest: int) -> tuple[Request, Sample]:
    """A sample that reads what its user says, and its last request."""
    tokens = min(_end(turns[-1]), longest)
    spans = [(_end(one), other.prompt_tokens) for one, other in pairwise(turns)]
    read = [(start, min(stop, tokens)) for start, stop in spans if start < min(stop, tokens)]
    return turns[-1], Sample(tokens, turns[0].prompt_tokens, read=tuple(read))


@dataclass(frozen=True)
class RandomSampleBatches:
    """Ids uniform over the vocabulary, for each microbatch as many as its sample has."""

    samples: tuple[Sample, ...]
    vocabulary: int
    seed: int = 0

    def ids(self, microbatch: int) -> Ids:
        """Token ids [1, tokens], those of its sample wherever that comes again."""
        number = microbatch % len(self.samples)
        rng = np.random.default_rng((self.seed, ORDER, number, 1))
        return rng.integers(self.vocabulary, size=(1, self.samples[number].tokens))

    def account(self) -> dict[str, int]:
        """Empty: no text is read."""
        return {}


@dataclass(frozen=True, eq=False)
class TextSampleBatches:
    """Documents of a text; `places` are first and last bounds of each sample among `tokens`."""

    tokens: npt.NDArray[np.int32]
    places: Ids
    vocabulary: int

    def ids(self, microbatch: int) -> Ids:
        """Token ids [1, tokens] of a microbatch, modulo the vocabulary."""
        start, stop = self.places[microbatch % len(self.places)]
        return self.tokens[start:stop].astype(np.int64)[None] % self.vocabulary

    def account(self) -> dict[str, int]:
        """Tokens read = used + dropped, and used ids beyond the vocabulary."""
        used = int((self.places[:, 1] - self.places[:, 0]).sum())
        beyond = sum([int((self.tokens[a:b] >= self.vocabulary).sum()) for a, b in self.places])
        return {
            "tokens_read": len(self.tokens),
            "tokens_used": used,
            "tokens_dropped": len(self.tokens) - used,
            "tokens_beyond_vocabulary": beyond,
        }


@dataclass(frozen=True, kw_only=True)
class Finetuning(TrainingWork):
    """A job that finetunes on samples of unequal length.

    Samples are there at once, or come at `rate` per second, drawn by the recipe's seed. The job
    makes `num_steps` updates, going through its samples again where these are more; without them as
    many as take each sample once, and begin again for what the last update lacks. With
    `until_served` it ends with the last request. `tenants` ask for a job each in the place of one.
    What it trains is published as a version of the adapter `publish` behind every
    `publish_every`-th update; "": never. Where `tenants` ask for jobs, `publish` lists one adapter
    for each.

    From feedback (FeedbackSamples) a job learns: it trains on each sample once, in the order in
    which they come, and makes as many updates as they fill. It learns from requests of its tenant,
    and of the adapter that it publishes, where it has one. Records that serving has kept of a
    request may be `staleness` updates behind its weights: such a sample trains through the version
    that served it.
    """

    data: Samples
    num_steps: int | None = None
    rate: float | None = None
    until_served: bool = True
    tenants: Sequence[str] = ()
    publish: str | Sequence[str] = ""
    publish_every: int = 1
    staleness: int = 0

    def __post_init__(self) -> None:
        if self.staleness < 0 or (self.staleness and not (self.publish and self.learns)):
            raise ValueError(
                f"training.staleness={self.staleness}: it is at least 0, and above 0 only of a job "
                "that learns from feedback and publishes an adapter"
            )
        if self.tenants and (self.tenant or len({*self.tenants}) < len(self.tenants)):
            raise ValueError(
                f"training.tenants=[{', '.join(self.tenants)}]: a job for each, with other names; "
                "leave training.tenant out"
            )
        if self.microbatches < 1:
            raise ValueError(f"training.microbatches={self.microbatches}: it must be at least 1")
        if self.save_model and any([Path(name).name != name for name in self.tenants]):
            raise ValueError(
                f"training.tenants=[{', '.join(self.tenants)}]: with save_model each has a folder; "
                "give names without a slash"
            )
        if self.publish_every < 1:
            raise ValueError(f"training.publish_every={self.publish_every}: it must be at least 1")
        self._check_publish()
        if self.rate is not None and self.learns:
            raise ValueError(
                f"training.rate={self.rate}: feedback comes behind answers; leave rate at null"
            )
        if self.rate is not None and not 0 < self.rate < math.inf:
            raise ValueError(f"training.rate={self.rate}: it must be above 0, or null for all")
        if self.num_steps is not None and self.num_steps < 1:
            raise ValueError(
                f"training.num_steps={self.num_steps}: it must be at least 1, or null for once "
                "through the samples"
            )

    def _check_publish(self) -> None:
        """ValueError where it is not one adapter, or one for each tenant."""
        if isinstance(self.publish, str):
            if self.publish and self.tenants:
                raise ValueError(
                    f"training.publish={self.publish}: there is a job for each tenant; give a list "
                    f"of {len(self.tenants)} adapters, or leave it out"
                )
        elif not len({*self.publish}) == len(self.publish) == len(self.tenants) > 0:
            raise ValueError(
                f"training.publish=[{', '.join(self.publish)}]: a list has another adapter for "
                f"each of training.tenants=[{', '.join(self.tenants)}]"
            )

    @property
    def learns(self) -> bool:
        """Whether its samples are feedback on the requests of the run."""
        return isinstance(self.data, FeedbackSamples)

    def on(self, requests: Sequence[Request], seed: int) -> Finetuning:
        """The job in a run with these requests, whose prompts are drawn by `seed`."""
        if isinstance(self.data, FeedbackOfRun):
            return replace(self, data=replace(self.data, tenant=self.tenant))
        if not isinstance(self.data, FeedbackSamples):
            return self
        own = [
            request
            for request in requests
            if self.tenant in ("", request.tenant) and self.publish in ("", request.adapter)
        ]
        return replace(self, data=self.data.on(own, seed))

    def each(self) -> tuple[Finetuning, ...]:
        """The job of each tenant, drawn by seeds that follow each other; itself without tenants."""
        if not self.tenants:
            return (self,)
        recipes = [
            replace(self.recipe, seed=self.recipe.seed + i) for i in range(len(self.tenants))
        ]
        adapters = [""] * len(self.tenants) if isinstance(self.publish, str) else self.publish
        each = zip(self.tenants, recipes, adapters, strict=True)
        return tuple(
            [replace(self, recipe=r, tenant=t, tenants=(), publish=name) for t, r, name in each]
        )

    def job(self, job_id: int, num_units: int, model: str, cache: Path) -> TrainingJob:
        """The job for a model of `num_units` units. Raises a ValueError of one line."""
        assert isinstance(self.publish, str), "tenants have a job each"
        samples = self.data.samples(self.sequence_tokens, self.recipe.seed, cache)
        is_feedback = isinstance(self.data, FeedbackSamples | FeedbackOfRun)  # each counts once
        if is_feedback and len(samples) < self.microbatches:
            raise ValueError(
                f"training.microbatches={self.microbatches}: only {len(samples)} requests get "
                "feedback; take fewer for an update, more requests or another chance of feedback"
            )
        steps = len(samples) / self.microbatches
        if self.rate is not None:
            rng = np.random.default_rng((self.recipe.seed, RELEASES))
            at_s = np.cumsum(rng.exponential(1 / self.rate, len(samples)))
            ns = np.rint(at_s * UNITS_NS["s"]).astype(int).tolist()
            samples = tuple([s._replace(release_ns=at) for s, at in zip(samples, ns, strict=True)])
        return TrainingJob(
            job_id,
            self.arrival_ns,
            num_units,
            self.sequence_tokens,
            num_steps=self.num_steps or (math.floor(steps) if is_feedback else math.ceil(steps)),
            microbatches=self.microbatches,
            model=model,
            dataset=self.data.name,
            recipe=self.recipe,
            samples=samples,
            until_served=self.until_served,
            tenant=self.tenant,
            publish=self.publish,
            publish_every=self.publish_every,
            learns=self.learns,
            staleness=self.staleness,
        )

    def batches(self, job: TrainingJob, vocabulary: int, cache: Path) -> Batches:
        """The tokens of the job's microbatches, all below `vocabulary`."""
        return self.data.batches(job, vocabulary, cache)
