"""`backend.reference_ns=auto`: the clock of a paced backend runs as on the day of calibration."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.model import ModelSpec
from traces.files import checked_text
from traces.recipe import Recipe

AUTO = "auto"
KEY = "reference_ns"


def is_auto(config: Mapping[str, Any]) -> bool:
    """Whether the nominal times of the reference works are still to be found."""
    return config["backend"].get(KEY) == AUTO


def with_reference(config: Mapping[str, Any], nominal_ns: Sequence[int]) -> dict[str, Any]:
    """The configuration with these nominal times of the reference works."""
    return {**config, "backend": {**config["backend"], KEY: [*nominal_ns]}}


def resolved(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with `auto` replaced by what the profile was measured with.

    ValueError without a profile, or where that was measured in real time or by an older clock.
    """
    if not is_auto(config):
        return dict(config)
    profile = config["profile"]
    if profile is None:
        raise ValueError(f"backend.{KEY}={AUTO} is that of a profile; name one with profile=")
    nominal = about(Path(str(profile))).get(KEY)
    if nominal is None:
        raise ValueError(
            f"backend.{KEY}={AUTO}: profile={profile} was measured in real time; "
            f"calibrate with backend.{KEY}={AUTO} too"
        )
    if not isinstance(nominal, list):
        raise ValueError(
            f"profile={profile} was measured with an older clock, of one reference work; "
            "calibrate anew"
        )
    return with_reference(config, nominal)


def about(profile: Path) -> dict[str, Any]:
    """What profile.json says of a profile, nothing where there is none. ValueError if damaged."""
    path = profile / "profile.json"
    if not path.is_file():
        return {}
    text = checked_text(path)
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}); run tandem calibrate") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} is damaged (no JSON object); run tandem calibrate")
    return found


def trained_ns(spec: ModelSpec, recipe: Recipe) -> tuple[int, ...]:
    """What the reference works of training take on this machine just now: a unit, an update."""
    import torch

    from runtime.reference import settled_ns
    from runtime.training_reference import training_references

    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    return settled_ns(training_references(spec, recipe))


def measured_ns(spec: ModelSpec, seed: int) -> tuple[int, ...]:
    """What the reference works take on this machine just now: decodes, prompt."""
    import torch

    from runtime.model import build_model
    from runtime.reference import references, settled_ns

    torch.set_num_threads(1)
    return settled_ns(references(build_model(spec, seed), spec))
