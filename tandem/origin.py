"""What a foreign profile says it was measured with, held against the run's model and device."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from analysis.yaml_text import yaml_value

NAMED = re.compile(r"(.+)_([^_]+)_tp\d+\.npz")  # Vidur's tables: MODEL_DEVICE_tpN
META = "meta.yaml"  # of LLMServingSim
AICONFIGURATOR = "gemm.parquet"


@dataclass(frozen=True)
class Origin:
    """Names as the profile has them, None where it tells none."""

    model: str | None = None
    device: str | None = None

    def check(self, path: Path, model: str, device: str) -> None:
        """ValueError where the profile names another model or device than the run's."""
        for what, named, wanted in (("model", self.model, model), ("device", self.device, device)):
            if named and not is_alike(named, wanted):
                raise ValueError(
                    f"profile={path} was measured with {what} {named}, not {wanted}; choose that "
                    f"{what} or another profile, or take it as it is: profile_may_differ=true"
                )


def origin_of(path: Path) -> Origin:
    """What a file name, a kernel profile's meta.yaml or AIConfigurator's tables tell."""
    if found := NAMED.fullmatch(path.name):
        return Origin(*found.groups())
    if (meta := path / META).is_file():
        try:
            text = meta.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{meta}: no text in UTF-8 (byte {error.start})") from error
        facts = yaml_value(text, meta)
        facts = facts if isinstance(facts, dict) else {}
        model, device = (facts.get(key) for key in ("model", "hardware"))
        return Origin(model and str(model).rpartition("/")[2], device and str(device))
    if (gemm := path / AICONFIGURATOR).is_file():
        import pyarrow.parquet as pq

        if "device" in pq.read_schema(gemm).names:
            devices = pq.read_table(gemm, columns=["device"])["device"].unique().to_pylist()
            return Origin(device=", ".join(map(str, devices)))
    return Origin()


def is_alike(one: str, other: str) -> bool:
    """Whether a name has all words and numbers of the other, as `a100_40` has those of `A100`.

    Models and devices are written in many ways: Llama-3.1-8B is `llama3_8b` here.
    """
    a, b = (set(re.findall(r"[a-z]+|\d+", name.lower())) for name in (one, other))
    return a <= b or b <= a
