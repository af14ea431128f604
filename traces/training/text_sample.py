"""The project's own text to train on: seeded pseudo-text of the words of traces.serving.sample.

`python -m traces.training.text_sample` writes samples/text_sample.* again, with equal text each
time. Some rows have no usable text, as in real files; every import must count them.
"""

from __future__ import annotations

import json
import os
from typing import Any

import numpy as np

from traces.serving.sample import SAMPLES, SEED, Writer

DOCUMENTS = 200
MEDIAN_TOKENS, SIGMA = 110.0, 0.8  # of a log-normal, as lengths of web pages roughly are
LONGEST_TOKENS = 1500

Row = dict[str, Any]


def rows(seed: int = SEED, documents: int = DOCUMENTS) -> list[Row]:
    """Rows with a title and a text; some without, or with an empty one."""
    # the seed of the conversations: the sample's tokenizer knows their words
    writer = Writer(np.random.default_rng(seed))
    lengths = writer.rng.lognormal(np.log(MEDIAN_TOKENS), SIGMA, documents)
    sizes = np.clip(lengths, 2, LONGEST_TOKENS).astype(int).tolist()
    found: list[Row] = [{"title": writer.text(3), "text": writer.text(size)} for size in sizes]
    found += [{"title": writer.text(2), "text": writer.foreign(size)} for size in (20, 40, 60)]
    found += [{"title": "", "text": ""}, {"title": "", "text": " \n"}, {"title": writer.text(4)}]
    found += [{"title": writer.text(1), "text": None}]
    return [found[at] for at in writer.rng.permutation(len(found))]


def sample_bytes(found: list[Row]) -> bytes:
    """The file: a JSON object per line, UTF-8 as it is."""
    lines = (json.dumps(row, ensure_ascii=False, separators=(",", ":")) for row in found)
    return "".join(f"{line}\n" for line in lines).encode()


def main() -> None:
    """Writes the sample and the documents imported from it."""
    from traces.importing import import_trace

    source = SAMPLES / "text_sample.jsonl"
    source.write_bytes(sample_bytes(rows()))
    os.chdir(SAMPLES)  # the sidecar names its source by a path that is valid on every machine
    print(import_trace(source.name, "text_sample.parquet", kind="text", tokenizer="tokenizer"))


if __name__ == "__main__":
    main()
