"""Training by the CUDA executor: whole runs over stand-ins for streams, and on a GPU for real."""

from __future__ import annotations

import threading
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.contract.regions import Tier
from runtime.executors.device import MIN_BUDGET_BYTES
from runtime.training.trainer import Trainer
from tandem.config.compose import composed
from tandem.config.composed_config import ComposedConfig
from tandem.wiring import machines
from tandem.wiring.experiment import run_experiment
from tandem.wiring.machines import device_bytes_of, warn_of_pinned
from tandem.wiring.run_spec import run_spec_of
from tests.runtime.test_cuda import TOTAL, StandIn, gpu, has_gpu
from tests.training.test_training_runs import POLICIES, RECIPE
from tests.training.trainings import (
    SMALL,
    Trained,
    differing,
    plain,
    run_spec,
    state_bytes,
    train,
    train_at,
)

pytestmark = pytest.mark.ci


class Slow(StandIn):
    """Streams whose launches have ended at the third poll, or behind a wait of a thread."""

    LOOKS = 3

    def __init__(self) -> None:
        super().__init__()
        waited = self.waited

        class Event(self.Event):  # type: ignore[misc, name-defined]
            looks = 0

            def query(self) -> bool:
                self.looks += 1
                return self.looks >= Slow.LOOKS

            def synchronize(self) -> None:
                self.looks = Slow.LOOKS

        class Stream(self.Stream):  # type: ignore[misc, name-defined]
            def wait_event(self, event: Any) -> None:
                assert event.stream is not None
                waited.append((self, event))

        self.Event, self.Stream = Event, Stream


def stand_in_gpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Any]]:
    """`backend=cuda` on this CPU with stand-ins for streams; notes devices and threads."""
    stand_in, noted = Slow(), defaultdict[str, list[Any]](list)
    stand_in.set_per_process_memory_fraction = lambda share, _: noted["shares"].append(share)
    stand_in.take_over(monkeypatch)
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", noted["cudnn"].append)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    requested = {"requested_bytes": {"all": {"current": 0}}}
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda device: requested)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1, 2))
    for name in ("training_machine", "finetuning_machine"):
        made = partial(_noting, noted["devices"], getattr(machines, name))
        monkeypatch.setattr(machines, name, made)
    return noted


def _noting(devices: list[Any], make: Any, setting: Any, device: str) -> Any:
    """A machine of this CPU in the place of one of a device."""
    devices.append(device)
    with pytest.MonkeyPatch.context() as patch:  # seeds are those of this CPU
        patch.setattr(torch.cuda, "device_count", lambda: 0)
        return make(setting)


@pytest.fixture
def as_gpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Any]]:
    """A stand-in that notes the threads of updates, too."""
    noted, update = stand_in_gpu(monkeypatch), Trainer.update

    def updated(self: Trainer, chunk: int, step: int, tier: Tier) -> None:
        noted[f"updates on {tier}"].append(threading.current_thread().name)
        update(self, chunk, step, tier)

    monkeypatch.setattr(Trainer, "update", updated)
    return noted


@pytest.mark.broad(8)
@pytest.mark.parametrize("mode", ["keep", "offload"])
@pytest.mark.parametrize("policy", POLICIES, ids=lambda words: words[0])
def test_policies_train_on_streams_as_plain_torch(
    policy: tuple[str, ...], mode: str, request: pytest.FixtureRequest
) -> None:
    words = (*policy, *RECIPE, f"planner.modes={mode}", f"budget.device_bytes={60_000_000}")
    wanted = plain(*words)
    noted = request.getfixturevalue("as_gpu")
    found = train("cuda", *words)
    assert not differing(found.result, wanted)
    assert noted["devices"] == ["cuda:0"] and noted["cudnn"] == [False]
    assert noted["shares"] == [MIN_BUDGET_BYTES / TOTAL, 1.0], (
        "a floor, and all of it behind the run"
    )
    assert {*noted["updates on host"]} <= {"lane 0 cpu"}
    assert {*noted["updates on gpu"]} <= {threading.current_thread().name}
    assert noted["updates on host"] or noted["updates on gpu"]
    rows = found.recorder.tables()["memory"].to_pylist()
    measured = [row["measured_bytes"] for row in rows if row["tier"] == "host"]
    assert max(filter(None, measured), default=0) > 0 or "device" in policy[0]


