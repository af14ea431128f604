"""Checkpoints of a training job: states by the model's names, written whole and read again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from traces.files import seal, write_text
from traces.training.checkpoints import (
    ABOUT,
    DRAWS,
    FILES,
    OPTIMIZER,
    WEIGHTS,
    step_folder,
)

DRAWN = "state"  # of the generator of dropout


@dataclass(frozen=True)
class SavedStates:
    """The states of a job between two steps, on the CPU.

    Chunks are not told: a checkpoint goes on under any policy.

    Attributes:
        weights: Flat, by the number of the parameter in model.parameters().
        sections: Optimizer states by parameter: float32 masters of 16-bit weights, then moments.
        draws: The state of the generator that dropout draws from.
    """

    weights: Mapping[int, Tensor]
    sections: Mapping[int, Sequence[Tensor]]
    draws: Tensor


@dataclass(frozen=True)
class CheckpointWriter:
    """Writes checkpoints of a job into a folder, and keeps the newest ones.

    Args:
        root: The folder of all checkpoints.
        every: Steps from one to the next.
        facts: Of the job, see traces.training.checkpoints.
        num_steps: Steps that it is to do.
        kept: How many stay.
    """

    root: Path
    every: int
    facts: Mapping[str, Any]
    num_steps: int
    kept: int = 2

    def is_due(self, step: int) -> bool:
        """Whether a checkpoint follows so many steps.

        Args:
            step: Steps that are done.

        Returns:
            True behind each `every`-th.
        """
        return step % self.every == 0

    def write(self, step: int, states: SavedStates) -> None:
        """Writes a checkpoint, whole or not at all, and removes those that are too many.

        Args:
            step: Steps that are done.
            states: What to write.

        Raises:
            OSError: The disk is full; the checkpoints before stay.
        """
        folder = step_folder(self.root, step)
        aside = folder.with_name(f".{folder.name}.tmp")
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        sections = {f"{p}.{i}": part for p, own in states.sections.items()
                    for i, part in enumerate(own)}  # fmt: skip
        save_file({str(p): part for p, part in states.weights.items()}, aside / WEIGHTS)
        save_file(sections, aside / OPTIMIZER)
        save_file({DRAWN: states.draws}, aside / DRAWS)
        sizes = {name: (aside / name).stat().st_size for name in (WEIGHTS, OPTIMIZER, DRAWS)}
        about = {"step": step, "num_steps": self.num_steps, "bytes": sizes}
        about["facts"] = dict(self.facts)
        write_text(aside / ABOUT, json.dumps(about, indent=1) + "\n")
        seal(aside, *FILES)
        shutil.rmtree(folder, ignore_errors=True)
        aside.rename(folder)
        for over in sorted(self.root.glob("step-*"))[: -self.kept]:
            shutil.rmtree(over)


def saved_states(folder: Path) -> SavedStates:
    """Reads the states of a checkpoint that was found whole, see traces.training.checkpoints.

    Args:
        folder: Of that checkpoint.

    Returns:
        Its states.
    """
    weights = {int(name): part for name, part in load_file(folder / WEIGHTS).items()}
    sections = dict[int, list[Tensor]]()
    found = load_file(folder / OPTIMIZER)
    for name in sorted(found, key=_section):
        sections.setdefault(_section(name)[0], []).append(found[name])
    return SavedStates(weights, sections, load_file(folder / DRAWS)[DRAWN])


def _section(name: str) -> tuple[int, int]:
    parameter, _, section = name.partition(".")
    return int(parameter), int(section)
