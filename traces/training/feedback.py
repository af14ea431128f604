"""Feedback as samples of a finetuning job: on requests of the run, or of another run."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from traces.files import absent
from traces.serving.recorded_times import UNITS_NS
from traces.serving.request import Request, Sample, TrainingJob
from traces.training.batches import ConversationBatches

FEEDBACK = 7  # stream of a seed, beside those of traces.training.batches and samples


@dataclass(frozen=True, kw_only=True)
class FeedbackSamples:
    """Feedback on the requests of the run: each answer that gets some becomes a sample.

    A sample is the prompt of a request and an answer, which carries the loss. It comes `delay_s`
    behind the answer that was served, and where `delays` is exponential that is the mean. `chance`
    is the share of the answers that get feedback, of all tenants or by tenant. Which do, and when,
    is drawn by the recipe's seed and the number of the request.

    The ids of an answer are drawn by that seed, too. A longer sample is cut behind what the job has
    memory for; where that leaves no answer there is none.
    """

    chance: float | Mapping[str, float] = 0.5
    delay_s: float = 60.0
    delays: Literal["exponential", "fixed"] = "exponential"
    requests: tuple[Request, ...] = ()
    prompt_seed: int = 0

    def __post_init__(self) -> None:
        for tenant, share in self._shares.items():
            if not 0 <= share <= 1:
                of = f" of tenant {tenant}" if tenant else ""
                raise ValueError(f"training.data.chance={share}{of}: it must be in [0, 1]")
        if not 0 <= self.delay_s < math.inf:
            raise ValueError(f"training.data.delay_s={self.delay_s}: it must be at least 0")
        if self.delays not in ("exponential", "fixed"):
            raise ValueError(f"training.data.delays={self.delays}: use exponential or fixed")

    @property
    def _shares(self) -> Mapping[str, float]:
        return self.chance if isinstance(self.chance, Mapping) else {"": self.chance}

    @property
    def name(self) -> str:
        """The name in results."""
        return "feedback"

    def on(self, requests: Sequence[Request], seed: int) -> FeedbackSamples:
        """The source with the requests of a run, whose prompts are drawn by `seed`."""
        return replace(self, requests=tuple(requests), prompt_seed=seed)

    def samples(self, longest: int, seed: int, cache: Path) -> tuple[Sample, ...]:
        """See Samples; each is feedback on a request, in the order of these."""
        if not self.requests:
            raise ValueError(
                "training=feedback learns from answered requests, and there are none of its "
                "tenant and adapter; choose a trace, or other settings of the job"
            )
        found = [self.on_request(request, longest, seed) for request in self.requests]
        return tuple([sample for sample in found if sample is not None])

    def on_request(self, request: Request, longest: int, seed: int) -> Sample | None:
        """The feedback on a request; None where it gets none. Its release is behind the answer."""
        rng = np.random.default_rng((seed, FEEDBACK, request.request_id, 1))
        drawn, delay_s = rng.random(), self.delay_s
        if self.delays == "exponential":
            delay_s = rng.exponential(self.delay_s)
        by_tenant = isinstance(self.chance, Mapping)
        share = self._shares.get(request.tenant if by_tenant else "", 0.0)
        prompt = request.prompt_tokens
        tokens = min(prompt + request.output_tokens, longest)
        if drawn >= share or prompt >= tokens:
            return None
        return Sample(tokens, prompt, round(delay_s * UNITS_NS["s"]), request.request_id)

    def batches(self, job: TrainingJob, vocabulary: int, cache: Path) -> ConversationBatches:
        """Ids of prompts, as they are served, and of answers, all below `vocabulary`."""
        by_id = {request.request_id: request for request in self.requests}
        chosen = [(by_id[s.request], s) for s in job.samples if s.request is not None]
        return ConversationBatches(tuple(chosen), vocabulary, job.recipe.seed, self.prompt_seed)


@dataclass(frozen=True, kw_only=True)
class FeedbackOfRun:
    """Feedback on the answers of another run, for a job that trains on a device of its own.

    Each sample is there when its feedback comes, on the clock of that run: the job is what a
    separate cluster trains beside the one that serves.

    `run` is the folder of a finished run, and `feedback` says which answers get feedback, and when.
    Feedback counts on requests of `tenant` that ran through `adapter`; "": of all.
    Prompts and answers have the ids that a job beside that run's requests would train on, where
    its prompts were drawn by its seed.
    """

    run: str
    feedback: FeedbackSamples
    adapter: str = ""
    tenant: str = ""

    @property
    def name(self) -> str:
        """The name in results."""
        return f"feedback on {Path(self.run).name}"

    def samples(self, longest: int, seed: int, cache: Path) -> tuple[Sample, ...]:
        """See Samples; in the order in which they come."""
        return tuple([sample for _, sample in self._chosen(longest, seed)])

    def batches(self, job: TrainingJob, vocabulary: int, cache: Path) -> ConversationBatches:
        """Ids of prompts and answers, all below `vocabulary`."""
        chosen = self._chosen(job.sequence_tokens, job.recipe.seed)
        return ConversationBatches(tuple(chosen), vocabulary, job.recipe.seed, self._prompt_seed)

    @property
    def _prompt_seed(self) -> int | None:
        """The seed of the run; None where its folder does not tell it."""
        told = Path(self.run).expanduser() / "provenance.json"
        return json.loads(told.read_text(encoding="utf-8")).get("seed") if told.is_file() else None

    def _chosen(self, longest: int, seed: int) -> list[tuple[Request, Sample]]:
        """Requests with their samples, which are released on the clock of the run."""
        found = list[tuple[Request, Sample]]()
        for request, finish_ns in self._answered():
            sample = self.feedback.on_request(request, longest, seed)
            if sample is not None:
                found.append((request, sample._replace(release_ns=finish_ns + sample.release_ns)))
        if not found:
            of = [f"{what} {name}" for what, name in
                  (("adapter", self.adapter), ("tenant", self.tenant)) if name]  # fmt: skip
            raise ValueError(
                f"training.data.run={self.run}: none of its answers"
                + (f" of {' and '.join(of)} gets feedback; name others" if of else " gets feedback")
                + ", or raise training.data.feedback.chance"
            )
        return sorted(found, key=lambda pair: (pair[1].release_ns, pair[0].request_id))

    def _answered(self) -> list[tuple[Request, int]]:
        """The requests that were answered and count, each with the end of its answer."""
        path = Path(self.run).expanduser() / "requests.parquet"
        if not path.is_file():
            raise ValueError(f"training.data.run={self.run}: {absent(path)} {path.name} in it")
        needed = ["request_id", "prompt_tokens", "output_tokens", "finish_ns", "status"]
        try:
            has = pq.read_schema(path).names
            names = [name for name in (*needed, "tenant", "adapter") if name in has]
            rows = pq.read_table(path, columns=names).to_pylist()
        except pa.ArrowInvalid as error:
            raise ValueError(f"training.data.run={self.run}: {path.name} is no table") from error
        if lacks := [name for name in needed if name not in has]:
            raise ValueError(
                f"training.data.run={self.run}: {path.name} has no column {lacks[0]}; give the "
                "folder of a run"
            )
        return [
            (
                Request(
                    row["request_id"],
                    0,
                    row["prompt_tokens"],
                    row["output_tokens"],
                    tenant=row.get("tenant") or "",
                ),
                row["finish_ns"],
            )
            for row in rows
            if row["status"] == "finished"
            and self.tenant in ("", row.get("tenant") or "")
            and self.adapter in ("", row.get("adapter") or "")
        ]