def test_training_may_take_its_budget_and_the_devices_reserve() -> None:
    found = run_spec("policy=zero3_offload", "budget.device_bytes=50000000", "device=h200")
    assert device_bytes_of(found) == 50_000_000 + found.device.reserve_bytes


def test_little_free_memory_is_told_and_refuses_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A rented machine may say that little is free, and grow."""
    monkeypatch.setattr(machines, "available_bytes", lambda: 1 << 10)
    warn_of_pinned(run_spec("policy=zero3_offload", "device=h200"))
    warn_of_pinned(run_spec_of(composed(["model=micro_llama", "limit=2", "budget.kv_pages=99"])))
    states, swapped = [record.getMessage() for record in caplog.records]
    assert "MiB of its states will be pinned" in states and "planner.start=device" in states
    assert "MiB of host memory for swapped KV will be pinned" in swapped
    assert not any("\n" in line for line in (states, swapped))


# ---- on a GPU
ON_GPU = ("device=h200", "budget.device_bytes=268435456")
SHORT = ("device=h200", "training.sequence_tokens=8", "training.sequences=1", "model.num_layers=8")


def as_on_cpu(policy: tuple[str, ...]) -> tuple[str, ...]:
    """The memory of the CPU's stand-in, and the reserve of a real device beside it."""
    return (*policy, *RECIPE, *ON_GPU)


def in_a_sixth(policy: str) -> tuple[str, ...]:
    """A sixth of the memory of the states."""
    words = (f"policy={policy}", *SHORT)
    return (*words, f"budget.device_bytes={state_bytes(run_spec(*words)) // 6}")


STREAMING = ("zero3_offload", "train_lru", "fsdp2_offload")
CASES = [*map(as_on_cpu, POLICIES), *map(in_a_sixth, STREAMING)]


@pytest.mark.broad(4)
@pytest.mark.parametrize("words", CASES, ids=lambda words: words[0])
def test_budgets_of_gpu_tests_hold_what_torch_takes_beside_them(words: tuple[str, ...]) -> None:
    """Its segments, cuBLAS's workspaces; there is no reserve on device=cpu."""
    found = run_spec(*words)
    states = found.room.capacity_bytes[Tier.GPU, 0]
    assert device_bytes_of(found) - states >= MIN_BUDGET_BYTES


@gpu
@has_gpu
@pytest.mark.parametrize("policy", POLICIES, ids=lambda words: words[0])
def test_a_gpu_trains_as_plain_torch_does_there(policy: tuple[str, ...], tmp_path: Path) -> None:
    """The plans of lockstep, replayed on a GPU: the same decisions, and losses within 1e-4.

    Units compute by the same kernels from the same numbers. What differs is where an update runs:
    torch's fused AdamW on the host rounds unlike that on the device, by some units in the last
    place of float32 (6e-8) of an update, which is 1e-3 of a weight at most. Three steps later that
    is 1e-6 of a loss; where a gradient is nearly nothing, AdamW's quotient may turn, for weights on
    which the loss by that very gradient does not depend. 1e-4 leaves two orders for both; a
    gradient that was read before it came moves losses by 1e-2.
    """
    torch.backends.cuda.matmul.allow_tf32 = False
    words = as_on_cpu(policy)
    known = tmp_path / "lockstep"
    run_experiment(composed([*SMALL, "backend=lockstep", *words]), known)
    point = composed([*SMALL, "backend=cuda", *words])
    replayed = {"scheduling": None, "memory": None, "replayed": str(known)}
    found = train_at(ComposedConfig({**point.config, **replayed}, point.overrides, ()))
    losses = [float(loss) for loss in plain(*words, device="cuda")[0]]
    assert found.losses == pytest.approx(losses, rel=1e-4)
    check_within(found)


@gpu
@has_gpu
@pytest.mark.parametrize("policy", STREAMING)
def test_a_gpu_trains_in_a_sixth_of_the_memory_of_the_states(policy: str) -> None:
    """By plans of its own, which follow its own times."""
    words = in_a_sixth(policy)
    found = train("cuda", *words)
    assert found.losses == pytest.approx(plain(*words, device="cuda")[0], rel=1e-4)
    check_within(found)


def check_within(found: Trained) -> None:
    """No span before its time, copies by real lanes."""
    spans = found.recorder.spans
    assert all(0 <= span.start_ns < span.end_ns for span in spans)
    lanes = {span.op.lane[1] for span in spans}
    assert "compute" in lanes
