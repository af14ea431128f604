"""What `tandem trace import --kind text` does: text to tokenised documents."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from traces.eos import eos_of
from traces.figures import spread
from traces.options import Options
from traces.store import read_sidecar, sha256_of
from traces.text_store import read_documents, write_documents
from traces.texts import Texts, read_texts
from traces.tokenizer import LoadedTokenizer, described, tokenizer_for

BATCH = 1000  # documents that are tokenised together


def import_text(source: Path, out: Path, options: Options) -> dict[str, Any]:
    """Reads documents, tokenises them, each with BOS before it and its end behind it.

    Returns the sidecar. ValueError in one line where there is nothing to train on.
    """
    tokenizer = tokenizer_for(source, options.tokenizer, options.bos_token)
    eos_token, eos_id = eos_of(tokenizer, options.eos_token)
    chosen = (options.text_field, options.sample_by, options.max_message_chars, options.limit)
    texts = read_texts(source, *chosen)
    documents = list(_tokenised(texts, tokenizer, eos_id))
    account = texts.account(len(documents))
    if not documents:
        dropped = sorted(texts.dropped.items())
        why = ", ".join(f"{count} {reason}" for reason, count in dropped) or "no rows"
        raise ValueError(f"{source}: no document left of {texts.rows_read} rows: {why}")
    origin = {
        "kind": "text",
        "source": str(source),
        "source_sha256": sha256_of(source),
        **account,
        "rule": {
            "text_field": options.text_field,
            "sample_by": options.sample_by,
            "max_message_chars": options.max_message_chars,
            "eos_token": eos_token,
            "eos_id": eos_id,
        },
        "limit": options.limit,
        "tokenizer": described(tokenizer),
    }
    return write_documents(out, documents, origin)


def inspect_text(path: Path) -> dict[str, Any]:
    """The sidecar of tokenised text, and how long its documents are."""
    _, ends = read_documents(path)
    lengths = [int(end - start) for start, end in zip([0, *ends], ends, strict=False)]
    return {
        "path": str(path),
        "documents": len(lengths),
        "document_tokens": spread(lengths),
        "sidecar": read_sidecar(path),
    }


def _tokenised(texts: Texts, tokenizer: LoadedTokenizer, eos_id: int) -> Iterator[list[int]]:
    for start in range(0, len(texts.documents), BATCH):
        batch = texts.documents[start : start + BATCH]
        for (row, _), ids in zip(batch, tokenizer.encode([text for _, text in batch]), strict=True):
            if ids:
                yield [*tokenizer.bos_ids, *ids, eos_id]
            else:
                texts.drop("no token in it", row)
