"""The runs by which benchmarks/same_behaviour.py holds two checkouts against each other.

Each is the words of a `tandem run`, so that it means the same whatever the code is called. Whether
a run of decodes is one jump is no setting: simulations of one device jump, lockstep and replicas go
step by step.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

Words = tuple[str, ...]
SHARED, INPUTS, PLAYED = "<shared>", "<inputs>", "<played>"  # folders, in the words of a run


@dataclass(frozen=True)
class BehaviourRun:
    """A run by its words behind `tandem run`.

    `shows`: what must have happened in it, see benchmarks/same_behaviour.py. `plays`: the run whose
    folder is <played>. `code`: the exit status. `is_timed`: a clock of the machine decides when.
    """

    name: str
    words: Words
    shows: tuple[str, ...] = ()
    plays: str = ""
    code: int = 0
    is_timed: bool = False

    @property
    def needs_shared(self) -> bool:
        """Whether it reads the research data that is not in the repository."""
        return any(SHARED in word or INPUTS in word for word in self.words)


# 40 requests in 200 pages: decodes jump, and memory runs short.
PRESSURE = ("experiment=pressure", "limit=40")
# Where tokens are computed: 24 short requests of a tiny model in 40 pages.
SHORT = (
    "model=micro_llama",
    "trace=random",
    "trace.requests=24",
    "trace.input_tokens=48",
    "trace.output_tokens=24",
    "trace.range_ratio=0.5",
    "arrival=all_at_once",
    "budget.kv_pages=40",
)
LOCKSTEP, CPU, WALL = "backend=lockstep", "backend=cpu", "backend.clock=wall"
SCHEDULINGS = ("static", "continuous", "chunked")
MEMORIES = {"reservation": (), "restart": ("restarts",), "swap": ("swaps",)}
CACHING = "memory.prefix_caching=true"
DEADLINES = "scheduling.deadline_s={interactive: 0.45, batch: 60}"

# An 8-layer Llama of width 64 in about a sixth of its states; two policies hold all weights.
TRAINING = (
    "trace=none",
    "training=random",
    "model=tiny_llama",
    "model.num_layers=8",
    "model.hidden_size=64",
    "model.num_heads=4",
    "model.num_kv_heads=2",
    "model.head_dim=16",
    "model.intermediate_size=96",
    "model.vocab_size=211",
    "model.max_positions=64",
    "training.sequence_tokens=8",
    "training.sequences=1",
    "budget.host_bytes=200000000",
)
SIXTH = "budget.device_bytes=960000"
CHUNKS = ("planner.chunk_elements=15000", "planner.oversize=alone")  # half a layer
TRAINED = {  # what each policy trains, so that modes, recipes and accumulation are all met
    "train_on_device": ("planner.modes=keep", "training.recipe.dropout=0.1"),
    "zero_offload": ("training/recipe=lora", "planner.modes=recompute", "training.microbatches=2"),
    "zero3_offload": ("planner.modes=offload", "training.recipe.clip_norm=0.5", SIXTH),
    "fsdp2_offload": ("planner.modes=recompute", "training.recipe.dropout=0.1", SIXTH),
    "train_lru": ("planner.modes=keep", "training.microbatches=2", SIXTH),
    "train_fifo": ("training/recipe=sgd", "planner.modes=offload", "planner.offloads_inputs=true"),
    "train_opt": ("training.recipe.dtype=bfloat16", "training.recipe.clip_norm=0.5"),
    "patrickstar": (*CHUNKS, "planner.modes=recompute", SIXTH),
}
STAYS = "train_on_device"  # without copies
RECURS = "patrickstar"  # long enough that measured steps recur
LARGE = ("trace=none", "training=random", "model=gpt2_shape", "training.recipe.dtype=bfloat16")

PEERS = f"{SHARED}/data/peers"
VIDUR = (
    "model=llama2_7b",
    "device=a100",
    f"profile='{PEERS}/cost_tables/llama2-7b_a100_tp1.npz'",
    "trace=recorded",
    f"trace.path='{INPUTS}/vidur.csv'",
    "limit=150",
    "budget.kv_pages=1200",
)


def runs() -> tuple[BehaviourRun, ...]:
    """All runs, each behind the run that it plays back."""
    found = (*_serving(), *_shared_prefixes(), *_fleets(), *_training(), *_groups(), *_both())
    return (*found, *_played(), *_timed(), *_peers())


def _serving() -> Iterator[BehaviourRun]:
    for scheduling in SCHEDULINGS:
        for memory, shows in MEMORIES.items():
            name = f"{scheduling}_{memory}"
            room = ("memory.max_tokens=1280",) if memory == "reservation" else ()
            yield BehaviourRun(f"{name}/sim", (*PRESSURE, f"policy={name}", *room), shows)
            room = ("memory.max_tokens=128",) if memory == "reservation" else ()
            words = (*SHORT, f"policy={name}", *room, LOCKSTEP)
            yield BehaviourRun(f"{name}/lockstep", words, (*shows, "tokens"))
    yield BehaviourRun("vllm_v0", (*PRESSURE, "policy=vllm_v0"), ("restarts",))
    yield BehaviourRun("vllm_v1", (*PRESSURE, "policy=vllm_v1"), ("restarts",))
    yield BehaviourRun("orca", (*PRESSURE, "policy=orca", "memory.max_tokens=1280"))
    yield BehaviourRun("sarathi", (*PRESSURE, "policy=sarathi"), ("restarts",))
    words = ("slo=mixed", "policy=deadline_restart", DEADLINES)
    yield BehaviourRun("deadline_restart", (*PRESSURE, *words), ("restarts",))
    yield BehaviourRun("shortest_restart", (*PRESSURE, "policy=shortest_restart"), ("restarts",))
    poisson = ("limit=60", "arrival.rate=16", "budget.kv_pages=200")
    yield BehaviourRun("depth_1", (*poisson, "policy=chunked_restart", "depth=1"), ("restarts",))
    yield BehaviourRun("depth_2", (*poisson, "policy=chunked_restart", "depth=2"), ("restarts",))
    yield BehaviourRun("depth_3", (*poisson, "policy=chunked_swap", "depth=3"), ("swaps",))
    words = ("arrival=clients", "arrival.clients=8", "arrival.think_s=0.1", "limit=40")
    yield BehaviourRun("clients", words)
    drawn = ("sampling.temperature=0.8", "sampling.top_k=20", "lengths=sampled", "eos_ids=[3,5,7]")
    words = (*SHORT, "arrival=gamma", *drawn, "depth=1", LOCKSTEP)
    yield BehaviourRun("sampled/lockstep", words, ("tokens",))
    refused = ("budget.kv_pages=40", "budget.may_refuse=true", "limit=40", "arrival.rate=8")
    yield BehaviourRun("refused", refused, ("refusals",))
    small = ("policy=chunked_swap", "budget.host_bytes=2000000")
    yield BehaviourRun("small_host", (*PRESSURE, *small), ("swaps", "restarts"))
    lengths = "scheduling.predictor.mean_tokens={interactive: 100, batch: 800}"
    words = ("slo=mixed", "policy=shortest_restart", "scheduling=shortest_by_class", lengths)
    yield BehaviourRun("shortest_by_class", (*PRESSURE, *words), ("restarts",))


def _shared_prefixes() -> Iterator[BehaviourRun]:
    prefix = ("trace.prefix_tokens=64", CACHING)
    words = (*SHORT, "policy=chunked_restart", *prefix)
    yield BehaviourRun("prefix/restart/sim", words, ("restarts", "cached tokens"))
    yield BehaviourRun("prefix/restart/lockstep", (*words, LOCKSTEP), ("cached tokens", "tokens"))
    words = (*SHORT, "policy=continuous_swap", *prefix)
    yield BehaviourRun("prefix/swap/sim", words, ("swaps", "cached tokens"))
    sessions = ("experiment=sessions", CACHING)
    yield BehaviourRun(
        "sessions/sim", (*sessions, "limit=25", "arrival.rate=4"), ("cached tokens",)
    )
    short = ("limit=12", "trace.max_total_tokens=320", "model.num_layers=1", LOCKSTEP)
    yield BehaviourRun("sessions/lockstep", (*sessions, *short), ("cached tokens", "tokens"))


def _fleets() -> Iterator[BehaviourRun]:
    two = ("replicas=2", "limit=40", "arrival.rate=16", "budget.kv_pages=90")
    yield BehaviourRun(
        "replicas/round_robin", (*two, "router=round_robin", "policy=chunked_swap"), ("swaps",)
    )
    least = ("router=least_outstanding", "router.load=tokens")
    yield BehaviourRun("replicas/least_outstanding", (*two, *least), ("restarts",))
    near = ("experiment=sessions", "router=prefix_affinity", CACHING, "replicas=2", "limit=20")
    yield BehaviourRun("replicas/prefix_affinity", near, ("cached tokens",))
    short = (*SHORT, "replicas=2", "router=round_robin", "trace.requests=30", LOCKSTEP)
    yield BehaviourRun("replicas/lockstep", short, ("restarts", "tokens"))


def _training() -> Iterator[BehaviourRun]:
    for policy, traits in TRAINED.items():
        words = (*TRAINING, f"policy={policy}", *traits)
        moves = () if policy == STAYS else ("copies",)
        yield BehaviourRun(f"{policy}/sim", (*words, "training.num_steps=4"), moves)
        if policy == RECURS:
            lockstep = (*words, "training.num_steps=8", LOCKSTEP)
            yield BehaviourRun(
                f"{policy}/lockstep", lockstep, ("copies", "losses", "plans unasked")
            )
        else:
            lockstep = (*words, "training.num_steps=3", LOCKSTEP)
            yield BehaviourRun(f"{policy}/lockstep", lockstep, (*moves, "losses"))
    text = ("trace=none", "training=sample", "model=micro_llama", "policy=zero_offload", LOCKSTEP)
    yield BehaviourRun(
        "text/lockstep", (*text, "model.vocab_size=2048", "training.num_steps=2"), ("losses",)
    )
    unasked = ("copies", "plans unasked")
    many = (*TRAINING, "policy=zero3_offload", SIXTH, "training.num_steps=12")
    yield BehaviourRun("recurrence/zero3_offload", many, unasked)
    tide = ("experiment=memory_tide", "training.num_steps=6")
    yield BehaviourRun("recurrence/memory_tide", tide, unasked)
    inclusive = ("policy=train_lru", "memory.tiers=inclusive", "memory.updates=device", SIXTH)
    yield BehaviourRun("options/train_lru", (*TRAINING, *inclusive), ("copies",))
    early: Words = ("policy=zero3_offload", "memory.prefetch=2", "memory.overlaps_updates=true")
    early = (*early, "memory.persistent_bytes=20000", "training.microbatches=2")
    yield BehaviourRun("options/zero3_offload", (*TRAINING, *early), ("copies",))
    still = (
        "memory.static_partition=true",
        "memory.reuses_gradients=true",
        "memory.updates=device",
    )
    yield BehaviourRun("options/patrickstar", ("experiment=memory_tide", *still), ("copies",))
    small = ("policy=train_on_device", "budget.device_bytes=100000")
    yield BehaviourRun("does_not_fit", (*TRAINING, *small), code=1)


def _groups() -> Iterator[BehaviourRun]:
    four = ("device=v100_yard", "group.devices=4", "training.sequences=4", "training.num_steps=4")
    for policy in ("zero3_offload", "patrickstar"):
        words = (*LARGE, *four, f"policy={policy}", "planner.modes=recompute")
        yield BehaviourRun(f"group/{policy}", words, ("copies", "collectives"))
    nodes = ("device=a100_superpod", "group.devices=2", "group.nodes=2", "training.num_steps=4")
    yield BehaviourRun("group/nodes", (*LARGE, *nodes, "policy=train_on_device"), ("collectives",))


def _both() -> Iterator[BehaviourRun]:
    words = (
        "policy=time_shared",
        "model=micro_llama",
        "training=random",
        "training.sequence_tokens=32",
        "training.num_steps=3",
        "limit=6",
    )
    yield BehaviourRun("time_shared/sim", words, ("copies",))
    cut = ("trace=random", "trace.requests=8", "trace.input_tokens=40", "trace.output_tokens=16")
    yield BehaviourRun(
        "time_shared/lockstep", (*words, *cut, LOCKSTEP), ("copies", "tokens", "losses")
    )


def _played() -> Iterator[BehaviourRun]:
    back = ("policy=recorded", f"replayed='{PLAYED}'")
    of = "chunked_swap/lockstep"
    yield BehaviourRun("playback/serving/sim", (*SHORT, *back), ("swaps",), of)
    yield BehaviourRun(
        "playback/serving/lockstep", (*SHORT, *back, LOCKSTEP), ("swaps", "tokens"), of
    )
    of = "prefix/restart/sim"
    words: Words = (*SHORT, "trace.prefix_tokens=64", *back)
    yield BehaviourRun("playback/prefix", words, ("restarts", "cached tokens"), of)
    of, traits = "zero3_offload/lockstep", TRAINED["zero3_offload"]
    words = (*TRAINING, *(word for word in traits if not word.startswith("planner.")), *back)
    words = (*words, "training.num_steps=3")
    yield BehaviourRun("playback/training/sim", words, ("copies",), of)
    yield BehaviourRun("playback/training/lockstep", (*words, LOCKSTEP), ("copies", "losses"), of)
    of = "replicas/round_robin"
    two = ("replicas=2", "limit=40", "arrival.rate=16", "budget.kv_pages=90", *back)
    yield BehaviourRun("playback/replicas", (*two, "router=round_robin"), ("swaps",), of)


def _timed() -> Iterator[BehaviourRun]:
    """Measured on this machine: tokens and losses are the same, times are not."""
    quiet = ("backend.probe_look_s=null",)
    words: Words = (*SHORT, "trace.requests=8", "budget.kv_pages=200", CPU, *quiet)
    yield BehaviourRun("serving/cpu", words, ("tokens",), is_timed=True)
    yield BehaviourRun("serving/wall", (*words, WALL), ("tokens",), is_timed=True)
    words = (*TRAINING, "policy=zero3_offload", *TRAINED["zero3_offload"], CPU, *quiet)
    words = (*words, "training.num_steps=3")
    yield BehaviourRun("training/cpu", words, ("copies", "losses"), is_timed=True)
    yield BehaviourRun("training/wall", (*words, WALL), ("copies", "losses"), is_timed=True)


def _peers() -> Iterator[BehaviourRun]:
    yield BehaviourRun("vidur/sarathi", (*VIDUR, "policy=sarathi"), ("restarts",))
    yield BehaviourRun("vidur/vllm_v0", (*VIDUR, "policy=vllm_v0"), ("restarts",))
    other = ("kernel_profile.skew=per_bucket", "kernel_profile.graphs=true")
    for card, pages, jobs, traits in (
        ("RTX4090", 2587, 256, ()),
        ("RTXPRO6000", 19999, 128, other),
    ):
        words: Words = (
            "model=llama3_8b",
            f"device={card.lower()}",
            "policy=vllm_v1",
            f"scheduling.max_jobs={jobs}",
            "trace=recorded",
            f"trace.path='{INPUTS}/{card}.jsonl'",
            f"profile='{PEERS}/kernel_profiles/{card}_Llama-3.1-8B'",
            f"budget.kv_pages={pages}",
            *traits,
        )
        short = ("restarts",) if pages < 10_000 else ()
        yield BehaviourRun(f"vllm/{card}", words, ("cached tokens", *short))
    words = ("model=llama3_8b", "device=h200", f"profile='{PEERS}/aiconfigurator_h200'")
    yield BehaviourRun("aiconfigurator", (*words, "limit=60", "arrival.rate=20"))
    for kind in ("azure2023_conv", "mooncake_conversation"):
        words = ("model=llama3_8b", "device=h100", "trace=recorded", "trace.max_total_tokens=8192")
        path = f"trace.path='{SHARED}/data/arrivals/{kind}_first45min.parquet'"
        yield BehaviourRun(f"recorded/{kind}", (*words, path, "limit=100", "trace.rate=4"))


def write_vidur(requests: Path, out: Path) -> None:
    """Vidur's list of requests, with the columns that `trace=recorded` reads."""
    names = {"arrived_at": "arrival_s", "num_prefill_tokens": "prompt_tokens"}
    names["num_decode_tokens"] = "output_tokens"
    pd.read_csv(requests).rename(columns=names)[list(names.values())].to_csv(out, index=False)


