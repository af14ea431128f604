"""The parts of a run that do not depend on its backend, built once from its configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.contract.policy import Policy, Router, traits_of
from engine.contract.regions import PageSize, Place, Pool
from engine.results.plan_log import check_jobs, read_plans
from models.spec import ModelSpec
from policies.composed import Composed as ComposedPolicy
from policies.scheduling.recorded import RecordedPlans, RecordedRouter
from sim.cost.contract import LaunchCost
from sim.cost.policy_cost import PolicyCost
from sim.cost.roofline import Roofline
from sim.cost.scaled import DurationRatio, scaled
from sim.devices.device import Device
from sim.devices.group import Group, check_links, rank_device
from tandem.config.build import Builder
from tandem.config.check import arguments, conform
from tandem.config.composed_config import ComposedConfig
from tandem.config.slo import Decoding, decoding_of
from tandem.wiring.adapters import adapters_of
from tandem.wiring.budget import (
    Budget,
    Room,
    check_states,
    room_for,
    training_room,
    with_adapters,
)
from tandem.wiring.cost import KernelProfile, foreign_cost, is_kernel_profile
from tandem.wiring.training import Trainee, laid_out, trainees_of
from tandem.wiring.workload import requests_of
from traces.serving.request import Request, TrainingJob

ENDLESS_BYTES = 1 << 60
MOST_REPLICAS = 10_000
MOST_DEPTH = 1_000
RATIOS = "duration_ratios"


@dataclass(frozen=True, eq=False)
class RunSpec:
    """A run without its backend: prediction and measurement share all of it."""

    requests: Sequence[Request]
    spec: ModelSpec
    device: Device
    cost: LaunchCost
    policy: Policy
    room: Room
    replicas: int  # devices with weights and KV of their own
    router: Router | None
    depth: int
    seed: int
    decoding: Decoding
    is_replay: bool  # of another run's plan log
    trainees: Sequence[Trainee] = ()
    ratios: Sequence[DurationRatio] = ()
    quote_pace: float = 1.0  # factor on the durations that policies are quoted
    lane_share: float = 0.5  # assumed: of a device's rate, while its other compute lane is busy

    @property
    def has_two_lanes(self) -> bool:
        """Whether what finetunes runs on a compute lane beside that of serving."""
        return traits_of(self.policy).two_lanes

    quoted_cost: LaunchCost | None = None  # what they are quoted; None: `cost`

    @property
    def quotes(self) -> LaunchCost:
        """The durations that policies are quoted, but for their pace."""
        return self.quoted_cost or self.cost

    @property
    def durations(self) -> LaunchCost:
        """The cost that a simulation takes, scaled; policies are quoted `quotes` as they are."""
        return scaled(self.cost, self.ratios)

    @property
    def page(self) -> PageSize:
        """A KV page of the model, for the ledger, machines and profiles alike."""
        return self.room.page

    @property
    def work(self) -> list[Request | TrainingJob]:
        """All that the engine replays."""
        return [*self.requests, *(trainee.job for trainee in self.trainees)]


def run_spec_of(point: ComposedConfig, spec: ModelSpec | None = None) -> RunSpec:
    """Builds the run that a configuration describes.

    Args:
        point: The composed configuration.
        spec: A model in the place of the configuration's.

    Raises:
        ValueError: In one line, the first setting that is wrong.
    """
    config = point.config
    _check_alone(config)
    seed = _int_from(0, config, "seed")
    builder = builder_of(point)
    spec = spec or _built(builder, config, "model", ModelSpec)
    device, group = _device(config, builder)
    requests = requests_of(config, builder, spec, point.overrides)
    policy = policy_of(config, builder)
    page_tokens = _int_from(1, config, "page_tokens")
    replicas = _int_within(1, MOST_REPLICAS, config, "replicas")
    trainees = trainees_of(config, builder, spec, requests, group.ranks)
    if group.ranks > 1 and (requests or not trainees):
        raise ValueError(
            f"group: {group.ranks} devices train one model and serve nothing; choose trace=none "
            "and what to train, training=..."
        )
    if group.ranks > 1 and any([trainee.job.finetunes for trainee in trainees]):
        raise ValueError(
            f"group: {group.ranks} devices train whole microbatches together; finetuning on "
            "samples runs on one device: set group.devices=1 and group.nodes=1"
        )
    if trainees and not requests:
        spec = trainees[0].spec  # in the dtype that it trains in
    if isinstance(policy, RecordedPlans):
        ids = {r.request_id for r in requests} | {t.job.job_id for t in trainees}
        check_jobs(log_path(config), policy.log, ids)
    page = PageSize.of(spec, page_tokens)
    cost = cost_of(config, device, spec, page, group)
    quoted = quoted_cost_of(config, device, spec, page, group)
    if requests and config["backend"]["name"] == "sim" and not cost.serves:
        raise ValueError(
            f"profile={config['profile']} was calibrated with training alone: it has no prices for "
            "what is served; take another, or none (profile=null)"
        )
    room = _room(config, device, spec, page, requests, trainees, policy, replicas)
    adapters = adapters_of(config, spec, policy, [trainee.job for trainee in trainees])
    if adapters:
        budget, _ = _space(config, device)
        published = {t.job.publish: 1 + t.job.staleness for t in trainees}
        room = with_adapters(room, adapters, requests, policy, budget, published)
    shown = PolicyCost(quoted or cost, _nothing)
    left_bytes = dict(room.capacity_bytes)
    finetunes = any([trainee.job.finetunes for trainee in trainees])
    if finetunes or adapters:
        for place, nbytes in room.layout.places.items():
            left_bytes[place.pool] -= nbytes
    planned = laid_out(config, builder, trainees, left_bytes, shown, policy)
    if finetunes and requests:
        budget, _ = _space(config, device)
        check_states(budget, room, planned, requests, policy)
    places = {**room.layout.places, **planned.places}
    depth, decoding = _int_within(1, MOST_DEPTH, config, "depth"), decoding_of(config, spec)
    if not decoding.forced and depth > 1:
        raise ValueError(f"depth={depth}: sampled lengths need one plan at a time; set depth=1")
    return RunSpec(
        requests,
        spec,
        device,
        cost,
        policy,
        replace(room, layout=replace(planned, places=places, adapters=adapters)),
        replicas,
        router_of(config, builder, policy, replicas),
        depth,
        seed,
        decoding,
        is_replay=config.get("replayed") is not None,
        trainees=trainees,
        ratios=_ratios(config),
        quote_pace=_quote_factor(config),
        lane_share=_lane_share(config),
        quoted_cost=quoted,
    )


def _quote_factor(config: Mapping[str, Any]) -> float:
    """The factor on what policies are quoted; earlier versions' runs have none."""
    pace = conform(config.get("quote_pace", 1.0), float, "quote_pace")
    if not 0 < pace < float("inf"):
        raise ValueError(f"quote_pace={pace}: it must be above 0")
    return float(pace)


