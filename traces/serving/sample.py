"""The project's own ShareGPT-shaped sample: seeded pseudo-text with ShareGPT's token lengths.

`python -m traces.serving.sample` writes traces/samples again, the same bytes each time. No word of
it is anybody's: the words are made of random syllables. Only the lengths are taken from ShareGPT,
through the quantiles in sharegpt_lengths.json.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from traces.serving.joint_lengths import JointLengths, read_joint_lengths

MAX_VOCABULARY = 2048  # the sample has fewer merges to learn than this
END_OF_TEXT = "<|endoftext|>"


def train(told: list[dict[str, Any]]) -> str:
    """tokenizer.json as text: a byte-level BPE in which every word of the sample is one token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    # a space before the first word too, so that a word has one spelling wherever it stands
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=MAX_VOCABULARY,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = (message["value"] for c in told for message in c["conversations"])
    tokenizer.train_from_iterator(texts, trainer)
    text: str = tokenizer.to_str(pretty=False)
    return text + "\n"


SAMPLES = Path(__file__).parents[1] / "samples"
SEED = 20261121
REGULAR = 280
# share of conversations with 1, 2, ... human-gpt pairs; shallower than the 3.5 pairs a chunk of
# ShareGPT has, to keep the file small
PAIRS = (0.45, 0.27, 0.15, 0.08, 0.05)
CONSONANTS, VOWELS = "bcdfghjklmnpqrstvwyz", "aeiou"
FOREIGN = tuple("éüñçøßжюλπ中文語日本한글🙂🚀")
NUM_WORDS = 700
PUNCTUATION_SHARE = 0.1

Conversation = dict[str, Any]


class Writer:
    """Writes pseudo-text of an exact number of words and marks; each is one token of ours."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self.words = _words(rng)
        # Zipf's law with exponent 1, as in natural text
        weights = 1.0 / np.arange(1, NUM_WORDS + 1)
        self.cumulative = np.cumsum(weights / weights.sum())

    def text(self, num_tokens: int) -> str:
        """Words with commas and full stops; `num_tokens` counts both."""
        ranks = np.searchsorted(self.cumulative, self.rng.random(num_tokens) * self.cumulative[-1])
        marks = self.rng.random(num_tokens)
        pieces: list[str] = []
        after_mark = True
        for rank, mark in zip(ranks, marks, strict=True):
            is_mark = not after_mark and mark < PUNCTUATION_SHARE
            if is_mark:
                pieces.append("," if mark < PUNCTUATION_SHARE / 2 else ".")
            else:
                pieces.append((" " if pieces else "") + self.words[rank])
            after_mark = is_mark
        return "".join(pieces)

    def foreign(self, num_words: int) -> str:
        """The same with letters beyond ASCII, which our tokenizer spells in bytes."""
        picks = self.rng.integers(len(FOREIGN), size=num_words)
        words = self.text(num_words).split(" ")
        return " ".join(w + FOREIGN[p] for w, p in zip(words, picks, strict=False))


def conversations(seed: int = SEED, regular: int = REGULAR) -> list[Conversation]:
    """The sample in ShareGPT's layout: regular conversations with awkward ones among them."""
    rng = np.random.default_rng(seed)
    writer = Writer(rng)
    lengths = read_joint_lengths(SAMPLES / "sharegpt_lengths.json")
    told = [*_regular(writer, lengths, regular), *_awkward(writer)]
    order = rng.permutation(len(told))
    return [{"id": f"sample_{i:04d}", "conversations": told[at]} for i, at in enumerate(order)]


def sample_bytes(told: list[Conversation]) -> bytes:
    """The file: one conversation per line inside one JSON list, UTF-8 as it is."""
    lines = ",\n".join(json.dumps(c, ensure_ascii=False, separators=(",", ":")) for c in told)
    return f"[\n{lines}\n]\n".encode()


def _regular(
    writer: Writer, lengths: dict[str, JointLengths], count: int
) -> list[list[dict[str, str]]]:
    rng = writer.rng
    depths = 1 + np.searchsorted(np.cumsum(PAIRS), rng.random(count) * sum(PAIRS))
    first = lengths["first_turn"].draw(count, rng)
    later = iter(lengths["later_turns"].draw(int((depths - 1).sum()), rng))
    told = []
    for depth, pair in zip(depths, first, strict=True):
        pairs = [pair, *(next(later) for _ in range(depth - 1))]
        told.append([m for prompt, output in pairs for m in _pair(writer, prompt, output)])
    return told


def _pair(writer: Writer, prompt_tokens: int, output_tokens: int) -> list[dict[str, str]]:
    return [_said("human", writer.text(prompt_tokens)), _said("gpt", writer.text(output_tokens))]


def _awkward(writer: Writer) -> list[list[dict[str, str]]]:
    """What real files also hold: every reader must count these, and none may stop it."""
    human, answer = _pair(writer, 40, 120)
    starts_with_gpt = [[answer, *_pair(writer, 20 + i, 90)] for i in range(8)]
    one_message = [[_said("human", writer.text(12 + i))] for i in range(3)]
    empty = [[human, _said("gpt", "")], [_said("human", ""), answer], [human, answer, human]]
    foreign = [
        [_said("human", writer.foreign(10 + i)), _said("gpt", writer.foreign(60 + i))]
        for i in range(4)
    ]
    with_system = [[_said("system", writer.text(9)), human, answer], []]
    return [*starts_with_gpt, *one_message, *empty, *foreign, *with_system]


def _said(role: str, text: str) -> dict[str, str]:
    return {"from": role, "value": text}


def _words(rng: np.random.Generator) -> list[str]:
    """Distinct made-up words, the frequent ones short: 1, 2, then 3 syllables."""
    words: dict[str, None] = {}
    while len(words) < NUM_WORDS:
        syllables = 1 if len(words) < 40 else 2 if len(words) < 250 else 3
        letters = [
            alphabet[rng.integers(len(alphabet))]
            for _ in range(syllables)
            for alphabet in (CONSONANTS, VOWELS)
        ]
        words["".join(letters)] = None
    return list(words)


def main() -> None:
    """Writes the sample, its tokenizer and the trace imported from it."""
    from traces.importing import import_trace

    pass

    told = conversations()
    source = SAMPLES / "sharegpt_sample.json"
    source.write_bytes(sample_bytes(told))
    folder = SAMPLES / "tokenizer"
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(train(told), encoding="utf-8")
    os.chdir(SAMPLES)  # the sidecar then names its source by a path that holds on every machine
    print(import_trace(source.name, "sharegpt_sample.parquet", tokenizer=folder.name))


if __name__ == "__main__":
    main()