def write_inputs(shared: Path, folder: Path) -> None:
    """Vidur's requests and those of vLLM's logs, as tables that `trace=recorded` reads."""
    folder.mkdir()
    requests = shared / "data/peers/inputs/sharegpt_n1000_qps2_seed42.csv"
    write_vidur(requests, folder / "vidur.csv")
    source = shared / "data/sharegpt/sharegpt_gpt4_llama3_ids_300.jsonl.gz"
    with gzip.open(source, "rt", encoding="utf-8") as file:
        prompts = [json.loads(line)["input_tok_ids"] for line in file]
    hashes = _hash_ids(prompts)
    for card in ("RTX4090", "RTXPRO6000"):
        name = f"vllm_{card}_Llama-3.1-8B_requests.parquet"
        log = pd.read_parquet(shared / "data/measured" / name)
        lines = pd.DataFrame(
            {
                "arrival_s": log["queued_ts"] - log["queued_ts"].min(),
                "input_length": log["input_toks"],
                "output_length": log["output_toks"],
                "hash_ids": hashes,
            }
        )
        lines.to_json(folder / f"{card}.jsonl", orient="records", lines=True, double_precision=9)


def _hash_ids(prompts: list[list[int]], block: int = 16) -> list[list[int]]:
    """A number per block of each prompt: two are equal where all up to their ends is."""
    numbers: dict[tuple[int, tuple[int, ...]], int] = {}
    found = []
    for prompt in prompts:
        ids, before = list[int](), -1
        for at in range(0, len(prompt), block):
            key = (before, tuple(prompt[at : at + block]))
            before = numbers.setdefault(key, len(numbers))
            ids.append(before)
        found.append(ids)
    return found
