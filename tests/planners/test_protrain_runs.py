"""ProTrain trains as plain torch does, whatever its knobs are, in a quarter of its states."""

from __future__ import annotations

from collections import Counter

import pytest

from engine.contract.plan import Copy
from engine.contract.regions import Kind, Place, Tier
from engine.contract.rules import ContractError
from policies.training import protrain
from tests.support.pressure import (
    BF16,
    CLIP,
    DROPOUT,
    FROZEN,
    JOB,
    LORA,
    SGD,
    TIED,
    Words,
    budget,
    pressing,
    refusal,
)
from tests.training.trainings import differing, plain, run_spec, state_bytes, train

pytestmark = pytest.mark.ci


def knobs(persistent: int, buffers: int, swaps: int, checkpoints: int, *more: str) -> Words:
    names = ("persistent", "buffers", "swaps", "checkpoints")
    pairs = zip(names, (persistent, buffers, swaps, checkpoints), strict=True)
    return (*[f"planner.{name}={value}" for name, value in pairs], *more)


KNOBS: dict[str, Words] = {  # of eight blocks
    "buffers": knobs(0, 1, 0, 7),
    "mixed": knobs(2, 2, 2, 4, "planner.interval=3"),
    "swaps": knobs(0, 3, 5, 0, "planner.placement=swaps_first", "planner.interval=1"),
    "persistent": knobs(8, 0, 0, 3),
    "wide_chunks": knobs(1, 1, 1, 6, "planner.chunk_elements=60000"),
    "searched": (),
}
RECIPES: dict[str, Words] = {
    "full": (),
    "lora": (LORA, DROPOUT),
    "sgd": (SGD, FROZEN),
    "clip": (CLIP, TIED),
    "accumulate": ("training.microbatches=3", DROPOUT),
    "accumulate_clip": ("training.microbatches=2", CLIP, BF16),
    "bf16": (BF16, TIED),
}


# Configurations that need more than a quarter of their states. Where all persists, all states are
# there; states of adapters and of SGD are little more than weights, and activations come on top.
BEYOND_A_QUARTER = {
    *[("persistent", recipe) for recipe in RECIPES],
    *[(chosen, "lora") for chosen in ("mixed", "swaps", "wide_chunks", "searched")],
    *[("mixed", "accumulate_clip"), ("mixed", "bf16"), ("searched", "sgd")],
}


