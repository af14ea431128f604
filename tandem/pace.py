"""How slow the machine was around a measured run, against its calibration."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from statistics import geometric_mean
from typing import Any


def pace_of(provenance: Mapping[str, Any], profile: Path) -> float:
    """The factor for the config key `pace`, by drift probes: fixed work, no part of the run.

    The machine's speed changes between minutes; the probes right before and after a measured run
    tell by how much since the profile was taken. Takes the run's provenance.
    """
    about = json.loads((profile / "profile.json").read_text(encoding="utf-8"))
    before, after, then = provenance["probe_before"], provenance["probe_after"], about["probe_s"]
    return round(geometric_mean([(before[k] * after[k]) ** 0.5 / then[k] for k in then]), 4)
