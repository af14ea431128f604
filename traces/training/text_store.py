"""Tokenised training text on disk, one document per row, and its import."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from traces.import_options import Options
from traces.serving.rules import spread
from traces.store import checked_table, read_sidecar, sha256_of, write_table
from traces.tokenizer import LoadedTokenizer, described, tokenizer_for
from traces.training.texts import Texts, eos_of, read_texts

BATCH = 1000  # documents that are tokenised together


def write_documents(
    path: str | Path, documents: Iterable[Iterable[int]], origin: Mapping[str, Any]
) -> dict[str, Any]:
    """Writes the token ids of each document, its end-of-sequence token included.

    `origin` has the facts of the importer: source, tokenizer, rule, rows read and dropped. Returns
    the sidecar.
    """
    import pyarrow as pa

    tokens, ends = array("i"), array("q", [0])
    for document in documents:
        tokens.extend(document)
        ends.append(len(tokens))
    flat, offsets = (np.frombuffer(a, a.typecode) for a in (tokens, ends))
    column = pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(flat))
    facts = {"documents": len(ends) - 1, "tokens": len(tokens), **origin}
    return write_table(path, pa.table([column], schema=_schema()), facts)


def read_documents(path: str | Path) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    """All tokens of a text, joined, and the place among them where each document ends.

    Imports no tokenizer, datasets or torch. Raises a ValueError of one line where the file is no
    tokenised text as it was written.
    """
    path = Path(path)
    if "documents" not in read_sidecar(path):
        raise ValueError(
            f"{path}: it holds requests, no text to train on; make that with "
            "`tandem trace import --kind text`"
        )
    column = checked_table(path, _schema()).column("ids").combine_chunks()
    if column.flatten().null_count:
        raise ValueError(f"{path}: column ids has empty cells; import it again")
    tokens = column.flatten().to_numpy().astype(np.int32)
    lengths = column.value_lengths().to_numpy().astype(np.int64)
    if len(tokens) and tokens.min() < 0:
        raise ValueError(f"{path}: column ids holds ids below 0; import it again")
    return tokens, np.cumsum(lengths)


def _schema() -> Any:
    import pyarrow as pa

    return pa.schema([pa.field("ids", pa.large_list(pa.int32()), nullable=False)])


def import_text(source: Path, out: Path, options: Options) -> dict[str, Any]:
    """Reads documents and writes them tokenised, each between BOS and its end-of-sequence token.

    Returns the sidecar. Raises a ValueError of one line where no document is left.
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
    """A summary of tokenised text: lengths of its documents, and its sidecar."""
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
