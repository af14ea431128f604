"""`profile=` of others: what other simulators measured, told apart by the files they keep."""

from __future__ import annotations

from pathlib import Path

from engine.model import ModelSpec
from sim.cost import LaunchCost
from sim.device import Device

KERNELS = ("dense.csv", "per_sequence.csv", "attention.csv")
SKEW = "skew.csv.gz"
AICONFIGURATOR = "gemm.parquet"


def foreign_cost(path: Path, device: Device, spec: ModelSpec) -> LaunchCost | None:
    """The cost in Vidur's, LLMServingSim's or AIConfigurator's tables; None where `path` is none.

    A file .npz is Vidur's; a folder is told by its tables. They do not say which model they are
    of: that is the user's word. ValueError where they cannot be read.
    """
    if path.suffix == ".npz" and path.is_file():
        from sim.vidur import VidurCost

        return VidurCost.load(path, spec)
    if all((path / name).is_file() for name in KERNELS):
        from sim.kernel_profile import KernelProfileCost

        skew = "per_bucket" if (path / SKEW).is_file() else "none"
        cost: LaunchCost = KernelProfileCost.load(path, spec, skew)
        return cost
    if (path / AICONFIGURATOR).is_file():
        from sim.aiconfigurator import AiConfiguratorCost

        return AiConfiguratorCost.load(path, device, spec)
    return None
