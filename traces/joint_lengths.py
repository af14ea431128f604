"""How long prompts and answers are together: a small summary to draw token lengths from."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class JointLengths:
    """Quantiles of the prompt, and of the output within equal shares of the prompts, in tokens.

    `prompt[i]` is the i/(len - 1) quantile; `output[b][j]` the j/(len - 1) quantile of the output
    over the b-th of len(output) equal shares of the pairs ordered by prompt.
    """

    source: str
    prompt: tuple[int, ...]
    output: tuple[tuple[int, ...], ...]

    def draw(self, n: int, rng: np.random.Generator) -> Ints:
        """n pairs, [n, 2]: a Latin hypercube, so that few pairs follow the summary closely."""
        u_prompt, u_output = _strata(n, rng), _strata(n, rng)
        share = np.minimum((u_prompt * len(self.output)).astype(np.int64), len(self.output) - 1)
        pairs = np.empty((n, 2), dtype=np.int64)
        pairs[:, 0] = _quantile(self.prompt, u_prompt)
        for b, quantiles in enumerate(self.output):
            inside = share == b
            pairs[inside, 1] = _quantile(quantiles, u_output[inside])
        return pairs


def summarise(source: str, prompt: Ints, output: Ints, levels: int, shares: int) -> JointLengths:
    """The joint quantiles of measured pairs; ties in the prompt keep their order in the source."""
    at = np.linspace(0, 1, levels)
    by_prompt = np.array_split(output[np.argsort(prompt, kind="stable")], shares)
    return JointLengths(
        source,
        tuple(int(q) for q in np.rint(np.quantile(prompt, at))),
        tuple(tuple(int(q) for q in np.rint(np.quantile(part, at))) for part in by_prompt),
    )


def read_joint_lengths(path: Path) -> dict[str, JointLengths]:
    """The named summaries of a file."""
    read = json.loads(path.read_text(encoding="utf-8"))
    return {
        name: JointLengths(
            entry["source"], tuple(entry["prompt"]), tuple(map(tuple, entry["output"]))
        )
        for name, entry in read.items()
    }


def _strata(n: int, rng: np.random.Generator) -> Floats:
    u: Floats = (rng.permutation(n) + rng.random(n)) / max(n, 1)
    return u


def _quantile(quantiles: tuple[int, ...], u: Floats) -> Ints:
    # logarithms: between two far quantiles of a heavy tail the density falls roughly as 1/length
    logs = np.log(np.asarray(quantiles, dtype=np.float64))
    drawn = np.exp(np.interp(u, np.linspace(0, 1, len(quantiles)), logs))
    lengths: Ints = np.maximum(np.rint(drawn), 1).astype(np.int64)
    return lengths