def _lane_share(config: Mapping[str, Any]) -> float:
    """A lane's share of a device while both compute lanes are busy; earlier versions have none."""
    share = conform(config.get("lane_share", 0.5), float, "lane_share")
    if not 0 < share <= 1:
        raise ValueError(f"lane_share={share}: it must be above 0, and at most 1")
    return float(share)


def _check_alone(config: Mapping[str, Any]) -> None:
    """Tokens per second of finetuning alone, which reports read; earlier versions have none."""
    alone = conform(config.get("finetune_alone"), float | None, "finetune_alone")
    if alone is not None and not alone > 0:
        raise ValueError(f"finetune_alone={alone}: tokens per second, above 0")


def _ratios(config: Mapping[str, Any]) -> tuple[DurationRatio, ...]:
    """Factors on durations of a simulation. ValueError for one that means nothing."""
    rows = (
        conform(config.get(RATIOS), list[Mapping[str, Any]] | None, RATIOS) or ()
    )  # earlier runs have none
    if rows and config["backend"]["name"] not in ("sim", "lockstep"):
        raise ValueError(f"{RATIOS} scales a simulation; set {RATIOS}=null, or backend=sim")
    found = []
    for number, row in enumerate(rows):
        where = f"{RATIOS}[{number}]"
        if not isinstance(row, Mapping):
            raise ValueError(
                f"{where}={row}: give a group and its ratio, {{group: decode, ratio: 1.1}}"
            )
        given = arguments(DurationRatio, row, where)
        try:
            found.append(DurationRatio(**given))
        except ValueError as error:
            raise ValueError(f"{where}.{error}") from error
    return tuple(found)


