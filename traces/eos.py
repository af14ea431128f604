"""The token that ends a document."""

from __future__ import annotations

import json
from pathlib import Path

from traces.tokenizer import LoadedTokenizer

KNOWN_EOS = ("<|endoftext|>", "</s>", "<|end_of_text|>")  # GPT-2 and Qwen; Llama 2, OPT; Llama 3


def eos_of(tokenizer: LoadedTokenizer, eos_token: str | None = None) -> tuple[str, int]:
    """The end-of-sequence token and its id.

    None asks the tokenizer_config.json in the tokenizer's folder, then takes the one known name
    among the special tokens, or else in the vocabulary. ValueError where there is none, or more.
    """
    wanted = _configured(Path(tokenizer.path)) if eos_token is None else eos_token
    names = KNOWN_EOS if wanted is None else (wanted,)
    found = [(name, tokenizer.backend.token_to_id(name)) for name in names]
    found = [(name, token) for name, token in found if token is not None]
    if len(found) > 1:  # Qwen's vocabulary has </s> as a piece of text
        special = {t.content for t in tokenizer.backend.get_added_tokens_decoder().values()}
        found = [entry for entry in found if entry[0] in special] or found
    if len(found) == 1:
        return found[0]
    if wanted is not None:
        raise ValueError(f"{tokenizer.path}: eos_token {wanted!r} is not in its vocabulary")
    several = " or ".join(name for name, _ in found) or "no end-of-sequence token that is known"
    raise ValueError(f"{tokenizer.path}: it has {several}; name one with eos_token")


def _configured(path: Path) -> str | None:
    file = path / "tokenizer_config.json"
    if not file.is_file():
        return None
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file}: not JSON ({error}); name the token with eos_token") from error
    token = config.get("eos_token") if isinstance(config, dict) else None
    if isinstance(token, dict):  # with its properties
        token = token.get("content")
    return token if isinstance(token, str) else None
