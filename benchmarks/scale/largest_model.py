"""Claim: the largest model that trains in a device arena of 256 MB, per policy, as planned.

For each policy `tandem plan` names the deepest Llama of one width, its peak and its step time. That
model then trains for 20 steps on this CPU inside the arena, and a model that is one layer deeper
must be refused in the words of the plan. The value counts policies with any deviation: a missing
step, a loss that is no number or did not fall, a byte beyond the arena by ledger or meter, a peak
3 % below the plan's or 3 % above the plan's with copies out that take 3 % longer, another refusal.
Step times are shown without a bar beside predictions by a profile of a shallow model of that width:
their fidelity is another claim. Activations are recomputed, which makes room for most layers.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import pandas as pd

from analysis.run import load
from analysis.training import training_summary
from analysis.usage import pools
from benchmarks.fidelity.cases import keep, say
from policies.training.out_of_memory import DoesNotFit
from policies.training.patrickstar import WARMUP_SHARE
from tandem.cli.errors import RunFailed
from tandem.cli.plan_command import PlannedRun, max_layers, plan_run
from tandem.config.compose import composed
from tandem.config.composed_config import ComposedConfig
from tandem.fidelity.protocol import run
from tandem.wiring.budget import advised_line
from tandem.wiring.experiment import run_experiment
from tandem.wiring.folder import status_of
from tandem.wiring.profile import calibrate_training

OUT = Path("benchmarks/results/largest_model.csv")
POLICIES = (
    "train_on_device",
    "zero_offload",
    "zero3_offload",
    "fsdp2_offload",
    "train_lru",
    "train_fifo",
    "train_opt",
    "patrickstar",
)
QUICK = ("train_on_device", "zero3_offload", "patrickstar")
MIB = 2**20
PEAK = 0.03  # error of the predicted peak of the device


@dataclass(frozen=True)
class Size:
    """Sizes of the claim: model width, memory, steps and policies."""

    width: int
    arena_bytes: int
    host_bytes: int
    num_steps: int
    policies: Sequence[str]

    def settings(self, policy: str) -> list[str]:
        """A job in the arena, without the depth of its model."""
        words = ["trace=none", "training=sample", f"policy={policy}", "planner.modes=recompute"]
        words += ["model=tiny_llama", f"model.hidden_size={self.width}"]
        words += [f"model.intermediate_size={11 * self.width // 4}"]
        words += [f"model.head_dim={self.width // 8}"]
        words += ["training.sequences=1", "training.sequence_tokens=64"]
        words += [f"training.num_steps={self.num_steps}"]
        words += [f"budget.device_bytes={self.arena_bytes}", f"budget.host_bytes={self.host_bytes}"]
        if policy == "patrickstar":
            most = int(WARMUP_SHARE * self.arena_bytes) // (2 * 4)  # numbers, two chunks
            words.append(f"planner.sizes=[{most},{2 * most // 3}]")
        return words


WHOLE = Size(512, 256 * MIB, 4096 * MIB, 20, POLICIES)
SMALL = Size(256, 64 * MIB, 256 * MIB, 3, QUICK)


@dataclass(frozen=True)
class LargestModelRow:
    """One policy: plan, measurement and deviations."""

    policy: str
    layers: int
    parameters: int
    predicted_peak_bytes: int
    predicted_most_bytes: int  # with slightly slower copies to the host
    peak_bytes: int
    measured_bytes: int  # by the meter, between launches
    predicted_step_s: float
    step_s: float
    num_steps: int
    first_loss: float
    last_loss: float
    refusal: str  # of a model that is one layer deeper, by the plan
    wrong: str  # deviations from the plan; empty if there are none


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policies", nargs="+")
    parser.add_argument("--host-mib", type=int, help="host memory [4096]")
    parser.add_argument("--quick", action="store_true", help="64 MiB, 3 steps, three policies")
    parser.add_argument("--keep", type=Path, help="folder for all runs")
    chosen = parser.parse_args()
    size = SMALL if chosen.quick else WHOLE
    host_bytes = chosen.host_mib * MIB if chosen.host_mib else size.host_bytes
    policies = chosen.policies or size.policies
    size = Size(size.width, size.arena_bytes, host_bytes, size.num_steps, policies)
    with tempfile.TemporaryDirectory() as temporary:
        root = chosen.keep or Path(temporary)
        profile = profiled(size, root / "profile")
        rows = [row(size, policy, profile, root) for policy in size.policies]
    table = pd.DataFrame([asdict(one) for one in rows])
    keep(table, OUT if size == WHOLE else OUT.with_name("largest_model_part.csv"))
    shown = [field.name for field in fields(LargestModelRow) if field.name != "refusal"]
    print(table[shown].to_string(index=False, float_format=lambda x: f"{x:.4g}"))
    print(f"arena {size.arena_bytes:,} bytes, host {size.host_bytes:,} bytes")
    count = int(table["wrong"].ne("").sum())
    verdict = "fail" if count else "pass"
    print(f"largest_model_not_as_foreseen {count} policies 0 {verdict}")
    return int(count > 0)


def profiled(size: Size, folder: Path) -> Path:
    """A profile of two layers of the claim's width."""
    if not folder.is_dir():
        say("calibrating")
        words = [*size.settings("zero3_offload"), "model.num_layers=2", "backend=cpu"]
        calibrate_training(composed(words), folder)
    return folder


