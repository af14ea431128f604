"""From the config node `adapters` to the adapters of a run, and to the requests that use them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.contract.adapters import AdapterSpec
from engine.contract.policy import Policy, traits_of
from models.parameters import adapter_bytes, lora_targets
from models.spec import ModelSpec
from tandem.config.check import arguments
from traces.serving.request import Request, TrainingJob
from traces.serving.sessions import with_adapters
from traces.training.recipe import Recipe


@dataclass(frozen=True)
class ServedAdapterSettings:
    """The config node `adapters`: how many there are, of which kind, and how popular each is.

    Adapters are called a0, a1, ... or as `names` says. Requests that name none get one, drawn by
    seed: the i-th as often as i to the power of -`zipf`. None leaves them as they are.
    """

    count: int = 0
    names: Sequence[str] = ()
    rank: int = 8
    alpha: float = 16.0
    targets: Sequence[str] = ()
    zipf: float | None = 1.0

    def __post_init__(self) -> None:
        if self.count < 0 or (self.count and self.names):
            raise ValueError(
                f"adapters.count={self.count}: it must be at least 0, and 0 beside adapters.names"
            )
        if len({*self.names}) < len(self.names) or "" in self.names:
            raise ValueError(
                f"adapters.names=[{', '.join(self.names)}]: give each a name of its own"
            )
        if self.rank < 1 or not self.alpha > 0:
            raise ValueError(
                f"adapters.rank={self.rank}, adapters.alpha={self.alpha}: both must be above 0"
            )
        if self.zipf is not None and not 0 <= self.zipf < float("inf"):
            raise ValueError(
                f"adapters.zipf={self.zipf}: it must be at least 0, or null where requests stay "
                "as they are"
            )

    @property
    def called(self) -> tuple[str, ...]:
        """The names of the adapters, the most popular first."""
        return tuple(self.names) or tuple([f"a{number}" for number in range(self.count)])

    @property
    def shares(self) -> dict[str, float]:
        """The share of the requests of each."""
        assert self.zipf is not None, "requests stay as they are"
        weights = [rank**-self.zipf for rank in range(1, len(self.called) + 1)]
        return {n: w / sum(weights) for n, w in zip(self.called, weights, strict=True)}


def adapter_settings(config: Mapping[str, Any]) -> ServedAdapterSettings:
    """The node of a configuration; earlier versions' runs have none."""
    node = config.get("adapters") or {}
    return ServedAdapterSettings(**arguments(ServedAdapterSettings, node, "adapters"))


def through_adapters(
    requests: Sequence[Request], config: Mapping[str, Any], seed: int
) -> list[Request]:
    """The requests with the adapters that the configuration has drawn for them.

    ValueError where one names an adapter that the run does not have.
    """
    asked = adapter_settings(config)
    if config["backend"]["name"] == "openai":  # a server has adapters of its own
        return [*requests]
    if asked.called and asked.zipf is not None:
        requests = with_adapters(requests, asked.shares, seed)
    known = {"", *asked.called}
    for request in requests:
        if request.adapter not in known:
            there = ", ".join(asked.called) or "none"
            raise ValueError(
                f"request {request.request_id} names adapter {request.adapter!r}, and the run has "
                f"{there}: list those of the trace, adapters.names=[{request.adapter}], and take "
                "policy=adapters"
            )
    return [*requests]


def adapters_of(
    config: Mapping[str, Any], spec: ModelSpec, policy: Policy, jobs: Sequence[TrainingJob]
) -> tuple[AdapterSpec, ...]:
    """The adapters of a run, each with a seed of its own; () without any.

    ValueError where the policy brings none to the device, a target is no module of the model, or
    what a job publishes is no adapter of this kind.
    """
    asked, found = adapter_settings(config), list[AdapterSpec]()
    for number, name in enumerate(asked.called):
        recipe = Recipe(
            lora_rank=asked.rank,
            lora_alpha=asked.alpha,
            lora_targets=tuple(asked.targets),
            dtype=spec.dtype,
            seed=int(config["seed"]) + number,
        )
        found.append(AdapterSpec(name, recipe, adapter_bytes(spec, recipe)))
    if found and config["backend"]["name"] == "openai":
        raise ValueError(
            f"adapters: there are {len(found)}, and a server has its own; leave adapters.count at 0"
        )
    if found and not traits_of(policy).adapters:
        raise ValueError(
            f"adapters: there are {len(found)}, and this policy brings none to the device; take "
            "policy=adapters, or policy=coserve_adapters where a job finetunes"
        )
    for job in jobs:
        if job.publish:
            _check_published(job, found, spec)
    return tuple(found)


def _check_published(job: TrainingJob, adapters: Sequence[AdapterSpec], spec: ModelSpec) -> None:
    """ValueError where a job publishes something else than the next version of an adapter."""
    names = [adapter.name for adapter in adapters]
    if job.publish not in names:
        there = ", ".join(names) or "none"
        raise ValueError(
            f"training.publish={job.publish}: the run has adapters {there}; name one of them, or "
            "give the run some with adapters.count"
        )
    made, served = job.recipe, adapters[names.index(job.publish)].recipe
    if made.lora_rank is None or made.frozen_units > 1:  # unit 0 is the embedding, without any
        raise ValueError(
            f"training.publish={job.publish}: the job does not train an adapter of all layers; "
            "take training/recipe=lora with training.recipe.frozen_units=0"
        )
    if _kind(made, spec) != _kind(served, spec):
        targets = ", ".join(made.lora_targets)
        raise ValueError(
            f"training.publish={job.publish}: the job trains another kind of adapter; set "
            f"adapters.rank={made.lora_rank} adapters.alpha={made.lora_alpha:g} "
            f"adapters.targets=[{targets}]"
        )


def _kind(recipe: Recipe, spec: ModelSpec) -> tuple[int | None, float, tuple[str, ...]]:
    """What adapters of one kind have in common."""
    return recipe.lora_rank, recipe.lora_alpha, tuple(lora_targets(spec, recipe))
