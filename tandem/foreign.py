"""`profile=` of others: what other simulators measured, told apart by the files they keep."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from engine.model import ModelSpec
from sim.cost import LaunchCost
from sim.device import Device
from tandem.origin import AICONFIGURATOR, origin_of
from traces.files import write_text
from traces.fingerprint import content_hash
from traces.store import sha256_of

IMPORTED = "profiles"  # folder in the cache: hashes of foreign profiles as they first came
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
    cache: Path | None = None,
) -> LaunchCost | None:
    """The cost in Vidur's, LLMServingSim's or AIConfigurator's tables; None where `path` is none.

    A file .npz is Vidur's; a folder is told by its tables. ValueError where they cannot be read,
    and, unless they `may_differ`, where they name another model or device. Where they name none
    it is the user's word. With a `cache`, also where their files are not those of the first use.
    """
    if cache is not None and is_foreign(path):
        check_import(path, cache)
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


def check_import(path: Path, cache: Path) -> None:
    """Holds a foreign profile against its hashes at the import, which is its first use.

    They are kept in `cache`, since the profile's own folder may be read-only. ValueError with the
    file that is another one by now. A cache that cannot be written keeps nothing.
    """
    whole_path = path.expanduser().absolute()
    found = [whole_path] if path.is_file() else sorted(p for p in path.iterdir() if p.is_file())
    hashes = {file.name: sha256_of(file) for file in found if not file.name.startswith(".")}
    name = hashlib.sha256(str(whole_path).encode()).hexdigest()[:16]
    kept = cache / IMPORTED / f"{path.stem}-{name}.json"
    if not kept.is_file():
        with suppress(OSError):
            kept.parent.mkdir(parents=True, exist_ok=True)
            write_text(kept, json.dumps({"path": str(whole_path), "files": hashes}, indent=1))
        return
    try:
        known = json.loads(kept.read_bytes())["files"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{kept} is damaged: remove it, and {path} is imported anew") from error
    if differ := sorted({*known.items()} ^ {*hashes.items()}):
        file = path if path.is_file() else path / differ[0][0]
        raise ValueError(
            f"{file} is not the file that was imported first: it is damaged, or was changed; where "
            f"that was meant, remove {kept}"
        )


def profile_hash(profile: str | Path | None) -> str | None:
    """One hash of what a profile's prices come from; None where there is no profile."""
    if profile is None:
        return None
    path = Path(profile).expanduser()
    return content_hash(path if is_foreign(path) else path / "cost.json")


def is_foreign(path: Path) -> bool:
    """Whether a profile is of another simulator, by the files that are there."""
    is_vidurs = path.suffix == ".npz" and path.is_file()
    return is_vidurs or is_kernel_profile(path) or (path / AICONFIGURATOR).is_file()


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
