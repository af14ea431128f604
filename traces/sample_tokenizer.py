"""A small byte-level BPE tokenizer of our own, trained on the sample."""

from __future__ import annotations

from typing import Any

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
