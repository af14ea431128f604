"""Where the sample's length summary comes from: ShareGPT's token lengths, as joint quantiles."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from traces.joint_lengths import JointLengths, summarise

FIRST = "lengths/sharegpt_v3_firstturn_llama2.parquet"
LATER = "sharegpt/sharegpt_v3_sample_dev_tokens.parquet"
MAX_TOTAL_TOKENS = 4096
LEVELS, SHARES = 33, 8


def summaries(data: Path) -> dict[str, JointLengths]:
    """The two summaries, from the shared data folder."""
    table = pq.read_table(data / FIRST)
    # the table counts one BOS per message; the sample's tokenizer adds none
    prompt, output = (
        table.column(name).to_numpy().astype(np.int64) - 1
        for name in ("prompt_tokens", "output_tokens")
    )
    kept = (prompt > 0) & (output > 0) & (prompt + output <= MAX_TOTAL_TOKENS)
    later = np.asarray(_later_pairs(data / LATER), dtype=np.int64)
    lineage = f"without BOS, both > 0, total <= {MAX_TOTAL_TOKENS}"
    return {
        "first_turn": summarise(
            "ShareGPT_V3 first human-gpt pairs, Llama-2 tokens, Nanoflow datasets/traces/"
            f"sharegpt.csv rows 0-49,999 (efeslab/Nanoflow d6b381e, Apache-2.0), {lineage}",
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
    """`python -m traces.sample_lengths SHARED/data` writes samples/sharegpt_lengths.json again."""
    entries = {name: asdict(summary) for name, summary in summaries(Path(sys.argv[1])).items()}
    path = Path(__file__).parent / "samples" / "sharegpt_lengths.json"
    path.write_text(json.dumps(entries) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
