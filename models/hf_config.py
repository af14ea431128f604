"""A model by the config.json that Hugging Face keeps beside its weights."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from models.spec import ModelSpec

log = logging.getLogger(__name__)


def read_model(path: str, name: str | None = None, dtype: str | None = None) -> ModelSpec:
    """The spec of a model whose config.json lies on this machine.

    Rotary scaling changes no size and no time. The spec leaves it out, and the log warns of it.

    Args:
        path: A config.json, or the folder that holds one; "~" is the home.
        name: What results call the model; None takes the name of the folder.
        dtype: "float32", "bfloat16" or "float16"; None takes the dtype of the file.

    Returns:
        The spec that `ModelSpec.from_hf` makes of the file.

    Raises:
        ValueError: There is no such file, it cannot be read, or its model is not supported. The
            message is one line and names the file.
    """
    file = Path(path).expanduser()
    file = file / "config.json" if file.is_dir() else file
    if not file.is_file():
        raise ValueError(f"model.path={path}: no such file; give a config.json or its folder")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: not JSON ({error})") from error
    if not isinstance(config, dict):
        raise ValueError(f"{file}: no JSON object, so no model's config")
    if dtype is not None:
        config["dtype"] = dtype
    try:
        spec = ModelSpec.from_hf(config, name or file.absolute().parent.name)
        scaling = _rope_scaling(config)
    except (AttributeError, TypeError, ValueError) as error:  # text where a number should be, ...
        raise ValueError(f"{file}: {error}") from error
    if scaling not in (None, "default"):
        log.warning(
            "%s: rotary scaling %s is left out: sizes and times do not depend on it, tokens do",
            file,
            scaling,
        )
    return spec


def _rope_scaling(config: Mapping[str, Any]) -> Any:
    """The name of the rotary scaling, under its key of transformers 4 or 5."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    return rope.get("rope_type") or rope.get("type")
