"""`backend.reference_ns=auto`: the clock of a paced backend runs as on the day of calibration."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.model import ModelSpec

AUTO = "auto"
KEY = "reference_ns"


def is_auto(config: Mapping[str, Any]) -> bool:
    """Whether the nominal time of the reference work is still to be found."""
    return config["backend"].get(KEY) == AUTO


def with_reference(config: Mapping[str, Any], nominal_ns: int) -> dict[str, Any]:
    """The configuration with this nominal time of the reference work."""
    return {**config, "backend": {**config["backend"], KEY: nominal_ns}}


def resolved(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with `auto` replaced by what the profile was measured with.

    ValueError without a profile, or where that was measured in real time.
    """
    if not is_auto(config):
        return dict(config)
    profile = config["profile"]
    if profile is None:
        raise ValueError(f"backend.{KEY}={AUTO} is that of a profile; name one with profile=")
    about = Path(str(profile)) / "profile.json"
    nominal = json.loads(about.read_text(encoding="utf-8")).get(KEY) if about.is_file() else None
    if nominal is None:
        raise ValueError(
            f"backend.{KEY}={AUTO}: profile={profile} was measured in real time; "
            f"calibrate with backend.{KEY}={AUTO} too"
        )
    return with_reference(config, int(nominal))


def measured_ns(spec: ModelSpec, seed: int) -> int:
    """What the reference work takes on this machine just now."""
    import torch

    from runtime.model import build_model
    from runtime.reference import Reference, settled_ns

    torch.set_num_threads(1)
    return settled_ns(Reference(build_model(spec, seed), spec))
