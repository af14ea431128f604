"""A local file through the Hugging Face `datasets` library: offline, quiet, nothing left behind."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def opened_dataset(builder: str, path: Path, **settings: Any) -> Iterator[Any]:
    """The rows of the file as a datasets.Dataset; `builder` is "json", "parquet" or "text".

    Whatever the library raises passes through: its errors have many types.
    """
    # both are read when `datasets` is first imported; a local file needs no network
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
    import datasets

    shown, said = datasets.are_progress_bars_disabled(), datasets.logging.get_verbosity()
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # what fails is told by us
    # a cache of our own: nothing stays behind in the user's home
    with tempfile.TemporaryDirectory(prefix="tandem-datasets-") as cache:
        link = Path(cache) / f"source{path.suffix}"  # it takes a name with [ or * for a pattern
        link.symlink_to(path.resolve())
        try:
            yield datasets.load_dataset(
                builder,
                data_files=str(link),
                split="train",
                cache_dir=cache,
                keep_in_memory=True,
                **settings,
            )
        finally:
            datasets.logging.set_verbosity(said)
            if not shown:
                datasets.enable_progress_bars()
