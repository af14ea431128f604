"""What an out-of-memory line advises: knobs of the pool that is short, and none that is set."""

from __future__ import annotations

import re

import pytest

from engine.contract.regions import Tier, Work
from engine.contract.rules import Remedy
from policies.planners.placement import STARTS
from policies.training.out_of_memory import OutOfMemory, remedies_of_launch
from tandem.wiring.budget import REMEDIES, advised_line
from tests.support.pressure import POLICIES, budget, min_budget, refusal
from tests.training.trainings import run_spec, train

INPUTS_OUT = "send layers' inputs to the host (planner.offloads_inputs=true)"
LORA = "train adapters (training/recipe=lora)"


def advised(tier: Tier, *words: str, work: Work = Work.BACKWARD) -> str:
    """The knobs for launches of such a job, in a line."""
    found = run_spec(*words)
    job = found.trainees[0].job
    layout = found.room.layout.training[job.job_id]
    return "; ".join([REMEDIES[r] for r in remedies_of_launch(tier, work, job, layout)])


def told(*words: str) -> str:
    """What a user reads of a job that does not fit."""
    refused = refusal(*words)
    assert refused is not None
    return advised_line(refused)


def test_of_a_device_it_names_what_its_activations_are_made_of() -> None:
    kept = advised(Tier.GPU, "policy=zero3_offload", "planner.modes=keep")
    assert "training.sequences" in kept and "planner.modes=recompute" in kept
    assert "chunks" not in kept and "lora" not in kept, "its chunks are units"
    words = ("policy=zero3_offload", "planner.modes=recompute", "training.sequences=1")
    shorter = "take shorter sequences (training.sequence_tokens)"
    assert advised(Tier.GPU, *words) == f"{shorter}; {INPUTS_OUT}"
    assert advised(Tier.GPU, *words, "planner.offloads_inputs=true") == shorter
    out = advised(Tier.HOST, *words, "planner.offloads_inputs=true")
    assert "planner.offloads_inputs=false" in out
    assert "planner.chunk_elements" in advised(
        Tier.GPU, "policy=patrickstar", "planner.chunk_elements=40000"
    )


def test_of_a_host_it_names_states_and_what_is_offloaded() -> None:
    words = ("policy=zero3_offload", "planner.modes=recompute", "training.sequences=1")
    assert advised(Tier.HOST, *words) == LORA
    assert "planner.modes=recompute" in advised(
        Tier.HOST, "policy=zero3_offload", "planner.modes=offload"
    )
    assert not advised(Tier.HOST, *words, "training/recipe=lora")


@pytest.mark.parametrize("tier", [Tier.GPU, Tier.HOST])
@pytest.mark.parametrize("mode", ["keep", "recompute", "offload"])
def test_of_an_update_it_names_nothing_of_activations(tier: Tier, mode: str) -> None:
    """They have ended before."""
    words = ("policy=zero3_offload", f"planner.modes={mode}")
    if mode != "keep":
        words += ("planner.offloads_inputs=true",)
    assert advised(tier, *words, work=Work.UPDATE) == LORA
    coarse = advised(tier, "policy=patrickstar", "planner.chunk_elements=40000", work=Work.UPDATE)
    assert ("planner.chunk_elements" in coarse) is (tier is Tier.GPU)


HOST_ALONE = (
    "zero_offload",
    "zero3_offload",
    "fsdp2_offload",
)  # updates run there, and nowhere else


@pytest.mark.broad(4)
@pytest.mark.parametrize("policy", POLICIES)
def test_another_start_is_named_where_it_makes_room_and_only_there(policy: str) -> None:
    words = ("model.num_layers=2", "training.sequence_tokens=8", *POLICIES[policy])
    whole = sum(min_budget(*words).values())
    told = set[str]()
    for start, tier in (("host", Tier.HOST), ("device", Tier.GPU)):
        for share in (4, 16):  # of all it needs: enough for launches, or not
            room = budget({Tier.GPU: 4 * whole, Tier.HOST: 4 * whole, tier: whole // share})
            refused = refusal(*words, f"planner.start={start}", *room)
            assert refused is not None and "the model states" in str(refused)
            assert "=" not in str(refused)
            others = {name: refusal(*words, f"planner.start={name}", *room) for name in STARTS}
            named = {*re.findall(r"take planner\.start=(\w+)", advised_line(refused))}
            helps = {name for name, other in others.items() if other is None}
            assert named <= helps if helps else all("states" not in str(others[n]) for n in named)
            assert named or not helps
            told |= named
    assert ("host_first" in told) is (policy not in (*HOST_ALONE, "train_on_device"))
    assert ("host" in told) is (policy != "train_on_device")


def test_no_other_start_is_named_where_both_tiers_are_full() -> None:
    room = budget({Tier.GPU: 400_000, Tier.HOST: 400_000})
    refused = told("policy=train_lru", *room)
    assert "planner.start=host)" in refused and "take planner.start" not in refused
    enough = told("policy=train_lru", *budget({Tier.GPU: 10_000_000, Tier.HOST: 400_000}))
    assert "take planner.start=host_first, or train adapters" in enough
    lora = told("policy=train_lru", "training/recipe=lora", *room)
    assert "the model states" in lora and "adapters" not in lora


def test_every_remedy_has_words() -> None:
    assert {*REMEDIES} == {*Remedy}


def test_the_line_says_so_where_a_job_fails() -> None:
    words = ("planner.modes=recompute", "training.sequences=1", "policy=zero3_offload")
    with pytest.raises(OutOfMemory) as caught:
        run_spec(*words, "budget.host_bytes=300000")
    assert re.search(r"states .*give it more memory, or train adapters", advised_line(caught.value))
    with pytest.raises(OutOfMemory) as caught:
        train("sim", *words, "budget.device_bytes=60000")
    line = advised_line(caught.value)
    assert line.startswith("gpu:0 is at least") and "\n" not in line
    assert "recompute" not in line and "training.sequences)" not in line
    assert line.endswith(f", or take shorter sequences (training.sequence_tokens), or {INPUTS_OUT}")
