"""What a budget must hold for the longest request, to the page."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from engine.contract.plan import Slice
from engine.contract.policy import PROMISES_NOTHING, PlanBuilder, Traits
from engine.contract.regions import PageSize, Tier
from engine.contract.view import View
from policies.composed import Composed
from policies.kv.paged_restart import PagedRestart
from policies.scheduling.chunked_prefill import ChunkedPrefill
from policies.scheduling.recorded import RecordedPlans
from policies.sharing.time_shared import DividedMemory, TakeTurns
from policies.training.patrickstar import PatrickStar
from policies.training.training_order import TrainingOrder
from sim.devices.kv_room import plan_memory
from tandem.cli.terminal import told
from tandem.config.compose import composed
from tandem.wiring.budget import Budget, memory_plan, room_for
from tandem.wiring.experiment import run_experiment
from tandem.wiring.machines import pages_of
from tandem.wiring.run_spec import RunSpec, run_spec_of
from traces.serving.request import Request
from traces.store import write_trace

TOKENS = 10 * 16  # ten pages
MODELS = {"cpu": "tiny_llama", "rtx4090": "llama3_8b"}


@pytest.mark.broad(3)
@pytest.mark.parametrize(
    ("policy", "least"),
    [
        ("chunked_restart", 10),
        ("chunked_swap", 10),
        ("vllm_v1", 10),
        ("vllm_v0", 11),
        ("sarathi", 11),
        ("chunked_reservation memory.max_tokens=159", 10),
        ("orca memory.max_tokens=200", 13),
    ],
)
def test_the_min_budget_that_is_accepted_serves_the_longest_request(
    policy: str, least: int, tmp_path: Path
) -> None:
    """vLLM v0's rules want a page free at every decode, or the job is refused on its way."""
    trace = tmp_path / "one.parquet"
    write_trace(trace, [Request(0, 0, 100, TOKENS - 100)], {})
    words = ["model=micro_llama", "trace=file", f"trace.path={trace}", "arrival=all_at_once"]
    words += f"policy={policy}".split()
    with pytest.raises(ValueError, match=f"raise budget.kv_pages to {least},"):
        run_spec_of(composed([*words, f"budget.kv_pages={least - 1}"]))
    with pytest.raises(
        ValueError, match=r"raise budget\.kv_bytes to"
    ) as told:  # the key that is set
        run_spec_of(composed([*words, "budget.kv_bytes=1"]))
    enough = re.search(r"kv_bytes to (\d+)", str(told.value))
    assert enough and run_spec_of(composed([*words, f"budget.kv_bytes={enough[1]}"]))
    metrics = run_experiment(composed([*words, f"budget.kv_pages={least}"]), tmp_path / "run")
    assert metrics["num_finished"] == 1


class Promising:
    """A memory policy that is known by its traits alone."""

    def __init__(self, traits: Traits) -> None:
        self.traits = traits

    def fit(self, batch: tuple[Slice, ...], view: View, plan: PlanBuilder) -> None:
        raise AssertionError("a budget plans nothing")


@pytest.mark.parametrize(
    ("traits", "least"),
    [
        (Traits(), 10),
        (Traits(spare_pages=3), 13),
        (Traits(kv_growth="reserved", reserved_tokens=200), 13),
    ],
)
def test_a_budget_goes_by_the_traits_of_the_memory_policy(traits: Traits, least: int) -> None:
    setting = run_spec_of(composed(["model=micro_llama", "limit=2"]))
    for memory in (Promising(traits), DividedMemory(Promising(traits), PatrickStar())):
        policy = Composed(ChunkedPrefill(), memory)
        requests = [Request(0, 0, 100, TOKENS - 100)]
        given = (setting.device, setting.spec, setting.page, requests, policy)
        with pytest.raises(ValueError, match=rf"raise budget\.kv_pages to {least},"):
            room_for(Budget(kv_pages=least - 1), *given)
        assert room_for(Budget(kv_pages=least), *given)


@dataclass
class Holds:
    """A scheduling whose attributes have the names that composing policies have."""

    serving: dict[int, int] = field(default_factory=dict)
    traits: Traits = Traits(step_tokens=64, max_jobs=4)  # noqa: RUF009

    def batch(self, view: View) -> tuple[Slice, ...]:
        raise AssertionError("a budget plans nothing")


