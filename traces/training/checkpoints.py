"""Checkpoints of training jobs on disk: where they lie, what job they are of, which are whole."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from traces.files import checked_bytes, checked_text, is_sealed
from traces.serving.request import TrainingJob
from traces.training.batches import Batches

FOLDER = "checkpoints"  # in the folder of a run
ABOUT = "checkpoint.json"
WEIGHTS, OPTIMIZER, DRAWS = "weights.safetensors", "optimizer.safetensors", "draws.safetensors"
FILES = (ABOUT, WEIGHTS, OPTIMIZER, DRAWS)
RUNNING = ".running"  # what the folder of a run bears until it has ended

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that is whole.

    Attributes:
        folder: Where its files lie.
        step: Steps that were done.
        facts: Of the job, see `facts_of`.
        num_steps: Steps that the job was to do.
    """

    folder: Path
    step: int
    facts: Mapping[str, Any]
    num_steps: int

    def check(self, job: TrainingJob, asked: Mapping[str, Any]) -> None:
        """Raises a ValueError of one line where a job differs from the one that was saved.

        Args:
            job: The job that would go on.
            asked: Its facts. Of those that an earlier version did not save nothing is known.
        """
        for name, other in self.facts.items():
            own = asked.get(name)
            if own != other:
                raise ValueError(
                    f"training.resume: {self.folder} is of a job with {name}={other}, and this one "
                    f"has {own}; resume with the settings that it was saved with"
                )
        if job.num_steps != self.num_steps and job.recipe.schedule != "constant":
            log.warning(
                "training.resume: the learning rate follows the number of steps, which was %s and "
                "is %s: losses are not those of a job that had as many from its beginning",
                self.num_steps,
                job.num_steps,
            )
        if self.step >= job.num_steps:
            raise ValueError(
                f"training.resume: {self.folder} has all {self.step} steps of the job; give more "
                f"with training.num_steps, which is {job.num_steps}"
            )


def facts_of(job: TrainingJob, batches: Batches, model: Mapping[str, Any]) -> dict[str, Any]:
    """What two jobs must have in common for one to go on where the other was.

    Args:
        job: A training job.
        batches: Its data, of which the first microbatch is looked at.
        model: Numbers of its model, by name.

    Returns:
        Plain values by name. The number of steps is not among them.
    """
    names = ("num_units", "sequence_tokens", "sequences", "microbatches", "model", "dataset")
    found = {name: getattr(job, name) for name in names}
    recipe = {name: _plain(value) for name, value in asdict(job.recipe).items()}
    found |= {f"recipe.{name}": value for name, value in recipe.items()}
    found |= {f"model.{name}": value for name, value in model.items()}
    ids = sha256(np.ascontiguousarray(batches.ids(0)).tobytes()).hexdigest()
    return {**found, "ids of its first microbatch": ids[:16]}


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def step_folder(root: Path, step: int) -> Path:
    """The folder of a checkpoint in the folder of all of a run.

    Args:
        root: The folder of all.
        step: Steps that are done.

    Returns:
        A path whose order by name is that of steps.
    """
    return root / f"step-{step:08d}"


def read_checkpoint(folder: Path) -> Checkpoint:
    """Reads what a checkpoint says of itself, and checks that all its files are whole.

    Args:
        folder: Of one checkpoint.

    Returns:
        The checkpoint.

    Raises:
        ValueError: A file is missing, cut off or changed; one line.
    """
    missing = [name for name in FILES if not (folder / name).is_file()]
    if missing or not is_sealed(folder):
        raise ValueError(f"{folder}: no whole checkpoint, {', '.join(missing) or 'hashes'} missing")
    about = json.loads(checked_text(folder / ABOUT))
    for name in (WEIGHTS, OPTIMIZER, DRAWS):
        size, known = (folder / name).stat().st_size, about["bytes"][name]
        if size != known:
            raise ValueError(f"{folder / name}: {size:,} bytes of {known:,}: it was cut off")
        checked_bytes(folder / name)
    return Checkpoint(folder, about["step"], about["facts"], about["num_steps"])


def newest_checkpoint(path: Path) -> Checkpoint:
    """The newest whole checkpoint of a run.

    Args:
        path: The folder of a run, also of one that was killed, of its checkpoints, or of one.

    Returns:
        The checkpoint. The log warns of later ones that are not whole.

    Raises:
        ValueError: There is none; one line.
    """
    if (path / ABOUT).is_file():
        return read_checkpoint(path)
    for folder in _saved(path):
        try:
            return read_checkpoint(folder)
        except ValueError as error:
            log.warning("%s; the checkpoint before it is taken", error)
    raise ValueError(
        f"training.resume={path}: no whole checkpoint there; give the folder of a run that had "
        "training.checkpoint_every, and came to its first one"
    )


def _saved(path: Path) -> Iterator[Path]:
    """The folders of all checkpoints of a run, the latest first."""
    running = path.with_name(f"{path.name}{RUNNING}")
    roots = (path / FOLDER, running / FOLDER, path)
    root = next((root for root in roots if root.is_dir()), path)
    if root.is_dir():
        yield from sorted(root.glob("step-*"), reverse=True)
