"""`profile=` of others: what other simulators measured, told apart by the files they keep."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from engine.model import ModelSpec
from sim.cost import LaunchCost
from sim.device import Device
from tandem.origin import AICONFIGURATOR, origin_of

KERNELS = ("dense.csv", "per_sequence.csv", "attention.csv")
SKEW = "skew.csv.gz"


@dataclass(frozen=True)
class KernelProfile:
    """The config node `kernel_profile`: how a profile of LLMServingSim becomes costs.

    `skew` None is the form that is held against vLLM's logs (benchmarks/vllm_logs.py): "default"
    where the profile has skew.csv.gz, else "none".
    """

    skew: Literal["none", "default", "per_bucket"] | None = None
    graphs: bool = False
    step_ns: int = 0
    host_ns_per_plan: int = 0

    def __post_init__(self) -> None:
        for name in ("step_ns", "host_ns_per_plan"):
            if (value := getattr(self, name)) < 0:
                raise ValueError(f"kernel_profile.{name}={value}: it must be at least 0")


def foreign_cost(
    path: Path,
    device: Device,
    spec: ModelSpec,
    how: KernelProfile | None = None,
    may_differ: bool = False,
) -> LaunchCost | None:
    """The cost in Vidur's, LLMServingSim's or AIConfigurator's tables; None where `path` is none.

    A file .npz is Vidur's; a folder is told by its tables. ValueError where they cannot be read,
    and, unless they `may_differ`, where they name another model or device. Where they name none
    it is the user's word.
    """
    if not may_differ:
        origin_of(path).check(path, spec.name, device.name)
    if path.suffix == ".npz" and path.is_file():
        from sim.vidur import VidurCost

        return VidurCost.load(path, spec)
    if is_kernel_profile(path):
        return _kernel_cost(path, spec, how or KernelProfile())
    if (path / AICONFIGURATOR).is_file():
        from sim.aiconfigurator import AiConfiguratorCost

        return AiConfiguratorCost.load(path, device, spec)
    return None


def is_kernel_profile(path: Path) -> bool:
    """Whether a folder holds the tables of LLMServingSim."""
    return all((path / name).is_file() for name in KERNELS)


def _kernel_cost(path: Path, spec: ModelSpec, how: KernelProfile) -> LaunchCost:
    from sim.kernel_profile import GRAPH_SIZES, KernelProfileCost

    has_skew = (path / SKEW).is_file()
    if not has_skew and how.skew not in (None, "none"):
        raise ValueError(f"kernel_profile.skew={how.skew}: {path} has no {SKEW}; take none")
    cost: LaunchCost = KernelProfileCost.load(
        path,
        spec,
        how.skew or ("default" if has_skew else "none"),
        padded_to=GRAPH_SIZES if how.graphs else (),
        step_ns=how.step_ns,
        host_ns_per_plan=how.host_ns_per_plan,
    )
    return cost
