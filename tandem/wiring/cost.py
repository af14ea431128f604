"""The cost model of a run: a profile of this project, or what other simulators measured."""

from __future__ import annotations

import hashlib
import json
import re
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from analysis.yaml_text import yaml_value
from engine.contract.regions import PageSize
from models.spec import ModelSpec
from sim.cost.contract import LaunchCost
from sim.cost.tables import TableCost
from sim.devices.device import Device
from traces.files import checked_text, write_text
from traces.store import content_hash, sha256_of


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


COST = "cost.json"


def read_cost(folder: Path, spec: ModelSpec, device: Device, page: PageSize) -> TableCost:
    """The tables of a profile. ValueError if there are none, or they are of something else."""
    path = folder / COST
    if not path.is_file():
        raise ValueError(
            f"profile={folder}: no {COST} and no tables of another simulator there; make a profile "
            "with `tandem calibrate`"
        )
    cost = TableCost.load(path).as_deep_as(spec)
    if asdict(cost.model) != asdict(spec):
        raise ValueError(
            f"profile={folder} was measured with model {cost.model.name}, not {spec.name}; "
            f"run `tandem calibrate model={spec.name}`"
        )
    if cost.page.tokens != page.tokens:
        raise ValueError(
            f"profile={folder} was measured with page_tokens={cost.page.tokens}, not {page.tokens}"
        )
    measured = about(folder)
    for name, value in device_facts(device).items():
        if measured.get(name, value) != value:
            raise ValueError(
                f"profile={folder} was measured with {name} {measured[name]}, not {value}; "
                "calibrate with the settings that you run with"
            )
    return cost


def device_facts(device: Device) -> dict[str, Any]:
    """What of a device decides over a profile: its name and its link."""
    return {
        "device": device.name,
        "to_device_bytes_per_s": device.to_device_bytes_per_s,
        "to_host_bytes_per_s": device.to_host_bytes_per_s,
        "link_ns": device.link_ns,
    }


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


IMPORTED = "profiles"  # folder in the cache: hashes of foreign profiles as they first came
KERNELS = ("dense.csv", "per_sequence.csv", "attention.csv")
SKEW = "skew.csv.gz"


@dataclass(frozen=True)
class KernelProfile:
    """The config node `kernel_profile`: how a profile of LLMServingSim becomes costs.

    `skew` None is the form that is held against vLLM's logs (benchmarks/fidelity/vllm_logs.py):
    "default" where the profile has skew.csv.gz, else "none".
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
        from sim.foreign.vidur import VidurCost

        return VidurCost.load(path, spec)
    if is_kernel_profile(path):
        return _kernel_cost(path, spec, how or KernelProfile())
    if (path / AICONFIGURATOR).is_file():
        from sim.foreign.aiconfigurator import AiConfiguratorCost

        return AiConfiguratorCost.load(path, device, spec)
    return None


def check_import(path: Path, cache: Path) -> None:
    """Holds a foreign profile against its hashes at the import, which is its first use.

    They are kept in `cache`, because the profile's own folder may be read-only. ValueError with the
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
    from sim.foreign.kernel_profile import GRAPH_SIZES, KernelProfileCost

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
