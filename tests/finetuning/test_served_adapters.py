"""Requests through adapters, computed: tokens are those of peft's generate, bytes are exact."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from engine.contract.adapters import AdapterSpec, adapter_homes, resident_adapters
from engine.contract.layout import Layout
from engine.contract.policy import Policy
from engine.contract.regions import PageSize, Tier
from engine.loop.engine import Engine
from engine.loop.state import VirtualClock
from engine.results.plan_log import encode
from engine.results.recorder import Recorder
from models.parameters import adapter_bytes
from models.spec import ModelSpec
from policies.composed import Composed
from policies.sharing.adapters import AdapterMemory
from runtime.executors.lockstep import CpuExecutor
from runtime.finetuning.adapters import ServedAdapters, drawn_adapter
from runtime.finetuning.machine import FinetuningMachine
from runtime.finetuning.model import over_served
from runtime.measure.meter import CpuMeter
from runtime.serving.machine import GPU, ServingMachine
from runtime.training.store import RegionStore
from tests.support.hand_made import FAMILIES, HOST, shared_model
from tests.support.reference import Reference, compare, generate, plain_model
from tests.support.serving import KEEPING, MEMORY, SCHEDULING, shared_requests, short_requests
from traces.serving.request import Request
from traces.training.recipe import Recipe

TARGETS = {
    "llama": ("q_proj", "v_proj", "down_proj"),
    "qwen3": ("k_proj", "o_proj", "gate_proj", "up_proj"),
    "opt": ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"),
    "gpt2": ("c_attn", "c_proj", "c_fc"),
}


@cache
def adapters_of(family: str, count: int = 3) -> tuple[AdapterSpec, ...]:
    """Adapters of unequal ranks; the first names the products that peft takes for the family."""
    spec, found = FAMILIES[family], list[AdapterSpec]()
    for number in range(count):
        targets = TARGETS[family] if number else ()
        recipe = Recipe(lora_rank=4 + 2 * number, lora_targets=targets, seed=number)
        found.append(AdapterSpec(f"a{number}", recipe, adapter_bytes(spec, recipe)))
    return tuple(found)


@cache
def adapted_model(family: str, number: int) -> Any:
    """The plain model with an adapter, as peft runs it; only to be read."""
    spec, adapter = FAMILIES[family], adapters_of(family)[number]
    model = over_served(plain_model(spec), adapter.recipe).eval()
    drawn = drawn_adapter(spec, adapter.recipe)
    state = {f"base_model.model.{name}": matrix for name, matrix in drawn.items()}
    assert not model.load_state_dict(state, strict=False).unexpected_keys
    assert {name for name, _ in model.named_parameters() if "lora_" in name} == {*state}
    return model


def references(family: str, requests: Sequence[Request]) -> Mapping[int, Reference]:
    names = [adapter.name for adapter in adapters_of(family)]
    found = dict[int, Reference]()
    for r in requests:
        model = plain_model(FAMILIES[family])
        if r.adapter:
            model = adapted_model(family, names.index(r.adapter))
        found[r.request_id] = generate(model, r.prompt_ids or (), r.output_tokens)
    return found


def naming(requests: Sequence[Request], seed: int = 0) -> list[Request]:
    rng = random.Random(seed)
    return [replace(r, adapter=rng.choice(("", "a0", "a1", "a2"))) for r in requests]


class Run:
    """A replay in lockstep, with the meter's readings."""

    def __init__(
        self, family: str, policy: Policy, requests: Sequence[Request], gpu_pages: int
    ) -> None:
        spec, adapters = FAMILIES[family], adapters_of(family)
        page, pages = PageSize.of(spec, 8), {GPU: gpu_pages, HOST: 4 * gpu_pages}
        prompts = {r.request_id: r.prompt_ids or () for r in requests}
        model = shared_model(spec)
        serving, store = ServingMachine(model, spec, page, pages, prompts), RegionStore()
        homes = adapter_homes(adapters, [HOST])
        served = ServedAdapters(adapters, spec, model, store)
        self.machine = FinetuningMachine(serving, {}, store, homes, served)
        arenas = {pool: arena.pages for pool, arena in serving.arenas.items()}
        self.meter = CpuMeter({}, arenas, 1, held=self.machine.held)
        self.recorder, env = Recorder(self.meter, names_adapters=True), VirtualClock()
        capacity = {pool: count * page.nbytes for pool, count in pages.items()}
        capacity[HOST] += sum(homes.values())
        layout = Layout().with_adapters(adapters, [HOST])
        executor = CpuExecutor(env, self.machine)
        engine = Engine(
            env, policy, executor, capacity, page, layout=layout, recorder=self.recorder
        )
        engine.replay(requests)
        self.outputs = {r.request_id: self.machine.outputs(r.request_id) for r in requests}
        self.resident = resident_adapters(engine.ledger.held_bytes, GPU)
        self.store = store


