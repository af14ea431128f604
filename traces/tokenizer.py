"""Tokenizers from local files."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# The template of published Llama 3 tokenizers begins with this token; the raw file may lack it.
KNOWN_BOS = "<|begin_of_text|>"
SAMPLE = Path(__file__).resolve().parent / "samples" / "tokenizer"  # ships with the project


@dataclass(frozen=True)
class LoadedTokenizer:
    """A tokenizer, the hash of its content, and the ids that it puts before every text (BOS)."""

    path: str
    sha256: str
    vocabulary_size: int
    bos_ids: tuple[int, ...]
    backend: Any

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, without BOS, in one parallel batch."""
        encodings = self.backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]


def tokenizer_for(source: Path, path: str | Path | None, bos_token: str | None) -> LoadedTokenizer:
    """The tokenizer for a source of text. Raises ValueError where none is named or it is none."""
    if path is None:
        raise ValueError(
            f"{source} holds text: name a tokenizer; `tandem trace import --tokenizer PATH` or, in "
            f"a run, trace=sharegpt trace.tokenizer=PATH (without one of your own: {SAMPLE})"
        )
    return load_tokenizer(path, bos_token)


def load_tokenizer(path: str | Path, bos_token: str | None = None) -> LoadedTokenizer:
    """Loads a tokenizer from local files; the network is never asked.

    Args:
        path: tokenizer.json, tokenizer.json.gz, a folder with either, or an AutoTokenizer folder.
        bos_token: None takes the tokenizer's own (Llama 3's where its template is missing), ""
            none; any other token must be in the vocabulary.

    Returns:
        The tokenizer, without truncation and padding.

    Raises:
        ValueError: There is no tokenizer at the path, or its vocabulary lacks `bos_token`.
    """
    path = Path(path)
    text = _content(path)
    backend = _from_text(path, text) if text is not None else _from_auto(path)
    backend.no_truncation()
    backend.no_padding()
    return LoadedTokenizer(
        path=str(path),
        sha256=hashlib.sha256((text or backend.to_str()).encode()).hexdigest(),
        vocabulary_size=backend.get_vocab_size(),
        bos_ids=_bos_ids(path, backend, bos_token),
        backend=backend,
    )


def described(tokenizer: LoadedTokenizer) -> dict[str, Any]:
    """The entry of a tokenizer in a sidecar."""
    return {
        "path": tokenizer.path,
        "sha256": tokenizer.sha256,
        "vocabulary_size": tokenizer.vocabulary_size,
        "bos_ids": list(tokenizer.bos_ids),
    }


def _content(path: Path) -> str | None:
    if not path.exists():
        raise ValueError(f"{path}: no such tokenizer; give a folder with tokenizer.json")
    candidates = (path / "tokenizer.json", path / "tokenizer.json.gz") if path.is_dir() else (path,)
    for file in candidates:
        if file.is_file():
            raw = file.read_bytes()
            try:
                return (gzip.decompress(raw) if file.suffix == ".gz" else raw).decode("utf-8")
            except (OSError, EOFError, UnicodeDecodeError) as error:
                raise ValueError(f"{file}: not a readable tokenizer file ({error})") from error
    return None


def _from_text(path: Path, text: str) -> Any:
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_str(text)
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"{path}: not a tokenizer.json ({error})") from error


def _from_auto(path: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(path, local_files_only=True, use_fast=True)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"{path}: AutoTokenizer cannot read it ({reason})") from error
    backend = getattr(loaded, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(f"{path}: only a slow tokenizer; convert it to tokenizer.json first")
    return backend


def _bos_ids(path: Path, backend: Any, bos_token: str | None) -> tuple[int, ...]:
    if bos_token is None:
        own = tuple(backend.encode("").ids)
        bos = backend.token_to_id(KNOWN_BOS)
        return own or (() if bos is None else (bos,))
    if bos_token == "":
        return ()
    bos = backend.token_to_id(bos_token)
    if bos is None:
        raise ValueError(f"{path}: bos_token {bos_token!r} is not in its vocabulary")
    return (bos,)
