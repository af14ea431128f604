"""Documents to train on, of JSON, Parquet or plain text, and their import as tokens.

Hugging Face `datasets` reads the files: .json (a list of rows), .jsonl and .txt, each also with
.gz, and .parquet. Every row becomes a document or is counted under its fault.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from traces.files import absent
from traces.import_options import Options
from traces.plain_json import count_rows, is_beyond_datasets, plain_rows
from traces.records import NOT_JSON, Drops, Unusable, header, is_unicode, opened
from traces.serving.rules import spread
from traces.serving.sharegpt import MAX_MESSAGE_CHARS
from traces.store import read_sidecar, sha256_of
from traces.tables import opened_dataset
from traces.tokenizer import LoadedTokenizer, described, tokenizer_for
from traces.training.text_store import read_documents, write_documents

BATCH = 1000  # documents that are tokenised together
KNOWN_EOS = ("<|endoftext|>", "</s>", "<|end_of_text|>")  # GPT-2 and Qwen; Llama 2, OPT; Llama 3


def eos_of(tokenizer: LoadedTokenizer, eos_token: str | None = None) -> tuple[str, int]:
    """The end-of-sequence token of a tokenizer, and its id.

    `eos_token` None takes the token of tokenizer_config.json in the tokenizer's folder, else the
    one of KNOWN_EOS among the special tokens, else the one in the vocabulary. Raises ValueError
    where there is none, or more than one.
    """
    chosen = _configured(Path(tokenizer.path)) if eos_token is None else eos_token
    names = KNOWN_EOS if chosen is None else (chosen,)
    found = [(name, tokenizer.backend.token_to_id(name)) for name in names]
    found = [(name, token) for name, token in found if token is not None]
    if len(found) > 1:  # Qwen's vocabulary has </s> as a piece of text
        special = {t.content for t in tokenizer.backend.get_added_tokens_decoder().values()}
        found = [entry for entry in found if entry[0] in special] or found
    if len(found) == 1:
        return found[0]
    if chosen is not None:
        raise ValueError(f"{tokenizer.path}: eos_token {chosen!r} is not in its vocabulary")
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


@dataclass
class Texts(Drops):
    """The kept documents, each with its row counted from 1, and the dropped rows by reason."""

    documents: list[tuple[int, str]] = field(default_factory=list)


def read_texts(
    path: str | Path,
    text_field: str = "text",
    sample_by: str = "line",
    max_chars: int = MAX_MESSAGE_CHARS,
    limit: int | None = None,
) -> Texts:
    """The first `limit` usable documents. Raises ValueError where the whole file is unreadable.

    `text_field` names the text in rows with fields. A row of plain text is a line, a paragraph
    (between blank lines) or the whole document.
    """
    path, texts = Path(path), Texts()
    if not path.is_file():
        raise ValueError(f"{path}: {absent(path)}; give a local .json, .jsonl, .parquet or .txt")
    for number, row in enumerate(_rows(path, text_field, sample_by), start=1):
        texts.rows_read += 1
        try:
            text = _text(row, text_field, max_chars)
        except Unusable as fault:
            texts.drop(str(fault), number)
            continue
        if limit is not None and len(texts.documents) == limit:
            texts.drop(f"beyond the limit of {limit} documents", number)
        else:
            texts.documents.append((number, text))
    return texts


def _rows(path: Path, text_field: str, sample_by: str) -> Iterable[Any]:
    name = path.name.removesuffix(".gz")
    if name.endswith((".json", ".jsonl")):
        return _json_rows(path, text_field)
    if path.suffix == ".parquet":
        return _parquet_rows(path, text_field)
    if name.endswith(".txt"):
        return _plain_rows(path, sample_by)
    raise ValueError(f"{path}: text is read from .json, .jsonl, .txt, each also .gz, and .parquet")


def _text(row: Any, text_field: str, max_chars: int) -> str:
    """The text of a row; a row may be a bare text. Raises Unusable with the fault."""
    if row is NOT_JSON:
        raise Unusable("line is not JSON")
    if not isinstance(row, dict | str):
        raise Unusable("row is not an object")
    text = row if isinstance(row, str) else row.get(text_field)
    if text is None:
        raise Unusable(f"no {text_field} field")
    if not isinstance(text, str):
        raise Unusable(f"{text_field} is not text")
    if not text.strip():
        raise Unusable("empty text")
    if len(text) > max_chars:
        raise Unusable(f"text longer than {max_chars} characters")
    if not is_unicode(text):
        raise Unusable(f"{text_field} is not valid Unicode")
    return text


def _json_rows(path: Path, text_field: str) -> Sequence[Any]:
    """Rows through `datasets` where that is exact, else as plain JSON, as in serving.sharegpt.

    `datasets` may also lose a row: {} before {"text": "a", "n": [null]} is lost (pyarrow 26).
    """
    if not is_beyond_datasets(path):
        try:
            with opened_dataset("json", path) as loaded:
                is_text = getattr(loaded.features.get(text_field), "dtype", None) == "string"
                if is_text and len(loaded) == count_rows(path):
                    return list(loaded.select_columns([text_field]))
        except Exception:  # errors of typing have many types; plain_rows names the place
            pass
    rows = plain_rows(path)
    objects = [row for row in rows if isinstance(row, dict)]
    if objects and not any(text_field in row for row in objects):
        _refuse_field(path, text_field, objects[0])
    return rows


def _parquet_rows(path: Path, text_field: str) -> Sequence[Any]:
    import pyarrow.parquet

    names = header(path)
    if text_field not in names:
        _refuse_field(path, text_field, names)
    if not pyarrow.parquet.read_metadata(path).num_rows:
        return ()  # `datasets` fails on it
    # the default batch_size of `datasets` fails where the first row group is empty
    return _all_rows("parquet", path, columns=[text_field], batch_size=1000)


def _plain_rows(path: Path, sample_by: str) -> Sequence[Any]:
    with opened(path) as file:
        if not file.read(1):
            return ()  # `datasets` fails on it
    return _all_rows("text", path, sample_by=sample_by, encoding="utf-8-sig")


def _all_rows(builder: str, path: Path, **settings: Any) -> Sequence[Any]:
    try:
        with opened_dataset(builder, path, **settings) as loaded:
            return list(loaded)
    except Exception as error:  # the library wraps the errors of its readers
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        reason = (str(cause).splitlines() or [type(cause).__name__])[0]
        raise ValueError(f"{path}: not a readable {path.suffix} file ({reason})") from error


def _refuse_field(path: Path, text_field: str, names: Iterable[str]) -> None:
    listed = " ".join(", ".join(names).split())  # a name may have several lines
    how = "name one with text_field (--text-field; training.data.text_field)"
    raise ValueError(f"{path}: no field {text_field}; it has {listed}: {how}")


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
