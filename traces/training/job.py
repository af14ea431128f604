"""A training job as conf/training names it: shape, recipe and tokens."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Protocol

from traces.files import absent
from traces.import_cache import cached_import
from traces.serving.recorded_times import UNITS_NS
from traces.serving.request import TrainingJob
from traces.store import read_sidecar, sidecar_path
from traces.training.batches import Batches, PackedBatches, RandomBatches, pack
from traces.training.checkpoints import Checkpoint, newest_checkpoint
from traces.training.recipe import Recipe
from traces.training.text_store import read_documents


class Data(Protocol):
    """The source of the tokens of a training job."""

    @property
    def name(self) -> str:
        """The name of the source in results."""
        ...

    def batches(self, job: TrainingJob, vocabulary: int, cache: Path) -> Batches:
        """The microbatches of a job; `cache` is the folder of imported text."""
        ...


@dataclass(frozen=True, kw_only=True)
class RandomTokens:
    """Tokens drawn by the recipe's seed."""

    @property
    def name(self) -> str:
        """The name in results."""
        return "random"

    def batches(self, job: TrainingJob, vocabulary: int, cache: Path) -> RandomBatches:
        """Ids below `vocabulary`; the cache is not used."""
        return RandomBatches(job.sequence_tokens, job.sequences, vocabulary, job.recipe.seed)


@dataclass(frozen=True, kw_only=True)
class Text:
    """Text in a local file: tokenised already (no `tokenizer`), or imported once into the cache.

    All fields but `path` are options of `tandem trace import --kind text` (traces.import_options).
    """

    path: str
    tokenizer: str | None = None
    text_field: str = "text"
    sample_by: str = "line"
    bos_token: str | None = None
    eos_token: str | None = None
    limit: int | None = None

    @property
    def name(self) -> str:
        """The name of the file."""
        return Path(self.path).name

    def batches(self, job: TrainingJob, vocabulary: int, cache: Path) -> PackedBatches:
        """Documents joined, cut into sequences and shuffled by the recipe's seed."""
        tokens, _ = read_documents(file := self.file(cache))
        blocks = pack(tokens, job.sequence_tokens)
        rest_tokens, dropped = len(tokens) - blocks.size, read_sidecar(file)["rows_dropped"]
        seed = job.recipe.seed
        return PackedBatches(blocks, job.sequences, vocabulary, seed, rest_tokens, dropped)

    def file(self, cache: Path) -> Path:
        """The tokenised text: the file itself, or its import in the cache."""
        path = Path(self.path).expanduser()
        options = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "path"}
        if self.tokenizer is None:
            self._check_is_tokenised(path)
            return path
        if not path.is_file():
            raise ValueError(f"training.data.path={path}: {absent(path)}")
        return cached_import(path, {"kind": "text", **options}, cache)

    def _check_is_tokenised(self, path: Path) -> None:
        if self != Text(path=self.path) or (path.is_file() and not sidecar_path(path).is_file()):
            raise ValueError(
                f"training.data.path={path}: to import text, name its tokenizer with "
                "training.data.tokenizer"
            )


@dataclass(frozen=True, kw_only=True)
class TrainingWork:
    """What every training job has without its model, as a configuration describes it.

    An update follows `microbatches` microbatches, whose sequences have at most `sequence_tokens`.
    `tenant` names whose job it is. Where it is really trained, with `save_model` the run keeps what
    it has trained.
    """

    recipe: Recipe
    sequence_tokens: int
    microbatches: int = 1
    arrival_s: float = 0.0
    tenant: str = ""
    save_model: bool = False

    @property
    def arrival_ns(self) -> int:
        """When the job arrives, on the clock of the run."""
        return round(self.arrival_s * UNITS_NS["s"])


@dataclass(frozen=True, kw_only=True)
class Training(TrainingWork):
    """A job whose microbatches are `sequences` sequences of `sequence_tokens` each.

    Where it is really trained, a checkpoint follows each `checkpoint_every`-th step (0: none), of
    which `checkpoints_kept` stay. `resume` is the folder of a run, or of a checkpoint, behind which
    the job goes on.
    """

    data: Data
    sequences: int = 1
    num_steps: int = 1
    has_update: bool = True
    checkpoint_every: int = 0
    checkpoints_kept: int = 2
    resume: str | None = None

    def __post_init__(self) -> None:
        if self.checkpoint_every < 0 or self.checkpoints_kept < 1:
            raise ValueError(
                f"training: checkpoint_every={self.checkpoint_every} must be at least 0, and "
                f"checkpoints_kept={self.checkpoints_kept} at least 1"
            )
        if (self.checkpoint_every or self.resume) and not self.has_update:
            raise ValueError(
                "training.has_update=false: no step changes a weight, so there is nothing to save "
                "or to resume; leave out checkpoint_every and resume"
            )

    def checkpoint(self) -> Checkpoint | None:
        """The newest whole checkpoint of what is resumed; None where the job begins anew.

        Raises:
            ValueError: There is none; one line.
        """
        return None if self.resume is None else newest_checkpoint(Path(self.resume))

    def job(self, job_id: int, num_units: int, model: str = "") -> TrainingJob:
        """The job for a model of `num_units` units. Raises a ValueError of one line."""
        return TrainingJob(
            job_id,
            self.arrival_ns,
            num_units,
            self.sequence_tokens,
            self.sequences,
            self.num_steps,
            self.microbatches,
            self.has_update,
            model,
            self.data.name,
            self.recipe,
            tenant=self.tenant,
        )

    def batches(self, job: TrainingJob, vocabulary: int, cache: Path) -> Batches:
        """The tokens of the job's microbatches, all below `vocabulary`."""
        return self.data.batches(job, vocabulary, cache)