def test_a_budget_looks_for_no_attribute_but_traits() -> None:
    setting = run_spec_of(composed(["model=micro_llama", "limit=2"]))
    requests = [Request(i, 0, 400, 40) for i in range(8)]
    bounded = ChunkedPrefill(token_budget=64, max_jobs=4)
    sides = DividedMemory(PagedRestart(), PatrickStar())
    page = PageSize.of(setting.spec, 16)
    found = [
        room_for(Budget(), setting.device, setting.spec, page, requests, policy).memory.activation
        for policy in (
            Composed(bounded, PagedRestart()),
            Composed(Holds(), PagedRestart()),
            Composed(TakeTurns(Holds(), TrainingOrder()), sides),
        )
    ]
    assert len(set(found)) == 1


def test_a_reservation_that_the_longest_request_outgrows_is_told_before_anything_runs(
    tmp_path: Path,
) -> None:
    trace = tmp_path / "one.parquet"
    write_trace(trace, [Request(0, 0, 100, TOKENS - 100), Request(1, 0, 10, 10)], {})
    words = ["model=micro_llama", "trace=file", f"trace.path={trace}", "arrival=all_at_once"]
    words += ["policy=chunked_reservation", f"memory.max_tokens={TOKENS - 2}"]
    with pytest.raises(ValueError, match="max_tokens=158: the longest request needs 159; raise it"):
        run_spec_of(composed(words))
    allowed = composed([*words, "budget.may_refuse=true"])
    metrics = run_experiment(allowed, tmp_path / "run")
    assert (metrics["num_finished"], metrics["num_refused"]) == (1, 1)


LOGGED_BLOCKS = 2588  # of vLLM 0.19 on this card: ../shared/data/measured, meta.json
RTX4090 = ("device=rtx4090", "model=llama3_8b", "limit=20")


def gpu(*words: str) -> RunSpec:
    return run_spec_of(composed([*RTX4090, *words]))


def pages(setting: RunSpec) -> int:
    return pages_of(setting)[Tier.GPU, 0]


def test_a_run_on_a_gpu_has_the_kv_that_vllm_found_room_for() -> None:
    """By the card's own reserve; both ends of its range: tests/sim/test_peers_logs.py.

    A reserve is known to some 256 MiB, which are 128 pages of 2 MiB or 5 %: 3 % is less than that.
    """
    assert pages(gpu("policy=vllm_v1")) == pytest.approx(LOGGED_BLOCKS, rel=0.03)


def test_the_plan_of_a_gpu_is_the_memory_model() -> None:
    setting = gpu("policy=vllm_v1", "budget.graph_rows=0")
    card = setting.device
    given = (card.memory_bytes, 0.9, 2048, 256, card.reserve_bytes, setting.page)
    assert setting.room.memory == plan_memory(setting.spec, *given)
    assert pages(setting) == setting.room.memory.pages


def test_a_scheduling_with_whole_prompts_sets_more_aside() -> None:
    small = ("scheduling.token_budget=16", "scheduling.max_jobs=1")
    cut, whole = (
        gpu(f"policy={name}", *small).room.memory.activation
        for name in ("chunked_restart", "continuous_restart")
    )
    assert whole > 4 * cut
    told_so = gpu("policy=continuous_restart", *small, "budget.step_tokens=16").room.memory
    assert told_so.activation == cut


@dataclass(frozen=True)
class Own(ChunkedPrefill):
    """A scheduling of a user's own, with settings of the usual names."""

    traits: Traits = PROMISES_NOTHING


@pytest.mark.parametrize("device", ["cpu", "rtx4090"])
def test_memory_for_a_step_goes_by_what_a_scheduling_tells(device: str) -> None:
    """Settings are not read. Where no bound is told, all prompts may start together."""
    words = [f"device={device}", "limit=20", f"model={MODELS[device]}"]
    found = run_spec_of(composed([*words, "budget.may_refuse=true"]))
    card, spec, requests = found.device, found.spec, list(found.requests)

    def activation(traits: Traits) -> int:
        policy = Composed(Own(traits=traits), PagedRestart())
        return memory_plan(Budget(), spec, card, found.page, requests, policy).activation

    told = activation(Traits(step_tokens=512, max_jobs=256))
    assert told == found.room.memory.activation, "as of our own"
    longest = max(r.prompt_tokens + r.output_tokens for r in requests)
    prompts = sum(r.prompt_tokens for r in requests)
    assert prompts > max(512, longest)
    assert activation(Traits(prompt_tokens=512)) < activation(Traits())
    assert activation(Traits(max_jobs=1)) < activation(Traits(max_jobs=len(requests)))
    assert activation(Traits(max_jobs=len(requests))) == activation(Traits())


