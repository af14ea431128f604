"""Law 12: memory policies train what plain torch trains; under pressure: the training matrix."""

from __future__ import annotations

import json

import pytest

from tests.support.pressure import STREAMING, WHOLE
from tests.training.trainings import GPU, Trained, differing, plain, run_spec, state_bytes, train

CHUNKS = "planner.chunk_elements=40000"  # about a layer: more than any table of the model
RECIPE = (
    "training.recipe.clip_norm=0.5",
    "training.recipe.dropout=0.1",
    "training.microbatches=2",
    "training.num_steps=2",
)
POLICIES = [(f"policy={name}",) for name in (*STREAMING, *WHOLE)] + [("policy=patrickstar", CHUNKS)]
TIGHT = ("training.sequence_tokens=8", "training.sequences=1", "model.num_layers=8")


@pytest.mark.broad(4)
@pytest.mark.parametrize("policy", POLICIES, ids=lambda words: words[0])
def test_a_policy_trains_as_plain_torch(policy: tuple[str, ...]) -> None:
    """Decisions in the simulator equal those of the runtime (law 11)."""
    runs = {name: train(name, *policy, *RECIPE) for name in ("sim", "lockstep", "cpu")}
    for name in ("lockstep", "cpu"):
        assert not differing(runs[name].result, plain(*policy, *RECIPE))
        assert runs[name].log == runs["sim"].log


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_states_may_be_made_at_the_first_update(dtype: str) -> None:
    """Masters are then made of what weights were at the start."""
    words = (CHUNKS, "policy=patrickstar", *RECIPE, f"training.recipe.dtype={dtype}")
    found = [train("lockstep", *words, f"planner.states={s}") for s in ("given", "first_update")]
    assert not differing(found[0].result, found[1].result)
    if dtype == "float32":
        assert not differing(found[1].result, plain(*words))


@pytest.mark.broad(2)
@pytest.mark.parametrize("policy", ["zero3_offload", "train_lru", "patrickstar"])
def test_real_lanes_train_the_same(policy: str) -> None:
    """With a thread for each lane, and copies that take time beside the computing."""
    words = (f"policy={policy}", *RECIPE, *([CHUNKS] if policy == "patrickstar" else []))
    assert not differing(train("cpu", *words, "backend.clock=wall").result, plain(*words))


@pytest.mark.broad(3)
@pytest.mark.parametrize("policy", STREAMING)
def test_a_policy_trains_in_a_sixth_of_the_memory_of_its_states(policy: str) -> None:
    """The meter reads what the ledger has booked, but for token ids (law 14)."""
    words = (f"policy={policy}", *TIGHT)
    whole = state_bytes(run_spec(*words))
    words = (*words, f"budget.device_bytes={whole // 6}")
    found = train("lockstep", *words, "device.host_plan_ns=0", "device.host_slice_ns=0")
    assert not differing(found.result, plain(*words))
    assert found.setting.room.capacity_bytes[GPU] == whole // 6
    assert 0 < max(held_bytes(found)) <= whole // 6
    assert set(off_bytes(found)) <= {0, *IDS_BYTES}


def test_a_training_clock_may_count_reference_works() -> None:
    """Those of a model like the one that is trained, beside it: nothing it computes is changed."""
    words = ("policy=train_on_device", *RECIPE)
    paced = train("cpu", *words, "backend.reference_ns=[1000000,1000000]")
    assert not differing(paced.result, plain(*words))


def test_a_tied_table_is_booked_while_its_gradient_waits() -> None:
    """From the head's backward to the embedding's, but in the first microbatch of a step."""
    words = ("policy=zero3_offload", "model.tie_embeddings=true", "training.microbatches=2")
    found = train("lockstep", *words, "device.host_plan_ns=0", "device.host_slice_ns=0")
    assert not differing(found.result, plain(*words))
    (trainee,) = found.setting.trainees
    spec, ids_bytes = trainee.spec, 8 * trainee.job.microbatch_tokens
    assert set(off_bytes(found)) <= {0, ids_bytes, ids_bytes + 8}, "the meter finds it, too"
    table_bytes = 4 * spec.vocab_size * spec.hidden_size
    waiting = [json.loads(body)["ops"] for body in found.log]
    grown = [op[2] for ops in waiting for op in ops if op[0] == "grow" and op[1][1:4] == ASIDE]
    assert grown == [table_bytes] * 3, "once in each step"


ASIDE = ["buffer", 0, 2]  # kind, part and slot of its region
IDS_BYTES = (64, 72)  # of 8 token ids, and with the loss's count of them


def held_bytes(found: Trained) -> list[int]:
    """Bytes that the device's ledger holds, at each row."""
    rows = found.recorder.tables()["memory"].to_pylist()
    return [r["capacity_bytes"] - r["free_bytes"] for r in rows if r["tier"] == "gpu"]


def off_bytes(found: Trained) -> list[int]:
    """Bytes that the meter reads beyond the ledger, in both tiers."""
    rows = found.recorder.tables()["memory"].to_pylist()
    read = [r for r in rows if r["measured_bytes"] is not None]
    booked = [r["capacity_bytes"] - r["free_bytes"] - r["coming_bytes"] for r in read]
    return [r["measured_bytes"] - nbytes for r, nbytes in zip(read, booked, strict=True)]
