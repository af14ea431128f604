"""`tandem plan`: before anything is trained, whether it fits, how long a step takes, and why."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path

import simpy

from analysis.run import Run
from analysis.training import training_steps, training_summary
from analysis.usage import fullest, lane_shares, pools
from engine.plan import Tier
from engine.recorder import Recorder
from policies.out_of_memory import DoesNotFit
from sim.cost import LaunchCost
from sim.executor import SimExecutor
from sim.late import Late
from tandem.axes import with_axes
from tandem.composed import Composed
from tandem.experiment import engine_of
from tandem.grid import grid_of
from tandem.progress import search_bar
from tandem.screen import shown_bytes, shown_parts, shown_seconds, shown_times
from tandem.setting import Setting, builder_of, setting_of, spec_of
from tandem.training import Trainee, planner_of
from tandem.worlds import World

LATE = 0.03  # as far as a steady machine moves
STEPS = 3  # simulated: a warm-up, one that finds memory as it left it, and one that has settled
MOST_LAYERS = 512  # beyond any model that is trained; a plan of so many takes seconds
BEYOND = 3  # layers: chunks are rounded, so a deeper model may fit where one in between does not
EXAMPLES = """examples:
  tandem plan trace=none training=sample policy=zero3_offload budget.device_bytes=70000000
  tandem plan trace=none training=sample policy=zero_offload,zero3_offload model=tiny_llama,gpt2
  tandem plan experiment=max_scale policy=patrickstar   (the models that its yaml sweeps)
"""


@dataclass(frozen=True, eq=False)
class Foresight:
    """What the simulator says of a few steps."""

    setting: Setting
    run: Run

    @cached_property
    def late(self) -> Run:
        """The same with copies to the host a little slower than foreseen."""
        return _simulated(self.setting, Late(self.setting.cost, LATE))

    @property
    def step_s(self) -> float:
        """Seconds of a settled step: the last."""
        return float(training_steps(self.run)["step_s"].iloc[-1])

    @property
    def tokens_per_s(self) -> float:
        """Of a settled step."""
        return float(training_steps(self.run)["tokens"].iloc[-1]) / self.step_s

    def peak_bytes(self, pool: str) -> dict[str, int]:
        """What lies in a pool such as gpu:0 when it is fullest, by part; `used` is the sum."""
        return fullest(pools(self.run)[pool])

    def most_bytes(self, pool: str) -> int:
        """The peak of a pool, or that where copies to the host are late, if it is higher."""
        return max(fullest(pools(run)[pool])["used"] for run in (self.run, self.late))


def foresee(point: Composed, num_layers: int | None = None) -> Foresight:
    """Simulates a few steps of what the point trains, on a model of so many layers.

    ValueError where the configuration is wrong, DoesNotFit where it is right and too large.
    """
    spec = spec_of(point)
    if num_layers is not None:
        spec = replace(spec, name=f"{spec.name} x {num_layers} layers", num_layers=num_layers)
    setting = _short(setting_of(point, spec))
    if not setting.trainees:
        raise ValueError("tandem plan foresees training: choose what to train, training=...")
    return Foresight(setting, _simulated(setting, setting.cost))


def largest(point: Composed) -> int:
    """The most layers of the point's model that fit, MOST_LAYERS if all do; 0 where the least that
    its recipe trains do not.

    By doubling and halving, as if depth alone decided; then a few layers beyond.
    """
    with search_bar("looking for the largest") as tried:

        @cache
        def fits(count: int) -> bool:
            tried()
            try:
                foresee(point, count)
            except DoesNotFit:
                return False
            return True

        return _largest(fits, least_layers(point))


def _largest(fits: Callable[[int], bool], least: int) -> int:
    low, high = least - 1, least
    while fits(high):
        low, high = high, min(2 * high, MOST_LAYERS)
        if low == high:
            return low
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    if low < least:
        return 0
    count = low + 2
    while count <= low + BEYOND:
        low, count = (count if fits(count) else low), count + 1
    return low


def least_layers(point: Composed) -> int:
    """Layers of the shallowest model in which the point's recipe trains something."""
    asked = builder_of(point).build(point.config["training"], "training")
    return max(1, int(asked.recipe.least_units) - 2)  # embedding and head


