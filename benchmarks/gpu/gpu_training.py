"""Claim: a GPU trains a model inside an emulated 24 GB that its states exceed.

Full fine-tuning in bf16 with fp32 masters of a GPT-2 of 2 billion parameters with states of 34 GB,
activations recomputed. Each policy is simulated first (by the device's roofline: no profile), then
trains on the GPU with torch's allocator cut to the budget. ProTrain trains as its planner chooses,
and three times with one knob set by hand. Two other systems train on equal tokens:
FSDP2 with CPU offload under that cut, and a plain loop with activation checkpointing that may take
the whole GPU, because it does not fit otherwise. Copies are shown as a share of the link's peak,
which is measured first with one large pinned copy each way. The value counts systems that exceed
the budget or fail, and systems with a loss that is no number or did not fall. Step times and peaks
are shown beside their predictions without a bar. So are the peak reserved by torch's allocator and
its retries: it has a pool per stream, so bytes that copies free do not serve computing
(PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True helps). With --keep an interrupted call resumes
without measuring a system again. Without a GPU it prints so and ends with 0; `--backend cpu
--device cpu --model tiny_llama --budget 40000000` tries it.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import pandas as pd
import torch

from analysis.run import Run, load
from analysis.training import training_summary
from analysis.usage import pools
from benchmarks.fidelity.cases import keep, say
from benchmarks.gpu.gpu_training_loops import TimedLoop, fsdp2, plain_loop
from policies.training.out_of_memory import DoesNotFit
from runtime.executors.device import budgets, clear_workspaces
from tandem.cli.errors import RunFailed
from tandem.cli.plan_command import plan_run
from tandem.config.compose import composed
from tandem.fidelity.protocol import cleared
from tandem.wiring.budget import advised_line
from tandem.wiring.experiment import run_experiment
from tandem.wiring.folder import commit
from tandem.wiring.run_spec import run_spec_of

OUT = Path("benchmarks/results/gpu_training.csv")
KNOBS = ("planner.persistent=0", "planner.buffers=3", "planner.swaps=1")  # set by hand, one each
POLICIES = (
    *("protrain", *(f"protrain {knob}" for knob in KNOBS), "patrickstar", "zero_offload"),
    *("zero3_offload", "fsdp2_offload", "train_on_device"),
)
TOO_LARGE = "train_on_device"
LINK_BYTES = 1 << 28  # of the copy that measures the link
LANES = {"to_device": "host->gpu", "to_host": "gpu->host"}


@dataclass(frozen=True)
class GpuTrainingRow:
    """One system. NaN for figures without a measurement, or without a prediction."""

    system: str
    tokens_per_s: float = math.nan
    step_s: float = math.nan
    predicted_step_s: float = math.nan
    peak_bytes: float = math.nan  # of torch's allocator
    reserved_peak_bytes: float = math.nan  # its pools at their peak
    retries: float = math.nan  # allocations that had to wait for its cache
    predicted_peak_bytes: float = math.nan
    to_device_share: float = math.nan  # of the link's peak, while something is copied
    to_host_share: float = math.nan
    first_loss: float = math.nan
    last_loss: float = math.nan
    budget_bytes: float = math.nan
    note: str = ""
    is_beside: bool = False  # another system: its failure does not fail the claim

    @property
    def is_wrong(self) -> bool:
        """Whether it did not train inside its budget; TOO_LARGE must not fit."""
        if self.note and self.is_beside:
            return False
        if self.note:
            return self.system != TOO_LARGE or not self.note.startswith("does not fit")
        falls = math.isfinite(self.last_loss) and self.last_loss < self.first_loss
        return not falls or self.peak_bytes > self.budget_bytes


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--device", default="h200")
    parser.add_argument("--model", default="gpt2_shape model.num_layers=40")
    parser.add_argument("--budget", type=int, default=24 * 10**9, help="bytes")
    parser.add_argument("--host", type=int, default=100 * 10**9, help="bytes")
    parser.add_argument("--sequences", type=int, default=4, help="of 1024 tokens or --tokens")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--policies", nargs="*", default=POLICIES)
    parser.add_argument("--words", nargs="*", default=[], help="of the configuration, in addition")
    parser.add_argument("--keep", type=Path, help="folder for all runs")
    parser.add_argument("--out", type=Path, default=OUT)
    chosen = parser.parse_args(words)
    if chosen.backend == "cuda" and not torch.cuda.is_available():
        print("skipped: no GPU")
        return 0
    rows = list[GpuTrainingRow]()
    for name, row in systems(chosen):
        rows.append(kept(chosen, name, row))
        say(str(rows[-1]))
        table = pd.DataFrame([asdict(row) for row in rows])
        keep(table, chosen.out)  # it takes long, and a call is cut
    print(table.to_string(index=False, float_format=lambda x: f"{x:.4g}", na_rep="-"))
    count = sum(row.is_wrong for row in rows)
    verdict = "fail" if count else "pass"
    print(f"gpu_training_not_inside_its_budget {count} systems 0 {verdict}")
    return int(count > 0)


def systems(chosen: argparse.Namespace) -> Iterator[tuple[str, Callable[[], GpuTrainingRow]]]:
    """The systems in turns, after the link."""
    job = job_of(chosen)
    peaks = link_peaks("cuda" if chosen.backend == "cuda" else "cpu")
    there, back = peaks["to_device"] / 1e9, peaks["to_host"] / 1e9
    say(f"link: {there:.3g} GB/s to the device, {back:.3g} back")
    for policy in chosen.policies:
        yield policy, partial(policy_row, chosen, job, policy, peaks)
    others = {"fsdp2 with CPU offload": (fsdp2, chosen.budget)} if chosen.backend == "cuda" else {}
    for name, (loop, budget) in {**others, "plain loop": (plain_loop, math.inf)}.items():
        yield name, partial(loop_row, name, loop, chosen, job, budget)


def kept(
    chosen: argparse.Namespace, name: str, make: Callable[[], GpuTrainingRow]
) -> GpuTrainingRow:
    """A system's row, of this call or of an earlier one with equal job and commit; failed systems
    run again."""
    if chosen.keep is None:
        return make()
    path = chosen.keep / f"{name.replace(' ', '_')}.json"
    about = {"job": job_of(chosen), "backend": chosen.backend, **commit()}
    if path.is_file():
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["about"] == about and not found["row"]["note"].startswith("failed"):
            say(f"{name}: measured by an earlier call")
            return GpuTrainingRow(**found["row"])
    row = make()
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(".part")
    aside.write_text(json.dumps({"about": about, "row": asdict(row)}), encoding="utf-8")
    aside.rename(path)
    return row


def job_of(chosen: argparse.Namespace) -> list[str]:
    """Overrides of the training job of all systems."""
    return [
        "trace=none",
        "training=random",
        *f"model={chosen.model}".split(),
        f"device={chosen.device}",
        "planner.modes=recompute",
        "training.recipe.dtype=bfloat16",
        f"training.sequences={chosen.sequences}",
        f"training.sequence_tokens={chosen.tokens}",
        f"training.num_steps={chosen.steps}",
        f"budget.device_bytes={chosen.budget}",
        f"budget.host_bytes={chosen.host}",
        *chosen.words,
    ]


# ---- Tandem's policies
def settings_of(job: Sequence[str], policy: str) -> list[str]:
    """Overrides of a policy, and of knobs behind its name; ProTrain chooses what is recomputed."""
    name, *knobs = policy.split()
    own = [word for word in job if name != "protrain" or not word.startswith("planner.modes=")]
    return [*own, f"policy={name}", *knobs]


def policy_row(
    chosen: argparse.Namespace, job: Sequence[str], policy: str, peaks: dict[str, float]
) -> GpuTrainingRow:
    """Plans, then simulates, then trains."""
    words = settings_of(job, policy)
    row = GpuTrainingRow(policy, budget_bytes=chosen.budget)
    try:
        found = plan_run(composed([*words, "backend=sim"]))
    except DoesNotFit as error:
        return replace(row, note=f"does not fit: {advised_line(error)}")
    predicted = found.peak_bytes("gpu:0")["used"]
    row = replace(row, predicted_step_s=found.step_s, predicted_peak_bytes=predicted)
    give_back(chosen.backend)
    with tempfile.TemporaryDirectory() as temporary:
        root = (chosen.keep or Path(temporary)) / policy.replace(" ", "_")
        for name in ("predicted", "measured"):  # remains of an interrupted call
            cleared(root / name)
        try:
            run_experiment(composed([*words, "backend=sim"]), root / "predicted")
            run_experiment(composed([*words, f"backend={chosen.backend}"]), root / "measured")
        except (RunFailed, ValueError) as error:
            return replace(row, note=f"failed: {error}")
        done = load(root / "measured")
    if chosen.backend == "cuda":
        row = with_peaks(row)
    else:
        row = replace(row, peak_bytes=float(pools(done)["gpu:0"]["measured_bytes"].max()))
    metrics = training_summary(done)
    return replace(
        row,
        tokens_per_s=float(metrics["train_tokens_per_s"]),
        step_s=float(metrics["mean_train_step_s"]),
        first_loss=float(metrics["first_loss"]),
        last_loss=float(metrics["last_loss"]),
        **{f"{way}_share": copied(done, lane) / peaks[way] for way, lane in LANES.items()},
    )


def copied(done: Run, lane: str) -> float:
    """Bytes per second of a copy lane while it copies; NaN if it never does."""
    rows = done.steps[done.steps["lane"].eq(lane)]
    busy_ns = float((rows["end_ns"] - rows["start_ns"]).sum())
    return float(rows["nbytes"].sum()) / busy_ns * 1e9 if busy_ns else math.nan


def link_peaks(device: str) -> dict[str, float]:
    """Bytes per second of the best of five large copies, each way."""
    host = torch.empty(LINK_BYTES, dtype=torch.uint8, pin_memory=device == "cuda")
    there = torch.empty_like(host, device=device)
    pairs = {"to_device": (there, host), "to_host": (host, there)}
    return {way: LINK_BYTES / min(_copy_s(*pair) for _ in range(5)) for way, pair in pairs.items()}


def _copy_s(to: torch.Tensor, what: torch.Tensor) -> float:
    began = time.perf_counter()
    to.copy_(what, non_blocking=True)
    if to.is_cuda or what.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - began


# ---- other systems
def loop_row(
    name: str,
    loop: Callable[..., TimedLoop],
    chosen: argparse.Namespace,
    job: Sequence[str],
    budget_bytes: float,
) -> GpuTrainingRow:
    """Another system on equal tokens."""
    setting = run_spec_of(composed([*job, "policy=zero3_offload", "backend=sim"]))
    trainee, device = setting.trainees[0], "cuda" if chosen.backend == "cuda" else "cpu"
    give_back(chosen.backend)
    row, limits = GpuTrainingRow(name, budget_bytes=budget_bytes, is_beside=True), nullcontext()
    if device == "cuda":
        whole = torch.cuda.get_device_properties(0).total_memory
        cut = budget_bytes + setting.device.reserve_bytes  # as for policies
        limits = budgets({0: int(min(cut, whole))})
    try:
        with limits:
            found = loop(trainee, setting.seed, device)
    except Exception as error:  # of any kind: the figures of the remaining systems are wanted
        reason = " ".join(str(error).split())[:120]
        return replace(row, note=f"failed: {type(error).__name__}: {reason}")
    return replace(
        with_peaks(row) if device == "cuda" else row,
        tokens_per_s=trainee.job.microbatch_tokens * trainee.job.microbatches / found.step_s,
        step_s=found.step_s,
        first_loss=found.losses[0],
        last_loss=found.losses[-1],
    )


def with_peaks(row: GpuTrainingRow) -> GpuTrainingRow:
    """The row with the counts of torch's allocator after `give_back`."""
    stats = torch.cuda.memory_stats()
    return replace(
        row,
        peak_bytes=stats["allocated_bytes.all.peak"],
        reserved_peak_bytes=stats["reserved_bytes.all.peak"],
        retries=stats["num_alloc_retries"],
    )


def give_back(backend: str) -> None:
    """Frees the memory of the previous system, and resets the allocator's counts."""
    gc.collect()
    if backend == "cuda":
        clear_workspaces()
        with suppress(RuntimeError):
            torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.reset_accumulated_memory_stats()


if __name__ == "__main__":
    sys.exit(main())