def _room(
    config: Mapping[str, Any],
    device: Device,
    spec: ModelSpec,
    page: PageSize,
    requests: Sequence[Request],
    trainees: Sequence[Trainee],
    policy: Policy,
    replicas: int,
) -> Room:
    """Memory for what is served, which training shares; or for training alone."""
    budget, device = _space(config, device)
    if not requests and not trainees:
        raise ValueError("there is nothing to do: choose a trace, or what to train, training=...")
    if trainees and replicas > 1:
        raise ValueError(f"replicas={replicas}: training runs on one device; set replicas=1")
    if requests and traits_of(policy).trains_only:
        raise ValueError(
            "this policy trains and serves nothing: set trace=none, or take one that does both, "
            "policy=time_shared"
        )
    if requests and budget.device_bytes is not None:
        raise ValueError("budget.device_bytes is for training alone; take budget.fraction")
    if requests:
        longest = max([t.job.sequence_tokens for t in trainees if t.job.finetunes], default=0)
        return room_for(budget, device, spec, page, requests, policy, replicas, longest)
    frozen = [trainee.frozen_bytes for trainee in trainees if trainee.job.finetunes]
    return training_room(budget, device, page, max(frozen, default=0))


def training_space(point: ComposedConfig) -> dict[Pool, int]:
    """The bytes of each tier for training alone."""
    device, _ = _device(point.config, builder_of(point))
    budget, device = _space(point.config, device)
    page = PageSize.of(spec_of(point), _int_from(1, point.config, "page_tokens"))
    return training_room(budget, device, page).capacity_bytes


def _device(config: Mapping[str, Any], builder: Builder) -> tuple[Device, Group]:
    """A device, as what its group leaves it, and the group."""
    group = Group(**arguments(Group, config.get("group") or {}, "group"))
    return rank_device(_built(builder, config, "device", Device), group), group


def _nothing(place: Place) -> int:
    """Bytes held before anything is laid out."""
    return 0


def spec_of(point: ComposedConfig) -> ModelSpec:
    """The model alone."""
    spec: ModelSpec = _built(builder_of(point), point.config, "model", ModelSpec)
    return spec


def builder_of(point: ComposedConfig) -> Builder:
    """Builds the targets that the point names."""
    return Builder(conform(point.config["trusted"], list[str], "trusted"), point.folders)


def policy_of(config: Mapping[str, Any], builder: Builder) -> Policy:
    """The named stack of scheduling and memory, or another run's plan log."""
    if config.get("replayed") is not None:
        path = log_path(config)
        if not path.is_file():
            raise ValueError(f"replayed={path.parent}: no plan log there; give a run's folder")
        return RecordedPlans(read_plans(path))
    if not config.get("scheduling") and not config.get("memory"):
        raise ValueError(
            "neither scheduling nor memory is set: choose a stack with policy=..., or play back "
            "the plans of a run with policy=recorded replayed=FOLDER"
        )
    halves = []
    for name in ("scheduling", "memory"):
        if not config.get(name):
            raise ValueError(f"{name} is not set: choose one, or a stack with policy=...")
        halves.append(builder.build(config[name], name))
    return ComposedPolicy(*halves)


