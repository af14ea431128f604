"""Tokenised training text on disk, one document per row."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from traces.store import checked_table, read_sidecar, write_table


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

    Raises a ValueError of one line where the file is no
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
