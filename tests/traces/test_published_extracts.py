"""The real extracts: counts and prefixes as published."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from traces.importing import import_trace
from traces.serving.request import Request
from traces.store import read_trace

Extract = Callable[[str, str], tuple[dict[str, Any], list[Request]]]


@pytest.fixture(scope="module")
def extract(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Extract:
    """Imports an extract of a kind, each once: its sidecar and its requests."""

    @cache
    def extract(name: str, kind: str) -> tuple[dict[str, Any], list[Request]]:
        source = shared / "data" / "arrivals" / f"{name}.parquet"
        out = tmp_path_factory.mktemp("extracts") / "out.parquet"
        return import_trace(source, out, kind=kind), read_trace(out)

    return extract


@pytest.mark.parametrize(
    ("name", "kind", "count", "prompt_mean", "bucket_s"),
    [
        ("azure2023_conv_first45min", "azure", 15_877, 1184, None),
        ("azure2023_code_first45min", "azure", 8_068, 2042, None),
        ("mooncake_conversation_first45min", "mooncake", 8_940, None, 3.0),
        ("mooncake_synthetic", "mooncake", 3_993, 15_325, None),
    ],
)
def test_published_counts(
    extract: Extract,
    name: str,
    kind: str,
    count: int,
    prompt_mean: int,
    bucket_s: float,
) -> None:
    # counts and means as the notes on the data have them (in whole tokens)
    sidecar, requests = extract(name, kind)
    assert sidecar["rows_read"] == len(requests) == count and not sidecar["rows_dropped"]
    if prompt_mean:
        # 1: a figure rounded on one side or the other
        assert np.mean([r.prompt_tokens for r in requests]) == pytest.approx(prompt_mean, abs=1)
    assert (sidecar["bucket"] or {"width_s": None})["width_s"] == bucket_s


@pytest.mark.parametrize(
    ("name", "share"),
    [("mooncake_conversation_first45min", 0.36), ("mooncake_synthetic", 0.65)],
)
def test_prefixes_repeat_as_published(extract: Extract, name: str, share: float) -> None:
    # prompt tokens that an infinite prefix cache would have served, from the notes on the data (the
    # whole hour there, 45 minutes of the conversation here: 2 points for that, and for rounding)
    seen: set[int] = set()
    reused = total = 0
    for request in extract(name, "mooncake")[1]:
        known = 0
        while known < len(request.prefix_ids) and request.prefix_ids[known] in seen:
            known += 1
        reused += min(known * request.prefix_block_tokens, request.prompt_tokens)
        total += request.prompt_tokens
        seen.update(request.prefix_ids)
    assert reused / total == pytest.approx(share, abs=0.02)
