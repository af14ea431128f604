"""From the training group to what a run trains: the job, its model's shape and its data."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from analysis.yaml_text import yaml_value
from engine.contract.layout import Layout
from engine.contract.policy import Planner, Policy, traits_of
from engine.contract.regions import Pool, Tier
from engine.contract.rules import Remedy
from engine.contract.view import Cost
from engine.results.plan_log import decode_layout
from engine.results.schema import read_table
from models.spec import ModelSpec
from models.training.kept import finetuning_shape
from models.training.shape import TrainingShape, training_shape
from policies.planners.placement import STARTS
from policies.training.out_of_memory import OutOfMemory
from tandem.config.build import Builder
from tandem.wiring.budget import advised_line
from traces.files import checked_text
from traces.serving.request import Request, TrainingJob
from traces.training.batches import ROWS_DROPPED, Batches
from traces.training.checkpoints import Checkpoint, facts_of
from traces.training.job import Training
from traces.training.samples import Finetuning

log = logging.getLogger(__name__)

STARTING = {
    "host": Remedy.START_ON_HOST,
    "host_first": Remedy.START_ON_HOST_FIRST,
    "device": Remedy.START_ON_DEVICE,
}


@dataclass(frozen=True, eq=False)
class Trainee:
    """A training job with the model that it trains, in the dtype of its recipe."""

    job: TrainingJob
    spec: ModelSpec
    shape: TrainingShape
    batches: Batches
    asked: Training | Finetuning | None = None
    checkpoint: Checkpoint | None = None  # behind which it goes on

    @property
    def frozen_bytes(self) -> int:
        """Weights that do not train."""
        frozen = [p.elements for p in self.shape.parameters if not p.trains]
        return sum(frozen) * self.shape.item_bytes


def trainees_of(
    config: Mapping[str, Any],
    builder: Builder,
    spec: ModelSpec,
    requests: Sequence[Request],
    ranks: int = 1,
) -> tuple[Trainee, ...]:
    """What the config node `training` asks for, on so many devices; nothing where it names nothing.

    ValueError in one line for what is wrong, also where the policy is not of that kind.
    """
    node = config.get("training") or {}  # earlier versions' runs have none
    has_planner = planner_of(config).get("_target_") is not None
    if node.get("_target_") is None:
        if has_planner:
            raise ValueError(
                "this policy trains, and there is nothing to train: choose it, such as "
                f"{_job_for(config)}, and trace=none where nothing is served; or a policy that "
                "serves"
            )
        return ()
    if not has_planner:
        finetunes = node["_target_"].endswith(".Finetuning")
        such = "coserve" if finetunes else "zero3_offload"
        raise ValueError(f"training needs a policy that trains: choose one, such as policy={such}")
    asked = builder.build(node, "training")
    if not isinstance(asked, Training | Finetuning):
        raise ValueError(f"training: {node['_target_']} does not make a Training")
    own = replace(spec, dtype=asked.recipe.dtype)
    if asked.sequence_tokens > own.max_positions:
        raise ValueError(
            f"training.sequence_tokens={asked.sequence_tokens}: model {own.name} knows "
            f"{own.max_positions} positions"
        )
    number = 1 + max((request.request_id for request in requests), default=-1)
    cache = Path(config["cache"])
    if not isinstance(asked, Finetuning):
        return (_trainee(asked, number, own, cache, ranks),)
    _check_dtype(asked, spec)
    _check_recorded(config, asked)
    seed, replayed = int(config["seed"]), config.get("replayed")
    each = enumerate([job.on(requests, seed) for job in asked.each()], number)
    played = None if replayed is None else Path(str(replayed))
    return tuple([_trainee(job, at, own, cache, ranks, played) for at, job in each])


def _check_recorded(config: Mapping[str, Any], asked: Finetuning) -> None:
    """ValueError where prompts are to be recorded for a job that could use no record."""
    record = (config.get("scheduling") or {}).get("record", "none")
    if record != "none" and asked.learns and not asked.publish:
        raise ValueError(
            f"scheduling.record={record}: prompts are recorded for the job that publishes their "
            "adapter, and this one publishes none; give it training.publish=a0 adapters.count=1, "
            "or take scheduling.record=none"
        )


def _job_for(config: Mapping[str, Any]) -> str:
    """A job that the planner of a configuration lays out."""
    windows = str(planner_of(config).get("_target_")).endswith(".Windows")
    return "training=finetune" if windows else "training=sample"


def _trainee(
    asked: Training | Finetuning,
    number: int,
    own: ModelSpec,
    cache: Path,
    ranks: int,
    replayed: Path | None = None,
) -> Trainee:
    """The job of that number, with its data; `replayed` is the folder of a run played back."""
    units, checkpoint = own.num_layers + 2, None
    if isinstance(asked, Finetuning):
        job = asked.job(number, units, own.name, cache)
        if replayed is not None:
            job = as_learned(job, replayed)
        shape = finetuning_shape(own, job)
    else:
        job = replace(asked.job(number, units, own.name), ranks=ranks)
        checkpoint, shape = asked.checkpoint(), training_shape(own, job)
    batches = asked.batches(job, own.vocab_size, cache)
    if checkpoint is not None:
        checkpoint.check(job, facts_of(job, batches, asdict(own)))
        job = replace(job, begun_steps=checkpoint.step)
    _warn_of_warmup(job)
    if getattr(asked.data, "tokenizer", None) is not None:  # else it was told at the import
        _warn_of_rows(batches.account(), job)
    _warn_of_ids(batches.account(), job, own)
    return Trainee(job, own, shape, batches, asked, checkpoint)


def as_learned(job: TrainingJob, run: Path) -> TrainingJob:
    """A job that learns, with its samples in the order in which they came to it in a run.

    Args:
        job: Any training job; one that does not learn stays as it is.
        run: The folder of a run that it was in.

    Returns:
        A job whose samples are those that it began there, each there when it came.
    """
    if not job.learns:
        return job
    on = {sample.request: sample for sample in job.samples}
    names = ["job_id", "request_id", "released_ns"]
    rows = read_table(run / "samples.parquet", columns=names).to_pylist()
    own = [row for row in rows if row["job_id"] == job.job_id]
    begun = [
        on[row["request_id"]]._replace(release_ns=max(0, row["released_ns"] - job.arrival_ns))
        for row in own
    ]
    return replace(job, samples=tuple(begun), learns=False)


def _check_dtype(asked: Finetuning, spec: ModelSpec) -> None:
    """A finetuning job computes with the weights that are served."""
    if asked.recipe.dtype != spec.dtype:
        raise ValueError(
            f"training.recipe.dtype={asked.recipe.dtype}: finetuning shares the weights of model "
            f"{spec.name}, which are {spec.dtype}; set training.recipe.dtype={spec.dtype}, or "
            "model.dtype to that of the recipe"
        )


def _warn_of_warmup(job: TrainingJob) -> None:
    """Warns where the last step is one of warm-up still, as in a short trial of a long job."""
    if job.has_update and job.recipe.warmup_steps >= job.num_steps:
        log.warning(
            "training.recipe.warmup_steps=%s, and training.num_steps=%s: the learning rate never "
            "comes to %g, it is %g at most; take a shorter warm-up or more steps",
            job.recipe.warmup_steps,
            job.num_steps,
            job.recipe.learning_rate,
            job.recipe.learning_rate_at(job.num_steps - 1, job.num_steps),
        )


def _warn_of_rows(account: Mapping[str, int], job: TrainingJob) -> None:
    for what, count in account.items():
        if what.startswith(ROWS_DROPPED):
            why = what.removeprefix(ROWS_DROPPED)
            log.warning("%s: not trained on, of its rows: %s (%s)", job.dataset, f"{count:,}", why)


def _warn_of_ids(account: Mapping[str, int], job: TrainingJob, own: ModelSpec) -> None:
    if beyond := account.get("tokens_beyond_vocabulary", 0):
        log.warning(
            "%s tokens of %s are beyond the %s that model %s knows: they are taken modulo that",
            f"{beyond:,}",
            job.dataset,
            f"{own.vocab_size:,}",
            own.name,
        )


def planner_of(config: Mapping[str, Any], behind: tuple[Path, ...] = ()) -> Mapping[str, Any]:
    """The config node of the planner.

    A replay has the planner of the run whose plans it plays back, which name its chunks; `behind`
    are the replays on the way there. ValueError where the two would differ.
    """
    own: Mapping[str, Any] = config.get("planner") or {}  # earlier versions' runs have none
    if config.get("replayed") is None:
        return own
    if own.get("_target_") is not None:
        raise ValueError(
            "planner: plans are played back on the chunks of the run that made them; leave it out"
        )
    path = Path(str(config["replayed"])) / "config.yaml"
    if not path.exists():
        return own
    if path in behind:
        raise ValueError(f"{path}: the run plays back itself; give the folder of the run it was of")
    return planner_of(yaml_value(checked_text(path), path) or {}, (*behind, path))


def laid_out(
    config: Mapping[str, Any],
    builder: Builder,
    trainees: Sequence[Trainee],
    capacity_bytes: Mapping[Pool, int],
    cost: Cost,
    policy: Policy,
) -> Layout:
    """What the planner decides for these jobs.

    Raises:
        OutOfMemory: their states do not fit. A remedy is another start, if the planner lays them
            out there and the policy leaves them there.
        ValueError: the planner cannot lay out these jobs whatever the memory.
    """
    if not trainees:
        return Layout()
    shapes = {trainee.job.job_id: trainee.shape for trainee in trainees}
    jobs = [trainee.job for trainee in trainees]

    def prepared(node: Mapping[str, Any]) -> Layout:
        planner: Planner = builder.build(node, "planner")
        try:
            return planner.prepare(shapes, jobs, capacity_bytes, cost)
        except ValueError as error:
            raise ValueError(f"planner: {advised_line(error)}") from error

    node = planner_of(config)
    try:
        found = prepared(node)
        _check_windows(found, jobs)
        return _as_replayed(config, found)
    except OutOfMemory as error:
        tiers = traits_of(policy).states_in
        if (start := _other_start(node, tiers, prepared)) is None:
            raise
        raise error.with_first(STARTING[start]) from None


LAYOUT = "layout.json"  # of a run folder: where states lay, and by which layouts a job went on


def _as_replayed(config: Mapping[str, Any], planned: Layout) -> Layout:
    """The layout of the run whose plans are played back: this one's memory or prices may differ.

    ValueError where the folder holds a layout of other jobs. Runs of earlier versions hold none.
    """
    path = Path(str(config.get("replayed"))) / LAYOUT
    if config.get("replayed") is None or not path.exists():
        return planned
    text = checked_text(path)
    try:
        return decode_layout(json.loads(text), planned)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(
            f"{path} holds no layout of this job ({reason}); play plans back on the model and the "
            "training that they were made for"
        ) from error


def _check_windows(layout: Layout, jobs: Sequence[TrainingJob]) -> None:
    """ValueError where a job that finetunes on samples is laid out for whole microbatches."""
    for job in jobs:
        if job.finetunes and layout.training[job.job_id].windows is None:
            raise ValueError(
                "training=finetune goes through samples in windows of tokens, and this policy "
                "trains whole microbatches: take policy=coserve, coserve_slo or temporal, or "
                "training=random"
            )


def _other_start(
    node: Mapping[str, Any],
    tiers: Collection[Tier],
    prepared: Callable[[Mapping[str, Any]], Layout],
) -> str | None:
    """Where states may begin instead, and fit."""
    if node.get("start") not in STARTS:
        return None
    for start, wanted in STARTS.items():
        if start != node["start"] and wanted <= {*tiers}:
            with suppress(OutOfMemory):
                prepared({**node, "start": start})
                return start
    return None