def row(size: Size, policy: str, profile: Path, root: Path) -> LargestModelRow:
    """Plans, then trains, then tries one layer more."""
    settings = size.settings(policy)
    point = composed([*settings, f"profile={profile}", "backend=sim"])
    layers = max_layers(point)
    if not layers:
        nothing = (0, 0, 0, 0, 0, 0, math.nan, math.nan, 0, math.nan, math.nan)
        return LargestModelRow(policy, *nothing, "", "not one layer fits")
    say(f"{policy}: {layers} layers are planned")
    found, refusal = plan_run(point, layers), refused(point, layers + 1)
    folder = root / f"{policy}-{layers}"
    words = [*settings, "backend=cpu"]
    run([*words, f"model.num_layers={layers}"], folder)
    said = failure([*words, f"model.num_layers={layers + 1}"], root / f"{policy}-{layers + 1}")
    return judged(size, policy, layers, found, folder, (refusal, said))


def refused(point: ComposedConfig, layers: int) -> str:
    """The plan's reason to refuse that depth; empty if it fits."""
    try:
        plan_run(point, layers)
    except DoesNotFit as error:
        return advised_line(error)
    return ""


def failure(words: Sequence[str], folder: Path) -> str:
    """The error of a run; empty if it trains."""
    if status_of(folder) is None:
        with suppress(RunFailed):
            run_experiment(composed(words), folder)
    status = json.loads((folder / "status.json").read_text(encoding="utf-8"))
    return str(status.get("error") or "")


def judged(
    size: Size,
    policy: str,
    layers: int,
    found: PlannedRun,
    folder: Path,
    refusals: tuple[str, str],
) -> LargestModelRow:
    """The row of a run, with its deviations from the plan."""
    done = load(folder)
    metrics, rows = training_summary(done), pools(done)["gpu:0"]
    predicted, most = found.peak_bytes("gpu:0")["used"], found.most_bytes("gpu:0")
    peak = int(rows["used_bytes"].max())
    measured = int(rows["measured_bytes"].max())
    losses = done.training["loss"].to_numpy(float)
    faults = {
        f"{len(losses)} steps": len(losses) != size.num_steps,
        "loss": not all(map(math.isfinite, losses)) or losses[-1] >= losses[0],
        "beyond the arena": max(peak, measured) > size.arena_bytes,
        "peak": not predicted * (1 - PEAK) <= peak <= most * (1 + PEAK),
        "refusal": not refusals[0] or refusals[0] not in refusals[1],
    }
    return LargestModelRow(
        policy,
        layers,
        int(done.provenance["parameters"]),
        predicted,
        most,
        peak,
        measured,
        found.step_s,
        float(metrics["mean_train_step_s"]),
        len(losses),
        float(losses[0]),
        float(losses[-1]),
        refusals[0],
        ", ".join(name for name, is_wrong in faults.items() if is_wrong),
    )


if __name__ == "__main__":
    sys.exit(main())