def log_path(config: Mapping[str, Any]) -> Path:
    """Where the plan log lies that a configuration plays back."""
    return Path(str(config["replayed"])) / "plans.parquet"


def router_of(
    config: Mapping[str, Any], builder: Builder, policy: Policy, replicas: int
) -> Router | None:
    """The router of requests to replicas; of a plan log, the replicas that served them."""
    if isinstance(policy, RecordedPlans):
        return RecordedRouter(policy.log) if replicas > 1 else None
    node = config["router"]
    if node.get("_target_") is not None:
        router: Router = builder.build(node, "router")
        return router
    if replicas > 1:
        raise ValueError(
            f"replicas={replicas}: there is no router; choose one with router=round_robin"
        )
    return None


def cost_of(
    config: Mapping[str, Any],
    device: Device,
    spec: ModelSpec,
    page: PageSize,
    group: Group,
) -> LaunchCost:
    """Tables of a profile, calibrated or foreign, if one is named, else the device's roofline."""
    pace = conform(config["pace"], float, "pace")
    if pace <= 0:
        raise ValueError(f"pace={pace}: it must be above 0")
    node = config.get("kernel_profile", {})  # earlier versions' runs have none
    how = KernelProfile(**arguments(KernelProfile, node, "kernel_profile"))
    path = None if config["profile"] is None else Path(str(config["profile"]))
    if how != KernelProfile() and (path is None or not is_kernel_profile(path)):
        raise ValueError(f"kernel_profile: profile={path} is none of LLMServingSim; leave it alone")
    if path is None:
        if pace != 1:
            raise ValueError(f"pace={pace}: only a profile has a pace; set profile=")
        if config["backend"]["name"] == "sim":  # other backends know no groups, and say so
            check_links(device, group)
        return Roofline(device, spec, page.tokens, group)
    may_differ = conform(config.get("profile_may_differ", False), bool, "profile_may_differ")
    cache = Path(str(config["cache"]))
    if (foreign := foreign_cost(path, device, spec, how, may_differ, cache)) is not None:
        if pace != 1:
            raise ValueError(f"pace={pace}: only a profile of `tandem calibrate` has a pace")
        return foreign
    from tandem.wiring.cost import read_cost

    cost = read_cost(path, spec, device, page)
    cost = replace(cost, assumed=Roofline(device, spec, page.tokens, group))
    return cost if pace == 1 else cost.scaled(pace, "pace")


def quoted_cost_of(
    config: Mapping[str, Any], device: Device, spec: ModelSpec, page: PageSize, group: Group
) -> LaunchCost | None:
    """Tables of the profile that policies are quoted; None where it is that of the run."""
    if (path := config.get("quoted_profile")) is None:  # earlier versions' runs have none
        return None
    return cost_of({**config, "profile": path, "pace": 1.0}, device, spec, page, group)


def _space(config: Mapping[str, Any], device: Device) -> tuple[Budget, Device]:
    """Budget and device of the config; without an end where a server has memory of its own."""
    budget = Budget(**arguments(Budget, config["budget"], "budget"))
    if config["backend"]["name"] != "openai":
        return budget, device
    free = replace(budget, kv_bytes=None, kv_pages=None, may_refuse=True)
    return free, replace(device, memory_bytes=ENDLESS_BYTES)


def _built(builder: Builder, config: Mapping[str, Any], name: str, kind: type) -> Any:
    built = builder.build(config[name], name)
    if not isinstance(built, kind):
        raise ValueError(f"{name}: {config[name]['_target_']} does not make a {kind.__name__}")
    return built


def _int_from(least: int, config: Mapping[str, Any], name: str) -> int:
    value = conform(config[name], int, name)
    if value < least:
        raise ValueError(f"{name}={value}: it must be at least {least}")
    return int(value)


def _int_within(least: int, most: int, config: Mapping[str, Any], name: str) -> int:
    if (value := _int_from(least, config, name)) > most:
        raise ValueError(f"{name}={value}: at most {most:,} are possible")
    return value
