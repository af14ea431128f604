"""Claim: which splits of a device's memory a finetuned or trained model fits is known beforehand.

A split is how much of the device is left to serving, in two policies:

- `time_shared` divides the device for good. `memory.device_share` is training's share, and serving
  has the rest: offloaded training (ZeRO-3) of all parameters by whole microbatches.
- `coserve` with static buffers takes what the longest sample of a LoRA job can hold when the job
  begins, and leaves serving the rest: what is tried is the size of the device, `budget.kv_pages`.

Foreseen is what `tandem plan` says, which simulates and allocates nothing. Real are runs with
torch's tensors on the service clock of the CPU: the books refuse what finds no room, which is the
same rule as in plans. So a meter is asked as well: behind each plan it may find no more than the
device has, and with the workspace that a launch was seen to take besides, no more either.

Eight splits of each policy fit, or are out of memory, as foreseen. The least memory with which the
job trains is found by bisecting plans and by bisecting real runs, at most one KV page apart. All of
it is in pages of the device; some splits lie near the edge.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.results.recorder import Recorder
from policies.training.out_of_memory import DoesNotFit
from tandem.cli.plan_command import plan_run
from tandem.config.compose import composed
from tandem.wiring.backends import backend_of
from tandem.wiring.budget import GPU
from tandem.wiring.experiment import engine_of
from tandem.wiring.run_spec import run_spec_of

BAR = 1  # page
SERVED = (
    *("model=micro_llama", "trace=random", "trace.requests=8", "trace.input_tokens=40"),
    *("trace.output_tokens=24", "arrival=all_at_once"),
)
MEASURED = ("backend=cpu", "backend.workspace_every=1", "backend.probe_look_s=null")
AS_CLOSE = 1.02  # as the meter is held


@dataclass(frozen=True)
class SplitPolicy:
    """A policy that splits a device, its settings, and how a split is named.

    Attributes:
        name: in tables.
        settings: of the policy and its job.
        pages: pages of the device's KV; 0 where the split is in this number.
        tried: splits that are looked at: pages for the job, or of the device.
        most: a split that surely fits.
    """

    name: str
    settings: tuple[str, ...]
    pages: int
    tried: tuple[int, ...]
    most: int

    def settings_for(self, split: int) -> list[str]:
        """Settings of a run with so many pages for the job (time_shared), or in all (coserve)."""
        own = [*SERVED, *self.settings]
        if not self.pages:
            return [*own, f"budget.kv_pages={split}"]
        return [*own, f"budget.kv_pages={self.pages}", f"memory.device_share={self.share(split)}"]

    def share(self, split: int) -> float:
        """Training's share of the device that is so many whole pages."""
        room = run_spec_of(composed([*SERVED, f"budget.kv_pages={self.pages}"])).room
        return (split + 0.5) * room.page.nbytes / room.capacity_bytes[GPU]


TRAINED = ("training=random", "training.sequence_tokens=64", "training.num_steps=2")
FINETUNED = (
    *("training=finetune", "training.sequence_tokens=96", "training.data.mean_tokens=64"),
    *("training.data.count=8", "training.microbatches=2", "training.until_served=false"),
)
SPLITS = (
    SplitPolicy(
        "time_shared",
        ("policy=time_shared", *TRAINED),
        512,
        (64, 128, 160, 192, 196, 224, 256, 320),
        400,
    ),
    SplitPolicy(
        "coserve",
        ("policy=coserve", "memory.buffers=static", *FINETUNED),
        0,
        (32, 64, 128, 144, 148, 160, 192, 256),
        512,
    ),
)


def foreseen(words: Sequence[str]) -> bool:
    """Whether `tandem plan` says that a split fits."""
    try:
        plan_run(composed([*words]))
    except DoesNotFit:
        return False
    return True


def real(words: Sequence[str]) -> float:
    """The fullest share of the device in a run with real tensors; 0 where it is out of memory.

    AssertionError where it holds more than the device has.
    """
    point = composed([*words, *MEASURED])
    try:
        run_spec = run_spec_of(point)
        with backend_of(run_spec, point.config["backend"]) as backend:
            recorder = Recorder(backend.meter)
            engine_of(run_spec, backend, recorder).replay(run_spec.work)
    except DoesNotFit:
        return 0.0
    tables = recorder.tables()
    rows, steps = tables["memory"].to_pandas(), tables["steps"].to_pandas()
    rows = rows[rows["tier"].eq("gpu") & rows["measured_bytes"].notna()]
    held = rows.groupby("step")["measured_bytes"].max()
    taken = (
        steps["peak_bytes"].fillna(0).to_numpy() + held.reindex(steps["step"]).ffill().to_numpy()
    )
    share = float(taken.max() / rows["capacity_bytes"].max())
    assert 0 < share <= AS_CLOSE, f"{words}: {share:.3f} of the device is held"
    return share


def smallest_split(policy: SplitPolicy, fits: Callable[[Sequence[str]], float]) -> int:
    """The smallest split that fits, which leaves serving the most; found by bisection."""
    low, high = 0, policy.most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(policy.settings_for(middle)) else (middle, high)
    return high


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two splits of each, no bisection")
    is_quick, wrong, worst = parser.parse_args().quick, 0, 0
    for policy in SPLITS:
        found = set[bool]()
        for split in (policy.tried[0], policy.tried[-1]) if is_quick else policy.tried:
            words = policy.settings_for(split)
            said, share = foreseen(words), real(words)
            came = share > 0
            found.add(came)
            wrong += said is not came
            told = ["out of memory", "fits"]
            full = f", {share:.1%} held at the most" if came else ""
            print(f"{policy.name}, {split} pages: foreseen {told[said]}, real {told[came]}{full}")
        if len(found) < 2:
            print(f"{policy.name}: all splits are alike, so nothing was to be foreseen")
            wrong += 1
        if is_quick:
            continue
        plans, runs = smallest_split(policy, foreseen), smallest_split(policy, real)
        worst = max(worst, abs(plans - runs))
        print(
            f"{policy.name}: the job trains from {plans} pages on as planned, {runs} in real runs"
        )
    passed = not wrong and worst <= BAR
    value = float("inf") if wrong else worst
    print(f"memory_split {value} pages {BAR} {'pass' if passed else 'fail'}")
    return int(not passed)


if __name__ == "__main__":
    sys.exit(main())