def in_a_quarter(*words: str) -> Words:
    """The words with a quarter of the model's states on the device, or the least that does."""
    quarter = budget({Tier.GPU: state_bytes(run_spec(*words)) // 4})
    return (*words, *quarter) if refusal(*words, *quarter) is None else pressing(*words)


@pytest.mark.broad(8)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("chosen", KNOBS)
def test_any_configuration_trains_as_plain_torch_and_decides_alike(
    chosen: str, recipe: str
) -> None:
    """To the bit: each number is computed by the same kernels from the same numbers in the same
    order, whatever lay elsewhere meanwhile."""
    traits = (*RECIPES[recipe], "training.num_steps=4")
    words = in_a_quarter(*JOB, "policy=protrain", *KNOBS[chosen], *traits)
    setting = run_spec(*words)
    is_quarter = setting.room.capacity_bytes[Tier.GPU, 0] == state_bytes(setting) // 4
    assert is_quarter == ((chosen, recipe) not in BEYOND_A_QUARTER)
    runs = {name: train(name, *words) for name in ("sim", "lockstep", "cpu")}
    expected = plain("policy=train_on_device", *JOB, *traits)
    for name in ("lockstep", "cpu"):
        assert not differing(runs[name].result, expected)
        assert runs[name].log == runs["sim"].log, f"{name} decides otherwise"


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("chosen", KNOBS)
def test_a_thread_for_each_lane_trains_as_plain_torch(chosen: str, recipe: str) -> None:
    traits = (*RECIPES[recipe], "training.num_steps=4")
    words = in_a_quarter(*JOB, "policy=protrain", *KNOBS[chosen], *traits)
    wall = train("cpu", *words, "backend.clock=wall")
    assert not differing(wall.result, plain("policy=train_on_device", *JOB, *traits))


class TakesOldForNew(protrain.BufferedResidency):
    """Weights stay where they are behind their update, and count as new."""

    def evict(self, place: Place) -> bool:
        return place.region.kind is not Kind.WEIGHT and super().evict(place)

    def is_new(self, place: Place) -> bool:
        return self.holds(place)


def test_a_weight_copy_that_its_update_has_made_old_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = (*JOB, "policy=protrain", *knobs(0, 8, 0, 0))
    train("sim", *words)
    monkeypatch.setattr(protrain, "BufferedResidency", TakesOldForNew)
    with pytest.raises(ContractError, match="which is newer in another tier"):
        train("sim", *words)


EAGER = "planner.updates=eager"


@pytest.mark.broad(4)
@pytest.mark.parametrize("recipe", ["full", "clip", "accumulate", "bf16"])
@pytest.mark.parametrize("policy", ["zero_offload", "zero3_offload", "train_lru", "patrickstar"])
def test_eager_updates_train_as_plain_torch(policy: str, recipe: str) -> None:
    """Rivals with ProTrain's order of updates."""
    more = ("planner.chunk_elements=15000", "planner.oversize=alone") * (policy == "patrickstar")
    traits = (*RECIPES[recipe], "training.num_steps=4")
    words = pressing(*JOB, f"policy={policy}", *more, EAGER, *traits)
    runs = {name: train(name, *words) for name in ("sim", "cpu")}
    assert not differing(runs["cpu"].result, plain("policy=train_on_device", *JOB, *traits))
    assert runs["cpu"].log == runs["sim"].log


def hidden_share(*words: str) -> float:
    """The share of the host's updates that lies under launches of the device."""
    spans = train("sim", *JOB, *words).recorder.spans
    device = [(s.start_ns, s.end_ns) for s in spans if s.op.lane == (0, "compute")]
    hidden = total = 0
    for span in spans:
        if span.op.lane == (0, "cpu"):
            total += span.end_ns - span.start_ns
            for start, end in device:
                hidden += max(0, min(end, span.end_ns) - max(start, span.start_ns))
    return hidden / total


def test_eager_updates_lie_under_the_backward_and_clipped_ones_do_not() -> None:
    """Of the last chunk's update nothing is left to hide it but the next step's forward."""
    words = ("policy=protrain", *knobs(0, 2, 0, 0), "training.num_steps=1")
    assert hidden_share(*words) > 0.5
    assert hidden_share(*words, CLIP) == 0


def test_kinds_of_what_persists_never_leave_where_there_is_room() -> None:
    run = train("sim", *JOB, "policy=protrain", *knobs(3, 2, 1, 4), "training.num_steps=3")
    layout = run.setting.room.layout
    (training,) = layout.training.values()
    moved = {
        (span.op.src.region.kind, span.op.src.region.part)
        for span in run.recorder.spans
        if hasattr(span.op, "src")
    }
    states = (Kind.WEIGHT, Kind.OPTIMIZER, Kind.GRADIENT)
    assert not {(kind, c) for kind in states for c in training.persistent} & moved
    assert {c for kind, c in moved if kind is Kind.WEIGHT} == {
        c for c in range(len(training.chunks)) if c not in training.persistent
    }


@pytest.mark.parametrize("backend", ["sim", "cpu"])
def test_a_host_update_begins_when_its_gradients_have_come_and_its_lane_is_free(
    backend: str,
) -> None:
    """Chunk by chunk, and so the share that lies under the device's launches is within 2 points of
    what that rule gives. On both clocks alike."""
    words = ("policy=protrain", *knobs(0, 2, 0, 2), "training.num_steps=3")
    recorder = train(backend, *JOB, *words).recorder
    spans, host_ns = recorder.spans, max([row[2] for row in recorder.steps])
    came = dict[tuple[int, int], int]()  # by chunk and how often before: end of the copy
    counts = Counter[int]()
    updates = list[tuple[int, int, int]]()
    for span in sorted(spans, key=lambda span: span.start_ns):
        op = span.op
        if isinstance(op, Copy) and op.src.region.kind is Kind.GRADIENT:
            came[op.src.region.part, counts[op.src.region.part]] = span.end_ns
            counts[op.src.region.part] += 1
    device = [(s.start_ns, s.end_ns) for s in spans if s.op.lane == (0, "compute")]
    free_ns, done = 0, Counter[int]()
    for span in sorted(spans, key=lambda span: span.start_ns):
        if span.op.lane != (0, "cpu"):
            continue
        chunk = span.op.slices[0].layers.start
        due_ns = max(came[chunk, done[chunk]], free_ns)
        done[chunk] += 1
        free_ns = span.end_ns
        updates.append((due_ns, span.start_ns, span.end_ns))
    assert len(updates) == 3 * 8

    def hidden(moved: bool) -> float:
        """The share of updates under launches, as they were or as the rule has them."""
        found = [(due, due + end - start) if moved else (start, end)
                 for due, start, end in updates]  # fmt: skip
        under = sum([max(0, min(e, end) - max(s, start)) for start, end in found
                     for s, e in device])  # fmt: skip
        return under / sum([end - start for start, end in found])

    # Chunk by chunk: none before its gradients came, and late by less than a launch of a layer and
    # the host's time of two plans, for a plan is made behind the launch that ends.
    longest = max([end - start for start, end in device]) + 2 * host_ns
    assert all(due <= start <= due + longest for due, start, _ in updates)
    assert hidden(False) == pytest.approx(hidden(True), abs=0.02)
    assert hidden(False) > 0.5