def _simulated(setting: Setting, cost: LaunchCost) -> Run:
    env, recorder = simpy.Environment(), Recorder()
    engine = engine_of(setting, World(env, SimExecutor(env, cost)), recorder)
    engine.replay(setting.work)
    tables = {name: table.to_pandas() for name, table in recorder.tables().items()}
    return Run(Path(), **tables, provenance={}, config={})


def _short(setting: Setting) -> Setting:
    def few(trainee: Trainee) -> Trainee:
        job = trainee.job
        return replace(trainee, job=replace(job, num_steps=min(job.num_steps, STEPS)))

    return replace(setting, trainees=tuple(few(trainee) for trainee in setting.trainees))


# ---- the command
def main(words: Sequence[str]) -> int:
    """Prints the foresight; 0 if it fits, 1 if not (then what is missing, and what would fit).

    Of several points, which of them fit, and the largest model among those that do.
    """
    parser = argparse.ArgumentParser(
        prog="tandem plan",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--no-largest", action="store_true", help="do not look for larger models")
    about = "as for tandem run, or KEY=a,b,c as for tandem sweep"
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help=about)
    chosen = parser.parse_args(words)
    grid = grid_of([*with_axes(chosen.overrides), "backend=sim"])
    if grid.axes:
        from tandem.family import tell

        return tell(grid)
    (point,) = grid.points()
    try:
        found = foresee(point)
    except DoesNotFit as error:
        from tandem.least import told_least

        print(f"does not fit: {error}")
        if least := told_least(point, error):
            print(least)
        _tell_largest(point, chosen.no_largest)
        return 1
    print(told(found))
    _tell_largest(point, chosen.no_largest)
    return 0


def told(found: Foresight) -> str:
    """Step time and where it goes, peak per tier and what makes it."""
    run, metrics = found.run, training_summary(found.run)
    (trainee, *_), room = found.setting.trainees, found.setting.room
    lanes = [f"{lane.partition(':')[2]} {share:.0%}" for lane, share in lane_shares(run).items()]
    lines = [
        f"fits: {trainee.spec.name}, {trainee.spec.parameters / 1e6:,.1f} M parameters, "
        f"{trainee.job.sequences} x {trainee.job.sequence_tokens} tokens, "
        f"{trainee.job.microbatches} to a step{_shared(trainee.job.ranks)}",
        f"step: {shown_seconds(found.step_s)} ({found.tokens_per_s:.4g} tokens/s; "
        f"{found.setting.cost.form}); the first {shown_seconds(metrics['first_train_step_s'])}",
        f"time: {shown_times(metrics)}; lanes busy: {', '.join(lanes)}",
    ]
    for (tier, device), capacity in room.capacity_bytes.items():
        peak, most = found.peak_bytes(pool := f"{tier}:{device}"), found.most_bytes(pool)
        used = peak.pop("used")
        late = f" (or {shown_bytes(most)}, if copies out are {LATE:.0%} slower)" * (most > used)
        shown = f"{shown_bytes(used)} of {shown_bytes(capacity)}{late}"
        name = "device" if tier is Tier.GPU else tier  # as in `budget`
        lines.append(f"{name} peak: {shown}: {shown_parts(peak)}")
    return "\n".join(lines)


def _shared(ranks: int) -> str:
    """Memory and lanes below are those of one device."""
    return f", on {ranks} devices each" if ranks > 1 else ""


def _tell_largest(point: Composed, is_silent: bool) -> None:
    if is_silent:
        return
    if isinstance(planner_of(point.config).get("modes"), list):
        print("largest: not sought, since planner.modes names layers one by one")
        return
    count = largest(point)
    if not count:
        least = least_layers(point)
        few = "one layer of this width fits" if least == 1 else f"{least} layers of this width fit"
        print(f"largest: not even {few}")
        return
    spec = replace(spec_of(point), num_layers=count)
    layers = f"{'at least ' if count == MOST_LAYERS else ''}{count} layer{'s' * (count > 1)}"
    print(f"largest of this width: {layers}, {spec.parameters / 1e6:,.1f} M parameters")
