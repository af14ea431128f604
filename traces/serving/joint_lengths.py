"""Joint token lengths of prompts and outputs: a small summary of ShareGPT to draw pairs from.

`python -m traces.serving.joint_lengths SHARED/data` writes samples/sharegpt_lengths.json.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
FIRST = "lengths/sharegpt_v3_firstturn_llama2.parquet"
LATER = "sharegpt/sharegpt_v3_sample_dev_tokens.parquet"
MAX_TOTAL_TOKENS = 4096
LEVELS, SHARES = 33, 8


@dataclass(frozen=True)
class JointLengths:
    """Quantiles of prompts, and of outputs within equal shares of the prompts, in tokens.

    `prompt[i]` is the i/(len - 1) quantile. The pairs, ordered by prompt, make len(output) equal
    shares; `output[b][j]` is the j/(len - 1) quantile of the outputs in share b.
    """

    source: str
    prompt: tuple[int, ...]
    output: tuple[tuple[int, ...], ...]

    def draw(self, n: int, rng: np.random.Generator) -> Ints:
        """n pairs [n, 2] by a Latin hypercube, so that even few pairs follow the summary."""
        u_prompt, u_output = _strata(n, rng), _strata(n, rng)
        share = np.minimum((u_prompt * len(self.output)).astype(np.int64), len(self.output) - 1)
        pairs = np.empty((n, 2), dtype=np.int64)
        pairs[:, 0] = _quantile(self.prompt, u_prompt)
        for b, quantiles in enumerate(self.output):
            inside = share == b
            pairs[inside, 1] = _quantile(quantiles, u_output[inside])
        return pairs


def summarise(source: str, prompt: Ints, output: Ints, levels: int, shares: int) -> JointLengths:
    """The joint quantiles of measured pairs; equal prompts keep the order of the source."""
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
    # logarithms: between far quantiles of a heavy tail the density falls roughly as 1/length
    logs = np.log(np.asarray(quantiles, dtype=np.float64))
    drawn = np.exp(np.interp(u, np.linspace(0, 1, len(quantiles)), logs))
    lengths: Ints = np.maximum(np.rint(drawn), 1).astype(np.int64)
    return lengths


def summaries(data: Path) -> dict[str, JointLengths]:
    """The summaries of first and later turns, from the shared data folder."""
    table = pq.read_table(data / FIRST)
    # the table counts one BOS per message; the sample's tokenizer adds none
    prompt, output = (
        table.column(name).to_numpy().astype(np.int64) - 1
        for name in ("prompt_tokens", "output_tokens")
    )
    kept = (prompt > 0) & (output > 0) & (prompt + output <= MAX_TOTAL_TOKENS)
    later = np.asarray(_later_pairs(data / LATER), dtype=np.int64)
    filters = f"without BOS, both > 0, total <= {MAX_TOTAL_TOKENS}"
    return {
        "first_turn": summarise(
            "ShareGPT_V3 first human-gpt pairs, Llama-2 tokens, Nanoflow datasets/traces/"
            f"sharegpt.csv rows 0-49,999 (efeslab/Nanoflow d6b381e, Apache-2.0), {filters}",
            prompt[kept],
            output[kept],
            LEVELS,
            SHARES,
        ),
        "later_turns": summarise(
            "human-gpt pairs after the first of 798 ShareGPT_V3 conversations, Llama-2 tokens, "
            "counted on Marugannwg/ShareGPT92k_user_linguistic_mining (8186064, MIT)",
            later[:, 0],
            later[:, 1],
            LEVELS,
            SHARES,
        ),
    }


def _later_pairs(path: Path) -> list[tuple[int, int]]:
    rows = pq.read_table(path, columns=["conv_id", "role", "tok_llama2"]).to_pylist()
    pairs, seen = [], set()
    for human, gpt in pairwise(rows):
        if human["conv_id"] != gpt["conv_id"] or (human["role"], gpt["role"]) != ("human", "gpt"):
            continue
        if human["conv_id"] in seen and human["tok_llama2"] and gpt["tok_llama2"]:
            pairs.append((human["tok_llama2"], gpt["tok_llama2"]))
        seen.add(human["conv_id"])
    return pairs


def main() -> None:
    """Writes samples/sharegpt_lengths.json from the data folder that the command line names."""
    entries = {name: asdict(summary) for name, summary in summaries(Path(sys.argv[1])).items()}
    path = Path(__file__).parents[1] / "samples" / "sharegpt_lengths.json"
    path.write_text(json.dumps(entries) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
