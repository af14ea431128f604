"""The project's own ShareGPT-shaped sample: seeded pseudo-text with ShareGPT's token lengths.

`python -m traces.serving.sample` writes traces/samples again, with equal bytes each time. The words
are made of random syllables, so no text is copied. Only the lengths come from ShareGPT, through the
quantiles in sharegpt_lengths.json.
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
SAMPLES = Path(__file__).parents[1] / "samples"
SEED = 20261121
REGULAR = 280
# share of conversations with 1, 2, ... human-gpt pairs; fewer than the 3.5 pairs of an entry of
# ShareGPT, to keep the file small
PAIRS = (0.45, 0.27, 0.15, 0.08, 0.05)
CONSONANTS, VOWELS = "bcdfghjklmnpqrstvwyz", "aeiou"
FOREIGN = tuple("éüñçøßжюλπ中文語日本한글🙂🚀")
NUM_WORDS = 700
PUNCTUATION_SHARE = 0.1

Conversation = dict[str, Any]


class Writer:
    """Writes pseudo-text of an exact number of words and marks, each one token of the sample's."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self.vocabulary = _vocabulary(rng)
        # Zipf's law with exponent 1, as in natural text
        weights = 1.0 / np.arange(1, NUM_WORDS + 1)
        self.cumulative = np.cumsum(weights / weights.sum())

    def text(self, num_tokens: int) -> str:
        """Words with commas and full stops; `num_tokens` counts words and marks."""
        ranks = np.searchsorted(self.cumulative, self.rng.random(num_tokens) * self.cumulative[-1])
        marks = self.rng.random(num_tokens)
        pieces: list[str] = []
        after_mark = True
        for rank, mark in zip(ranks, marks, strict=True):
            is_mark = not after_mark and mark < PUNCTUATION_SHARE
            if is_mark:
                pieces.append("," if mark < PUNCTUATION_SHARE / 2 else ".")
            else:
                pieces.append((" " if pieces else "") + self.vocabulary[rank])
            after_mark = is_mark
        return "".join(pieces)

    def foreign(self, num_words: int) -> str:
        """Text with letters beyond ASCII, which the sample's tokenizer spells in bytes."""
        picks = self.rng.integers(len(FOREIGN), size=num_words)
        words = self.text(num_words).split(" ")
        return " ".join(w + FOREIGN[p] for w, p in zip(words, picks, strict=False))


def conversations(seed: int = SEED, regular: int = REGULAR) -> list[Conversation]:
    """The sample in ShareGPT's layout: regular conversations with awkward ones among them."""
    rng = np.random.default_rng(seed)
    writer = Writer(rng)
    lengths = read_joint_lengths(SAMPLES / "sharegpt_lengths.json")
    talks = [*_regular(writer, lengths, regular), *_awkward(writer)]
    order = rng.permutation(len(talks))
    return [{"id": f"sample_{i:04d}", "conversations": talks[at]} for i, at in enumerate(order)]


def sample_bytes(talks: list[Conversation]) -> bytes:
    """The file: one conversation per line inside one JSON list, UTF-8 as it is."""
    lines = ",\n".join(json.dumps(c, ensure_ascii=False, separators=(",", ":")) for c in talks)
    return f"[\n{lines}\n]\n".encode()


def train(talks: list[Conversation]) -> str:
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
    texts = (message["value"] for talk in talks for message in talk["conversations"])
    tokenizer.train_from_iterator(texts, trainer)
    text: str = tokenizer.to_str(pretty=False)
    return text + "\n"


def _regular(
    writer: Writer, lengths: dict[str, JointLengths], count: int
) -> list[list[dict[str, str]]]:
    rng = writer.rng
    depths = 1 + np.searchsorted(np.cumsum(PAIRS), rng.random(count) * sum(PAIRS))
    first = lengths["first_turn"].draw(count, rng)
    later = iter(lengths["later_turns"].draw(int((depths - 1).sum()), rng))
    talks = []
    for depth, pair in zip(depths, first, strict=True):
        pairs = [pair, *(next(later) for _ in range(depth - 1))]
        talks.append([m for prompt, output in pairs for m in _pair(writer, prompt, output)])
    return talks


def _pair(writer: Writer, prompt_tokens: int, output_tokens: int) -> list[dict[str, str]]:
    return [_said("human", writer.text(prompt_tokens)), _said("gpt", writer.text(output_tokens))]


def _awkward(writer: Writer) -> list[list[dict[str, str]]]:
    """Conversations as in real files that a reader must count and that must not stop it."""
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


def _vocabulary(rng: np.random.Generator) -> list[str]:
    """Distinct random words; frequent ones are short: 1, 2, then 3 syllables."""
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

    talks = conversations()
    source = SAMPLES / "sharegpt_sample.json"
    source.write_bytes(sample_bytes(talks))
    folder = SAMPLES / "tokenizer"
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(train(talks), encoding="utf-8")
    os.chdir(SAMPLES)  # the sidecar names its source by a path that is valid on every machine
    print(import_trace(source.name, "sharegpt_sample.parquet", tokenizer=folder.name))


if __name__ == "__main__":
    main()