def test_a_scheduling_that_tells_no_bound_is_told_so_where_memory_is_short() -> None:
    found = gpu("policy=vllm_v1", "budget.may_refuse=true")
    short = replace(found.device, memory_bytes=found.spec.weight_bytes + (2 << 30))
    for traits, helps in (
        (Traits(), "declare step_tokens and max_jobs in the scheduling's traits (activations)"),
        (Traits(step_tokens=4), "lower the scheduling's token_budget or max_jobs (activations)"),
    ):
        policy = Composed(Own(traits=traits), PagedRestart())
        with pytest.raises(ValueError, match=re.escape(helps)):
            room_for(Budget(), short, found.spec, found.page, list(found.requests), policy)


def test_what_memory_is_for_is_told(tmp_path: Path) -> None:
    words = [*RTX4090, "limit=2", "policy=vllm_v1", "arrival=all_at_once"]
    metrics = run_experiment(composed(words), tmp_path / "run")
    provenance = json.loads((tmp_path / "run" / "provenance.json").read_text())
    plan = provenance["memory_plan"]
    parts = ("weight", "activation", "reserve", "kv")
    left = plan["usable_bytes"] - sum(plan[f"{part}_bytes"] for part in parts)
    assert 0 <= left < 16 * 131072, "the parts make up the whole, but for less than a page"
    line = "weights 14.96 GiB, activations 438.4 MiB, reserve 600.0 MiB, KV 5.19 GiB (2,658 pages)"
    assert line in told(metrics, provenance)


def test_a_model_that_does_not_fit_a_gpu_is_told_with_the_reserve() -> None:
    parts = r"weights .* MiB, activations .* MiB, reserve 1,024\.0 MiB"
    with pytest.raises(ValueError, match=parts):
        run_spec_of(composed(["device=v100", "model=llama3_8b", "limit=2"]))


def test_kv_of_a_given_size_must_fit_beside_all_else() -> None:
    """141 GB of weights were simulated on 24 GB, as long as the KV was given."""
    huge = ["model=llama3_70b", "device=rtx4090", "limit=2", "budget.kv_pages=1000"]
    with pytest.raises(ValueError, match=r"short: weights 134,\d+.*at most 0 fit.*of rtx4090"):
        run_spec_of(composed(huge))
    with pytest.raises(ValueError, match=r"lower budget\.kv_pages, lower the scheduling's") as told:
        gpu("budget.kv_pages=100000")
    most = int(re.findall(r"at most (\d+) fit", str(told.value))[0])
    assert pages(gpu(f"budget.kv_pages={most}")) == most > pages(gpu()), "all of it, not 90 %"
    with pytest.raises(ValueError, match="MiB short"):
        gpu(f"budget.kv_pages={most + 1}")
    page_bytes = gpu().page.nbytes
    with pytest.raises(ValueError, match=rf"budget\.kv_bytes; at most {most * page_bytes} fit"):
        gpu(f"budget.kv_bytes={(most + 1) * page_bytes}")


def test_the_steps_of_a_plan_log_are_not_judged_again() -> None:
    """Nothing limits a step of a log but the log: what all prompts together would take is moot."""
    setting = run_spec_of(composed(["model=micro_llama", "limit=2"]))
    many = [Request(i, 0, 1000, 10) for i in range(200)]
    budget = Budget(kv_pages=100, may_refuse=True)
    given = (setting.device, setting.spec, setting.page, many)
    assert room_for(budget, *given, RecordedPlans(())).page.tokens == 16
    whole = run_spec_of(composed(["model=micro_llama", "limit=2", "policy=static_restart"])).policy
    unlimited = replace(whole, scheduling=replace(whole.scheduling, max_jobs=200))
    with pytest.raises(ValueError, match="MiB short"):
        room_for(budget, *given, unlimited)


@pytest.mark.parametrize("device", ["cpu", "a100"])
def test_a_time_shared_policy_sets_aside_what_its_serving_side_takes(device: str) -> None:
    words = [f"device={device}", "backend=sim"]
    shared = run_spec_of(composed([*words, "policy=time_shared", "training=random"]))
    served = run_spec_of(composed([*words, "policy=chunked_restart"]))
    assert shared.room.memory == served.room.memory