def check(family: str, found: Run, requests: Sequence[Request]) -> None:
    equal, ties, wrong = compare(found.outputs, references(family, requests))
    assert (equal + ties, wrong) == (len(requests), [])
    assert ties <= 1


@pytest.mark.parametrize("family", TARGETS)
def test_tokens_equal_those_of_peft(family: str) -> None:
    requests = naming(short_requests(12, 211, max_output=12))
    policy = Composed(SCHEDULING["chunked_prefill"], AdapterMemory(MEMORY["paged_restart"]))
    found = Run(family, policy, requests, gpu_pages=60)
    check(family, found, requests)


@pytest.mark.broad(3)
@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("scheduling", SCHEDULING)
def test_tokens_under_pressure(scheduling: str, memory: str) -> None:
    requests = naming(short_requests(12, 211, seed=1, max_output=16), 1)
    policy = Composed(SCHEDULING[scheduling], AdapterMemory(MEMORY[memory], most=2))
    found = Run("llama", policy, requests, gpu_pages=36)
    check("llama", found, requests)


def test_adapters_differ_from_the_model_and_from_each_other() -> None:
    (request,) = short_requests(1, 211, max_output=24)
    tokens = [
        generate(model, request.prompt_ids or (), 24).tokens
        for model in (plain_model(FAMILIES["llama"]), *[adapted_model("llama", i) for i in (0, 1)])
    ]
    assert len({*map(tuple, tokens)}) == 3


@pytest.mark.parametrize("memory", KEEPING)
def test_kept_pages_are_those_of_the_adapter(memory: str) -> None:
    requests = naming(shared_requests(10, 211), 2)
    policy = Composed(SCHEDULING["chunked_prefill"], AdapterMemory(KEEPING[memory]))
    found = Run("llama", policy, requests, gpu_pages=60)
    assert sum(o.cached_tokens for o in found.recorder.outcomes.values()) > 0
    check("llama", found, requests)


def test_resident_bytes_are_exact_by_the_meter() -> None:
    requests = naming(short_requests(12, 211, seed=3, max_output=12), 3)
    policy = Composed(SCHEDULING["chunked_prefill"], AdapterMemory(MEMORY["paged_restart"]))
    found = Run("llama", policy, requests, gpu_pages=40)
    assert len(found.resident) > 1
    spec = FAMILIES["llama"]
    for place, nbytes in found.resident.items():
        adapter = adapters_of("llama")[place.region.part]
        numbers = sum(matrix.numel() for matrix in drawn_adapter(spec, adapter.recipe).values())
        (storage,) = found.store.find(place.region, Tier.GPU, "a test").storages_held()
        assert storage.nbytes() == nbytes == numbers * spec.item_bytes
    rows = found.recorder.tables()["memory"].to_pylist()
    last = [row for row in rows if row["tier"] == "gpu" and row["measured_bytes"] is not None][-1]
    assert last["adapter_bytes"] == sum(found.resident.values())


def test_plans_are_those_of_the_simulation() -> None:
    """Lockstep decides as virtual time does: the log of plans is one."""
    from tests.support.replays import ToyExecutor

    requests = naming(short_requests(12, 211, seed=1, max_output=16), 1)
    policy = Composed(SCHEDULING["chunked_prefill"], AdapterMemory(MEMORY["paged_swap"]))
    found = Run("llama", policy, requests, gpu_pages=36)
    env, recorder, page = VirtualClock(), Recorder(), PageSize.of(FAMILIES["llama"], 8)
    homes = adapter_homes(adapters_of("llama"), [HOST])
    capacity = {GPU: 36 * page.nbytes, HOST: 144 * page.nbytes + sum(homes.values())}
    layout = Layout().with_adapters(adapters_of("llama"), [HOST])
    Engine(env, policy, ToyExecutor(env), capacity, page, layout=layout, recorder=recorder).replay(
        requests
    )
    logs = [[encode(row[-1]) for row in r.plans] for r in (found.recorder, recorder)]
    assert logs[0] == logs[1]


def test_a_drawn_adapter_is_seeded_and_has_no_zero_matrix() -> None:
    spec: ModelSpec = FAMILIES["gpt2"]
    one, other = (drawn_adapter(spec, Recipe(lora_rank=2, seed=s)) for s in (1, 2))
    again = drawn_adapter(spec, Recipe(lora_rank=2, seed=1))
    assert all(torch.equal(one[name], again[name]) for name in one)
    assert not any(torch.equal(one[name], other[name]) for name in one)
    assert all(bool(matrix.any()) for matrix in one.values())
